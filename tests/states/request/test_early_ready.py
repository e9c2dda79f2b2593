"""Early READY in the core: reports of layers, effects of a fault, and which pages the caller may still write to."""

from __future__ import annotations

import pytest

from simulation.rig import Rig
from tidekv.states import commands, events
from tidekv.states.errors import BrokenInvariant
from tidekv.states.records.stages import State

TOKENS = b"abcdefgh"


def on_host(**settings: int | bool) -> Rig:
    """A rig with pages of two tokens, whose host memory has the first three pages of TOKENS."""
    rig = Rig(page_size=2, key_bytes=2, growth_reserve_pages=1, **settings)
    rig.make_cached("past", TOKENS[:6])
    rig.flush("l1")
    return rig


def begin(rig: Rig, tokens: bytes = TOKENS, **fields: object) -> tuple[commands.CopyPages, commands.SendPromise]:
    """Submit an early request, whose prefill has sent its part."""
    rig.arrive("a", tokens, early=True, **fields)
    copy, promise = rig.take(commands.CopyPages, target="device"), rig.take(commands.SendPromise)
    rig.serve(promise)
    return copy, promise


def layers(rig: Rig, copy: commands.CopyPages, count: int) -> None:
    rig.step(events.LayersCopied, op=copy.op, layers=count)


def used_up(rig: Rig, early: commands.ReportEarly) -> None:
    rig.step(events.EarlyUseEnded, op=early.op)


def early_one(rig: Rig) -> tuple[commands.CopyPages, commands.SendPromise, commands.ReportEarly]:
    copy, promise = begin(rig)
    layers(rig, copy, 1)
    return copy, promise, rig.take(commands.ReportEarly)


def test_layers_are_reported_while_the_copy_continues_and_ready_follows() -> None:
    rig = on_host()
    copy, _, early = early_one(rig)
    assert copy.by_layer
    assert early.layers == 1
    assert len(early.pages) == 4
    assert len(early.reserve) == 1
    assert rig.request("a").state is State.LOCAL_RESTORE
    layers(rig, copy, 3)
    assert rig.take(commands.ReportLayers).layers == 3
    # A repeated or late report changes nothing.
    layers(rig, copy, 2)
    rig.nothing_else()
    rig.copied(copy)
    ready = rig.take(commands.ReportReady)
    assert (ready.pages, ready.reserve) == (early.pages, early.reserve)
    rig.take(commands.SendReceived)
    layers(rig, copy, 4)
    used_up(rig, early)
    rig.nothing_else()
    assert rig.core.state.counters["outcomes_late"] == 2


def test_without_the_option_nothing_is_copied_by_layer() -> None:
    rig = on_host()
    rig.arrive("a", TOKENS)
    copy = rig.take(commands.CopyPages, target="device")
    assert not copy.by_layer
    rig.serve(rig.take(commands.SendPromise))
    layers(rig, copy, 1)
    rig.nothing_else()


def test_all_pages_from_the_host_are_one_copy() -> None:
    rig = on_host(copy_run_pages=1)
    copy, _ = begin(rig)
    assert len(copy.source_pages) == 3


def test_nothing_is_reported_before_the_first_token_and_the_pages_of_prefill() -> None:
    rig = on_host()
    rig.arrive("a", TOKENS, early=True)
    copy, promise = rig.take(commands.CopyPages, target="device"), rig.take(commands.SendPromise)
    layers(rig, copy, 2)
    rig.promised(promise)
    rig.chunk(promise)
    rig.nothing_else()
    rig.aux(promise)
    assert rig.take(commands.ReportEarly).layers == 2


def test_a_failed_copy_is_a_loss_and_the_request_is_reported_again() -> None:
    rig = on_host()
    copy, promise, early = early_one(rig)
    rig.copied(copy, error="the device is gone")
    lost = rig.take(commands.ReportLayersLost)
    assert "copy from host to device failed" in lost.cause
    extend = rig.take(commands.SendExtend)
    rig.chunk(extend)
    ready = rig.take(commands.ReportReady)
    assert ready.pages == early.pages
    assert ready.generation == promise.generation
    rig.take(commands.SendReceived)
    used_up(rig, early)
    rig.nothing_else()


