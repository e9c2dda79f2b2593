"""Components in the core, by example: what is promised, copied and shared, and what follows from failures."""

from __future__ import annotations

from functools import partial

import pytest

from simulation.rig import Rig, ids
from tests.support import component_stories
from tests.support.component_stories import (
    PROMPT,
    cached,
    device_pages,
    finish,
    raise_at_promises,
    recompute_order,
    settle,
    state,
    window,
)
from tidekv.states import commands, events
from tidekv.states.errors import InvalidConfig
from tidekv.states.settings import CoreSettings

rig_with = partial(component_stories.rig_with, storage=False)


def component_pages_of(promise: commands.SendPromise) -> dict[str, tuple[int, int]]:
    assert promise.component_pages is not None
    return {tail.component: (tail.first, len(tail.pages)) for tail in promise.component_pages}


def test_without_components_no_command_mentions_component_pages() -> None:
    rig = Rig()
    rig.arrive("a", PROMPT)
    promise = rig.take(commands.SendPromise)
    assert promise.component_pages is None
    rig.serve(promise)
    assert rig.take(commands.ReportReady).component_pages is None


def test_pools_that_one_request_does_not_fit_in_are_refused() -> None:
    with pytest.raises(InvalidConfig, match="has 3 device pages, one request needs 4"):
        CoreSettings(page_size=1, key_bytes=1, device_pages=8, components=(window(3, device=3),))


def test_prefill_sends_all_component_pages_that_decode_lacks() -> None:
    rig = rig_with()
    rig.arrive("a", PROMPT)
    promise = rig.take(commands.SendPromise)
    assert promise.promised_tokens == 0 and component_pages_of(promise) == {"window": (5, 3), "state": (7, 1)}
    rig.serve(promise)
    ready = rig.take(commands.ReportReady)
    assert ready.component_pages is not None
    of_window, of_state = ready.component_pages
    # A window gets all that it will ever need: the pages of its boundary, and the page that it writes.
    assert (of_window.first, len(of_window.pages), len(of_window.own)) == (5, 3, 4)
    assert (of_state.first, of_state.pages, len(of_state.own)) == (7, of_state.own, 1)


def test_a_prompt_that_is_all_here_goes_on_from_the_shared_window_and_a_copy_of_the_record() -> None:
    rig = rig_with()
    before = cached(rig, PROMPT)
    assert before.component_pages is not None
    rig.arrive("b", PROMPT)
    promise = rig.take(commands.SendPromise)
    # Empty is not absent: for each component the promise states that prefill need not send anything.
    assert promise.promised_tokens == 8 and component_pages_of(promise) == {"window": (8, 0), "state": (8, 0)}
    clone = rig.take(commands.CopyPages, of_components=True)
    assert (clone.component, clone.source, clone.target) == ("state", "device", "device")
    assert clone.source_pages == before.component_pages[1].pages and clone.target_pages != clone.source_pages
    assert rig.state("b") == "LOCAL_RESTORE"
    rig.serve(promise)
    assert rig.state("b") == "TRANSFER" or rig.state("b") == "LOCAL_RESTORE"
    rig.copied(clone)
    ready = rig.take(commands.ReportReady)
    assert ready.component_pages is not None
    assert ready.component_pages[0].pages == before.component_pages[0].pages and len(ready.component_pages[0].own) == 4
    assert ready.component_pages[1].pages == ready.component_pages[1].own == clone.target_pages
    finish(rig, ready, PROMPT)
    rig.settle()
    rig.expect_nothing_held()


def test_a_longer_prompt_gets_from_prefill_what_comes_after_the_boundary() -> None:
    rig = rig_with()
    cached(rig, PROMPT)
    rig.arrive("b", PROMPT + b"i")
    promise = rig.take(commands.SendPromise)
    assert promise.promised_tokens == 8 and component_pages_of(promise) == {"window": (8, 1), "state": (8, 1)}
    assert not rig.take_all(commands.CopyPages, of_components=True)
    rig.serve(promise)
    ready = rig.take(commands.ReportReady)
    assert ready.component_pages is not None and (
        ready.component_pages[0].first,
        len(ready.component_pages[0].pages),
    ) == (6, 3)
    assert set(ready.component_pages[0].pages[:2]).isdisjoint(ready.component_pages[0].own)
    # Far beyond the boundary, nothing of the window is needed.
    rig.arrive("c", PROMPT + bytes(8))
    assert component_pages_of(rig.take(commands.SendPromise)) == {"window": (13, 3), "state": (15, 1)}


