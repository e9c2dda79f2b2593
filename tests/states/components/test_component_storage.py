"""Components in storage, by example: how far they let a plan reach, and what goes wrong."""

from __future__ import annotations

import pytest

from simulation.rig import Rig, ids
from tests.support.component_stories import (
    ALL,
    PROMPT,
    asked,
    cached,
    fetching,
    finish,
    only_in_storage,
    pages,
    raise_at_promises,
    ready_with,
    rig_with,
    settle,
    state,
    tail,
    window,
)
from tests.support.rigs import extended, tails_of
from tidekv.states import commands, events
from tidekv.states.errors import BrokenInvariant


def test_a_prompt_comes_back_from_storage_with_its_component_pages() -> None:
    rig = rig_with()
    only_in_storage(rig)
    of_window, of_state = fetching(rig)
    assert (of_window.component, ids(of_window.positions)) == ("window", [5, 6, 7])
    assert (of_state.component, ids(of_state.positions)) == ("state", [7])
    promise = rig.take(commands.SendPromise)
    assert promise.promised_tokens == 8 and promise.component_pages is not None
    assert [len(asked_for.pages) for asked_for in promise.component_pages] == [0, 0]
    rig.serve(promise)
    rig.fetched(rig.take(commands.FetchPages))
    rig.copied(rig.take(commands.CopyPages, target="device"))
    rig.fetched(of_state)
    assert rig.state("a") == "PREFETCH"
    rig.fetched(of_window)
    assert rig.state("a") == "LOCAL_RESTORE"
    for copy in rig.take_all(commands.CopyPages, of_components=True):
        assert copy.source == "host" and copy.target == "device"
        rig.copied(copy)
    ready = rig.take(commands.ReportReady)
    assert ready.component_pages is not None and [len(table.pages) for table in ready.component_pages] == [3, 1]
    assert ready.sources["l3"] == 8 and pages(rig, "window") == pages(rig, "state") == (0, 0)
    assert rig.core.statistics()["window_device_cached"] == 3
    finish(rig, ready, PROMPT)
    settle(rig)


def test_full_pages_come_from_storage_whether_or_not_it_has_the_component_pages() -> None:
    rig = rig_with(state())
    only_in_storage(rig)
    # Storage has lost the last record.
    rig.answer(asked(rig), 8, component_pages=(tail("state", (3, 4)),))
    promise = rig.take(commands.SendPromise)
    assert promise.promised_tokens == 8 and tails_of(promise) == {"state": (7, 1)}
    assert len(rig.take(commands.FetchPages).host_pages) == 8
    assert not rig.take_all(commands.FetchPages, of_components=True)


def test_component_pages_come_from_storage_whether_or_not_it_has_the_full_pages() -> None:
    rig = rig_with()
    rig.answer(asked(rig), 3, component_pages=ALL)
    promise = rig.take(commands.SendPromise)
    assert promise.promised_tokens == 3 and tails_of(promise) == {"window": (8, 0), "state": (8, 0)}
    for fetch in rig.take_all(commands.FetchPages, of_components=True):
        rig.fetched(fetch)
    for copy in rig.take_all(commands.CopyPages, of_components=True):
        rig.copied(copy)
    rig.fetched(rig.take(commands.FetchPages))
    rig.copied(rig.take(commands.CopyPages, target="device"))
    rig.serve(promise)
    ready = rig.take(commands.ReportReady)
    # The window lies beyond the pages of storage, so it does not join the index.
    assert ready.component_pages is not None and set(ready.component_pages[0].pages) < set(ready.component_pages[0].own)
    finish(rig, ready, PROMPT)
    settle(rig)


