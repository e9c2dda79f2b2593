"""What ranks make of outcomes that came to one of them only: the least of all, or the failure of one."""

from __future__ import annotations

import pytest

from tidekv.states import commands, events
from tidekv.states.errors import PrefillCause
from tidekv.states.ranks.room_votes import FAILED, RoomVote
from tidekv.states.ranks.vote_items import NOT_TAKEN, OfferVote, OperationVote
from tidekv.states.ranks.votes import VoteVector
from tidekv.states.types import page_ids


def test_a_hit_in_storage_is_what_all_ranks_have(make_ranks) -> None:
    ranks = make_ranks(3)
    query = ranks.ask_storage()
    ranks.receive(events.StorageAnswered, ranks=[0, 1], op=query.op, found=4)
    assert ranks.turn().events == []
    ranks.receive(events.StorageAnswered, ranks=[2], op=query.op, found=3)
    ranks.turn()
    assert ranks.taken == [events.StorageAnswered(at_s=0.0, op=query.op, found=3)]
    promise = ranks.take(commands.SendPromise)
    assert promise.promised_tokens == 3


def test_an_answer_that_one_rank_owes_is_waited_for_no_longer_on_all_at_once(make_ranks) -> None:
    """The wait ends with the leader's clock: no rank plans with storage, although two of them have its answer."""
    ranks = make_ranks(3)
    query = ranks.ask_storage()
    ranks.receive(events.StorageAnswered, ranks=[0, 1], op=query.op, found=4)
    assert ranks.turn().events == []
    ranks.now_s = 0.2
    ranks.turn()
    assert ranks.taken == [events.ClockAdvanced(at_s=0.2)]
    assert ranks.take(commands.SendPromise).promised_tokens == 0
    ranks.receive(events.StorageAnswered, ranks=[2], op=query.op, found=3)
    ranks.turn()
    assert ranks.taken == [events.StorageAnswered(at_s=0.2, op=query.op, found=3)]
    assert [agreement.slots_taken for agreement in ranks.agreements] == [ranks.agreements[0].slots_taken] * 3


@pytest.mark.parametrize("at_rank", [0, 1, 2])
def test_a_page_missing_on_one_rank_cuts_the_plan_on_all(make_ranks, at_rank: int) -> None:
    ranks = make_ranks(3)
    ranks.receive(events.StorageAnswered, op=ranks.ask_storage().op, found=4)
    ranks.turn()
    fetch = ranks.take(commands.FetchPages)
    for rank in range(3):
        ranks.receive(events.PagesFetched, ranks=[rank], op=fetch.op, valid=2 if rank == at_rank else 4)
    ranks.turn()
    assert ranks.take(commands.SendExtend).first == 2
    assert len(ranks.take(commands.CopyPages, target="device").target_pages) == 2


@pytest.mark.parametrize("raised", [False, True])
def test_a_copy_that_fails_on_one_rank_has_failed_on_all_once_all_have_ended(make_ranks, raised: bool) -> None:
    ranks = make_ranks(3)
    ranks.receive(events.StorageAnswered, op=ranks.ask_storage().op, found=4)
    ranks.turn()
    ranks.receive(events.PagesFetched, op=ranks.take(commands.FetchPages).op, valid=4)
    ranks.turn()
    copy = ranks.take(commands.CopyPages, target="device")
    if raised:
        ranks.receive(events.CommandRaised, ranks=[1], op=copy.op, detail="out of host memory")
    else:
        ranks.receive(events.CopyEnded, ranks=[1], op=copy.op, error="checksum")
    ranks.receive(events.CopyEnded, ranks=[0], op=copy.op)
    assert ranks.turn().events == []
    ranks.receive(events.CopyEnded, ranks=[2], op=copy.op)
    ranks.turn()
    assert ranks.taken == [events.CopyEnded(at_s=0.0, op=copy.op, error="failed on rank 1")]
    assert ranks.take(commands.SendExtend).first == 0


def test_a_repeated_outcome_counts_once(make_ranks) -> None:
    ranks = make_ranks(2)
    query = ranks.ask_storage()
    for found in (4, 0):
        ranks.receive(events.StorageAnswered, op=query.op, found=found)
    ranks.turn()
    assert ranks.taken[0].found == 4
    ranks.receive(events.StorageAnswered, op=query.op, found=1)
    ranks.receive(events.RoomDrained, request_id="nobody", generation=3, rank=0)
    assert ranks.agreements[0].outcomes_unknown == 2


