"""Early READY with components, in the core: what the first layer waits for, and what becomes of the caller's pages."""

from __future__ import annotations

import pytest

from simulation.rig import Rig
from tests.support.component_stories import PROMPT, cached, device_pages, rig_with, state, window
from tidekv.states import commands, events
from tidekv.states.component_specs import Component
from tidekv.states.types import FULL


def on_host(*components: Component) -> Rig:
    """A rig whose host memory has the prompt, its window and its record."""
    rig = rig_with(*components, storage=False, growth_reserve_pages=1)
    cached(rig, PROMPT)
    rig.flush("l1")
    return rig


def begin(rig: Rig, request_id: str = "a") -> tuple[commands.CopyPages, commands.SendPromise]:
    """Submit an early request. Prefill has sent its part, and the component pages are in place."""
    rig.arrive(request_id, PROMPT, early=True)
    copy, promise = rig.take(commands.CopyPages, target="device"), rig.take(commands.SendPromise)
    parts = rig.take_all(commands.CopyPages, of_components=True)
    assert parts
    rig.serve(promise)
    rig.step(events.LayersCopied, op=copy.op, layers=1)
    for part in parts:
        rig.nothing_else()
        rig.copied(part)
    return copy, promise


def test_no_layer_is_reported_before_all_component_pages_are_in_place() -> None:
    rig = on_host()
    copy, _ = begin(rig)
    early = rig.take(commands.ReportEarly)
    assert early.layers == 1 and early.component_pages is not None
    rig.copied(copy)
    ready = rig.take(commands.ReportReady)
    assert ready.component_pages is not None
    assert [each.pages for each in ready.component_pages] == [each.pages for each in early.component_pages]


def test_components_are_copied_before_the_full_pages() -> None:
    rig = on_host()
    given = rig.arrive("a", PROMPT, early=True)
    copies = [one.component for one in given if isinstance(one, commands.CopyPages)]
    assert copies == ["window", "state", "full"]


def test_the_caller_may_not_write_to_window_pages_that_are_to_be_cached() -> None:
    rig = on_host(window())
    copy, _ = begin(rig)
    early = rig.take(commands.ReportEarly)
    assert early.component_pages is not None
    (table,) = early.component_pages
    # All three come from the host, and the request has the pages that it writes besides.
    assert len(table.own) == 4 and set(table.own).isdisjoint(table.pages)
    rig.copied(copy)
    ready = rig.take(commands.ReportReady)
    assert ready.component_pages == early.component_pages
    assert device_pages(rig, "window")["cached"] == 3


def test_window_pages_in_use_are_not_exchanged_for_those_that_another_request_has_cached() -> None:
    rig = on_host(window())
    copy, _ = begin(rig)
    early = rig.take(commands.ReportEarly)
    # Another request loads the window as well, and is ready first: its full pages are the load of the first one.
    rig.arrive("b", PROMPT)
    promise, part = rig.take(commands.SendPromise), rig.take(commands.CopyPages, of_components=True)
    rig.copied(part)
    rig.serve(promise)
    rig.copied(copy)
    readies = {ready.request_id: ready for ready in rig.take_all(commands.ReportReady)}
    assert early.component_pages is not None and readies["a"].component_pages is not None
    assert readies["b"].component_pages is not None
    assert readies["a"].component_pages[0].pages == early.component_pages[0].pages
    assert readies["b"].component_pages[0].pages == early.component_pages[0].pages
    rig.core.check()


@pytest.mark.parametrize("arrives", ["before the caller has stopped", "after it"])
def test_after_a_loss_prefill_sends_the_record_again_once_the_caller_has_stopped(arrives: str) -> None:
    rig = on_host()
    copy, _ = begin(rig)
    early = rig.take(commands.ReportEarly)
    rig.copied(copy, error="injected")
    assert rig.take(commands.ReportLayersLost).cause == "the copy from host to device failed"
    (full,) = rig.take_all(commands.SendExtend)
    assert full.component == FULL
    if arrives == "before the caller has stopped":
        rig.chunk(full)
        rig.nothing_else()
    assert early.component_pages is not None
    record = early.component_pages[1].pages
    rig.step(events.EarlyUseEnded, op=early.op)
    (again,) = rig.take_all(commands.SendExtend, of_components=True)
    assert (again.component, again.pages) == ("state", record)
    if arrives == "after it":
        rig.chunk(full)
    rig.nothing_else()
    rig.chunk(again)
    ready = rig.take(commands.ReportReady)
    assert ready.generation == early.generation and ready.component_pages is not None
    assert ready.component_pages[1].pages == record
    assert rig.core.statistics()["sent_back"] == 0
    rig.core.check()


def test_a_second_loss_of_a_request_with_a_state_is_one_more_extend_of_its_record() -> None:
    rig = on_host()
    # Two loads, the first of which another request has begun.
    rig.arrive("b", PROMPT[:4])
    first, promise = rig.take(commands.CopyPages, target="device"), rig.take(commands.SendPromise)
    rig.take_all(commands.CopyPages, of_components=True)
    rig.serve(promise)
    copy, _ = begin(rig)
    rig.step(events.LayersCopied, op=first.op, layers=1)
    early = rig.take(commands.ReportEarly)
    rig.copied(copy, error="injected")
    rig.take(commands.ReportLayersLost)
    rig.chunk(rig.take(commands.SendExtend))
    rig.step(events.EarlyUseEnded, op=early.op)
    rig.chunk(rig.take(commands.SendExtend, of_components=True, component="state"))
    early = rig.take(commands.ReportEarly)
    rig.copied(first, error="injected")
    rig.take(commands.ReportLayersLost)
    rig.step(events.EarlyUseEnded, op=early.op)
    rig.chunk(rig.take(commands.SendExtend, of_components=True, component="state"))
    rig.core.check()


def test_a_request_that_leaves_after_a_loss_asks_for_no_record() -> None:
    rig = on_host()
    copy, _ = begin(rig)
    early = rig.take(commands.ReportEarly)
    rig.copied(copy, error="injected")
    rig.take(commands.ReportLayersLost)
    rig.abort("a")
    rig.take_all(commands.SendExtend)
    rig.step(events.EarlyUseEnded, op=early.op)
    assert not rig.take_all(commands.SendExtend, of_components=True)
    for abort in rig.take_all(commands.SendAbort):
        rig.drained(abort)
    rig.expect_nothing_held()


def test_after_a_loss_a_window_serves_again_in_the_same_room() -> None:
    rig = on_host(window())
    copy, _ = begin(rig)
    early = rig.take(commands.ReportEarly)
    rig.copied(copy, error="injected")
    rig.take(commands.ReportLayersLost)
    extend = rig.take(commands.SendExtend)
    rig.step(events.EarlyUseEnded, op=early.op)
    rig.chunk(extend)
    ready = rig.take(commands.ReportReady)
    assert ready.generation == early.generation
    assert early.component_pages is not None and ready.component_pages is not None
    assert ready.component_pages[0].pages == early.component_pages[0].pages


def test_own_component_pages_wait_for_the_caller_after_an_abort() -> None:
    rig = on_host(state())
    copy, _ = begin(rig)
    early = rig.take(commands.ReportEarly)
    rig.abort("a")
    assert device_pages(rig, "state")["draining"] == 1
    rig.copied(copy)
    assert device_pages(rig, "state")["draining"] == 1
    rig.step(events.EarlyUseEnded, op=early.op)
    assert device_pages(rig, "state")["draining"] == 0
    rig.settle()
    rig.expect_nothing_held()
