"""What ranks make of outcomes that came to one of them only, vote by vote, on real cores."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from tidekv.states import commands, events
from tidekv.states.agreement import COMPARED, HEADER_WORDS, Agreement, Decision, Opening
from tidekv.states.core import Core
from tidekv.states.errors import RankBroken, RanksDiverged
from tidekv.states.fingerprint import PARTS, Fingerprint
from tidekv.states.questions import OperationQuestion, RequestQuestion
from tidekv.states.room_questions import FAILED, RoomQuestion
from tidekv.states.settings import CoreSettings
from tidekv.states.shapes import page_ids
from tidekv.states.votes import SLOTS_MIN, Ballot

SETTINGS = CoreSettings(
    page_size=1,
    key_bytes=1,
    device_pages=16,
    host_pages=16,
    prefetch_threshold_tokens=1,
    growth_reserve_pages=1,
    fetch_run_pages=4,
)


class Ranks:
    """Cores and agreements of some ranks, stepped together by hand."""

    def __init__(self, ranks: int = 2, settings: CoreSettings = SETTINGS) -> None:
        self.cores = [Core(settings) for _ in range(ranks)]
        self.agreements = [Agreement(core, rank=rank, hold_s=2.0) for rank, core in enumerate(self.cores)]
        self.given: list[list[commands.Command]] = [[] for _ in range(ranks)]
        self.taken: list[events.Event] = []
        self.now_s = 0.0

    def turn(self) -> Decision:
        """One turn of all ranks; the decision of rank 0, which is that of all."""
        frame = msgspec.msgpack.encode(self.agreements[0].open_turn(self.now_s))
        for agreement in self.agreements[1:]:
            agreement.take_opening(msgspec.msgpack.decode(frame, type=Opening))
        votes = [list(agreement.cast()) for agreement in self.agreements]
        assert len({len(vote) for vote in votes}) == 1
        reduced = [min(words) for words in zip(*votes, strict=True)]
        decisions = [agreement.decide(reduced) for agreement in self.agreements]
        for rank, decision in enumerate(decisions):
            assert decision.events == decisions[0].events
            for event in decision.events:
                given = self.cores[rank].step(event)
                self.agreements[rank].stepped(event, given)
                self.given[rank] += given
            self.cores[rank].check()
        self.taken = decisions[0].events
        return decisions[0]

    def hear(self, kind: type[events.Event], *, ranks: Sequence[int] | None = None, **fields: object) -> None:
        """The same event on some ranks, or all."""
        for rank in range(len(self.cores)) if ranks is None else ranks:
            self.agreements[rank].hear(kind(at_s=self.now_s, **fields))

    def arrive(self, request_id: str = "a", tokens: bytes = b"abcd", **fields: object) -> None:
        """Callers of all ranks make a request."""
        for rank in range(len(self.cores)):
            self.hear(
                events.RequestArrived,
                ranks=[rank],
                **{
                    "request_id": request_id,
                    "serial": 7 + rank,
                    "keys": tokens,
                    "prompt_tokens": len(tokens),
                    "generation": 100 * rank,
                    **fields,
                },
            )

    def take(self, kind: type[commands.Command]) -> commands.Command:
        """The only command of this kind, the same on all ranks."""
        found = [[wish for wish in given if isinstance(wish, kind)] for given in self.given]
        assert all(wishes == found[0] for wishes in found), found
        assert len(found[0]) == 1, found[0]
        for rank, given in enumerate(self.given):
            self.given[rank] = [wish for wish in given if not isinstance(wish, kind)]
        return found[0][0]

    def room(self, kind: type[events.Event], *, ranks: Sequence[int] | None = None, **fields: object) -> None:
        """An event of the room of "a"."""
        self.hear(kind, ranks=ranks, request_id="a", generation=0, **fields)

    def make_ready(self, request_id: str = "a", tokens: bytes = b"abcd") -> None:
        """Restore a prompt by prefill alone, without storage."""
        self.arrive(request_id, tokens)
        self.turn()
        for agreement in self.agreements:
            agreement.hear(events.PromiseSent(at_s=0.0, request_id="a", generation=0, writer="p", ranks=1))
        self.room(events.ChunkLanded, rank=0, span=0, first=0, count=len(tokens), last=True)
        self.room(events.AuxLanded, rank=0)
        self.turn()
        self.take(commands.SendPromise)
        self.take(commands.SendReceived)

    def types(self) -> list[str]:
        """What the cores took in the last turn."""
        return [type(event).__name__ for event in self.taken]


def test_an_arrival_waits_for_the_callers_of_all_ranks_and_has_the_leaders_numbers() -> None:
    ranks = Ranks(3)
    arrival = {"request_id": "a", "keys": b"ab", "prompt_tokens": 2}
    ranks.hear(events.RequestArrived, ranks=[1], serial=50, generation=9, **arrival)
    ranks.hear(events.RequestArrived, ranks=[0], serial=3, generation=4, **arrival)
    assert ranks.turn().events == []
    ranks.hear(events.RequestArrived, ranks=[2], serial=70, generation=2, **arrival)
    ranks.now_s = 1.0
    ranks.turn()
    (event,) = ranks.taken
    assert isinstance(event, events.RequestArrived)
    assert (event.serial, event.generation, event.keys, event.at_s) == (3, 4, b"ab", 1.0)


def test_arrivals_come_in_the_leaders_order() -> None:
    ranks = Ranks(2)
    for rank, order in ((0, "ab"), (1, "ba")):
        for name in order:
            ranks.hear(events.RequestArrived, ranks=[rank], request_id=name, serial=1, keys=b"x", prompt_tokens=1)
    ranks.turn()
    assert [event.request_id for event in ranks.taken] == ["a", "b"]


def test_a_call_that_one_rank_lacks_is_refused_after_the_hold_by_its_number() -> None:
    ranks = Ranks(3)
    ranks.hear(events.RequestArrived, ranks=[0, 1], request_id="a", serial=1, keys=b"x", prompt_tokens=1)
    assert ranks.turn().refusals == []
    assert ranks.agreements[0].next_deadline_s() == 2.0
    ranks.now_s = 2.0
    (refusal,) = ranks.turn().refusals
    assert refusal.cause == "ranks differ"
    assert refusal.detail == "rank 2 did not make the call in time"
    assert ranks.taken == []
    # The late rank's caller hears of it as well, without a vote.
    ranks.hear(events.RequestArrived, ranks=[2], request_id="a", serial=1, keys=b"x", prompt_tokens=1)
    assert ranks.agreements[2].take_refusals(3.0) == []
    (late,) = ranks.agreements[2].take_refusals(4.0)
    assert late.detail == "rank 0 did not make the call in time"


def test_requests_of_one_name_that_differ_are_refused() -> None:
    ranks = Ranks(2)
    for rank, keys in ((0, b"x"), (1, b"y")):
        ranks.hear(events.RequestArrived, ranks=[rank], request_id="a", serial=1, keys=keys, prompt_tokens=1)
    (refusal,) = ranks.turn().refusals
    assert "different contents" in refusal.detail


def test_a_caller_that_gives_up_before_the_arrival_ends_it_on_all_ranks() -> None:
    ranks = Ranks(2)
    ranks.hear(events.RequestArrived, ranks=[0], request_id="a", serial=1, keys=b"x", prompt_tokens=1)
    ranks.turn()
    ranks.hear(events.AbortRequested, ranks=[0], request_id="a")
    (refusal,) = ranks.turn().refusals
    assert refusal.cause == "aborted"


def test_a_caller_that_gives_up_before_the_leader_named_its_call_needs_no_vote() -> None:
    ranks = Ranks(2)
    ranks.hear(events.RequestArrived, request_id="a", serial=1, keys=b"x", prompt_tokens=1)
    ranks.hear(events.AbortRequested, request_id="a", cause="cancelled by the caller")
    for agreement in ranks.agreements:
        (refusal,) = agreement.take_refusals(0.0)
        assert refusal.cause == "cancelled by the caller"
    assert ranks.turn().events == []
    ranks.hear(events.AbortRequested, request_id="nobody")
    assert not any(agreement.has_news for agreement in ranks.agreements)


def test_a_hit_in_storage_is_what_all_ranks_have() -> None:
    ranks = Ranks(3)
    ranks.hear(events.StorageChanged, available=True)
    ranks.arrive()
    ranks.turn()
    query = ranks.take(commands.QueryStorage)
    ranks.hear(events.StorageAnswered, ranks=[0, 1], op=query.op, found=4)
    assert ranks.turn().events == []
    ranks.hear(events.StorageAnswered, ranks=[2], op=query.op, found=3)
    ranks.turn()
    assert ranks.taken == [events.StorageAnswered(at_s=0.0, op=query.op, found=3)]
    promise = ranks.take(commands.SendPromise)
    assert promise.promised_tokens == 3


@pytest.mark.parametrize("at_rank", [0, 1, 2])
def test_a_page_missing_on_one_rank_cuts_the_plan_on_all(at_rank: int) -> None:
    ranks = Ranks(3)
    ranks.hear(events.StorageChanged, available=True)
    ranks.arrive()
    ranks.turn()
    ranks.hear(events.StorageAnswered, op=ranks.take(commands.QueryStorage).op, found=4)
    ranks.turn()
    fetch = ranks.take(commands.FetchPages)
    for rank in range(3):
        ranks.hear(events.PagesFetched, ranks=[rank], op=fetch.op, good=2 if rank == at_rank else 4)
    ranks.turn()
    assert ranks.take(commands.SendExtend).first == 2
    assert len(ranks.take(commands.CopyToDevice).device_pages) == 2


@pytest.mark.parametrize("raised", [False, True])
def test_a_copy_that_fails_on_one_rank_has_failed_on_all_once_all_have_ended(raised: bool) -> None:
    ranks = Ranks(3)
    ranks.hear(events.StorageChanged, available=True)
    ranks.arrive()
    ranks.turn()
    ranks.hear(events.StorageAnswered, op=ranks.take(commands.QueryStorage).op, found=4)
    ranks.turn()
    ranks.hear(events.PagesFetched, op=ranks.take(commands.FetchPages).op, good=4)
    ranks.turn()
    copy = ranks.take(commands.CopyToDevice)
    if raised:
        ranks.hear(events.CommandRaised, ranks=[1], op=copy.op, detail="out of host memory")
    else:
        ranks.hear(events.CopyEnded, ranks=[1], op=copy.op, error="checksum")
    ranks.hear(events.CopyEnded, ranks=[0], op=copy.op)
    assert ranks.turn().events == []
    ranks.hear(events.CopyEnded, ranks=[2], op=copy.op)
    ranks.turn()
    assert ranks.taken == [events.CopyEnded(at_s=0.0, op=copy.op, error="failed on rank 1")]
    assert ranks.take(commands.SendExtend).first == 0


def test_an_outcome_that_is_told_twice_counts_once() -> None:
    ranks = Ranks(2)
    ranks.hear(events.StorageChanged, available=True)
    ranks.arrive()
    ranks.turn()
    query = ranks.take(commands.QueryStorage)
    for found in (4, 0):
        ranks.hear(events.StorageAnswered, op=query.op, found=found)
    ranks.turn()
    assert ranks.taken[0].found == 4
    ranks.hear(events.StorageAnswered, op=query.op, found=1)
    ranks.hear(events.RoomDrained, request_id="nobody", generation=3, rank=0)
    assert ranks.agreements[0].outcomes_unknown == 2


def chunk(ranks: Ranks, rank: int, first: int, count: int, *, last: bool, writer: int = 0, span: int = 0) -> None:
    ranks.room(events.ChunkLanded, ranks=[rank], rank=writer, span=span, first=first, count=count, last=last)


def test_a_room_has_come_as_far_as_its_slowest_rank() -> None:
    ranks = Ranks(2)
    ranks.arrive()
    ranks.turn()
    for rank in range(2):
        ranks.agreements[rank].hear(
            events.PromiseSent(at_s=0.0, request_id="a", generation=0, writer=f"p{rank}", ranks=1 + rank)
        )
    ranks.turn()
    assert ranks.types() == ["PromiseSent"]
    chunk(ranks, 0, 0, 4, last=True)
    ranks.room(events.AuxLanded, ranks=[0], rank=0)
    # Rank 1 has two prefill ranks.
    chunk(ranks, 1, 0, 3, last=False)
    assert ranks.turn().events == []
    chunk(ranks, 1, 0, 2, last=False, writer=1)
    ranks.turn()
    assert [(event.first, event.count, event.last) for event in ranks.taken] == [(0, 2, False)]
    chunk(ranks, 1, 3, 1, last=True)
    chunk(ranks, 1, 2, 2, last=True, writer=1)
    ranks.room(events.AuxLanded, ranks=[1], rank=0)
    ranks.turn()
    assert [(event.first, event.count, event.last) for event in ranks.taken] == [(2, 2, True)]
    ranks.room(events.AuxLanded, ranks=[1], rank=1)
    ranks.turn()
    assert ranks.types() == ["AuxLanded"]
    assert ranks.take(commands.TellReady).sources["transfer"] == 4


def test_chunks_that_do_not_fit_change_nothing() -> None:
    ranks = Ranks(1)
    ranks.arrive()
    ranks.turn()
    ranks.agreements[0].hear(events.PromiseSent(at_s=0.0, request_id="a", generation=0, writer="p", ranks=1))
    ranks.turn()
    for first, count, last, writer, span in (
        (1, 1, False, 0, 0),
        (0, 5, True, 0, 0),
        (0, 1, False, 1, 0),
        (0, 1, False, 0, 1),
    ):
        chunk(ranks, 0, first, count, last=last, writer=writer, span=span)
    ranks.room(events.AuxLanded, rank=4)
    assert ranks.turn().events == []
    # A last chunk in the middle ends nothing, and what comes behind the end is not counted.
    chunk(ranks, 0, 0, 2, last=True)
    chunk(ranks, 0, 2, 2, last=True)
    chunk(ranks, 0, 4, 0, last=True)
    ranks.turn()
    assert [(event.count, event.last) for event in ranks.taken] == [(4, True)]


def sent(ranks: Ranks, *at: int) -> None:
    for rank in at:
        ranks.agreements[rank].hear(
            events.PromiseSent(at_s=0.0, request_id="a", generation=0, writer=f"p{rank}", ranks=1)
        )


def test_a_room_that_fails_on_one_rank_fails_on_all_and_its_pages_wait_for_every_writer() -> None:
    ranks = Ranks(2)
    ranks.arrive()
    ranks.turn()
    sent(ranks, 0)
    ranks.room(events.RoomFailed, ranks=[1], cause="connection refused", settled=True)
    ranks.turn()
    (failed,) = ranks.taken
    assert failed == events.RoomFailed(at_s=0.0, request_id="a", generation=0, cause="failed on rank 1", settled=False)
    assert ranks.take(commands.TellFailed).detail == "failed on rank 1"
    ranks.take(commands.SendAbort)
    assert ranks.turn().events == []
    assert ranks.cores[1].books.device.draining == 4
    ranks.room(events.RoomDrained, ranks=[0], rank=0)
    ranks.turn()
    assert ranks.types() == ["RoomDrained"]
    assert [core.books.device.free for core in ranks.cores] == [16, 16]
    assert ranks.turn().is_idle


def test_a_refused_room_says_which_rank_was_refused() -> None:
    ranks = Ranks(2)
    ranks.arrive()
    ranks.turn()
    sent(ranks, 0, 1)
    ranks.room(events.RoomRefused, ranks=[0], span=0, cause="evicted")
    ranks.turn()
    (refused,) = ranks.taken
    assert isinstance(refused, events.RoomRefused)
    assert refused.cause == "refused to rank 0"
    assert ranks.turn().events == []


def test_a_lost_writer_of_one_rank_fails_its_rooms_and_its_death_settles_them() -> None:
    ranks = Ranks(2)
    ranks.arrive()
    ranks.turn()
    sent(ranks, 0, 1)
    ranks.turn()
    ranks.hear(events.WriterLost, ranks=[1], writer="p1", cause="silent")
    ranks.hear(events.WriterLost, ranks=[1], writer="someone else", cause="silent")
    ranks.turn()
    assert ranks.taken[0].cause == "rank 1 lost its prefill"
    ranks.room(events.RoomDrained, ranks=[0], rank=0)
    assert ranks.turn().events == []
    ranks.hear(events.WriterDead, ranks=[1], writer="p1")
    # What a room hears after its end on this rank changes nothing.
    ranks.room(events.AuxLanded, ranks=[1], rank=0)
    ranks.turn()
    assert ranks.types() == ["RoomDrained"]


def test_an_abort_by_one_caller_is_an_abort_on_all_ranks() -> None:
    ranks = Ranks(3)
    ranks.make_ready()
    ranks.hear(events.AbortRequested, ranks=[1], request_id="a", cause="cancelled by the caller")
    ranks.hear(events.AbortRequested, ranks=[2], request_id="a", cause="because")
    ranks.hear(events.GrowthTaken, ranks=[2], request_id="a", page_count=1)
    ranks.turn()
    assert ranks.taken == [events.AbortRequested(at_s=0.0, request_id="a", cause="cancelled by the caller")]
    ranks.take(commands.TellDropped)
    ranks.hear(events.GrowthTaken, request_id="a", page_count=1)
    assert ranks.turn().events == []


def test_growth_is_what_all_callers_have_taken() -> None:
    ranks = Ranks(2)
    ranks.make_ready()
    ranks.hear(events.GrowthTaken, ranks=[0], request_id="a", page_count=1, wanted=2)
    assert ranks.turn().events == []
    ranks.hear(events.GrowthTaken, ranks=[1], request_id="a", page_count=1)
    ranks.turn()
    assert ranks.taken == [events.GrowthTaken(at_s=0.0, request_id="a", page_count=1)]
    ranks.hear(events.GrowthTaken, ranks=[1], request_id="a", page_count=0, wanted=3)
    ranks.turn()
    assert ranks.taken == [events.GrowthTaken(at_s=0.0, request_id="a", page_count=0, wanted=2)]
    # One of the three that rank 1 wanted is left, which nobody else wants.
    assert ranks.turn().events == []


def test_finish_waits_for_all_callers_and_a_missing_one_drops_the_request() -> None:
    ranks = Ranks(2)
    ranks.make_ready()
    ranks.hear(events.FinishRequested, request_id="a", keys=b"abcd", tokens=4)
    ranks.turn()
    assert ranks.take(commands.TellFinished).inserted == 0
    ranks.arrive("b", b"efgh")
    ranks.turn()
    for rank in range(2):
        for event in (
            events.PromiseSent(at_s=0.0, request_id="b", generation=0, writer="p", ranks=1),
            events.ChunkLanded(at_s=0.0, request_id="b", generation=0, rank=0, span=0, first=0, count=4, last=True),
            events.AuxLanded(at_s=0.0, request_id="b", generation=0, rank=0),
        ):
            ranks.agreements[rank].hear(event)
    ranks.turn()
    ranks.hear(events.FinishRequested, ranks=[0], request_id="b", keys=b"efgh", tokens=4)
    ranks.turn()
    ranks.now_s = 5.0
    decision = ranks.turn()
    assert decision.refusals[0].detail == "rank 1 did not make the call in time"
    assert ranks.types() == ["AbortRequested"]
    ranks.take(commands.TellDropped)


def test_retracting_and_dropping_are_calls_of_all_ranks() -> None:
    ranks = Ranks(2)
    ranks.make_ready()
    ranks.hear(events.RetractRequested, request_id="a", keys=b"abcd", tokens=4)
    ranks.turn()
    ranks.hear(events.CopyEnded, op=ranks.take(commands.CopyToHost).op)
    ranks.turn()
    assert ranks.take(commands.TellRetracted).held_pages == 4
    ranks.hear(events.RetractedDropped, ranks=[1], request_id="a")
    ranks.turn()
    ranks.hear(events.RetractedDropped, ranks=[0], request_id="a")
    ranks.turn()
    assert ranks.types() == ["RetractedDropped"]


def test_an_abort_comes_before_what_all_callers_asked_for_in_the_same_turn() -> None:
    ranks = Ranks(2)
    ranks.make_ready()
    ranks.hear(events.RetractRequested, request_id="a", keys=b"abcd", tokens=4)
    ranks.hear(events.AbortRequested, ranks=[1], request_id="a")
    ranks.turn()
    assert ranks.types() == ["AbortRequested", "RetractRequested"]
    ranks.take(commands.TellDropped)
    assert ranks.turn().is_idle


def test_the_leader_alone_flushes_and_changes_policies() -> None:
    ranks = Ranks(2)
    ranks.make_ready()
    ranks.hear(events.FlushRequested, ranks=[0], call=1, tiers=("l1",))
    ranks.turn()
    assert ranks.take(commands.TellFlushed).spared == {"l1": 4}


def test_storage_is_there_when_all_ranks_have_it() -> None:
    ranks = Ranks(2)
    ranks.hear(events.StorageChanged, ranks=[0], available=True)
    assert ranks.turn().events == []
    ranks.hear(events.StorageChanged, ranks=[1], available=True)
    ranks.turn()
    assert ranks.taken == [events.StorageChanged(at_s=0.0, available=True)]
    ranks.hear(events.StorageChanged, ranks=[1], available=False)
    ranks.turn()
    assert ranks.taken == [events.StorageChanged(at_s=0.0, available=False)]


def test_deadlines_come_by_the_leaders_clock_and_behind_what_has_completed() -> None:
    ranks = Ranks(2)
    ranks.arrive(deadline_at_s=5.0)
    ranks.turn()
    sent(ranks, 0, 1)
    assert ranks.agreements[1].next_deadline_s() == 5.0
    ranks.now_s = 5.0
    ranks.turn()
    assert ranks.types() == ["PromiseSent", "ClockAdvanced"]
    assert ranks.take(commands.TellFailed).cause == "deadline"


def test_a_rank_that_broke_still_votes_and_all_stop() -> None:
    ranks = Ranks(3)
    ranks.agreements[2].has_broken = True
    with pytest.raises(RankBroken, match="rank 2 broke") as caught:
        ranks.turn()
    assert caught.value.rank == 2


def test_ranks_leave_together() -> None:
    ranks = Ranks(2)
    ranks.agreements[0].leave()
    assert not ranks.turn().all_leave
    ranks.agreements[1].leave()
    assert ranks.turn().all_leave


def test_the_votes_shape_grows_by_powers_of_two_and_is_one_for_all_requests() -> None:
    settings = msgspec.structs.replace(SETTINGS, device_pages=4096)
    ranks = Ranks(2, settings)
    for number in range(300):
        for rank in range(2):
            ranks.agreements[rank].hear(
                events.RequestArrived(at_s=0.0, request_id=f"r{number}", serial=number, keys=bytes(4), prompt_tokens=4)
            )
    shapes = set()
    for _ in range(3):
        ranks.turn()
        shapes.add(len(ranks.agreements[0]._ballot))
    assert all(shape % SLOTS_MIN == 0 and shape & (shape - 1) == 0 for shape in shapes)
    assert len(ranks.agreements[0]._requests) == 300


def test_an_outcome_is_news_until_it_was_voted_on() -> None:
    ranks = Ranks(2)
    assert not any(agreement.has_news for agreement in ranks.agreements)
    ranks.arrive()
    assert all(agreement.is_idle is False for agreement in ranks.agreements)
    ranks.turn()
    sent(ranks, 1)
    assert [agreement.has_news for agreement in ranks.agreements] == [False, True]
    ranks.turn()
    assert not any(agreement.has_news for agreement in ranks.agreements)
    assert ranks.agreements[0].questions == 4


def test_a_rank_that_is_left_alone_ends_everything_by_itself() -> None:
    ranks = Ranks(2)
    ranks.arrive()
    ranks.turn()
    sent(ranks, 0, 1)
    ranks.turn()
    for name in ("b", "c"):
        ranks.hear(events.RequestArrived, ranks=[1], request_id=name, serial=1, keys=b"x", prompt_tokens=1)
    alone, core = ranks.agreements[1], ranks.cores[1]
    alone.take_opening(
        Opening(
            0,
            3,
            0.0,
            256,
            calls=(events.RequestArrived(at_s=0.0, request_id="c", serial=1, keys=b"", prompt_tokens=1),),
        )
    )
    refused = alone.go_solo()
    assert {(refusal.call.request_id, refusal.cause) for refusal in refused} == {
        ("b", "a rank was lost"),
        ("c", "a rank was lost"),
    }
    told = []
    for _ in range(2):
        alone.open_turn(1.0)
        for event in alone.decide(alone.cast()).events:
            given = core.step(event)
            alone.stepped(event, given)
            told += given
        alone.hear(events.RoomDrained(at_s=1.0, request_id="a", generation=0, rank=0))
    assert [command.cause for command in told if isinstance(command, commands.TellFailed)] == ["a rank was lost"]
    assert core.is_idle
    assert alone.is_idle


def test_what_a_rank_said_in_a_vote_that_was_never_decided_is_news_when_it_is_left_alone() -> None:
    # Nothing but a backup is in flight, and its end was told in the last vote, which broke off: nothing new comes.
    ranks = Ranks(2)
    ranks.make_ready()
    ranks.hear(events.FinishRequested, request_id="a", keys=b"abcd", tokens=4)
    ranks.turn()
    copy = ranks.take(commands.CopyToHost)
    assert isinstance(copy, commands.CopyToHost)
    ranks.hear(events.CopyEnded, ranks=[1], op=copy.op)
    alone = ranks.agreements[1]
    alone.take_opening(Opening(0, alone.turn + 1, 0.0, 256))
    alone.cast()
    assert not alone.has_news
    alone.go_solo()
    assert alone.has_news
    alone.open_turn(1.0)
    assert [type(event) for event in alone.decide(alone.cast()).events] == [events.CopyEnded]


# --- Divergence ---


def diverged(ranks: Ranks, *, whole: bool = False) -> set[str]:
    """What the ranks name when they vote next."""
    if not whole:
        ranks.hear(events.StorageChanged, available=True)
    with pytest.raises(RanksDiverged) as caught:
        ranks.turn()
    assert "ranks differ at turn" in str(caught.value)
    return set(caught.value.parts)


def test_an_order_of_free_pages_that_differs_is_named() -> None:
    ranks = Ranks(2)
    free = ranks.cores[1].books.device.free_pages
    free[0], free[1] = free[1], free[0]
    assert diverged(ranks) == {"device pool"}


def test_host_pages_that_differ_are_named() -> None:
    ranks = Ranks(2)
    free = ranks.cores[0].books.host.free_pages
    free[-1], free[-2] = free[-2], free[-1]
    assert diverged(ranks) == {"host pool"}


def test_a_tree_that_differs_is_named_when_ranks_are_idle() -> None:
    ranks = Ranks(2)
    ranks.make_ready()
    ranks.hear(events.AbortRequested, request_id="a")
    ranks.turn()
    assert ranks.agreements[0].is_idle
    assert ranks.turn().is_idle
    assert all(agreement.is_whole for agreement in ranks.agreements)
    node = next(iter(ranks.cores[1].books.index.nodes()))
    node.device[0], node.device[1] = node.device[1], node.device[0]
    assert diverged(ranks, whole=True) == {"index"}


def test_an_event_more_on_one_rank_is_named() -> None:
    ranks = Ranks(2)
    event = events.RequestArrived(at_s=0.0, request_id="x", serial=1, keys=b"ab", prompt_tokens=2)
    ranks.agreements[1].stepped(event, ranks.cores[1].step(event))
    parts = diverged(ranks)
    assert {"events", "requests", "rooms", "questions"} <= parts


def test_a_rank_of_another_epoch_or_turn_is_named() -> None:
    ranks = Ranks(2)
    ranks.agreements[1].epoch = 7
    ranks.agreements[1].turn = 4
    assert diverged(ranks) == {"epoch", "turn"}


def test_what_is_compared_has_two_words_each() -> None:
    assert 4 + 2 * len(COMPARED) == HEADER_WORDS
    assert set(PARTS) < set(COMPARED)


def test_pools_that_are_larger_than_the_window_are_compared_by_and_by() -> None:
    settings = msgspec.structs.replace(SETTINGS, device_pages=10_000)
    cores = [Core(settings), Core(settings)]
    prints = [Fingerprint(core) for core in cores]
    free = cores[1].books.device.free_pages
    free[0], free[1] = free[1], free[0]
    seen = [prints[0].numbers(turn, whole=False) != prints[1].numbers(turn, whole=False) for turn in range(12)]
    assert any(seen)
    assert prints[0].numbers(1, whole=True) != prints[1].numbers(1, whole=True)


def test_evictions_are_part_of_the_fingerprint() -> None:
    ranks = Ranks(2)
    ranks.make_ready()
    ranks.hear(events.AbortRequested, request_id="a")
    ranks.turn()
    before = ranks.agreements[0]._fingerprint.numbers(1, whole=False)
    ranks.hear(events.FlushRequested, ranks=[0], call=1, tiers=("l1", "l2"))
    ranks.turn()
    assert ranks.agreements[0]._fingerprint.numbers(1, whole=False)[1] != before[1]


# --- Questions, one by one ---


@pytest.mark.parametrize(
    ("command", "outcome"),
    [
        (
            commands.StorePages(op=5, serial=1, first=0, host_pages=page_ids([1])),
            events.PagesStored(at_s=1.0, op=5, stored=3),
        ),
        (commands.ProbeStorage(op=5), events.StorageProbed(at_s=1.0, op=5)),
        (
            commands.Recompute(op=5, request_id="a", generation=0, first=0, pages=page_ids([1])),
            events.Recomputed(at_s=1.0, op=5),
        ),
    ],
)
def test_each_operation_has_its_own_outcome(command: commands.Operation, outcome: events.Event) -> None:
    ballot = Ballot()
    question = OperationQuestion(1, ballot, command)
    question.hear(ballot, 4, 3, failed=False)
    ballot.take(ballot.cast(len(ballot)))
    assert question.decide(ballot, 1.0) == [outcome]
    question.close(ballot)
    assert ballot.taken == 0


def test_what_comes_after_an_agreed_abort_is_no_event() -> None:
    ballot = Ballot()
    question = RequestQuestion(1, ballot, "a")
    question.abort(ballot, "aborted")
    question.abort(ballot, "aborted")
    ballot.take(ballot.cast(len(ballot)))
    assert question.decide(ballot, 1.0) == [events.AbortRequested(at_s=1.0, request_id="a")]
    question.grow(ballot, 1, 2)
    assert ballot.take(ballot.cast(len(ballot))) == [question]
    assert question.decide(ballot, 1.0) == []


def test_a_wish_that_not_all_callers_have_any_more_is_no_event() -> None:
    ballot = Ballot()
    question = RequestQuestion(1, ballot, "a")
    assert question.decide(ballot, 1.0) == []


def test_a_room_that_is_left_asks_for_the_last_of_its_writers() -> None:
    ballot = Ballot()
    room = RoomQuestion(1, ballot, "a", 0)
    room.sent(ballot, events.PromiseSent(at_s=0.0, request_id="a", generation=0, writer="p", ranks=2))
    ballot.take(ballot.cast(len(ballot)))
    assert [type(event) for event in room.decide(ballot, 1.0)] == [events.PromiseSent]
    room.fail(ballot, 3, FAILED)
    ballot.take(ballot.cast(len(ballot)))
    assert [type(event) for event in room.decide(ballot, 1.0)] == [events.RoomFailed]
    # Told once; what it says after that waits for the core, which leaves the room.
    assert room.decide(ballot, 1.0) == []
    room.leave(ballot)
    room.leave(ballot)
    room.drained(ballot, 0)
    room.drained(ballot, 0)
    room.drained(ballot, 7)
    assert ballot.word(room.slot) == 0
    room.drained(ballot, 1)
    ballot.take(ballot.cast(len(ballot)))
    assert room.decide(ballot, 1.0) == [events.RoomDrained(at_s=1.0, request_id="a", generation=0, rank=0)]
    assert room.is_over
    room.close(ballot)
    assert ballot.taken == 0


def test_a_rank_with_another_number_of_slots_votes_in_the_leaders_shape() -> None:
    ballot = Ballot()
    assert len(ballot.cast(2 * SLOTS_MIN)) == 2 * SLOTS_MIN
    assert len(ballot.cast(16)) == 16