def test_a_room_has_come_as_far_as_its_slowest_rank(make_ranks) -> None:
    ranks = make_ranks(2)
    ranks.arrive()
    ranks.turn()
    for rank in range(2):
        ranks.agreements[rank].receive(
            events.PromiseSent(at_s=0.0, request_id="a", generation=0, writer=f"p{rank}", ranks=1 + rank)
        )
    ranks.turn()
    assert ranks.types() == ["PromiseSent"]
    ranks.chunk(0, 0, 4, last=True)
    ranks.room(events.AuxReceived, ranks=[0], rank=0)
    # Rank 1 has two prefill ranks.
    ranks.chunk(1, 0, 3, last=False)
    assert ranks.turn().events == []
    ranks.chunk(1, 0, 2, last=False, writer=1)
    ranks.turn()
    assert [(event.first, event.count, event.last) for event in ranks.taken] == [(0, 2, False)]
    ranks.chunk(1, 3, 1, last=True)
    ranks.chunk(1, 2, 2, last=True, writer=1)
    ranks.room(events.AuxReceived, ranks=[1], rank=0)
    ranks.turn()
    assert [(event.first, event.count, event.last) for event in ranks.taken] == [(2, 2, True)]
    ranks.room(events.AuxReceived, ranks=[1], rank=1)
    ranks.turn()
    assert ranks.types() == ["AuxReceived"]
    assert ranks.take(commands.ReportReady).sources["transfer"] == 4


def test_chunks_that_do_not_fit_change_nothing(make_ranks) -> None:
    ranks = make_ranks(1)
    ranks.arrive()
    ranks.turn()
    ranks.agreements[0].receive(events.PromiseSent(at_s=0.0, request_id="a", generation=0, writer="p", ranks=1))
    ranks.turn()
    for first, count, last, writer, span in (
        (1, 1, False, 0, 0),
        (0, 5, True, 0, 0),
        (0, 1, False, 1, 0),
        (0, 1, False, 0, 1),
    ):
        ranks.chunk(0, first, count, last=last, writer=writer, span=span)
    ranks.room(events.AuxReceived, rank=4)
    assert ranks.turn().events == []
    # A last chunk in the middle ends nothing, and what comes behind the end is not counted.
    ranks.chunk(0, 0, 2, last=True)
    ranks.chunk(0, 2, 2, last=True)
    ranks.chunk(0, 4, 0, last=True)
    ranks.turn()
    assert [(event.count, event.last) for event in ranks.taken] == [(4, True)]


def test_a_first_token_from_a_writer_that_the_room_does_not_have_changes_nothing(make_ranks) -> None:
    ranks = make_ranks(2)
    ranks.arrive()
    ranks.turn()
    ranks.sent(0, 1)
    ranks.turn()
    for writer in (1, -1):
        ranks.room(events.AuxReceived, rank=writer)
        assert ranks.turn().events == []
    ranks.room(events.AuxReceived, rank=0)
    ranks.turn()
    assert ranks.types() == ["AuxReceived"]


def test_a_room_that_fails_on_one_rank_fails_on_all_and_its_pages_wait_for_every_writer(make_ranks) -> None:
    ranks = make_ranks(2)
    ranks.arrive()
    ranks.turn()
    ranks.sent(0)
    ranks.room(events.RoomFailed, ranks=[1], cause="connection refused", settled=True)
    ranks.turn()
    (failed,) = ranks.taken
    cause = "prefill failed: failed on rank 1"
    assert failed == events.RoomFailed(at_s=0.0, request_id="a", generation=0, cause=cause, settled=False)
    assert ranks.take(commands.ReportFailed).detail == "failed on rank 1"
    ranks.take(commands.SendAbort)
    assert ranks.turn().events == []
    assert ranks.cores[1].state.device.draining == 4
    ranks.room(events.RoomDrained, ranks=[0], rank=0)
    ranks.turn()
    assert ranks.types() == ["RoomDrained"]
    assert [core.state.device.free for core in ranks.cores] == [16, 16]
    assert ranks.turn().is_idle


def test_a_refused_room_names_the_refused_rank(make_ranks) -> None:
    ranks = make_ranks(2)
    ranks.arrive()
    ranks.turn()
    ranks.sent(0, 1)
    ranks.room(events.RoomRefused, ranks=[0], span=0, cause="evicted")
    ranks.turn()
    (refused,) = ranks.taken
    assert isinstance(refused, events.RoomRefused)
    assert refused.cause == "refused by prefill: refused to rank 0"
    assert ranks.turn().events == []