def test_component_pages_are_combined_from_device_host_and_storage() -> None:
    rig = rig_with(window(4))
    cached(rig, PROMPT)
    index = rig.core.state.components
    assert index is not None
    (leaf,) = (node for node in rig.core.state.index.nodes() if node.depth_pages == 8)
    for at in (5, 1, 1):
        rig.core.state.index.split(leaf, at)
    at_end = {node.depth_pages: node for node in rig.core.state.index.nodes()}
    # Of positions 4 to 7, the device has lost 5 and 6, and the host 6 as well.
    for tier, end in (("device", 6), ("device", 7), ("host", 7)):
        index.drop(tier, "window", at_end[end])
    rig.answer(asked(rig), 0, component_pages=(tail("window", (6, 7)),))
    fetch, copy = rig.take(commands.FetchPages, of_components=True), rig.take(commands.CopyPages, of_components=True)
    assert ids(fetch.positions) == [6] and (copy.source, len(copy.source_pages)) == ("host", 1)
    rig.serve(rig.take(commands.SendPromise))
    rig.copied(copy)
    rig.fetched(fetch)
    rig.copied(rig.take(commands.CopyPages, of_components=True))
    ready = rig.take(commands.ReportReady)
    assert ready.component_pages is not None and len(ready.component_pages[0].pages) == 4
    finish(rig, ready, PROMPT)
    settle(rig)


def test_positions_that_are_not_of_the_prompt_are_not_believed() -> None:
    rig = rig_with()
    answered = (tail("window", (-5, 99)), tail("state", (-9, -1), (3, 4), (70, 80)), tail("nobody", (0, 8)))
    rig.answer(asked(rig), 99, component_pages=answered)
    promise = rig.take(commands.SendPromise)
    assert promise.promised_tokens == 8 and tails_of(promise) == {"window": (8, 0), "state": (7, 1)}


def test_full_pages_have_precedence_over_component_pages_within_limits() -> None:
    rig = rig_with(fetch_pages_in_flight_max=9)
    rig.answer(asked(rig), 8, component_pages=ALL)
    promise = rig.take(commands.SendPromise)
    # One page is left after the full ones: too few for the window, enough for the record.
    assert promise.promised_tokens == 8 and tails_of(promise) == {"window": (5, 3), "state": (8, 0)}
    assert [fetch.component for fetch in rig.take_all(commands.FetchPages, of_components=True)] == ["state"]


def test_full_pages_that_do_not_fit_the_host_leave_the_component_pages_as_they_are() -> None:
    rig = rig_with(state(), host_pages=5)
    rig.answer(asked(rig), 8, component_pages=(tail("state", (3, 4), (7, 8)),))
    promise = rig.take(commands.SendPromise)
    assert promise.promised_tokens == 5 and tails_of(promise) == {"state": (8, 0)}
    assert rig.request("a").sources.declined == ("no_host_page", 3)


def test_host_pages_of_a_component_are_not_waited_for() -> None:
    rig = rig_with(window(3, host=2), state())
    rig.answer(asked(rig), 8, component_pages=ALL)
    promise = rig.take(commands.SendPromise)
    assert promise.promised_tokens == 8 and tails_of(promise) == {"window": (5, 3), "state": (8, 0)}
    assert [fetch.component for fetch in rig.take_all(commands.FetchPages, of_components=True)] == ["state"]
    rig.pending.clear()


def test_a_pool_without_room_for_shared_pages_fetches_into_the_pages_of_the_request() -> None:
    rig = rig_with(window(3, device=4), state())
    rig.answer(asked(rig), 8, component_pages=ALL)
    assert tails_of(rig.take(commands.SendPromise)) == {"window": (8, 0), "state": (8, 0)}
    assert rig.core.statistics()["window_device_owned"] == 4
    rig.abort("a")
    settle(rig)


def test_a_pool_that_others_hold_is_waited_for() -> None:
    rig = rig_with(window(3, device=7), state())
    ready = ready_with(rig, "b", b"xyz")
    rig.answer(asked(rig), 8, component_pages=ALL)
    assert rig.state("a") == "PREALLOC"
    finish(rig, ready, b"xyz")
    rig.settle()
    assert rig.core.request("a") is None or rig.state("a") == "READY"


