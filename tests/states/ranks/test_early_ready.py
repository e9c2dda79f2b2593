"""Early READY on several ranks: a layer is in place once it is on all of them, and a use ends with its last caller."""

from __future__ import annotations

import pytest

from tidekv.states import commands, events
from tidekv.states.pages.page_pool import PageState
from tidekv.states.ranks.vote_items import OperationVote
from tidekv.states.ranks.votes import VoteVector
from tidekv.states.types import page_ids

CACHED = b"abcd"
TOKENS = b"abcdef"


@pytest.fixture
def ranks(make_ranks):
    """Three ranks that have the first pages of TOKENS in host memory only."""
    ranks = make_ranks(3)
    ranks.make_ready("a", CACHED)
    ranks.receive(events.FinishRequested, request_id="a", keys=CACHED, tokens=len(CACHED))
    ranks.turn()
    ranks.receive(events.CopyEnded, op=ranks.take(commands.CopyPages, target="host").op)
    ranks.turn()
    ranks.receive(events.FlushRequested, ranks=[0], call=1, tiers=("l1",))
    ranks.turn()
    for given in ranks.given:
        given.clear()
    return ranks


def begin(ranks, **fields: object) -> commands.CopyPages:
    """The callers of all ranks submit an early request, whose prefill sends its part at once."""
    ranks.arrive("a", TOKENS, early=True, **fields)
    ranks.turn()
    serve(ranks, ranks.take(commands.SendPromise))
    copy = ranks.take(commands.CopyPages, target="device")
    assert isinstance(copy, commands.CopyPages) and copy.by_layer
    return copy


def serve(ranks, promise: commands.SendPromise) -> None:
    at, first = {"request_id": "a", "generation": promise.generation}, len(TOKENS) - len(promise.pages)
    for agreement in ranks.agreements:
        agreement.receive(events.PromiseSent(at_s=0.0, writer="p", ranks=1, **at))
    ranks.receive(events.ChunkReceived, rank=0, span=0, first=first, count=len(promise.pages), last=True, **at)
    ranks.receive(events.AuxReceived, rank=0, **at)
    ranks.turn()


def layers(ranks, copy: commands.CopyPages, *counts: int) -> None:
    """Each rank reports so many layers in place; 0 reports nothing."""
    for rank, count in enumerate(counts):
        if count:
            ranks.receive(events.LayersCopied, ranks=[rank], op=copy.op, layers=count)
    ranks.turn()


def begun(ranks, **fields: object) -> tuple[commands.CopyPages, commands.ReportEarly]:
    copy = begin(ranks, **fields)
    layers(ranks, copy, 1, 1, 1)
    early = ranks.take(commands.ReportEarly)
    assert isinstance(early, commands.ReportEarly)
    return copy, early


def writable(early: commands.ReportEarly) -> list[int]:
    """Pages that the caller may write to."""
    return [early.pages[-1], *early.reserve]


def are_free(ranks, pages: list[int]) -> list[set[bool]]:
    """For each rank, whether the pages are free: a set of one unless they differ."""
    return [{core.state.device.condition(page) is PageState.FREE for page in pages} for core in ranks.cores]


def slots_after_the_use(ranks) -> int:
    """Slots in use on all ranks."""
    (slots,) = {agreement.slots_taken for agreement in ranks.agreements}
    return slots


def test_a_layer_is_in_place_when_the_last_rank_has_it(ranks) -> None:
    copy = begin(ranks)
    layers(ranks, copy, 3, 2, 0)
    assert ranks.taken == []
    layers(ranks, copy, 0, 0, 1)
    assert ranks.taken == [events.LayersCopied(at_s=0.0, op=copy.op, layers=1)]
    assert ranks.take(commands.ReportEarly).layers == 1
    # Rank 1 is the last one now.
    layers(ranks, copy, 4, 0, 3)
    assert ranks.taken == [events.LayersCopied(at_s=0.0, op=copy.op, layers=2)]
    assert ranks.take(commands.ReportLayers).layers == 2