def test_full_pages_are_promised_beyond_the_last_snapshot_and_prefill_sends_the_one_at_the_end() -> None:
    rig = rig_with(state())
    cached(rig, PROMPT[:5])
    ready = rig.make_ready("b", PROMPT)
    finish(rig, ready, PROMPT, component_pages=())
    rig.settle()
    rig.arrive("c", PROMPT + b"i")
    promise = rig.take(commands.SendPromise)
    assert promise.promised_tokens == 8 and component_pages_of(promise) == {"state": (8, 1)}
    assert not rig.take_all(commands.CopyPages, of_components=True)


def test_of_a_window_with_a_hole_prefill_sends_everything_from_the_hole_on() -> None:
    rig = rig_with(window(4))
    cached(rig, PROMPT)
    index = rig.core.state.components
    assert index is not None
    (leaf,) = (node for node in rig.core.state.index.nodes() if node.depth_pages == 8)
    for at in (5, 1):
        rig.core.state.index.split(leaf, at)
    (hole,) = (node for node in rig.core.state.index.nodes() if node.depth_pages == 6)
    index.drop("device", "window", hole)
    index.drop("host", "window", hole)
    rig.arrive("b", PROMPT)
    promise = rig.take(commands.SendPromise)
    assert promise.promised_tokens == 8 and component_pages_of(promise) == {"window": (5, 3)}
    rig.serve(promise)
    ready = rig.take(commands.ReportReady)
    assert ready.component_pages is not None
    assert [page in ready.component_pages[0].own for page in ready.component_pages[0].pages] == [False, *[True] * 3]
    finish(rig, ready, PROMPT)
    rig.settle()
    rig.expect_nothing_held()


def test_a_pool_without_room_for_shared_pages_loads_a_window_into_the_pages_of_the_request() -> None:
    rig = rig_with(window(device=4))
    cached(rig, PROMPT)
    rig.flush("l1")
    rig.arrive("b", PROMPT)
    copy = rig.take(commands.CopyPages, of_components=True)
    rig.copied(rig.take(commands.CopyPages, target="device"))
    rig.copied(copy)
    rig.serve(rig.take(commands.SendPromise))
    ready = rig.take(commands.ReportReady)
    assert ready.component_pages is not None and ready.component_pages[0].pages == copy.target_pages
    assert set(copy.target_pages) < set(ready.component_pages[0].own) and len(ready.component_pages[0].own) == 4
    finish(rig, ready, PROMPT)
    rig.settle()
    rig.expect_nothing_held()


def test_component_pages_that_only_the_host_has_are_loaded_and_shared_again() -> None:
    rig = rig_with()
    cached(rig, PROMPT)
    rig.flush("l1")
    assert device_pages(rig, "window")["cached"] == 0
    rig.arrive("b", PROMPT)
    copies = rig.take_all(commands.CopyPages, of_components=True)
    assert [(copy.component, copy.source, len(copy.source_pages)) for copy in copies] == [
        ("window", "host", 3),
        ("state", "host", 1),
    ]
    rig.copied(rig.take(commands.CopyPages, target="device"))
    rig.serve(rig.take(commands.SendPromise))
    rig.copied(copies[0])
    assert rig.state("b") == "LOCAL_RESTORE"
    rig.copied(copies[1])
    ready = rig.take(commands.ReportReady)
    assert ready.component_pages is not None and ready.component_pages[0].pages == copies[0].target_pages
    assert (
        set(ready.component_pages[0].pages).isdisjoint(ready.component_pages[0].own)
        and len(ready.component_pages[0].own) == 4
    )
    assert device_pages(rig, "window")["cached"] == 3 and device_pages(rig, "state")["cached"] == 0
    # Another request finds the window on the device, and copies the record from the host.
    rig.arrive("c", PROMPT)
    copy = rig.take(commands.CopyPages, of_components=True)
    assert (copy.component, copy.source) == ("state", "host")