def test_a_lost_writer_of_one_rank_fails_its_rooms_and_its_death_settles_them(make_ranks) -> None:
    ranks = make_ranks(2)
    ranks.arrive()
    ranks.turn()
    ranks.sent(0, 1)
    ranks.turn()
    ranks.receive(events.WriterLost, ranks=[1], writer="p1", cause="silent")
    ranks.receive(events.WriterLost, ranks=[1], writer="someone else", cause="silent")
    ranks.turn()
    assert ranks.taken[0].cause == "prefill lost: rank 1 lost its prefill"
    ranks.room(events.RoomDrained, ranks=[0], rank=0)
    assert ranks.turn().events == []
    ranks.receive(events.WriterDead, ranks=[1], writer="p1")
    # Outcomes of a room after its end on this rank change nothing.
    ranks.room(events.AuxReceived, ranks=[1], rank=0)
    ranks.turn()
    assert ranks.types() == ["RoomDrained"]


COPY = commands.CopyPages(op=5, source="host", source_pages=page_ids([1]), target="device", target_pages=page_ids([2]))


@pytest.mark.parametrize(
    ("command", "outcome"),
    [
        (
            commands.StorePages(op=5, request_number=1, host_pages=page_ids([1])),
            events.PagesStored(at_s=1.0, op=5, stored=3),
        ),
        (commands.ProbeStorage(op=5), events.StorageProbed(at_s=1.0, op=5)),
        (
            COPY,
            events.CopyEnded(at_s=1.0, op=5),
        ),
        (
            COPY,
            events.CopyEnded(at_s=1.0, op=5, error="failed on rank 4", intact=0),
        ),
        (
            COPY,
            events.CopyEnded(at_s=1.0, op=5, error="failed on rank 4"),
        ),
        (
            commands.Recompute(op=5, request_id="a", generation=0, first=0, pages=page_ids([1])),
            events.Recomputed(at_s=1.0, op=5),
        ),
    ],
)
def test_each_operation_has_its_own_outcome(command: commands.OperationCommand, outcome: events.Event) -> None:
    vote_vector = VoteVector()
    item = OperationVote(1, vote_vector, command)
    item.receive(vote_vector, 4, outcome)
    vote_vector.take(vote_vector.cast(len(vote_vector)))
    assert item.decide(vote_vector, 1.0) == [outcome]
    item.close(vote_vector)
    assert vote_vector.taken == 0


def test_a_copy_has_the_fewest_intact_pages_of_all_ranks() -> None:
    command = COPY
    outcomes = [
        events.CopyEnded(at_s=1.0, op=5),
        events.CopyEnded(at_s=1.0, op=5, error="injected"),
        events.CopyEnded(at_s=1.0, op=5, error="damaged", intact=7),
        events.CopyEnded(at_s=1.0, op=5, error="damaged", intact=3),
        events.CommandRaised(at_s=1.0, op=5, detail="injected"),
    ]
    vote_vectors = [VoteVector() for _ in outcomes]
    items = [OperationVote(1, vote_vector, command) for vote_vector in vote_vectors]
    for rank, outcome in enumerate(outcomes):
        items[rank].receive(vote_vectors[rank], rank, outcome)
    cast = [vote_vector.cast(len(vote_vector)) for vote_vector in vote_vectors]
    vote_vectors[0].take([min(values) for values in zip(*cast, strict=True)])
    assert items[0].decide(vote_vectors[0], 2.0) == [
        events.CopyEnded(at_s=2.0, op=5, error="failed on rank 3", intact=3)
    ]


OFFER = commands.HandPrompt(op=5, peer="a:1", page_count=9, heat=(0, 0, 0, 0), timeout_s=1.0)


@pytest.mark.parametrize(
    ("answer", "agreed"),
    [
        ({"there": 7, "brought": 3}, {"there": 7, "brought": 3}),
        ({"there": 7, "brought": 3, "error": "full", "refuses": True}, {"there": 7, "brought": 3, "refuses": True}),
        ({"there": -99, "brought": 1 << 30, "error": "?"}, {"there": 0, "brought": (1 << 20) - 1}),
        (None, {"there": 0, "brought": 0}),
    ],
)
def test_the_answer_to_the_first_rank_is_that_of_all(
    answer: dict[str, object] | None, agreed: dict[str, object]
) -> None:
    vote_vectors = [VoteVector() for _ in range(3)]
    items = [OfferVote(1, vote_vector, OFFER) for vote_vector in vote_vectors]
    others = events.PromptHanded(at_s=1.0, op=5, there=0, brought=0, error="not offered here")
    first = events.CommandRaised(at_s=1.0, op=5, detail="injected")
    events_of = [first if answer is None else events.PromptHanded(at_s=1.0, op=5, **answer), others, others]
    error = {} if answer is not None and "error" not in answer else {"error": NOT_TAKEN}
    # Whichever rank knows its outcome first: the others' say nothing.
    for rank in (1, 2, 0):
        items[rank].receive(vote_vectors[rank], rank, events_of[rank])
        cast = [vote_vector.cast(len(vote_vector)) for vote_vector in vote_vectors]
        for number, vote_vector in enumerate(vote_vectors):
            vote_vector.take([min(values) for values in zip(*cast, strict=True)])
            expected = [] if rank else [events.PromptHanded(at_s=2.0, op=5, **agreed, **error)]
            assert items[number].decide(vote_vector, 2.0) == expected
    items[0].close(vote_vectors[0])
    assert vote_vectors[0].taken == 0