def test_a_rank_that_has_all_layers_does_not_hold_up_those_of_the_others(ranks) -> None:
    copy, _ = begun(ranks)
    ranks.receive(events.CopyEnded, ranks=[0, 2], op=copy.op)
    layers(ranks, copy, 0, 3, 0)
    assert ranks.taken == [events.LayersCopied(at_s=0.0, op=copy.op, layers=3)]
    # A report that comes behind the end, or again, changes nothing.
    layers(ranks, copy, 2, 3, 1)
    assert ranks.taken == []
    ranks.receive(events.CopyEnded, ranks=[1], op=copy.op)
    ranks.turn()
    assert ranks.taken == [events.CopyEnded(at_s=0.0, op=copy.op)]
    assert ranks.take(commands.ReportReady).sources["l2"] == len(CACHED)


@pytest.mark.parametrize("raised", [False, True])
def test_a_copy_that_failed_on_one_rank_brings_no_further_layer_and_is_lost_on_all(ranks, raised: bool) -> None:
    copy, early = begun(ranks)
    if raised:
        ranks.receive(events.CommandRaised, ranks=[1], op=copy.op, detail="a bug")
    else:
        ranks.receive(events.CopyEnded, ranks=[1], op=copy.op, error="the device is gone")
    layers(ranks, copy, 3, 0, 3)
    assert ranks.taken == []
    ranks.receive(events.CopyEnded, ranks=[0, 2], op=copy.op)
    ranks.turn()
    assert ranks.taken == [events.CopyEnded(at_s=0.0, op=copy.op, error="failed on rank 1")]
    assert ranks.take(commands.ReportLayersLost).generation == early.generation
    assert ranks.take(commands.SendExtend).first == 0


def test_a_copy_that_did_not_begin_on_one_rank_brings_no_layer(ranks) -> None:
    copy = begin(ranks)
    ranks.receive(events.CommandRaised, ranks=[2], op=copy.op, detail="a bug")
    layers(ranks, copy, 2, 2, 0)
    assert ranks.taken == []


def test_a_use_ends_when_the_callers_of_all_ranks_have_stopped(ranks) -> None:
    _, early = begun(ranks)
    ranks.receive(events.AbortRequested, ranks=[1], request_id="a")
    ranks.receive(events.EarlyUseEnded, ranks=[1], op=early.op)
    ranks.turn()
    assert ranks.types() == ["AbortRequested"]
    ranks.take(commands.ReportLayersLost)
    ranks.take(commands.ReportFailed)
    ranks.room(events.RoomDrained, rank=0)
    ranks.receive(events.EarlyUseEnded, ranks=[0], op=early.op)
    ranks.turn()
    assert "EarlyUseEnded" not in ranks.types()
    assert are_free(ranks, writable(early)) == [{False}] * 3
    ranks.receive(events.EarlyUseEnded, ranks=[2], op=early.op)
    ranks.turn()
    assert ranks.taken == [events.EarlyUseEnded(at_s=0.0, op=early.op)]
    assert are_free(ranks, writable(early)) == [{True}] * 3


def test_after_a_loss_the_request_is_reported_again_when_the_last_caller_has_stopped(ranks) -> None:
    copy, first = begun(ranks, prefills=("one", "other"))
    ranks.receive(events.RoomFailed, ranks=[1], request_id="a", generation=first.generation, cause="gone", settled=True)
    ranks.turn()
    ranks.take(commands.ReportLayersLost)
    serve(ranks, ranks.take(commands.SendPromise))
    ranks.receive(events.EarlyUseEnded, ranks=[0, 1], op=first.op)
    layers(ranks, copy, 2, 2, 2)
    assert not any(isinstance(command, commands.ReportEarly) for given in ranks.given for command in given)
    ranks.receive(events.EarlyUseEnded, ranks=[2], op=first.op)
    ranks.turn()
    again = ranks.take(commands.ReportEarly)
    assert (again.generation, again.layers) == (first.generation + 1, 2)