def test_two_that_load_one_window_at_once_end_up_with_one() -> None:
    rig = rig_with(window())
    cached(rig, PROMPT)
    rig.flush("l1")
    rig.arrive("b", PROMPT)
    rig.arrive("c", PROMPT)
    first, second = rig.take_all(commands.CopyPages, of_components=True)
    rig.copied(rig.take(commands.CopyPages, target="device"))
    for promise in rig.take_all(commands.SendPromise):
        rig.serve(promise)
    rig.copied(first)
    rig.copied(second)
    tables = [ready.component_pages for ready in rig.take_all(commands.ReportReady)]
    assert tables[0] is not None and tables[1] is not None
    assert tables[0][0].pages == tables[1][0].pages == first.target_pages
    assert device_pages(rig, "window")["owned"] == 8


@pytest.mark.parametrize("raises", [False, True])
def test_after_a_failed_copy_its_pages_are_asked_of_prefill_by_an_extend(raises: bool) -> None:
    rig = rig_with()
    cached(rig, PROMPT)
    rig.flush("l1")
    rig.arrive("c", PROMPT)
    of_window, of_state = rig.take_all(commands.CopyPages, of_components=True)
    assert of_window.source == of_state.source == "host"
    promise = rig.take(commands.SendPromise)
    rig.serve(promise)
    if raises:
        rig.step(events.CommandRaised, op=of_window.op, detail="RuntimeError: no stream")
    else:
        rig.copied(of_window, error="bus error")
    extend = rig.take(commands.SendExtend)
    assert (extend.component, extend.span, extend.first) == ("window", 1, 5)
    # Into the pages that the copy had: nothing writes to them any more.
    assert extend.pages == of_window.target_pages
    rig.copied(of_state)
    rig.copied(rig.take(commands.CopyPages, target="device"))
    assert rig.state("c") == "TRANSFER"
    rig.chunk(extend)
    ready = rig.take(commands.ReportReady)
    assert ready.generation == 0 and not rig.take_all(commands.SendPromise)
    # What prefill has brought joins the index as what the host has would have done.
    assert device_pages(rig, "window")["cached"] == 3
    finish(rig, ready, PROMPT)
    settle(rig)


def test_pages_of_a_late_copy_stay_with_it_and_prefill_brings_others() -> None:
    rig = rig_with(state(device=3))
    cached(rig, PROMPT)
    rig.arrive("b", PROMPT)
    clone = rig.take(commands.CopyPages, of_components=True)
    rig.serve(rig.take(commands.SendPromise))
    rig.wait_until(rig.now_s + 40.0)
    extend = rig.take(commands.SendExtend)
    assert (extend.component, extend.first) == ("state", 7) and set(extend.pages).isdisjoint(clone.target_pages)
    # The record that is still written to, and the one that prefill writes; the source is locked.
    assert device_pages(rig, "state")["owned"] == 2 and rig.core.statistics()["copies_late"] == 1
    rig.chunk(extend)
    ready = rig.take(commands.ReportReady)
    assert ready.component_pages is not None and ready.component_pages[0].pages == extend.pages
    finish(rig, ready, PROMPT)
    rig.settle()
    assert device_pages(rig, "state")["owned"] == 1
    rig.copied(clone)
    settle(rig)


