"""How turns begin and end, and how the only remaining rank ends its work."""

from __future__ import annotations

import msgspec
import pytest

from tidekv.states import commands, events
from tidekv.states.errors import RankBroken
from tidekv.states.ranks.agreement import Opening
from tidekv.states.ranks.votes import SLOTS_MIN, VoteVector


def test_storage_is_there_when_all_ranks_have_it(make_ranks) -> None:
    ranks = make_ranks(2)
    ranks.receive(events.StorageChanged, ranks=[0], available=True)
    assert ranks.turn().events == []
    ranks.receive(events.StorageChanged, ranks=[1], available=True)
    ranks.turn()
    assert ranks.taken == [events.StorageChanged(at_s=0.0, available=True)]
    ranks.receive(events.StorageChanged, ranks=[1], available=False)
    ranks.turn()
    assert ranks.taken == [events.StorageChanged(at_s=0.0, available=False)]


def test_deadlines_come_by_the_leaders_clock_and_behind_what_has_completed(make_ranks) -> None:
    ranks = make_ranks(2)
    ranks.arrive(deadline_at_s=5.0)
    ranks.turn()
    ranks.sent(0, 1)
    assert ranks.agreements[1].next_deadline_s() == 5.0
    ranks.now_s = 5.0
    ranks.turn()
    assert ranks.types() == ["PromiseSent", "ClockAdvanced"]
    assert ranks.take(commands.ReportFailed).cause == "deadline"


def test_a_rank_that_broke_still_votes_and_all_stop(make_ranks) -> None:
    ranks = make_ranks(3)
    ranks.agreements[2].has_broken = True
    with pytest.raises(RankBroken, match="rank 2 broke") as caught:
        ranks.turn()
    assert caught.value.rank == 2


def test_ranks_leave_together(make_ranks) -> None:
    ranks = make_ranks(2)
    ranks.agreements[0].leave()
    assert not ranks.turn().all_leave
    ranks.agreements[1].leave()
    assert ranks.turn().all_leave


def test_the_votes_shape_grows_by_powers_of_two_and_is_one_for_all_requests(make_ranks) -> None:
    settings = msgspec.structs.replace(make_ranks.settings, device_pages=4096)
    ranks = make_ranks(2, settings)
    for number in range(300):
        for rank in range(2):
            ranks.agreements[rank].receive(
                events.RequestArrived(
                    at_s=0.0, request_id=f"r{number}", request_number=number, keys=bytes(4), prompt_tokens=4
                )
            )
    shapes = set()
    for _ in range(3):
        ranks.turn()
        shapes.add(len(ranks.agreements[0]._vote_vector))
    assert all(shape % SLOTS_MIN == 0 and shape & (shape - 1) == 0 for shape in shapes)
    assert len(ranks.agreements[0]._requests) == 300


def test_an_outcome_is_news_until_it_was_voted_on(make_ranks) -> None:
    ranks = make_ranks(2)
    assert not any(agreement.has_news for agreement in ranks.agreements)
    ranks.arrive()
    assert all(agreement.is_idle is False for agreement in ranks.agreements)
    ranks.turn()
    ranks.sent(1)
    assert [agreement.has_news for agreement in ranks.agreements] == [False, True]
    ranks.turn()
    assert not any(agreement.has_news for agreement in ranks.agreements)
    assert ranks.agreements[0].slots_taken == 4


def test_the_only_remaining_rank_ends_everything_by_itself(make_ranks) -> None:
    ranks = make_ranks(2)
    ranks.arrive()
    ranks.turn()
    ranks.sent(0, 1)
    ranks.turn()
    for name in ("b", "c"):
        ranks.receive(events.RequestArrived, ranks=[1], request_id=name, request_number=1, keys=b"x", prompt_tokens=1)
    alone, core = ranks.agreements[1], ranks.cores[1]
    alone.take_opening(
        Opening(
            0,
            3,
            0.0,
            256,
            calls=(events.RequestArrived(at_s=0.0, request_id="c", request_number=1, keys=b"", prompt_tokens=1),),
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
        alone.receive(events.RoomDrained(at_s=1.0, request_id="a", generation=0, rank=0))
    assert [command.cause for command in told if isinstance(command, commands.ReportFailed)] == ["a rank was lost"]
    assert core.is_idle
    assert alone.is_idle


def test_outcomes_in_an_undecided_vote_are_news_again_for_the_only_remaining_rank(make_ranks) -> None:
    # Only a backup is in flight, and its end was part of the last vote, which broke off: nothing new comes.
    ranks = make_ranks(2)
    ranks.make_ready()
    ranks.receive(events.FinishRequested, request_id="a", keys=b"abcd", tokens=4)
    ranks.turn()
    copy = ranks.take(commands.CopyPages, target="host")
    assert isinstance(copy, commands.CopyPages)
    ranks.receive(events.CopyEnded, ranks=[1], op=copy.op)
    alone = ranks.agreements[1]
    alone.take_opening(Opening(0, alone.turn + 1, 0.0, 256))
    alone.cast()
    assert not alone.has_news
    alone.go_solo()
    assert alone.has_news
    alone.open_turn(1.0)
    assert [type(event) for event in alone.decide(alone.cast()).events] == [events.CopyEnded]


def test_a_rank_with_another_number_of_slots_votes_in_the_leaders_shape() -> None:
    vote_vector = VoteVector()
    assert len(vote_vector.cast(2 * SLOTS_MIN)) == 2 * SLOTS_MIN
    assert len(vote_vector.cast(16)) == 16
