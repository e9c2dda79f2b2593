"""Look-ahead, on a core stepped by hand: what waits for device memory has its pages on the host when it is admitted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulation.rig import Rig
from tests.support.rigs import change
from tidekv.states import commands, events
from tidekv.states.errors import BrokenInvariant
from tidekv.states.types import page_ids

TOKENS = b"abcdefgh"
BIG = bytes(range(128, 152))


def waiting_rig(*, on_host: bytes = b"", **settings: object) -> Rig:
    """The device is full with a READY request; "a" waits for eight pages of it, and storage has been asked.

    The pages of `on_host` are on the host before.
    """
    rig = Rig(**{"device_pages": 24, "host_pages": 16, "lookahead_pages_max": 100, "fetch_run_pages": 3, **settings})
    rig.attach_storage()
    if on_host:
        rig.make_cached("past", on_host)
        rig.flush("l1")
    rig.make_ready("big", BIG)
    rig.arrive("a", TOKENS)
    return rig


def make_room(rig: Rig) -> None:
    """The big one leaves, and with it all that it had."""
    rig.abort("big")
    rig.take(commands.ReportDropped)


def fetches(rig: Rig) -> list[commands.FetchPages]:
    return rig.take_all(commands.FetchPages)


def end_by_transfer(rig: Rig) -> commands.ReportReady:
    """Copies end, prefill sends what is asked of it."""
    promise = rig.take(commands.SendPromise)
    rig.promised(promise)
    for copy in rig.take_all(commands.CopyPages, target="device"):
        rig.copied(copy)
    for extend in rig.take_all(commands.SendExtend):
        rig.chunk(extend)
    rig.chunk(promise)
    rig.aux(promise)
    rig.take(commands.SendReceived)
    return rig.take(commands.ReportReady)


def test_who_waits_finds_its_pages_on_the_host_and_they_count_as_storage() -> None:
    rig = waiting_rig()
    rig.answer(rig.take(commands.QueryStorage), 6)
    first, second = fetches(rig)
    assert (list(first.positions), list(second.positions)) == ([0, 1, 2], [3, 4, 5])
    # The second run cannot join the tree before the first one.
    rig.fetched(second)
    assert rig.core.state.host.cached == 0
    rig.fetched(first)
    assert rig.core.state.host.cached == 6
    assert rig.core.state.index.probe_prefix("", TOKENS) == (0, 6)
    assert rig.state("a") == "PREALLOC"
    rig.nothing_else()
    # No request can take them meanwhile.
    assert rig.flush("l2").spared == {"l2": 6}
    make_room(rig)
    ready = end_by_transfer(rig)
    assert ready.sources == {"l1": 0, "l2": 0, "l3": 6, "transfer": 2}
    assert rig.core.lookahead.pages == 0
    assert rig.flush("l2").dropped == {"l2": 6}


def test_what_was_on_the_host_before_counts_as_host() -> None:
    rig = waiting_rig(on_host=TOKENS[:2], fetch_run_pages=4)
    query = rig.take(commands.QueryStorage)
    assert query.first == 2
    rig.answer(query, 4)
    (fetch,) = fetches(rig)
    assert fetch.positions[0] == 2
    rig.fetched(fetch)
    make_room(rig)
    assert end_by_transfer(rig).sources == {"l1": 0, "l2": 2, "l3": 4, "transfer": 2}


def test_who_is_admitted_goes_on_with_reads_that_are_under_way() -> None:
    rig = waiting_rig()
    rig.answer(rig.take(commands.QueryStorage), 8)
    first, second, third = fetches(rig)
    rig.fetched(first)
    rig.fetched(third)
    make_room(rig)
    # Nothing is read twice: the copy of the first run, of the third, which ended early, and the promise of all.
    assert fetches(rig) == []
    assert rig.take(commands.SendPromise).promised_tokens == 8
    assert [len(copy.source_pages) for copy in rig.take_all(commands.CopyPages, target="device")] == [3, 2]
    assert rig.state("a") == "PREFETCH"
    rig.fetched(second)
    assert len(rig.take(commands.CopyPages, target="device").source_pages) == 3
    assert rig.core.lookahead.pages == 0
    assert rig.core.storage.pages_in_flight == 0


def test_a_read_that_is_late_for_the_plan_is_extended() -> None:
    rig = waiting_rig(prefetch_base_s=1.0, prefetch_per_ki_token_s=0.001)
    rig.answer(rig.take(commands.QueryStorage), 3)
    (fetch,) = fetches(rig)
    rig.wait_until(0.9)
    make_room(rig)
    rig.promised(rig.take(commands.SendPromise))
    rig.wait_until(1.5)
    assert rig.state("a") == "PREFETCH"
    rig.wait_until(2.0)
    assert (rig.take(commands.SendExtend).first, rig.core.statistics()["l3_fetches_late"]) == (0, 1)
    assert rig.core.state.host.owned == 3
    rig.fetched(fetch)
    assert rig.core.state.host.owned == 0


def test_a_read_that_is_late_while_its_request_waits_is_given_up_with_what_follows() -> None:
    rig = waiting_rig(prefetch_base_s=1.0, breaker_failures=2)
    rig.answer(rig.take(commands.QueryStorage), 8)
    first, second, third = fetches(rig)
    rig.fetched(first)
    rig.fetched(third)
    rig.wait_until(10.0)
    assert rig.core.statistics()["l3_fetches_late"] == 1
    assert rig.core.state.host.owned == 3
    assert rig.core.state.index.probe_prefix("", TOKENS) == (0, 3)
    rig.fetched(second)
    assert rig.core.state.host.owned == 0
    make_room(rig)
    rig.take_all(commands.FetchPages)
    rig.core.check()


@pytest.mark.parametrize("ended", [0, 1, 2, 3])
def test_an_abort_gives_back_what_is_not_under_way(ended: int) -> None:
    rig = waiting_rig()
    rig.answer(rig.take(commands.QueryStorage), 8)
    runs = fetches(rig)
    for fetch in runs[:ended]:
        rig.fetched(fetch)
    rig.abort("a")
    rig.take(commands.ReportFailed)
    for fetch in runs[ended:]:
        rig.fetched(fetch)
    assert rig.core.state.host.owned == 0
    assert rig.core.state.index.host_protected == 0
    make_room(rig)
    rig.expect_nothing_held()


@pytest.mark.parametrize("valid", [0, 1])
def test_a_short_read_ends_the_look_ahead_there(valid: int) -> None:
    rig = waiting_rig()
    rig.answer(rig.take(commands.QueryStorage), 8)
    first, second, third = fetches(rig)
    rig.fetched(second)
    rig.fetched(first, valid)
    assert rig.core.state.index.probe_prefix("", TOKENS) == (0, valid)
    assert rig.core.state.host.owned == 2
    rig.fetched(third, error="no")
    assert rig.core.state.host.owned == 0
    assert rig.core.statistics()["l3_pages_short"] == 3 - valid


def test_the_bound_is_over_all_and_who_waits_gets_what_others_leave() -> None:
    rig = waiting_rig(lookahead_pages_max=6)
    rig.answer(rig.take(commands.QueryStorage), 4)
    a = fetches(rig)
    assert sum(len(fetch.host_pages) for fetch in a) == 4
    rig.arrive("b", b"ABCDEFGH")
    rig.answer(rig.take(commands.QueryStorage), 8)
    b = fetches(rig)
    assert sum(len(fetch.host_pages) for fetch in b) == 2
    rig.arrive("c", b"tuvwxyzs")
    rig.answer(rig.take(commands.QueryStorage), 8)
    assert fetches(rig) == []
    rig.abort("a")
    # Four pages of the bound are free again, and go to the next waiting request.
    assert sum(len(fetch.host_pages) for fetch in fetches(rig)) == 4
    assert rig.core.lookahead.pages == 6


def test_the_same_pages_are_fetched_ahead_for_one_only() -> None:
    rig = waiting_rig()
    rig.answer(rig.take(commands.QueryStorage), 6)
    runs = fetches(rig)
    rig.arrive("b", TOKENS[:6] + b"xy")
    rig.answer(rig.take(commands.QueryStorage), 6)
    assert fetches(rig) == []
    for fetch in runs:
        rig.fetched(fetch)
    assert rig.core.state.index.probe_prefix("", TOKENS[:6]) == (0, 6)


@pytest.mark.parametrize(
    "settings",
    [
        {"lookahead_pages_max": 0},
        {"host_pages": 0},
        {"prefetch_threshold_tokens": 7},
        {"fetch_pages_in_flight_max": 1, "prefetch_threshold_tokens": 2},
        {"lookahead_pages_max": 3, "prefetch_threshold_tokens": 4},
    ],
    ids=str,
)
def test_nothing_is_fetched_ahead_where_that_is_not_wanted_or_cannot_be(settings: dict[str, object]) -> None:
    rig = waiting_rig(fetch_run_pages=32, **settings)
    rig.answer(rig.take(commands.QueryStorage), 6)
    assert fetches(rig) == []
    assert rig.core.lookahead.pages == 0
    rig.core.check()


def test_pages_on_the_device_alone_have_no_host_pages_below_them() -> None:
    rig = Rig(device_pages=24, host_pages=16, lookahead_pages_max=100)
    rig.attach_storage()
    rig.make_cached("past", TOKENS[:2])
    rig.make_ready("keep", TOKENS[:2] + b"q")
    rig.flush("l2")
    rig.make_ready("big", BIG[:20])
    rig.arrive("a", TOKENS)
    rig.answer(rig.take(commands.QueryStorage), 6)
    assert rig.state("a") == "PREALLOC"
    assert fetches(rig) == []


def test_an_answer_from_further_on_than_the_caches_reach_now_is_of_no_use() -> None:
    rig = waiting_rig(on_host=TOKENS[:2])
    rig.flush("l2")
    rig.answer(rig.take(commands.QueryStorage), 6)
    assert fetches(rig) == []


def test_policies_that_change_leave_alone_what_is_under_way() -> None:
    rig = waiting_rig()
    rig.answer(rig.take(commands.QueryStorage), 6)
    runs = fetches(rig)
    change(rig, lookahead_pages_max=0)
    for fetch in runs:
        rig.fetched(fetch)
    make_room(rig)
    assert end_by_transfer(rig).sources["l3"] == 6
    # And a request that was left out before is considered again.
    rig.make_ready("huge", BIG[:14])
    rig.arrive("b", b"ABCDEFGHIJ")
    rig.answer(rig.take(commands.QueryStorage), 6)
    assert fetches(rig) == []
    change(rig, lookahead_pages_max=4)
    assert sum(len(fetch.host_pages) for fetch in fetches(rig)) == 4


def test_storage_that_was_replaced_meanwhile_is_not_said_to_have_the_pages() -> None:
    rig = waiting_rig(fetch_run_pages=8)
    rig.answer(rig.take(commands.QueryStorage), 6)
    (fetch,) = fetches(rig)
    rig.step(events.StorageChanged, available=False)
    rig.step(events.StorageChanged, available=True)
    rig.fetched(fetch)
    tree = rig.core.state.index.tree
    assert [tree.is_stored(node) for node in tree.nodes() if node.host is not None] == [False]


def test_reads_ahead_are_not_taken_over_while_storage_is_left_alone() -> None:
    rig = waiting_rig()
    rig.answer(rig.take(commands.QueryStorage), 6)
    runs = fetches(rig)
    rig.step(events.StorageChanged, available=False)
    make_room(rig)
    assert rig.take(commands.SendPromise).promised_tokens == 0
    for fetch in runs:
        rig.fetched(fetch)
    assert rig.core.state.host.owned == 0
    rig.core.check()


def test_puts_give_way_to_reads_ahead() -> None:
    rig = waiting_rig(store_wait_s=1.0)
    rig.answer(rig.take(commands.QueryStorage), 3)
    (fetch,) = fetches(rig)
    rig.finish("big", BIG[:2])
    rig.copied(rig.take(commands.CopyPages, target="host"))
    assert rig.take_all(commands.StorePages) == []
    rig.fetched(fetch)
    rig.take_all(commands.CopyPages, target="device")
    rig.take(commands.StorePages)


# --- The index ---


def test_host_pages_join_what_is_there() -> None:
    """Of the keys, some are on the device, some on the host, some under load, some nowhere."""
    rig = Rig(device_pages=24, host_pages=24)
    rig.attach_storage()
    rig.make_cached("past", b"abcd")
    rig.make_ready("more", b"abcdef")
    index, host = rig.core.state.index, rig.core.state.host
    match = index.match("", b"ab")
    pages = host.take(8)
    node, unused = index.insert_host(match.host_node, b"cdefghXY", pages)
    assert node.depth_pages == 10
    assert list(unused) == list(pages[:2])
    host.give_back(unused)
    index.check()
    assert index.probe_prefix("", b"abcdefghXY") == (6, 4)
    with pytest.raises(BrokenInvariant, match="cannot be entered"):
        index.insert_host(node, b"ab", page_ids((1,)))


@given(
    st.lists(st.binary(min_size=1, max_size=6).map(lambda drawn: bytes(byte % 2 for byte in drawn)), max_size=6),
    st.binary(min_size=1, max_size=6).map(lambda drawn: bytes(byte % 2 for byte in drawn)),
)
def test_host_pages_of_any_keys_join_any_tree(prompts: list[bytes], keys: bytes) -> None:
    rig = Rig(device_pages=64, host_pages=64, write="back")
    for number, tokens in enumerate(prompts):
        rig.make_ready(f"r{number}", tokens)
        rig.finish(f"r{number}", tokens)
    index, host = rig.core.state.index, rig.core.state.host
    device, _ = index.probe_prefix("", keys)
    pages = host.take(len(keys))
    node, unused = index.insert_host(index.match("", b"").host_node, keys, pages)
    assert node.depth_pages == len(keys)
    assert len(unused) == 0
    assert index.probe_prefix("", keys) == (device, len(keys) - device)
    found = page_ids()
    for above in index.path(node):
        assert above.host is not None
        found += above.host
    assert found == pages
    index.check()


def test_look_ahead_that_is_declined_leaves_no_namespace_behind() -> None:
    rig = Rig(device_pages=24, host_pages=16, lookahead_pages_max=100, fetch_run_pages=3, fetch_pages_in_flight_max=3)
    rig.attach_storage()
    rig.make_ready("big", BIG)
    rig.arrive("first", TOKENS)
    rig.answer(rig.take(commands.QueryStorage), 8)
    for number in range(10):
        rig.arrive(f"r{number}", TOKENS, namespace=f"tenant {number}")
        rig.answer(rig.take(commands.QueryStorage), 8)
    assert set(rig.core.state.index.tree.roots) == {""}