def test_remains_of_another_load_in_the_way_leave_only_the_full_pages_to_prefill() -> None:
    rig = rig_with(prefetch="wait_complete")
    only_in_storage(rig)
    rig.answer(asked(rig), 8, component_pages=ALL)
    rig.take_all(commands.FetchPages, of_components=True)
    rig.fetched(rig.take(commands.FetchPages))
    rig.take(commands.SendPromise)
    # The copy to the device is late: its pages are reclaimed until it ends.
    rig.wait_until(rig.now_s + 40.0)
    assert rig.core.statistics()["copies_late"] == 1
    rig.abort("a")
    rig.pending = [wish for wish in rig.pending if not isinstance(wish, commands.SendPromise)]
    rig.arrive("b", PROMPT)
    query = rig.take_all(commands.QueryStorage)[-1]
    rig.answer(query, 8, component_pages=ALL)
    promise = rig.take(commands.SendPromise)
    assert promise.promised_tokens == 0 and tails_of(promise) == {"window": (8, 0), "state": (8, 0)}
    assert rig.request("b").sources.declined == ("in_the_way", 8)


@pytest.mark.parametrize("valid", [0, 2, -1])
def test_what_a_short_fetch_of_component_pages_does_not_bring_is_asked_of_prefill(valid: int) -> None:
    rig = rig_with()
    only_in_storage(rig)
    of_window, of_state = fetching(rig)
    promise = rig.take(commands.SendPromise)
    rig.serve(promise)
    rig.fetched(of_window, valid, error="no such record" if valid < 1 else "")
    valid = max(valid, 0)
    assert rig.core.statistics()["l3_pages_short"] == 3 - valid
    assert extended(rig) == {"window": (5 + valid, 3 - valid)}
    # What came is copied, and only its host pages are held.
    copies = rig.take_all(commands.CopyPages, of_components=True)
    assert sum(len(copy.source_pages) for copy in copies) == valid == pages(rig, "window")[0]
    rig.fetched(of_state)
    for copy in (*copies, *rig.take_all(commands.CopyPages, of_components=True)):
        rig.copied(copy)
    rig.fetched(rig.take(commands.FetchPages))
    rig.copied(rig.take(commands.CopyPages, target="device"))
    ready = rig.take(commands.ReportReady)
    assert ready.generation == 0 and pages(rig, "window") == pages(rig, "state") == (0, 0)
    finish(rig, ready, PROMPT)
    settle(rig)


def test_a_late_fetch_of_component_pages_keeps_its_host_pages_until_it_ends() -> None:
    rig = rig_with(prefetch_base_s=2.0)
    only_in_storage(rig)
    of_window, of_state = fetching(rig)
    rig.fetched(rig.take(commands.FetchPages))
    rig.copied(rig.take(commands.CopyPages, target="device"))
    rig.fetched(of_state)
    rig.copied(rig.take(commands.CopyPages, of_components=True))
    rig.serve(rig.take(commands.SendPromise))
    rig.wait_until(rig.now_s + 3.0)
    assert rig.core.statistics()["l3_fetches_late"] == 1 and pages(rig, "window") == (3, 0)
    assert extended(rig) == {"window": (5, 3)}
    assert rig.take(commands.ReportReady).generation == 0
    rig.fetched(of_window)
    assert pages(rig, "window") == (0, 0)


@pytest.mark.parametrize("is_late", [False, True])
def test_what_a_copy_of_fetched_pages_does_not_bring_is_asked_of_prefill(is_late: bool) -> None:
    rig = rig_with(prefetch_base_s=100.0)
    only_in_storage(rig)
    of_window, of_state = fetching(rig)
    rig.fetched(of_window)
    copy = rig.take(commands.CopyPages, of_components=True)
    rig.serve(rig.take(commands.SendPromise))
    if is_late:
        rig.wait_until(rig.now_s + 40.0)
        assert extended(rig) == {"window": (5, 3)}
        # Until the copy has ended its pages stay taken, on the device and on the host.
        assert pages(rig, "window") == (3, 0)
    rig.copied(copy, error="bus error")
    assert extended(rig) == ({} if is_late else {"window": (5, 3)})
    assert pages(rig, "window") == (0, 0) and rig.core.statistics()["sent_back"] == 0
    rig.fetched(of_state)
    settle_all(rig)


def settle_all(rig: Rig) -> None:
    rig.abort("a")
    settle(rig)