def test_without_the_first_rank_an_offer_has_ended_and_none_follows() -> None:
    vote_vector = VoteVector()
    item = OfferVote(1, vote_vector, OFFER)
    item.receive(vote_vector, 1, events.PromptHanded(at_s=1.0, op=5, there=0, brought=0, error="not offered here"))
    vote_vector.take(vote_vector.cast(len(vote_vector)))
    (ended,) = item.decide(vote_vector, 2.0)
    assert ended == events.PromptHanded(at_s=2.0, op=5, there=0, brought=0, error=NOT_TAKEN, refuses=True)


def test_a_left_room_waits_for_the_last_of_its_writers() -> None:
    vote_vector = VoteVector()
    room = RoomVote(1, vote_vector, "a", 0)
    room.sent(vote_vector, events.PromiseSent(at_s=0.0, request_id="a", generation=0, writer="p", ranks=2))
    vote_vector.take(vote_vector.cast(len(vote_vector)))
    assert [type(event) for event in room.decide(vote_vector, 1.0)] == [events.PromiseSent]
    room.fail(vote_vector, 3, FAILED)
    vote_vector.take(vote_vector.cast(len(vote_vector)))
    assert [type(event) for event in room.decide(vote_vector, 1.0)] == [events.RoomFailed]
    # The failure is reported once; later outcomes wait until the core leaves the room.
    assert room.decide(vote_vector, 1.0) == []
    room.leave(vote_vector)
    room.leave(vote_vector)
    room.drained(vote_vector, 0)
    room.drained(vote_vector, 0)
    room.drained(vote_vector, 7)
    assert vote_vector.value(room.slot) == 0
    room.drained(vote_vector, 1)
    vote_vector.take(vote_vector.cast(len(vote_vector)))
    assert room.decide(vote_vector, 1.0) == [events.RoomDrained(at_s=1.0, request_id="a", generation=0, rank=0)]
    assert room.is_over
    room.close(vote_vector)
    assert vote_vector.taken == 0


@pytest.mark.parametrize("cause", PrefillCause)
@pytest.mark.parametrize("kind", [events.RoomFailed, events.RoomRefused])
def test_ranks_agree_on_the_cause_of_a_failed_room(make_ranks, kind: type[events.Event], cause: PrefillCause) -> None:
    ranks = make_ranks(3)
    ranks.arrive()
    ranks.turn()
    ranks.take(commands.SendPromise)
    ranks.sent(0, 1, 2)
    more = {"settled": False} if kind is events.RoomFailed else {"span": 0}
    ranks.room(kind, ranks=[2], cause=cause.words("the words: of one rank"), **more)
    ranks.turn()
    (failed,) = ranks.taken
    assert type(failed) is kind
    assert PrefillCause.parse(failed.cause)[0] is cause
    if cause is PrefillCause.DAMAGED:
        # The pages are asked for again, once more than the attempts allow.
        assert ranks.take(commands.SendPromise).generation == failed.generation + 1
        assert not any(isinstance(command, commands.ReportFailed) for command in ranks.given[0])
        return
    told = ranks.take(commands.ReportFailed)
    assert told.cause == cause.value
    assert "rank 2" in told.detail


def test_aux_from_a_writer_that_the_room_does_not_have_changes_nothing(make_ranks) -> None:
    ranks = make_ranks(2)
    ranks.arrive()
    ranks.turn()
    ranks.sent(0, 1)
    ranks.turn()
    for writer in (1, -1):
        ranks.room(events.AuxReceived, rank=writer)
        assert ranks.turn().events == []
    ranks.room(events.AuxReceived, rank=0)
    ranks.turn()
    assert ranks.types() == ["AuxReceived"]