@pytest.mark.parametrize("error", ["", "bus error"])
def test_a_late_copy_is_waited_for_if_there_is_no_other_page(error: str) -> None:
    rig = rig_with(state(device=2))
    cached(rig, PROMPT)
    rig.arrive("b", PROMPT)
    clone = rig.take(commands.CopyPages, of_components=True)
    rig.serve(rig.take(commands.SendPromise))
    for _ in range(3):
        rig.wait_until(rig.now_s + 40.0)
    assert rig.core.statistics()["copies_late"] == 1 and not rig.take_all(commands.SendExtend)
    assert rig.state("b") == "LOCAL_RESTORE"
    rig.copied(clone, error=error)
    if error:
        extend = rig.take(commands.SendExtend)
        assert extend.pages == clone.target_pages
        rig.chunk(extend)
    assert rig.take(commands.ReportReady).generation == 0


def test_a_request_that_leaves_after_an_extend_keeps_its_pages_until_prefill_has_drained() -> None:
    rig = rig_with(window())
    cached(rig, PROMPT)
    rig.flush("l1")
    rig.arrive("b", PROMPT)
    copy = rig.take(commands.CopyPages, of_components=True)
    rig.promised(rig.take(commands.SendPromise))
    rig.copied(copy, error="bus error")
    rig.take(commands.SendExtend)
    rig.abort("b")
    assert device_pages(rig, "window")["draining"] == 3
    rig.drained(rig.take(commands.SendAbort))
    assert device_pages(rig, "window")["draining"] == 0
    settle(rig)


def test_an_extend_that_is_refused_sends_the_request_to_the_next_prefill() -> None:
    rig = rig_with(window())
    cached(rig, PROMPT)
    rig.flush("l1")
    rig.arrive("b", PROMPT, prefill_count=2)
    copy = rig.take(commands.CopyPages, of_components=True)
    rig.promised(rig.take(commands.SendPromise))
    rig.copied(copy, error="bus error")
    extend = rig.take(commands.SendExtend)
    rig.step(events.RoomRefused, request_id="b", generation=0, span=extend.span, cause="it had a full hit")
    rig.drained(rig.take(commands.SendAbort))
    rig.copied(rig.take(commands.CopyPages, target="device"))
    rig.wait_until(rig.now_s + 0.1)
    assert rig.take(commands.SendPromise).generation == 1


def test_a_request_that_is_aborted_leaves_its_pages_to_the_copy_and_to_prefill() -> None:
    rig = rig_with()
    cached(rig, PROMPT)
    rig.flush("l1")
    rig.arrive("b", PROMPT + b"ij")
    copy = rig.take(commands.CopyPages, of_components=True)
    promise = rig.take(commands.SendPromise)
    rig.promised(promise)
    rig.abort("b")
    assert device_pages(rig, "window") == {"free": 11, "owned": 3, "cached": 0, "draining": 2, "protected": 0}
    assert device_pages(rig, "state")["draining"] == 1
    rig.wait_until(rig.now_s + 40.0)
    rig.copied(copy, error="late")
    rig.drained(rig.take(commands.SendAbort))
    assert device_pages(rig, "window")["free"] == 16 and device_pages(rig, "state")["free"] == 8
    rig.settle()
    rig.expect_nothing_held()


def test_a_request_waits_for_pools_of_components_that_others_hold() -> None:
    rig = rig_with(window(3, device=8), state(device=1))
    ready = rig.make_ready("a", PROMPT)
    rig.arrive("b", b"xyz")
    rig.arrive("c", b"uvw")
    assert rig.state("b") == rig.state("c") == "PREALLOC"
    finish(rig, ready, PROMPT)
    assert rig.state("b") == "TRANSFER" and rig.state("c") == "PREALLOC"
    rig.abort("b")
    rig.settle()
    assert rig.core.request("c") is not None


def test_the_only_snapshot_gives_way_to_a_request_that_continues_from_it() -> None:
    # There is no room for a copy of it, and never will be.
    rig = rig_with(state(device=1, host=0))
    ready = rig.make_ready("a", PROMPT)
    finish(rig, ready, PROMPT)
    rig.settle()
    rig.arrive("b", PROMPT)
    promise = rig.take(commands.SendPromise)
    assert promise.promised_tokens == 8 and component_pages_of(promise) == {"state": (7, 1)}


