"""Handing the cache over to another worker before this one goes away, on a core stepped by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulation.rig import Rig
from tests.states.backup.test_write_back import back_rig, turn
from tests.support.thorough import examples
from tidekv.states import commands, events

TO = "new:7100"


def hand(rig: Rig, within_s: float = 10.0, **fields: object) -> None:
    rig.step(events.StoreRequested, call=7, within_s=within_s, to=TO, **fields)


def report(rig: Rig) -> tuple[int, int, int, int, str]:
    """Pages handed, present, left and failed, and the cause."""
    told = rig.take(commands.ReportStored)
    assert told.call == 7 and not told.components_stored
    return told.stored, told.present, told.left, told.failed, told.cause


def offers(rig: Rig) -> list[tuple[commands.HandPrompt, bytes]]:
    """What is offered now, with its keys."""
    found = [(offer, rig.core.keys_stored(offer.op)[1]) for offer in rig.take_all(commands.HandPrompt)]
    assert all(offer.peer == TO and offer.page_count == len(keys) for offer, keys in found)
    return found


class Successor:
    """A worker that has room for so many pages, and keeps prefixes: too simple to be wrong."""

    def __init__(self, rig: Rig, room: int = 10**6) -> None:
        self.rig, self.room = rig, room
        self.has: set[bytes] = set()
        self.taken: list[bytes] = []

    def take(self, keys: bytes) -> tuple[int, int]:
        """Take a prompt; returns the pages that are there then, and those that were brought."""
        brought = there = 0
        for end in range(1, len(keys) + 1):
            if keys[:end] not in self.has:
                if not self.room:
                    break
                self.room -= 1
                self.has.add(keys[:end])
                brought += 1
            there = end
        return there, brought

    def run(self) -> None:
        """Answer every offer until the run has its report."""
        rig = self.rig
        while True:
            for copy in rig.take_all(commands.CopyPages, target="host"):
                rig.copied(copy)
            for offer, keys in offers(rig):
                there, brought = self.take(keys)
                self.taken.append(keys)
                is_full = there < len(keys)
                rig.handed(offer, there, brought=brought, error="no room" if is_full else "", refuses=is_full)
            if any(isinstance(wish, commands.ReportStored) for wish in rig.pending):
                return
            rig.wait_until(rig.now_s + 0.001)


def test_what_only_the_device_has_is_handed_by_way_of_the_host_hottest_first() -> None:
    rig = back_rig(device_pages=64, host_pages=64)
    for number in range(6):
        turn(rig, f"r{number}", bytes([number]) * 3 + bytes([100 + number]))
    hand(rig)
    copies = rig.take_all(commands.CopyPages, target="host")
    assert len(copies) == 4
    for copy in copies:
        rig.copied(copy)
    found = offers(rig)
    assert [keys[0] for _, keys in found] == [5, 4, 3, 2]
    # Uses ago: the hotter, the fewer.
    used = [offer.heat[0] for offer, _ in found]
    assert used == sorted(used) and len(set(used)) == 4
    for offer, _ in found:
        rig.handed(offer)
    successor = Successor(rig)
    successor.run()
    assert [keys[0] for keys in successor.taken] == [1, 0]
    assert report(rig) == (24, 0, 0, 0, "")
    assert rig.core.state.counters["pages_handed"] == 24
    rig.nothing_else()
    rig.expect_nothing_held()


def test_neither_storage_nor_its_policy_matters() -> None:
    rig = Rig(write_tokens_min=1000, write="selective", write_hits_min=9, breaker_failures=1)
    rig.make_cached("a", b"abcd")
    rig.core.storage.note("store", failed=True)
    hand(rig)
    Successor(rig).run()
    assert report(rig) == (4, 0, 0, 0, "")


def test_what_the_successor_has_counts_as_present_and_a_common_prefix_is_handed_once() -> None:
    rig = Rig(device_pages=64, host_pages=64)
    rig.make_cached("a", b"abcdef")
    rig.make_cached("b", b"abcxyz")
    rig.make_cached("c", b"ABCD")
    successor = Successor(rig)
    successor.take(b"ABCD")
    hand(rig)
    successor.run()
    assert report(rig) == (9, 4, 0, 0, "")
    assert successor.has >= {b"abcdef", b"abcxyz", b"ABCD"}


def test_a_full_successor_gets_the_hottest_and_ends_the_run() -> None:
    rig = Rig(device_pages=64, host_pages=64)
    for number in range(8):
        rig.make_cached(f"r{number}", bytes([number]) * 4)
    successor = Successor(rig, room=10)
    hand(rig)
    successor.run()
    # Those behind the refused one were offered before its answer.
    assert [keys[0] for keys in successor.taken] == [7, 6, 5, 4, 3, 2]
    assert report(rig) == (10, 0, 22, 14, "no room")
    rig.nothing_else()
    rig.expect_nothing_held()


def test_a_successor_that_takes_a_part_keeps_it_and_is_asked_for_the_rest_once_more() -> None:
    rig = Rig(device_pages=64, host_pages=64)
    rig.make_cached("a", b"abcdefgh")
    hand(rig)
    ((offer, _),) = offers(rig)
    rig.handed(offer, 3, error="late")
    rig.wait_until(rig.now_s + 0.001)
    ((offer, keys),) = offers(rig)
    assert keys == b"abcdefgh"
    rig.handed(offer, 8, brought=5)
    rig.wait_until(rig.now_s + 0.001)
    assert report(rig) == (8, 0, 0, 0, "")


def test_a_successor_that_takes_nothing_is_not_asked_for_ever() -> None:
    rig = Rig(device_pages=64, host_pages=64)
    rig.make_cached("a", b"abcd")
    rig.make_cached("b", b"efgh")
    hand(rig)
    for offer, _ in offers(rig):
        rig.handed(offer, 0, error="busy")
    rig.wait_until(rig.now_s + 0.001)
    assert report(rig) == (0, 0, 8, 8, "busy")
    rig.expect_nothing_held()


@pytest.mark.parametrize("event", [events.CommandRaised, events.PromptHanded])
def test_an_offer_that_fails_is_reported_and_holds_nothing(event: type[events.Event]) -> None:
    rig = Rig()
    rig.make_cached("a", b"abcd")
    hand(rig)
    ((offer, _),) = offers(rig)
    assert rig.core.statistics()["host_protected"] == 4
    if event is events.CommandRaised:
        rig.step(event, op=offer.op, detail="raised")
    else:
        # What cannot be: more than was offered.
        rig.step(event, op=offer.op, there=99, brought=-3, error="", refuses=False)
    rig.wait_until(rig.now_s + 0.001)
    handed, present, left, failed, _ = report(rig)
    assert (handed, present, left, failed) == ((0, 0, 4, 4) if event is events.CommandRaised else (0, 4, 0, 0))
    rig.expect_nothing_held()


def test_a_silent_successor_ends_the_run_at_its_limit_and_its_late_answer_frees_the_pages() -> None:
    rig = Rig()
    rig.make_cached("a", b"abcd")
    hand(rig, within_s=5.0)
    ((offer, _),) = offers(rig)
    assert offer.timeout_s == 5.0
    rig.wait_until(4.9)
    rig.nothing_else()
    rig.wait_until(5.0)
    assert report(rig) == (0, 0, 4, 0, "")
    rig.handed(offer, 0, error="it has not answered")
    rig.nothing_else()
    rig.expect_nothing_held()


def test_a_run_that_goes_on_offers_only_what_is_new() -> None:
    rig = Rig(device_pages=64, host_pages=64)
    rig.make_cached("a", b"abcd")
    successor = Successor(rig)
    hand(rig)
    successor.run()
    assert report(rig) == (4, 0, 0, 0, "")
    rig.make_cached("b", b"abxy")
    successor.taken.clear()
    hand(rig, goes_on=True)
    successor.run()
    # A node was split: its first part is known to be there as well.
    assert successor.taken == [b"abxy"] and report(rig) == (2, 4, 0, 0, "")
    successor.taken.clear()
    hand(rig)
    successor.run()
    assert sorted(successor.taken) == [b"abcd", b"abxy"] and report(rig) == (0, 6, 0, 0, "")


def test_what_one_worker_has_is_not_taken_for_what_another_one_has() -> None:
    rig = Rig(device_pages=64, host_pages=64)
    rig.make_cached("a", b"abcd")
    successor = Successor(rig)
    hand(rig)
    successor.run()
    report(rig)
    rig.step(events.StoreRequested, call=7, within_s=10.0, to="other:7100", goes_on=True)
    offer = rig.take(commands.HandPrompt)
    assert (offer.peer, offer.page_count) == ("other:7100", 4)
    rig.handed(offer, 4, brought=4)
    assert report(rig) == (4, 0, 0, 0, "")
    rig.expect_nothing_held()


def test_a_run_without_time_hands_nothing_over_and_a_run_to_store_ends_it() -> None:
    rig = Rig()
    rig.make_cached("a", b"abcd")
    hand(rig, within_s=0.0)
    assert report(rig) == (0, 0, 0, 0, "")
    hand(rig)
    ((offer, _),) = offers(rig)
    rig.step(events.StoreRequested, call=8, within_s=0.0)
    first, second = rig.take_all(commands.ReportStored)
    assert (first.call, first.left, second.call) == (7, 4, 8)
    rig.handed(offer)
    rig.expect_nothing_held()


def test_lent_pages_are_handed_from_the_host() -> None:
    rig = Rig(lends_device=True)
    rig.make_cached("a", b"abcd")
    hand(rig)
    Successor(rig).run()
    assert report(rig) == (4, 0, 0, 0, "")


@examples(60)
@given(
    st.lists(st.text("abc", min_size=1, max_size=7), min_size=1, max_size=8),
    st.sampled_from(("through", "back")),
    st.integers(4, 24),
    st.integers(0, 40),
)
def test_after_a_run_the_successor_has_all_that_fits_through_the_host_and_into_its_room(
    prompts: list[str], write: str, host_pages: int, room: int
) -> None:
    rig = Rig(device_pages=64, host_pages=host_pages, write=write)
    for number, prompt in enumerate(prompts):
        rig.make_ready(f"r{number}", prompt.encode())
        rig.finish(f"r{number}", prompt.encode())
        # Half of the backups fail.
        for copy in rig.take_all(commands.CopyPages, target="host"):
            rig.copied(copy, error="failed" if number % 2 else "")
    rig.take_all(commands.ReportFinished)
    rig.take_all(commands.ForgetTokens)
    successor = Successor(rig, room)
    hand(rig, within_s=1e6)
    successor.run()
    handed, present, left, _, _ = report(rig)
    index = rig.core.state.index
    prefixes = {
        b"".join(each.edge for each in index.path(node))[: node.depth_pages - at]
        for node in index.nodes()
        for at in range(node.page_count)
    }
    assert handed == len(successor.has) and not present
    assert left >= len(prefixes - successor.has)
    if successor.room:
        # Only the end of a path that is longer than host memory is left.
        assert all(len(prefix) > host_pages for prefix in prefixes - successor.has)
    rig.expect_nothing_held()
