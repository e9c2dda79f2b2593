"""Outcomes that come late, or without a waiter: they change only what they are about."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from simulation.rig import Rig
from tests.support.each_call import raised_at_each_call
from tidekv.states import commands, events
from tidekv.states.errors import RemoteProtocolError
from tidekv.states.loads.loads import Loads
from tidekv.states.records.request import Load
from tidekv.states.records.stages import State
from tidekv.transports.decode.decode_room import ReceiverRoom

EIGHT = b"abcdefgh"


def finishing(rig: Rig) -> commands.CopyPages:
    """Request "a" has ended, and its pages are on their way to the host, with storage behind it."""
    rig.attach_storage()
    rig.make_ready("a", b"abc")
    rig.finish("a", b"abc")
    rig.take(commands.ReportFinished)
    return rig.take(commands.CopyPages, target="host")


# --- Deadlines ---


def test_the_deadline_of_a_restore_says_nothing_once_the_request_is_ready() -> None:
    rig = Rig()
    rig.make_ready("a", b"abc", deadline_at_s=5.0)
    rig.wait_until(6.0)
    rig.nothing_else()
    assert rig.state("a") == "READY"
    rig.finish("a", b"abc")
    rig.take(commands.ReportFinished)


def test_a_late_backup_is_counted_and_keeps_its_pages_until_it_has_ended() -> None:
    rig = Rig(copy_deadline_s=2.0)
    copy = finishing(rig)
    rig.wait_until(3.0)
    rig.nothing_else()
    statistics = rig.core.statistics()
    assert (statistics["backups_late"], statistics["backups"]) == (1, 1)
    assert (statistics["device_protected"], statistics["host_owned"]) == (3, 3)
    rig.copied(copy)
    rig.stored(rig.take(commands.StorePages))
    rig.take(commands.ForgetTokens)
    rig.expect_nothing_held()
    assert rig.core.statistics()["host_cached"] == 3


def test_late_puts_open_the_breaker_like_failed_ones() -> None:
    rig = Rig(breaker_failures=2)
    rig.copied(finishing(rig))
    put = rig.take(commands.StorePages)
    rig.make_ready("b", b"xy")
    rig.finish("b", b"xy")
    rig.copied(rig.take(commands.CopyPages, target="host"))
    another = rig.take(commands.StorePages)
    assert not rig.core.storage.is_open
    rig.wait_until(10_000.0)
    statistics = rig.core.statistics()
    assert (statistics["backups_late"], statistics["l3_breaker_opened"]) == (2, 1)
    # Both still read the host pages that they were given.
    assert (statistics["backups"], statistics["host_protected"]) == (2, 5)
    rig.stored(put)
    rig.stored(another, 0)
    rig.step(events.StorageProbed, op=rig.take(commands.ProbeStorage).op)
    rig.expect_nothing_held()


# --- Copies to the device ---


def late_copy(rig: Rig) -> commands.CopyPages:
    """A copy of the first six pages of a request, which prefill has sent the rest, is late."""
    rig.make_cached("past", EIGHT[:6])
    rig.flush("l1")
    rig.arrive("a", EIGHT)
    copy = rig.take(commands.CopyPages, target="device")
    rig.serve(rig.take(commands.SendPromise))
    rig.wait_until(1.5)
    return copy


@pytest.mark.parametrize("end", ["well", "failed", "damaged"])
def test_after_a_late_copy_prefill_sends_the_pages_into_fresh_ones(end: str) -> None:
    rig = Rig(copy_deadline_s=1.0)
    copy = late_copy(rig)
    extend = rig.take(commands.SendExtend)
    assert len(extend.pages) == 6 and not set(extend.pages) & set(copy.target_pages)
    rig.chunk(extend)
    ready = rig.take(commands.ReportReady)
    assert (ready.generation, ready.sources["transfer"]) == (extend.generation, 8)
    # The copy has what it reads and writes until it ends.
    statistics = rig.core.statistics()
    assert (statistics["device_owned"], statistics["host_protected"]) == (6, 6)
    rig.core.check()
    if end == "damaged":
        rig.step(events.CopyEnded, op=copy.op, error="PagesDamaged: host page 3 has changed", intact=1)
    else:
        rig.copied(copy, error="" if end == "well" else "failed")
    statistics = rig.core.statistics()
    assert (statistics["device_owned"], statistics["host_protected"], statistics["copies_late"]) == (0, 0, 1)
    assert (statistics["l2_damaged"], statistics["host_cached"]) == ((1, 0) if end == "damaged" else (0, 6))
    assert statistics["sent_back"] == statistics["loads_reclaimed"] == 0
    rig.core.check()


def test_without_a_fresh_page_a_late_copy_is_waited_for() -> None:
    rig = Rig(copy_deadline_s=1.0, device_pages=13)
    copy = late_copy(rig)
    rig.wait_until(5.0)
    rig.nothing_else()
    assert (rig.state("a"), rig.core.statistics()["copies_late"]) == ("LOCAL_RESTORE", 1)
    rig.copied(copy)
    assert rig.take(commands.ReportReady).sources["l2"] == 6


def test_a_late_copy_gives_way_once_there_are_fresh_pages() -> None:
    rig = Rig(copy_deadline_s=1.0, device_pages=16)
    rig.make_ready("other", b"xyz")
    copy = late_copy(rig)
    rig.nothing_else()
    rig.abort("other")
    rig.wait_until(5.0)
    rig.chunk(rig.take(commands.SendExtend))
    rig.take(commands.ReportReady)
    rig.copied(copy)
    rig.core.check()


def test_a_request_that_leaves_while_its_copy_is_waited_for_leaves_pages_that_are_reclaimed() -> None:
    rig = Rig(copy_deadline_s=1.0, device_pages=13)
    copy = late_copy(rig)
    rig.abort("a")
    rig.take(commands.ReportFailed)
    rig.drained(rig.take(commands.SendAbort))
    rig.wait_until(5.0)
    assert rig.core.statistics()["device_draining"] == 6
    rig.copied(copy)
    rig.expect_nothing_held()


def copying() -> tuple[Rig, commands.CopyPages]:
    """Request "a" waits for a copy of six pages only."""
    rig = Rig(copy_deadline_s=1.0)
    rig.make_cached("past", EIGHT[:6])
    rig.flush("l1")
    rig.arrive("a", EIGHT)
    rig.serve(rig.take(commands.SendPromise))
    return rig, rig.take(commands.CopyPages, target="device")


def test_whatever_raises_when_a_copy_is_late_no_page_is_lost() -> None:
    copies: list[commands.CopyPages] = []

    def is_late() -> tuple[Rig, Callable[[], object]]:
        rig, copy = copying()
        copies.append(copy)
        return rig, lambda: rig.wait_until(1.5)

    for _, rig in raised_at_each_call(is_late):
        rig.core.check()
        rig.copied(copies[-1])
        rig.settle()
        rig.core.check()
        assert rig.core.statistics()["device_draining"] == 0


def test_whatever_raises_when_a_late_copy_ends_no_page_is_lost() -> None:
    def ends() -> tuple[Rig, Callable[[], object]]:
        rig, copy = copying()
        rig.wait_until(1.5)
        rig.chunk(rig.take(commands.SendExtend))
        return rig, lambda: rig.step(events.CopyEnded, op=copy.op, error="PagesDamaged: page 3", intact=1)

    for _, rig in raised_at_each_call(ends):
        rig.core.check()
        assert rig.core.statistics()["host_protected"] == rig.core.statistics()["device_owned"] == 0


# --- Loads without a waiter ---


def late_copy_above_a_fetch(rig: Rig) -> tuple[commands.CopyPages, commands.FetchPages]:
    """The first two pages are copied from the host, too late; below them two pages are fetched."""
    rig.attach_storage()
    rig.make_cached("past", EIGHT[:2])
    rig.flush("l1")
    rig.arrive("a", EIGHT)
    rig.answer(rig.take(commands.QueryStorage), 2)
    rig.promised(rig.take(commands.SendPromise))
    copy, fetch = rig.take(commands.CopyPages, target="device"), rig.take(commands.FetchPages)
    rig.abort("a")
    rig.take(commands.ReportFailed)
    rig.drained(rig.take(commands.SendAbort))
    return copy, fetch


def test_pages_of_a_late_copy_wait_for_what_hangs_below_them() -> None:
    rig = Rig(copy_deadline_s=1.0, prefetch_base_s=100.0)
    copy, fetch = late_copy_above_a_fetch(rig)
    rig.wait_until(1.5)
    assert rig.core.statistics()["copies_late"] == 1
    rig.copied(copy)
    # The two pages have no writer any more, but the fetched ones below are still being filled.
    assert [len(load.nodes) for load in rig.core.loads.settled_reclaiming] == [1]
    assert rig.core.statistics()["device_draining"] == 2
    rig.fetched(fetch)
    rig.expect_nothing_held()
    assert rig.core.loads.settled_reclaiming == []


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_outcome_of_a_void_load_frees_its_pages_once_even_if_taking_it_raises(
    monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    rig = Rig(copy_deadline_s=1.0)
    rig.bring(State.LOCAL_RESTORE)
    copy = rig.take(commands.CopyPages, target="device")
    rig.abort("a")
    for told in rig.take_all(commands.SendAbort):
        rig.drained(told)
    rig.wait_until(1.5)
    assert rig.core.statistics()["device_draining"] == 6
    original = Loads.copied

    def raises(self: Loads, load: Load, error: str) -> None:
        if when == "after":
            original(self, load, error)
        raise RuntimeError("copied is broken")

    monkeypatch.setattr(Loads, "copied", raises)
    rig.copied(copy)
    assert rig.core.statistics()["transitions_raised"] == 1
    assert rig.core.statistics()["device_draining"] == 0
    rig.core.check()


# --- The last resort ---


def asked_to_recompute(rig: Rig) -> commands.Recompute:
    """Four pages are cached, one more request loads two of the next; "a" can get the rest from its caller only."""
    rig.make_cached("past", EIGHT[:4])
    rig.arrive("a", EIGHT, can_recompute=True)
    promise = rig.take(commands.SendPromise)
    rig.step(events.RoomFailed, request_id="a", generation=promise.generation, cause="no", settled=True)
    return rig.take(commands.Recompute)


def test_what_the_caller_computed_is_told_by_its_own_source_and_cached() -> None:
    rig = Rig()
    asked = asked_to_recompute(rig)
    assert (asked.first, len(asked.pages)) == (4, 8)
    rig.step(events.Recomputed, op=asked.op)
    ready = rig.take(commands.ReportReady)
    assert ready.sources == {"l1": 4, "l2": 0, "l3": 0, "transfer": 0, "recompute": 4}
    assert ready.pages == asked.pages
    rig.nothing_else()  # No prefill exists that could be notified of pages it may free.
    assert rig.make_ready("b", EIGHT).sources["l1"] == 8


def test_a_recompute_that_fails_is_the_end_of_its_request_alone() -> None:
    rig = Rig()
    rig.make_ready("bystander", b"xyz")
    asked = asked_to_recompute(rig)
    rig.step(events.Recomputed, op=asked.op, error="no room for activations")
    failed = rig.take(commands.ReportFailed)
    assert (failed.cause, failed.detail) == ("recompute failed", "no room for activations")
    rig.nothing_else()
    assert rig.state("bystander") == "READY"
    rig.abort("bystander")
    rig.expect_nothing_held()


def test_who_recomputes_shares_no_load_of_others() -> None:
    rig = Rig()
    rig.make_cached("past", EIGHT[:6])
    rig.flush("l1")
    rig.make_cached("again", EIGHT[:2])
    # "loader" copies pages 2 to 5 from the host; "a" matches them as well.
    rig.arrive("loader", EIGHT[:6] + b"L")
    copy = rig.take(commands.CopyPages, target="device")
    rig.take(commands.SendPromise)
    rig.arrive("a", EIGHT, can_recompute=True)
    promise = rig.take(commands.SendPromise)
    rig.step(events.RoomFailed, request_id="a", generation=promise.generation, cause="no", settled=True)
    asked = rig.take(commands.Recompute)
    # It could not extend into a load that fails: it starts where no load is.
    assert asked.first == 2
    rig.copied(copy, error="failed")
    rig.step(events.Recomputed, op=asked.op)
    assert rig.take(commands.ReportReady).sources["recompute"] == 6


# --- Peers ---


def test_a_lost_writer_ends_its_live_rooms_and_frees_nothing_that_it_may_still_write_to() -> None:
    rig = Rig()
    for name in ("left", "live", "other"):
        rig.arrive(name, name.encode())
        rig.promised(rig.take(commands.SendPromise), "prefill.2" if name == "other" else "prefill.1")
    rig.abort("left")
    rig.take(commands.ReportFailed)
    told = rig.take(commands.SendAbort)
    rig.step(events.WriterLost, writer="prefill.1", cause="no heartbeat")
    assert rig.take(commands.ReportFailed).request_id == "live"
    assert rig.state("other") == "TRANSFER"
    assert rig.core.statistics()["device_draining"] == 8
    rig.drained(told)
    assert rig.core.statistics()["device_draining"] == 4


def test_a_span_ends_at_its_end_and_one_that_goes_on_can_be_refused() -> None:
    room = ReceiverRoom(first=2, count=3)
    with pytest.raises(RemoteProtocolError, match=r"marked as the last; the span ends at 5"):
        room.receive(span=0, first=2, count=2, last=True)
    room.receive(span=0, first=2, count=2, last=False)
    room.refuse(0)
    with pytest.raises(RemoteProtocolError, match="was never requested, or was refused"):
        room.receive(span=0, first=4, count=1, last=True)