@pytest.mark.parametrize("end", [5, 7])
def test_a_caller_that_recomputes_continues_at_the_longest_boundary_of_all_components(end: int) -> None:
    rig = rig_with()
    cached(rig, PROMPT[:3])
    left = cached(rig, PROMPT[:end], "again").component_pages
    # The full KV is there beyond it.
    finish(rig, rig.make_ready("c", PROMPT), PROMPT, component_pages=())
    rig.settle()
    order = recompute_order(rig, "b", PROMPT)
    assert order.first == end and order.resume_from is not None and order.component_pages is not None
    assert left is not None
    of_window, of_state = order.resume_from
    assert (of_window.first, len(of_window.pages)) == (end - 3, 3)
    assert (of_state.first, of_state.pages) == (end - 1, left[1].pages)
    window_table, state_table = order.component_pages
    shared = [page for page in window_table.pages if page not in window_table.own]
    assert shared == list(of_window.pages)[len(of_window.pages) - max(0, end - 5) :]
    assert state_table.pages == state_table.own != of_state.pages
    # What the computation reads stays where it is until it ends.
    assert rig.core.state.components is not None
    rig.core.state.components.evict("device", "window", 99)
    assert device_pages(rig, "window")["cached"] >= 3 and device_pages(rig, "state")["protected"] == 1
    rig.step(events.Recomputed, op=order.op, error="")
    finish(rig, rig.take(commands.ReportReady), PROMPT)
    rig.settle()
    rig.expect_nothing_held()


def test_a_boundary_whose_pages_leave_no_room_for_a_computation_is_not_continued_from() -> None:
    rig = rig_with(state(device=1, host=0))
    cached(rig, PROMPT[:5])
    order = recompute_order(rig, "b", PROMPT)
    assert order.first == 0 and order.resume_from is not None and not order.resume_from[0].pages
    rig.step(events.Recomputed, op=order.op, error="")
    rig.take(commands.ReportReady)


def test_a_caller_that_recomputes_begins_with_the_first_page_without_a_boundary() -> None:
    rig = rig_with()
    cached(rig, PROMPT)
    rig.arrive("b", PROMPT, can_recompute=True)
    clone = rig.take(commands.CopyPages, of_components=True)
    promise = rig.take(commands.SendPromise)
    rig.step(events.RoomFailed, request_id="b", generation=promise.generation, cause="gone", settled=True)
    rig.copied(clone)
    order = rig.take(commands.Recompute)
    assert order.first == 0 and order.component_pages is not None
    assert [(table.component, len(table.pages), len(table.own)) for table in order.component_pages] == [
        ("window", 3, 4),
        ("state", 1, 1),
    ]
    # An aborted computation keeps these pages until it has ended.
    rig.abort("b")
    assert device_pages(rig, "window")["owned"] == 4
    rig.step(events.Recomputed, op=order.op, error="")
    assert device_pages(rig, "window")["owned"] == 0
    rig.settle()
    rig.expect_nothing_held()


def test_storage_that_holds_only_full_pages_is_used_for_those() -> None:
    rig = rig_with()
    rig.attach_storage()
    rig.arrive("a", PROMPT)
    rig.answer(rig.take(commands.QueryStorage), 8)
    assert len(rig.take(commands.FetchPages).host_pages) == 8
    promise = rig.take(commands.SendPromise)
    assert promise.promised_tokens == 8 and component_pages_of(promise) == {"window": (5, 3), "state": (7, 1)}


@pytest.mark.parametrize("times", [1, 2])
def test_a_raise_while_the_plan_is_made_undoes_what_was_begun(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rig_with()
    cached(rig, PROMPT)
    if times == 2:
        rig.flush("l1")
    rig.attach_storage()
    raise_at_promises(rig, times, monkeypatch)
    rig.arrive("b", PROMPT)
    promise = rig.take(commands.SendPromise)
    # After the second raise the host is not trusted either: the grant is given back, and another one is made.
    assert promise.promised_tokens == (8 if times == 1 else 0)
    assert ids(rig.request("b").held.own) == ids(promise.pages)
    rig.abort("b")
    rig.settle()
    rig.expect_nothing_held()
