"""Storing everything before a worker goes away, on a core stepped by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulation.rig import Rig
from tests.states.backup.test_write_back import back_rig, turn
from tests.support.each_call import raised_at_each_call
from tests.support.raise_stories import (
    hand_all,
    hand_all_answered,
    hand_all_copied,
    hand_all_late,
    hand_all_refused,
    store_all,
    store_all_copied,
    store_all_late,
    store_all_stored,
)
from tests.support.rigs import change
from tests.support.thorough import examples
from tidekv.states import commands, events

STORING = (store_all, store_all_copied, store_all_stored, store_all_late)
HANDING = (hand_all, hand_all_copied, hand_all_answered, hand_all_refused, hand_all_late)


def store(rig: Rig, within_s: float = 10.0) -> None:
    rig.step(events.StoreRequested, call=7, within_s=within_s)


def report(rig: Rig) -> tuple[int, int, int, int]:
    """Pages stored, present, left and failed."""
    told = rig.take(commands.ReportStored)
    assert told.call == 7 and 0 <= told.seconds <= rig.now_s
    return told.stored, told.present, told.left, told.failed


def put_keys(rig: Rig) -> list[bytes]:
    """What the next writes put, in order; ends them."""
    found = []
    for put in rig.take_all(commands.StorePages):
        found.append(rig.core.keys_stored(put.op)[1])
        rig.stored(put)
    return found


def tick(rig: Rig) -> None:
    """Let work that goes on in the next steps go on."""
    rig.wait_until(rig.now_s + 0.001)


def run(rig: Rig) -> list[bytes]:
    """Store everything with a storage that works; returns what the writes put, in order."""
    found: list[bytes] = []
    while rig.pending:
        found += put_keys(rig)
        for copy in rig.take_all(commands.CopyPages, target="host"):
            rig.copied(copy)
        if rig.pending and all(isinstance(wish, commands.ReportStored) for wish in rig.pending):
            break
        tick(rig)
    return found


def test_what_only_the_device_has_is_stored_by_way_of_the_host_hottest_first() -> None:
    rig = back_rig(device_pages=64, host_pages=64, store_wait_s=0.0)
    for number in range(6):
        turn(rig, f"r{number}", bytes([number]) * 3 + bytes([100 + number]))
    rig.nothing_else()
    store(rig)
    copies = rig.take_all(commands.CopyPages, target="host")
    # The bound of writes at once.
    assert len(copies) == 4
    for copy in copies:
        rig.copied(copy)
    put = put_keys(rig)
    assert [keys[0] for keys in put] == [5, 4, 3, 2]
    put += run(rig)
    assert [keys[0] for keys in put] == [5, 4, 3, 2, 1, 0]
    assert report(rig) == (24, 0, 0, 0)
    rig.nothing_else()
    rig.expect_nothing_held()


def test_storage_is_not_measured_meanwhile() -> None:
    rig = back_rig(device_pages=64, host_pages=8, prefetch="soonest")
    turn(rig, "r0", b"abcd")
    store(rig)
    rig.copied(rig.take(commands.CopyPages, target="host"))
    assert put_keys(rig) == [b"abcd"]
    # A measurement takes host pages, for which what storage lacks has no other time.
    assert not rig.take_all(commands.FetchPages)


def test_a_path_used_again_is_hotter_than_one_that_was_inserted_later() -> None:
    rig = back_rig(device_pages=64, host_pages=64, store_wait_s=0.0)
    turn(rig, "a", b"abcd")
    turn(rig, "b", b"efgh")
    rig.core.state.index.match("", b"abcd")
    store(rig)
    assert run(rig) == [b"abcd", b"efgh"]


def test_what_storage_has_is_not_written_again() -> None:
    rig = Rig(store_wait_s=0.0)
    rig.attach_storage()
    rig.make_cached("a", b"abcd")
    store(rig)
    assert run(rig) == [] and report(rig) == (0, 4, 0, 0)
    rig.expect_nothing_held()


def test_a_run_without_time_stores_nothing_and_says_what_is_known() -> None:
    rig = back_rig(store_wait_s=0.0)
    turn(rig, "a", b"abcd")
    store(rig, within_s=0.0)
    assert report(rig) == (0, 0, 0, 0)
    rig.nothing_else()
    rig.expect_nothing_held()


def test_a_storage_that_hangs_ends_the_run_at_its_limit() -> None:
    rig = back_rig(store_wait_s=0.0)
    turn(rig, "a", b"abcd")
    turn(rig, "b", b"efgh")
    store(rig, within_s=5.0)
    for copy in rig.take_all(commands.CopyPages, target="host"):
        rig.copied(copy)
    puts = rig.take_all(commands.StorePages)
    assert len(puts) == 2
    rig.wait_until(4.9)
    rig.nothing_else()
    rig.wait_until(5.0)
    assert report(rig) == (0, 0, 8, 0)
    # Their host pages stay protected until they end.
    assert rig.core.statistics()["host_protected"] == 8
    for put in puts:
        rig.stored(put)
    rig.nothing_else()
    rig.expect_nothing_held()


def test_an_open_breaker_is_waited_for_within_the_limit() -> None:
    rig = back_rig(store_wait_s=0.0, breaker_failures=1, breaker_backoff_s=1.0)
    turn(rig, "a", b"abcd")
    rig.core.storage.note("store", failed=True)
    rig.step(events.ClockAdvanced)
    store(rig, within_s=3.0)
    rig.nothing_else()
    rig.wait_until(1.0)
    rig.step(events.StorageProbed, op=rig.take(commands.ProbeStorage).op, error="")
    assert run(rig) == [b"abcd"] and report(rig) == (4, 0, 0, 0)


def test_an_open_breaker_does_not_delay_the_end() -> None:
    rig = back_rig(store_wait_s=0.0, breaker_failures=1, breaker_backoff_s=60.0)
    turn(rig, "a", b"abcd")
    rig.core.storage.note("store", failed=True)
    store(rig, within_s=3.0)
    rig.wait_until(3.0)
    assert report(rig) == (0, 0, 4, 0)
    rig.nothing_else()


def test_without_storage_a_run_ends_at_once_and_says_what_is_lost() -> None:
    rig = Rig()
    rig.make_cached("a", b"abcd")
    store(rig)
    assert report(rig) == (0, 0, 4, 0)
    rig.expect_nothing_held()


def test_a_write_that_fails_is_tried_once_more_after_the_others() -> None:
    rig = back_rig(device_pages=64, host_pages=64, store_wait_s=0.0)
    turn(rig, "a", b"abcd")
    turn(rig, "b", b"efgh")
    store(rig)
    for copy in rig.take_all(commands.CopyPages, target="host"):
        rig.copied(copy)
    first, second = rig.take_all(commands.StorePages)
    rig.step(events.PagesStored, op=first.op, stored=0, written=0, error="full disk")
    rig.stored(second)
    tick(rig)
    again = rig.take(commands.StorePages)
    assert rig.core.keys_stored(again.op)[1] == b"efgh"
    rig.step(events.PagesStored, op=again.op, stored=0, written=0, error="full disk")
    tick(rig)
    assert report(rig) == (4, 0, 4, 4)
    rig.nothing_else()
    rig.expect_nothing_held()


def test_host_pages_that_storage_lacks_are_stored_before_a_copy_evicts_them() -> None:
    rig = back_rig(device_pages=64, host_pages=8, store_wait_s=0.0)
    # "old" is on the host only, and nowhere else.
    rig.make_ready("old", b"ABCDEF")
    rig.step(events.RetractRequested, request_id="old", keys=b"ABCDEF", tokens=6)
    rig.copied(rig.take(commands.CopyPages, target="host"))
    rig.take(commands.ReportRetracted)
    rig.take(commands.ForgetTokens)
    rig.step(events.RetractedDropped, request_id="old")
    rig.flush("l1")
    turn(rig, "hot", b"abcdef")
    store(rig)
    # The hot path needs the pages of the old one, which would be lost.
    assert rig.take_all(commands.CopyPages) == []
    assert put_keys(rig) == [b"ABCDEF"]
    assert run(rig) == [b"abcdef"]
    assert report(rig) == (12, 0, 0, 0)
    assert not rig.core.state.counters["l2_pages_dropped"]
    rig.expect_nothing_held()


def test_a_path_whose_own_beginning_has_the_host_waits_for_other_writes() -> None:
    """Its host pages cannot be evicted for its rest, and a part of it would be all that it gets."""
    rig = back_rig(device_pages=64, host_pages=8, store_wait_s=0.0)
    turn(rig, "a", b"abcd")
    store(rig)
    run(rig)
    report(rig)
    turn(rig, "a", b"abcdefgh")
    turn(rig, "b", b"xyz")
    store(rig)
    copy = rig.take(commands.CopyPages, target="host")
    assert len(copy.target_pages) == 3, "the other path has one page of room, and four that are its own"
    rig.copied(copy)
    assert run(rig) == [b"xyz", b"abcdefgh"]
    assert report(rig)[2:] == (0, 0)
    rig.expect_nothing_held()


def test_more_than_the_host_holds_is_stored_one_after_the_other() -> None:
    rig = back_rig(device_pages=64, host_pages=8, store_wait_s=0.0, write_back_ahead=0.0)
    for number in range(8):
        turn(rig, f"r{number}", bytes([number]) * 6)
    store(rig)
    put = run(rig)
    assert {keys[0] for keys in put} == set(range(8))
    assert report(rig) == (48, 0, 0, 0)
    rig.expect_nothing_held()


def test_a_storage_of_known_size_does_not_get_more_than_it_holds() -> None:
    rig = back_rig(device_pages=64, host_pages=64, store_wait_s=0.0, write_back_ahead=0.0)
    rig.step(events.StorageChanged, available=True, capacity_pages=12)
    for number in range(8):
        turn(rig, f"r{number}", bytes([number]) * 5)
    store(rig)
    assert [keys[0] for keys in run(rig)] == [7, 6]
    assert report(rig) == (10, 0, 30, 0)


def test_the_policy_still_keeps_short_and_rare_prompts_out() -> None:
    rig = back_rig(device_pages=64, host_pages=64, store_wait_s=0.0, write_tokens_min=4)
    turn(rig, "a", b"abc")
    turn(rig, "b", b"defg")
    store(rig)
    assert run(rig) == [b"defg"] and report(rig) == (4, 0, 3, 0)
    change(rig, write="selective", write_hits_min=3, write_tokens_min=0)
    store(rig)
    assert run(rig) == [] and report(rig) == (0, 4, 3, 0)


def test_another_request_to_store_ends_the_first_one() -> None:
    rig = back_rig(store_wait_s=0.0)
    turn(rig, "a", b"abcd")
    store(rig)
    rig.step(events.StoreRequested, call=8, within_s=0.0)
    first, second = rig.take_all(commands.ReportStored)
    assert (first.call, first.left, second.call) == (7, 4, 8)
    rig.settle()
    rig.expect_nothing_held()


def test_what_a_request_leaves_meanwhile_is_stored_as_well() -> None:
    rig = back_rig(device_pages=64, host_pages=64, store_wait_s=0.0)
    turn(rig, "a", b"abcd")
    rig.make_ready("b", b"efgh")
    rig.step(events.GrowthTaken, request_id="b", page_count=0, wanted=2)
    rig.step(events.GrowthTaken, request_id="b", page_count=2)
    rig.take_all(commands.GiveReserve)
    store(rig)
    copies = rig.take_all(commands.CopyPages, target="host")
    rig.finish("b", b"efghij")
    rig.take(commands.ReportFinished)
    rig.take(commands.ForgetTokens)
    for copy in copies:
        rig.copied(copy)
    put = run(rig)
    assert b"efghij" in put and b"abcd" in put
    assert report(rig)[2:] == (0, 0)
    rig.expect_nothing_held()


@pytest.mark.parametrize("story", [*STORING, *HANDING], ids=lambda story: story.__name__)
def test_a_raise_at_any_call_of_a_run_ends_in_one_report(story: Callable[[Rig], Callable[[Rig], object]]) -> None:
    def prepare() -> tuple[Rig, Callable[[], object]]:
        rig = Rig(store_wait_s=0.0)
        step = story(rig)
        return rig, lambda: step(rig)

    for call, rig in raised_at_each_call(prepare):
        told = rig.settle()
        rig.wait_until(10.0)
        told += rig.settle()
        assert sum(isinstance(wish, commands.ReportStored) for wish in told) == 1, (call, told)
        assert not rig.core.store_all.pages_left and not rig.core.state.is_storing
        rig.expect_nothing_held()


def test_a_large_tree_is_looked_at_in_several_steps() -> None:
    rig = Rig(device_pages=9000, host_pages=9000, key_bytes=2, store_wait_s=0.0)
    for number in range(4500):
        pages = rig.core.state.device.take(1)
        rig.core.state.index.insert("", number.to_bytes(2, "big"), pages)
    rig.attach_storage()
    taken = []
    rig.step = lambda kind, **fields: taken.append(kind) or _unaudited(rig, kind, **fields)  # type: ignore[method-assign]
    store(rig, within_s=1e9)
    assert rig.core.store_all.run is not None and not rig.core.store_all.run.is_scanned
    while not rig.core.store_all.run.is_scanned:
        rig.wait_until(rig.core.next_deadline_s() or 0.0)
    assert taken.count(events.ClockAdvanced) >= 2
    assert rig.core.store_all.pages_left == 4500


def _unaudited(rig: Rig, kind: type[events.Event], **fields: object) -> list[commands.Command]:
    wishes = rig.core.step(kind(at_s=rig.now_s, **fields))
    rig.pending += wishes
    return wishes


@examples(60)
@given(
    st.lists(st.text("abc", min_size=1, max_size=7), min_size=1, max_size=8),
    st.sampled_from(("through", "back", "selective")),
    st.integers(4, 24),
)
def test_after_a_run_storage_has_all_that_fits_through_the_host(
    prompts: list[str], write: str, host_pages: int
) -> None:
    rig = Rig(device_pages=64, host_pages=host_pages, write=write, write_hits_min=1, store_wait_s=0.0)
    rig.attach_storage()
    for number, prompt in enumerate(prompts):
        rig.make_ready(f"r{number}", prompt.encode())
        rig.finish(f"r{number}", prompt.encode())
        # Half of the backups fail.
        for copy in rig.take_all(commands.CopyPages, target="host"):
            rig.copied(copy, error="failed" if number % 2 else "")
        for put in rig.take_all(commands.StorePages):
            rig.stored(put, 0 if number % 2 else None)
    rig.take_all(commands.ReportFinished)
    rig.take_all(commands.ForgetTokens)
    store(rig)
    run(rig)
    stored, present, left, failed = report(rig)
    tree = rig.core.state.index.tree
    unstored = [node for node in rig.core.state.index.nodes() if not tree.is_stored(node)]
    assert left == sum(node.page_count for node in unstored) and not failed
    # Only the end of a path that is longer than host memory is left.
    assert all(node.depth_pages > host_pages for node in unstored)
    assert stored + present >= sum(node.page_count for node in rig.core.state.index.nodes()) - left
    rig.expect_nothing_held()