@pytest.mark.parametrize("stage", ["answered", "fetched", "copied"])
def test_a_leaving_request_leaves_its_pages_to_operations_that_still_write_to_them(stage: str) -> None:
    rig = rig_with()
    only_in_storage(rig)
    of_window, of_state = fetching(rig)
    if stage != "answered":
        rig.fetched(of_window)
        copy = rig.take(commands.CopyPages, of_components=True)
        if stage == "copied":
            rig.copied(copy)
    rig.abort("a")
    counts = rig.core.statistics()
    assert counts["window_device_owned"] == (7 if stage == "fetched" else 0)
    assert pages(rig, "window")[0] == (0 if stage == "copied" else 3)
    if stage == "answered":
        rig.fetched(of_window)
    elif stage == "fetched":
        rig.copied(copy)
    rig.fetched(of_state)
    settle(rig)


def test_failures_with_component_pages_open_the_breaker_too() -> None:
    rig = rig_with(breaker_failures=2)
    only_in_storage(rig)
    of_window, of_state = fetching(rig)
    rig.fetched(of_state, 0, error="down")
    assert not rig.core.statistics()["l3_breaker_open"]
    rig.fetched(of_window, 0, error="down")
    assert rig.core.statistics()["l3_breaker_open"]
    assert pages(rig, "window") == (0, 0)


@pytest.mark.parametrize("policy", ["best_effort", "wait_complete"])
def test_component_pages_are_waited_for_when_the_transfer_is_done(policy: str) -> None:
    rig = rig_with(prefetch=policy)
    only_in_storage(rig)
    fetches = fetching(rig, deadline_at_s=100.0)
    assert {fetch.timeout_s for fetch in fetches} == {50.0}
    rig.serve(rig.take(commands.SendPromise))
    if policy == "best_effort":
        extend = rig.take(commands.SendExtend)
        rig.chunk(extend)
        rig.fetched(rig.take(commands.FetchPages))
    else:
        rig.fetched(rig.take(commands.FetchPages))
        rig.copied(rig.take(commands.CopyPages, target="device"))
    assert rig.state("a") == "PREFETCH"
    for fetch in fetches:
        rig.fetched(fetch)
    for copy in rig.take_all(commands.CopyPages, of_components=True):
        rig.copied(copy)
    rig.take(commands.ReportReady)


@pytest.mark.parametrize("times", [1, 2])
def test_a_raise_while_a_plan_from_storage_is_made_undoes_what_was_begun(
    times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = rig_with()
    only_in_storage(rig)
    query = asked(rig)
    raise_at_promises(rig, times, monkeypatch)
    rig.answer(query, 8, component_pages=ALL)
    # Storage is not trusted any more: the grant that relied on it is given back, and another one is made.
    promise = rig.take(commands.SendPromise)
    assert promise.promised_tokens == 0
    rig.nothing_else()
    settle_all(rig)


def test_a_recomputing_caller_begins_with_the_first_page_whatever_storage_has() -> None:
    rig = rig_with()
    only_in_storage(rig)
    fetches = fetching(rig, can_recompute=True)
    promise = rig.take(commands.SendPromise)
    rig.step(events.RoomFailed, request_id="a", generation=promise.generation, cause="gone", settled=True)
    assert rig.take(commands.Recompute).first == 0 and not rig.take_all(commands.QueryStorage)
    for fetch in fetches:
        rig.fetched(fetch)
    assert pages(rig, "window") == (0, 0)


def test_a_broken_invariant_is_not_taken_for_a_failed_put(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rig_with()
    finish(rig, ready_with(rig, "a", PROMPT), PROMPT)
    rig.copied(rig.take(commands.CopyPages, target="host"))
    for copy in rig.take_all(commands.CopyPages, of_components=True):
        rig.copied(copy)

    def contradict(*_: object) -> None:
        raise BrokenInvariant("planted")

    monkeypatch.setattr(rig.core.state.components, "trailing_pages_of", contradict)
    with pytest.raises(BrokenInvariant, match="planted"):
        rig.stored(rig.take(commands.StorePages))
