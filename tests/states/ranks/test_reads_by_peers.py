"""Reads of host memory by the ranks of another decode worker: one call of all ranks, and one end."""

from __future__ import annotations

from tidekv.states import commands, events
from tidekv.states.types import page_ids

PROMPT = b"abcd"


def ranks_with_host_pages(make_ranks, count: int = 2):  # type: ignore[no-untyped-def]  # As the fixture gives them.
    ranks = make_ranks(count)
    for core in ranks.cores:
        core.step(events.HostPagesFound(at_s=0.0, runs=(events.FoundRun(-1, PROMPT, (3, 5, 7, 9), ""),)))
    return ranks


def ask(ranks, which: list[int], keys: bytes = PROMPT, read: str = "r") -> None:  # type: ignore[no-untyped-def]
    """Some ranks of a reader ask, each under a number of the rank that it asks."""
    for rank in which:
        ranks.receive(
            events.ShareRequested, ranks=[rank], call=-10 - rank, read=read, namespace="", keys=keys, pages_max=16
        )


def shares_of(ranks) -> list[commands.SharePages]:  # type: ignore[no-untyped-def]
    return [command for given in ranks.given for command in given if isinstance(command, commands.SharePages)]


def test_a_read_is_served_once_all_ranks_were_asked_each_by_its_own_number(make_ranks) -> None:
    ranks = ranks_with_host_pages(make_ranks, 3)
    ask(ranks, [2, 0])
    assert ranks.turn().events == []
    ask(ranks, [1], PROMPT)
    ranks.turn()
    shares = shares_of(ranks)
    assert [share.call for share in shares] == [-10, -11, -12]
    assert {(share.op, tuple(share.host_pages)) for share in shares} == {(shares[0].op, (3, 5, 7, 9))}
    answers = [command for given in ranks.given for command in given if isinstance(command, commands.ReportHinted)]
    assert [answer.call for answer in answers] == [-10, -11, -12]


def test_the_pages_are_held_until_the_last_rank_has_written_them(make_ranks) -> None:
    ranks = ranks_with_host_pages(make_ranks)
    ask(ranks, [0, 1])
    ranks.turn()
    op = shares_of(ranks)[0].op
    ranks.receive(events.CopyEnded, ranks=[0], op=op)
    ranks.turn()
    assert all(core.statistics()["host_protected"] == 4 for core in ranks.cores)
    ranks.receive(events.CopyEnded, ranks=[1], op=op)
    ranks.turn()
    # Nothing was damaged: the pages stay, and may be evicted again.
    for core in ranks.cores:
        assert core.statistics()["host_protected"] == 0 and core.state.counters["l2_damaged"] == 0
        assert core.state.host.cached == 4 and core.is_idle


def test_a_page_that_is_damaged_on_one_rank_is_dropped_on_all(make_ranks) -> None:
    ranks = ranks_with_host_pages(make_ranks)
    ask(ranks, [0, 1])
    ranks.turn()
    op = shares_of(ranks)[0].op
    ranks.receive(events.CopyEnded, ranks=[0], op=op)
    ranks.receive(events.CopyEnded, ranks=[1], op=op, error="a page is damaged", intact=0)
    ranks.turn()
    assert [core.state.host.cached for core in ranks.cores] == [0, 0]


def test_a_rank_that_was_not_asked_refuses_the_read_on_all_before_its_reader_gives_up(make_ranks) -> None:
    ranks = ranks_with_host_pages(make_ranks)
    ask(ranks, [0])
    ask(ranks, [1], read="another")
    ranks.turn()
    ranks.now_s = 1.0
    (refusal,) = ranks.turn().refusals
    assert isinstance(refusal.call, events.ShareRequested) and refusal.call.call == -10
    assert refusal.detail == "rank 1 did not make the call in time"
    (late,) = ranks.agreements[1].take_refusals(1.0)
    assert isinstance(late.call, events.ShareRequested) and late.call.call == -11
    assert not shares_of(ranks) and not any(agreement.slots_taken for agreement in ranks.agreements)


def test_reads_of_different_prompts_under_one_name_are_refused(make_ranks) -> None:
    ranks = ranks_with_host_pages(make_ranks)
    ask(ranks, [0])
    ask(ranks, [1], b"abce")
    (refusal,) = ranks.turn().refusals
    assert "different contents" in refusal.detail and not shares_of(ranks)


def test_a_second_read_of_the_same_name_is_refused_while_the_first_is_agreed_on(make_ranks) -> None:
    ranks = ranks_with_host_pages(make_ranks)
    ask(ranks, [0, 0])
    (refusal,) = ranks.agreements[0].take_refusals(0.0)
    assert refusal.detail == "the ranks are agreeing on the same read"


def test_a_lost_rank_refuses_the_reads_that_were_not_agreed_on(make_ranks) -> None:
    ranks = ranks_with_host_pages(make_ranks)
    ask(ranks, [0])
    ranks.turn()
    (refusal,) = ranks.agreements[0].go_solo()
    assert isinstance(refusal.call, events.ShareRequested)


def test_the_leaders_peers_are_those_of_all_ranks_and_the_fewest_pages_count(make_ranks) -> None:
    ranks = make_ranks(2)
    for rank, peers in ((0, ("one",)), (1, ("one", "two"))):
        ranks.receive(
            events.RequestArrived,
            ranks=[rank],
            request_id="a",
            request_number=1,
            keys=PROMPT,
            prompt_tokens=4,
            prefills=("p",),
            deadline_at_s=60.0,
            peers=peers,
        )
    ranks.turn()
    fetches = [command for given in ranks.given for command in given if isinstance(command, commands.FetchPages)]
    assert [fetch.peer for fetch in fetches] == ["one", "one"]
    ranks.receive(events.PagesFetched, ranks=[0], op=fetches[0].op, valid=4)
    ranks.receive(events.PagesFetched, ranks=[1], op=fetches[0].op, valid=1, error="peer one: silent")
    ranks.turn()
    copies = [command for given in ranks.given for command in given if isinstance(command, commands.CopyPages)]
    assert [tuple(copy.source_pages) for copy in copies] == [tuple(page_ids(fetches[0].host_pages[:1]))] * 2
    # A rank that was late or failed counts as a failure of the peer on all: none of them asks it for a while.
    assert all(core.peers.choose(("one",)) == "" for core in ranks.cores)