def test_ready_closes_the_vote_on_the_use(ranks) -> None:
    before = slots_after_the_use(ranks)
    copy, early = begun(ranks)
    ranks.receive(events.CopyEnded, op=copy.op)
    ranks.turn()
    assert ranks.take(commands.ReportReady).pages == early.pages
    # What is left are the two slots of the READY request.
    assert slots_after_the_use(ranks) == before + 2
    assert all(agreement.is_idle for agreement in ranks.agreements)
    # A caller that had stopped in between reports that too late, and changes nothing.
    ranks.receive(events.EarlyUseEnded, ranks=[1], op=early.op)
    assert not ranks.agreements[1].has_news
    assert ranks.agreements[1].outcomes_unknown == 1


def test_ready_in_other_pages_leaves_the_vote_open_until_all_callers_have_stopped(ranks) -> None:
    copy, first = begun(ranks, prefills=("one", "other"))
    ranks.receive(events.RoomFailed, ranks=[1], request_id="a", generation=first.generation, cause="gone", settled=True)
    ranks.turn()
    serve(ranks, ranks.take(commands.SendPromise))
    ranks.receive(events.CopyEnded, op=copy.op)
    ranks.room(events.RoomDrained, rank=0)
    ranks.turn()
    assert ranks.take(commands.ReportReady).generation == first.generation + 1
    assert are_free(ranks, writable(first)) == [{False}] * 3
    ranks.receive(events.EarlyUseEnded, op=first.op)
    ranks.turn()
    assert ranks.taken == [events.EarlyUseEnded(at_s=0.0, op=first.op)]
    assert are_free(ranks, writable(first)) == [{True}] * 3


def test_callers_that_differ_on_early_are_refused(make_ranks) -> None:
    ranks = make_ranks(2)
    for rank in range(2):
        ranks.receive(
            events.RequestArrived,
            ranks=[rank],
            request_id="a",
            request_number=1,
            keys=b"x",
            prompt_tokens=1,
            early=rank == 0,
        )
    (refusal,) = ranks.turn().refusals
    assert "different contents" in refusal.detail
    assert ranks.taken == []


def test_the_only_remaining_rank_waits_for_its_own_caller(ranks) -> None:
    copy, early = begun(ranks)
    alone, core = ranks.agreements[1], ranks.cores[1]
    assert alone.go_solo() == []
    alone.receive(events.CopyEnded(at_s=0.0, op=copy.op))
    alone.receive(events.RoomDrained(at_s=0.0, request_id="a", generation=early.generation, rank=0))
    given: list[commands.Command] = []

    def turn() -> list[type[events.Event]]:
        alone.open_turn(1.0)
        taken = alone.decide(alone.cast()).events
        for event in taken:
            alone.stepped(event, given_now := core.step(event))
            given.extend(given_now)
        return [type(event) for event in taken]

    while alone.has_news:
        turn()
    assert [type(one) for one in given if isinstance(one, commands.ReportLayersLost | commands.ReportFailed)] == [
        commands.ReportLayersLost,
        commands.ReportFailed,
    ]
    assert not alone.is_idle
    assert not core.is_idle
    alone.receive(events.EarlyUseEnded(at_s=1.0, op=early.op))
    assert turn() == [events.EarlyUseEnded]
    assert alone.is_idle
    assert core.is_idle


def test_a_copy_of_all_layers_at_once_takes_one_slot_and_one_by_layer_two() -> None:
    for by_layer in (False, True):
        vote_vector = VoteVector()
        copy = commands.CopyPages(
            op=5,
            source="host",
            source_pages=page_ids([1]),
            target="device",
            target_pages=page_ids([2]),
            by_layer=by_layer,
        )
        item = OperationVote(1, vote_vector, copy)
        assert vote_vector.taken == 1 + by_layer
        item.close(vote_vector)
        assert vote_vector.taken == 0