def test_pages_that_the_caller_may_write_wait_for_its_end_after_an_abort() -> None:
    rig = on_host()
    _, promise, early = early_one(rig)
    rig.abort("a")
    rig.take(commands.ReportLayersLost)
    rig.take(commands.ReportFailed)
    # Prefill has confirmed its end; the caller has not.
    rig.drained(rig.take(commands.SendAbort))
    held = [early.pages[-1], *early.reserve]
    assert not set(held) & set(rig.free_pages(rig.core.state.device.free))
    assert not rig.core.is_idle
    used_up(rig, early)
    assert set(held) <= set(rig.free_pages(rig.core.state.device.free))
    assert promise.generation == early.generation


def test_pages_that_prefill_may_write_wait_for_it_after_the_caller_has_stopped() -> None:
    rig = on_host()
    copy, promise, early = early_one(rig)
    rig.copied(copy, error="the device is gone")
    rig.take(commands.ReportLayersLost)
    rig.take(commands.SendExtend)
    rig.abort("a")
    rig.take(commands.ReportFailed)
    used_up(rig, early)
    held = [early.pages[-1], *early.reserve]
    assert not set(held) & set(rig.free_pages(rig.core.state.device.free))
    rig.drained(rig.take(commands.SendAbort))
    rig.nothing_else()
    assert set(held) <= set(rig.free_pages(rig.core.state.device.free))
    assert rig.core.is_idle
    assert promise.generation == early.generation


def test_with_two_prefills_the_next_one_serves_and_early_follows_the_end_of_the_use() -> None:
    rig = on_host()
    copy, promise = begin(rig, prefill_count=2)
    layers(rig, copy, 1)
    first = rig.take(commands.ReportEarly)
    rig.step(events.RoomFailed, request_id="a", generation=promise.generation, cause="prefill lost: gone", settled=True)
    lost = rig.take(commands.ReportLayersLost)
    assert "prefill lost" in lost.cause
    again = rig.take(commands.SendPromise)
    assert again.generation == promise.generation + 1
    assert not set(again.pages) & {*first.reserve, first.pages[-1]}
    # The copy of the first generation still runs, and both generations wait for it.
    rig.serve(again)
    layers(rig, copy, 2)
    assert not rig.take_all(commands.ReportEarly)
    used_up(rig, first)
    second = rig.take(commands.ReportEarly)
    assert (second.layers, second.generation) == (2, again.generation)
    rig.copied(copy)
    assert rig.take(commands.ReportReady).pages == second.pages


def test_a_late_copy_starts_the_request_over() -> None:
    rig = on_host(copy_deadline_s=1.0)
    copy, _, early = early_one(rig)
    rig.wait_until(1.5)
    lost = rig.take(commands.ReportLayersLost)
    assert "did not end in time" in lost.cause
    used_up(rig, early)
    rig.copied(copy)
    told = rig.settle()
    assert [type(one) for one in told if not isinstance(one, commands.SendReceived)][-1] is commands.ReportReady


def test_the_deadline_is_a_loss_and_a_failure() -> None:
    rig = on_host()
    copy, _ = begin(rig, deadline_at_s=5.0)
    layers(rig, copy, 1)
    early = rig.take(commands.ReportEarly)
    rig.wait_until(6.0)
    assert rig.take(commands.ReportLayersLost).cause == "deadline"
    assert rig.take(commands.ReportFailed).cause == "deadline"
    used_up(rig, early)
    rig.copied(copy)
    rig.settle()
    assert rig.core.is_idle


def test_pages_of_a_caller_that_has_begun_are_not_exchanged_for_those_of_the_cache() -> None:
    rig = on_host(share_transfers=False)
    copy, _, early = early_one(rig)
    # Another request brings the same last page into the cache meanwhile.
    rig.arrive("b", TOKENS)
    rig.serve(rig.take(commands.SendPromise))
    rig.copied(copy)
    by_request = {ready.request_id: ready for ready in rig.take_all(commands.ReportReady)}
    assert by_request["a"].pages == early.pages
    rig.finish("a", TOKENS)
    rig.finish("b", TOKENS)
    rig.settle()
    assert rig.core.is_idle


def test_the_audit_finds_a_report_of_a_layer_that_is_not_there() -> None:
    rig = on_host()
    early_one(rig)
    rig.request("a").early.layers = 2
    with pytest.raises(BrokenInvariant, match="reports 2 layers of 1 in place"):
        rig.core.check()


def test_the_audit_finds_a_room_that_would_be_left_without_its_caller() -> None:
    rig = on_host()
    early_one(rig)
    room = rig.request("a").room
    assert room is not None
    room.user_op = 0
    with pytest.raises(BrokenInvariant, match="its room may be left without it"):
        rig.core.check()
