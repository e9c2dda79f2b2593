"""Rules with components that raise: a raise at any of their calls loses neither full pages nor component pages."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from simulation.rig import Rig
from tests.support.component_stories import PROMPT, finish, rig_with, state, window
from tests.support.each_call import raised_at_each_call
from tidekv.states import commands, events

Step = Callable[[Rig], object]


def rig_with_past(*, host_windows: int = 16) -> Rig:
    """The prompt with its component pages is on the host, the first half of it on the device as well."""
    rig = rig_with(window(host=host_windows), state(), storage=False, growth_reserve_pages=1)
    leave(rig, PROMPT)
    rig.flush("l1")
    leave(rig, PROMPT[:4])
    return rig


def rig_with_storage() -> Rig:
    """The prompt with its component pages is only in storage."""
    rig = rig_with(growth_reserve_pages=1, store_wait_s=50.0, lookahead_pages_max=100)
    leave(rig, PROMPT)
    rig.flush("l1")
    rig.flush("l2")
    return rig


def leave(rig: Rig, tokens: bytes) -> None:
    finish(rig, restored(rig, "past", tokens), tokens)
    rig.settle()


def restored(rig: Rig, request_id: str, tokens: bytes) -> commands.ReportReady:
    rig.arrive(request_id, tokens)
    (ready,) = (wish for wish in rig.settle() if isinstance(wish, commands.ReportReady))
    return ready


def arrival(rig: Rig) -> Step:
    return lambda rig: rig.arrive("a", PROMPT)


def copies_end(rig: Rig) -> Step:
    rig.arrive("a", PROMPT)
    rig.serve(rig.take(commands.SendPromise))
    rig.copied(rig.take(commands.CopyPages, target="device"))
    first, second = rig.take_all(commands.CopyPages, of_components=True)
    rig.copied(first)
    return lambda rig: rig.copied(second)


def copy_fails(rig: Rig) -> Step:
    rig.arrive("a", PROMPT)
    first, second = rig.take_all(commands.CopyPages, of_components=True)
    rig.pending.append(second)
    return lambda rig: rig.copied(first, error="bus error")


def copy_is_late(rig: Rig) -> Step:
    rig.arrive("a", PROMPT)
    return lambda rig: rig.wait_until(rig.now_s + 40.0)


def a_window_is_here_already(rig: Rig) -> Step:
    """Two requests load the same pages: the later one switches to the window of the first one."""
    rig.arrive("b", PROMPT)
    rig.arrive("a", PROMPT)
    of_window, of_state, *others = rig.take_all(commands.CopyPages, of_components=True)
    rig.copied(rig.take(commands.CopyPages, target="device"))
    for promise in rig.take_all(commands.SendPromise):
        rig.serve(promise)
    for copy in (of_window, of_state, others[1]):
        rig.copied(copy)
    return lambda rig: rig.copied(others[0])


def room_is_lost(rig: Rig) -> Step:
    rig.arrive("a", PROMPT + b"ij", prefill_count=2)
    promise = rig.take(commands.SendPromise)
    rig.promised(promise)
    return lambda rig: rig.step(
        events.RoomFailed, request_id="a", generation=promise.generation, cause="lost", settled=False
    )


def room_was_never_sent(rig: Rig) -> Step:
    rig.arrive("a", PROMPT + b"ij", prefill_count=2)
    promise = rig.take(commands.SendPromise)
    return lambda rig: rig.step(
        events.RoomFailed, request_id="a", generation=promise.generation, cause="lost", settled=True
    )


def room_of_a_transfer_was_never_sent(rig: Rig) -> Step:
    rig.arrive("a", b"xyz", prefill_count=2)
    promise = rig.take(commands.SendPromise)
    return lambda rig: rig.step(
        events.RoomFailed, request_id="a", generation=promise.generation, cause="lost", settled=True
    )


def abort(rig: Rig) -> Step:
    rig.arrive("a", PROMPT + b"ij")
    rig.promised(rig.take(commands.SendPromise))
    return lambda rig: rig.abort("a")


def copy_of_the_aborted_ends(rig: Rig) -> Step:
    rig.arrive("a", PROMPT)
    copies = rig.take_all(commands.CopyPages, of_components=True)
    rig.abort("a")
    for copy in copies[1:]:
        rig.copied(copy)
    return lambda rig: rig.copied(copies[0])


def drained(rig: Rig) -> Step:
    rig.arrive("a", PROMPT + b"ij")
    rig.promised(rig.take(commands.SendPromise))
    rig.abort("a")
    return lambda rig: rig.drained(rig.take(commands.SendAbort))


def finished(rig: Rig) -> Step:
    ready = restored(rig, "a", b"xyzxyz")
    return lambda rig: finish(rig, ready, b"xyzxyz")


def retracted(rig: Rig) -> Step:
    ready = restored(rig, "a", b"xyzxyz")
    return lambda rig: finish(rig, ready, b"xyzxyz", events.RetractRequested)


def full_backup_ends(rig: Rig) -> Step:
    finish(rig, restored(rig, "a", b"xyzxyz"), b"xyzxyz")
    return lambda rig: rig.copied(rig.take(commands.CopyPages, target="host"))


def the_host_has_no_room_for_the_rest_of_a_tail(rig: Rig) -> Step:
    """What there is of it on the host already is all that could be evicted."""
    leave(rig, PROMPT + b"i")
    finish(rig, restored(rig, "a", PROMPT + b"ij"), PROMPT + b"ij")
    return lambda rig: rig.copied(rig.take(commands.CopyPages, target="host"))


def component_backup_ends(rig: Rig) -> Step:
    full_backup_ends(rig)(rig)
    copies = rig.take_all(commands.CopyPages, of_components=True)
    rig.copied(copies[0])
    return lambda rig: rig.copied(copies[1])


def component_backup_fails(rig: Rig) -> Step:
    full_backup_ends(rig)(rig)
    copies = rig.take_all(commands.CopyPages, of_components=True)
    rig.copied(copies[0])
    return lambda rig: rig.copied(copies[1], error="bus error")


def computed_by_the_caller(rig: Rig) -> Step:
    rig.arrive("a", PROMPT, can_recompute=True)
    promise = rig.take(commands.SendPromise)
    rig.step(events.RoomFailed, request_id="a", generation=promise.generation, cause="lost", settled=True)
    order = rig.take(commands.Recompute)
    rig.abort("a")
    return lambda rig: rig.step(events.Recomputed, op=order.op)


STORIES = [
    arrival,
    copies_end,
    copy_fails,
    copy_is_late,
    a_window_is_here_already,
    room_is_lost,
    room_was_never_sent,
    room_of_a_transfer_was_never_sent,
    abort,
    copy_of_the_aborted_ends,
    drained,
    finished,
    retracted,
    full_backup_ends,
    the_host_has_no_room_for_the_rest_of_a_tail,
    component_backup_ends,
    component_backup_fails,
    computed_by_the_caller,
]
HOST_WINDOWS: dict[Callable[[Rig], Step], int] = {the_host_has_no_room_for_the_rest_of_a_tail: 3}


# --- With storage ---


def answer(rig: Rig) -> Step:
    rig.arrive("a", PROMPT)
    query = rig.take(commands.QueryStorage)
    component_pages = (events.StoredComponent("window", ((5, 8),)), events.StoredComponent("state", ((7, 8),)))
    return lambda rig: rig.answer(query, 8, component_pages=component_pages)


def answer_of_which_some_is_cached(rig: Rig) -> Step:
    leave(rig, PROMPT[:4])
    rig.flush("l1")
    return answer(rig)


def answer_where_the_front_has_left(rig: Rig) -> Step:
    """The request waits for device pages, and queries again."""
    leave(rig, PROMPT[:4])
    restored(rig, "b", bytes(range(128, 154)))
    answered = answer(rig)
    answered(rig)
    rig.flush("l1")
    return lambda rig: rig.flush("l2")


def component_fetch_ends(rig: Rig) -> Step:
    answer(rig)(rig)
    fetch, *others = rig.take_all(commands.FetchPages, of_components=True)
    rig.pending += others
    return lambda rig: rig.fetched(fetch)


def component_fetch_fails(rig: Rig) -> Step:
    answer(rig)(rig)
    fetch, *others = rig.take_all(commands.FetchPages, of_components=True)
    rig.pending += others
    return lambda rig: rig.fetched(fetch, 1)


def component_fetch_is_late(rig: Rig) -> Step:
    answer(rig)(rig)
    return lambda rig: rig.wait_until(rig.now_s + 10.0)


def component_fetch_of_the_aborted_ends(rig: Rig) -> Step:
    answer(rig)(rig)
    fetches = rig.take_all(commands.FetchPages, of_components=True)
    rig.fetched(fetches[0])
    rig.abort("a")
    return lambda rig: rig.fetched(fetches[1])


def abort_while_fetching(rig: Rig) -> Step:
    answer(rig)(rig)
    fetches = rig.take_all(commands.FetchPages, of_components=True)
    rig.fetched(fetches[0])
    rig.pending.append(fetches[1])
    return lambda rig: rig.abort("a")


def copy_of_a_tail_from_storage_ends(rig: Rig) -> Step:
    component_fetch_ends(rig)(rig)
    copy = rig.take(commands.CopyPages, of_components=True)
    return lambda rig: rig.copied(copy)


def copy_of_a_tail_from_storage_fails(rig: Rig) -> Step:
    component_fetch_ends(rig)(rig)
    copy = rig.take(commands.CopyPages, of_components=True)
    return lambda rig: rig.copied(copy, error="bus error")


def copy_of_a_tail_from_storage_ends_after_an_abort(rig: Rig) -> Step:
    component_fetch_ends(rig)(rig)
    copy = rig.take(commands.CopyPages, of_components=True)
    rig.abort("a")
    return lambda rig: rig.copied(copy)


def left_on_the_host(rig: Rig) -> list[commands.CopyPages]:
    finish(rig, restored(rig, "b", b"xyzxyz"), b"xyzxyz")
    rig.copied(rig.take(commands.CopyPages, target="host"))
    return rig.take_all(commands.CopyPages, of_components=True)


def full_pages_are_stored(rig: Rig) -> Step:
    for copy in left_on_the_host(rig):
        rig.copied(copy)
    return lambda rig: rig.stored(rig.take(commands.StorePages))


def tail_backup_ends_after_the_full_put(rig: Rig) -> Step:
    copies = left_on_the_host(rig)
    rig.stored(rig.take(commands.StorePages))
    rig.copied(copies[0])
    return lambda rig: rig.copied(copies[1])


def component_put_ends(rig: Rig) -> Step:
    full_pages_are_stored(rig)(rig)
    puts = rig.take_all(commands.StorePages, of_components=True)
    rig.stored(puts[0])
    return lambda rig: rig.stored(puts[1])


def waiting_put(rig: Rig) -> list[commands.FetchPages]:
    copies = left_on_the_host(rig)
    rig.stored(rig.take(commands.StorePages))
    answer(rig)(rig)
    rig.fetched(rig.take(commands.FetchPages))
    fetches = rig.take_all(commands.FetchPages, of_components=True)
    rig.fetched(fetches[0])
    rig.copied(copies[0])
    rig.pending.append(copies[1])
    return fetches[1:]


def last_fetch_ends_before_a_put(rig: Rig) -> Step:
    (fetch,) = waiting_put(rig)
    return lambda rig: rig.fetched(fetch)


def last_fetch_ends_before_a_put_that_is_of_no_use(rig: Rig) -> Step:
    (fetch,) = waiting_put(rig)
    rig.step(events.StorageChanged, available=False)
    return lambda rig: rig.fetched(fetch)


def read_ahead(rig: Rig) -> list[commands.FetchPages]:
    """Request "a" waits for device memory, and the component pages of its end are being read."""
    restored(rig, "b", bytes(range(128, 154)))
    answer(rig)(rig)
    rig.fetched(rig.take(commands.FetchPages))
    return rig.take_all(commands.FetchPages, of_components=True)


def an_answer_begins_reads_ahead(rig: Rig) -> Step:
    restored(rig, "b", bytes(range(128, 154)))
    return answer(rig)


def a_read_ahead_fails(rig: Rig) -> Step:
    fetch, *others = read_ahead(rig)
    rig.pending += others
    return lambda rig: rig.fetched(fetch, 1, error="lost")


def a_plan_adopts_reads_ahead(rig: Rig) -> Step:
    """One has arrived, the other is under way."""
    fetch, *others = read_ahead(rig)
    rig.fetched(fetch)
    rig.pending += others
    return lambda rig: rig.abort("b")


def an_abort_leaves_reads_ahead(rig: Rig) -> Step:
    fetch, *others = read_ahead(rig)
    rig.fetched(fetch)
    rig.pending += others
    return lambda rig: rig.abort("a")


STORED_STORIES = [
    an_answer_begins_reads_ahead,
    a_read_ahead_fails,
    a_plan_adopts_reads_ahead,
    an_abort_leaves_reads_ahead,
    answer,
    answer_of_which_some_is_cached,
    answer_where_the_front_has_left,
    component_fetch_ends,
    component_fetch_fails,
    component_fetch_is_late,
    component_fetch_of_the_aborted_ends,
    abort_while_fetching,
    copy_of_a_tail_from_storage_ends,
    copy_of_a_tail_from_storage_fails,
    copy_of_a_tail_from_storage_ends_after_an_abort,
    full_pages_are_stored,
    tail_backup_ends_after_the_full_put,
    component_put_ends,
    last_fetch_ends_before_a_put,
    last_fetch_ends_before_a_put_that_is_of_no_use,
]


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_a_raise_at_any_call_loses_no_component_page(story: Callable[[Rig], Step]) -> None:
    raise_everywhere(lambda: rig_with_past(host_windows=HOST_WINDOWS.get(story, 16)), story)


@pytest.mark.parametrize("story", STORED_STORIES, ids=lambda story: story.__name__)
def test_a_raise_at_any_call_loses_no_component_page_of_storage(story: Callable[[Rig], Step]) -> None:
    raise_everywhere(rig_with_storage, story)


def raise_everywhere(make_rig: Callable[[], Rig], story: Callable[[Rig], Step]) -> None:
    def prepare() -> tuple[Rig, Callable[[], object]]:
        rig = make_rig()
        step = story(rig)
        return rig, lambda: step(rig)

    for _, rig in raised_at_each_call(prepare):
        rig.settle()
        for name in ("a", "b", "c"):
            if rig.core.request(name) is not None:
                rig.abort(name)
        rig.step(events.RetractedDropped, request_id="a")
        rig.settle()
        rig.expect_nothing_held()
        storage = rig.core.storage
        assert (storage.pages_in_flight, storage.ahead_in_flight, rig.core.lookahead.pages) == (0, 0, 0)
