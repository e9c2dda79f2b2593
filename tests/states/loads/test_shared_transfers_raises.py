"""Rules of shared transfers that raise, at every call that they make: nothing is lost, one request at most fails."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from simulation.rig import Rig
from tests.support.each_call import raised_at_each_call
from tidekv.states import commands, events

A, B = b"abcdefgh123x", b"abcdefgh45y"
Step = Callable[[], object]


def pair(*names: str, device_pages: int = 64) -> tuple[Rig, dict[str, commands.SendPromise]]:
    rig = Rig(share_transfers=True, device_pages=device_pages, growth_reserve_pages=1)
    promises = {}
    for name in names:
        rig.arrive(name, {"a": A, "b": B}[name])
        promises[name] = rig.take(commands.SendPromise)
        rig.promised(promises[name], writer=f"prefill of {name}")
    return rig, promises


def the_plan_of_the_first() -> tuple[Rig, Step]:
    rig, _ = pair()
    return rig, lambda: rig.arrive("a", A)


def the_plan_of_who_shares() -> tuple[Rig, Step]:
    rig, _ = pair("a")
    return rig, lambda: rig.arrive("b", B)


def a_chunk_that_ends_the_common_part() -> tuple[Rig, Step]:
    rig, promises = pair("a", "b")
    return rig, lambda: rig.chunk(promises["a"], count=9, last=False)


def the_aux_record_that_ends_the_rest() -> tuple[Rig, Step]:
    rig, promises = pair("a", "b")
    rig.chunk(promises["a"])
    return rig, lambda: rig.aux(promises["a"])


def an_abort_of_the_sender() -> tuple[Rig, Step]:
    rig, _ = pair("a", "b")
    return rig, lambda: rig.abort("a")


def an_abort_of_the_sender_without_fresh_pages() -> tuple[Rig, Step]:
    rig, _ = pair("a", "b", device_pages=18)
    return rig, lambda: rig.abort("a")


def an_abort_of_who_shares_nothing() -> tuple[Rig, Step]:
    rig, _ = pair("a")
    return rig, lambda: rig.abort("a")


def a_sender_whose_pages_are_settled() -> tuple[Rig, Step]:
    rig, _ = pair("a", "b")
    return rig, lambda: rig.step(events.RoomFailed, request_id="a", generation=0, cause="no", settled=True)


def a_sender_that_is_slow() -> tuple[Rig, Step]:
    rig, promises = pair("a", "b")
    rig.chunk(promises["a"], count=3, last=False)
    rig.aux(promises["b"])
    rig.chunk(promises["b"])
    return rig, lambda: rig.wait_until(1.5)


def who_begins_to_wait_for_nothing_else() -> tuple[Rig, Step]:
    rig, promises = pair("a", "b")
    rig.aux(promises["b"])
    return rig, lambda: rig.chunk(promises["b"])


@pytest.mark.parametrize(
    "prepare",
    [
        the_plan_of_the_first,
        the_plan_of_who_shares,
        a_chunk_that_ends_the_common_part,
        the_aux_record_that_ends_the_rest,
        an_abort_of_the_sender,
        an_abort_of_the_sender_without_fresh_pages,
        an_abort_of_who_shares_nothing,
        a_sender_whose_pages_are_settled,
        a_sender_that_is_slow,
        who_begins_to_wait_for_nothing_else,
    ],
    ids=lambda prepare: prepare.__name__,
)
def test_a_raise_at_any_call_loses_nothing(prepare: Callable[[], tuple[Rig, Step]]) -> None:
    for call, rig in raised_at_each_call(prepare):
        ends: dict[str, list[str]] = {}
        """By request: "", where it was READY, or the cause of its failure."""
        for _ in range(4):
            # Prefill brings what is left, as far as it was not brought before.
            for room in list(rig.core.rooms):
                bring(rig, *room.key)
            for wish in rig.settle():
                if isinstance(wish, commands.ReportReady | commands.ReportFailed):
                    ends.setdefault(wish.request_id, []).append(getattr(wish, "cause", ""))
        assert all(len(told) == 1 for told in ends.values()), (call, ends)
        failed = [told[0] for told in ends.values() if told[0] not in ("", "aborted", "prefill failed")]
        assert failed in ([], ["internal error"]), (call, ends)
        for name in ("a", "b"):
            assert rig.core.request(name) is None or name in ends, (call, name)
            rig.abort(name)
        rig.settle()
        rig.expect_nothing_held()


def bring(rig: Rig, request_id: str, generation: int) -> None:
    """Prefill reports every span of a room as complete, and sends the first token."""
    while (room := rig.core.rooms.live(request_id, generation)) is not None and not room.is_complete:
        fields = {"request_id": request_id, "generation": generation}
        if not room.ranks:
            rig.step(events.PromiseSent, writer=f"prefill of {request_id}", ranks=1, **fields)
        for number, span in enumerate(list(room.spans)):
            if not span.ended:
                first = span.cursors.get(0, span.first)
                rest = span.first + span.count - first
                rig.step(events.ChunkReceived, rank=0, span=number, first=first, count=rest, last=True, **fields)
        rig.step(events.AuxReceived, rank=0, **fields)
