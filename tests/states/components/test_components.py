"""Components in the index, by example: what a prompt matches, what a request gets of each pool, what goes with what."""

from __future__ import annotations

import pytest

from tests.support.prefixes import keys
from tidekv.states.component_specs import Component
from tidekv.states.errors import BrokenInvariant, InvalidConfig
from tidekv.states.pages.page_pool import PagePool
from tidekv.states.prefix.component_index import ComponentIndex
from tidekv.states.prefix.index import Node, PrefixIndex
from tidekv.states.prefix.node import TierName
from tidekv.states.types import page_ids


def window(pages: int, *, device_pages: int = 32, host_pages: int = 32) -> Component:
    return Component(
        name="window", kind="window", window_tokens=pages, device_pages=device_pages, host_pages=host_pages
    )


def state(*, device_pages: int = 8, host_pages: int = 8) -> Component:
    return Component(name="state", kind="state", device_pages=device_pages, host_pages=host_pages)


class Bench:
    """An index of one-token pages with components, and the calls of a request in one line each."""

    def __init__(self, *components: Component) -> None:
        self.device = PagePool("device", 128)
        self.host = PagePool("host", 128)
        self.index = PrefixIndex(key_bytes=4, device=self.device, host=self.host)
        self.component_pages = ComponentIndex(self.index, components, page_size=1)

    def put(self, *tokens: int) -> Node:
        inserted = self.index.insert("", keys(*tokens), self.device.take(len(tokens)))
        self.device.give_back(inserted.duplicates)
        return inserted.node

    def to_host(self, leaf: Node) -> None:
        for node in self.index.path(leaf):
            if node.host is None:
                self.index.give_host(node, self.host.take(node.page_count))

    def enter(self, name: str, node: Node, *positions: int, tier: TierName = "device") -> list[int]:
        pool = (self.component_pages.device if tier == "device" else self.component_pages.host)[name].pool
        pages = []
        for position in positions:
            page = pool.take(1)
            table, unused = self.component_pages.insert(tier, name, node, position, page)
            pool.give_back(unused)
            pages += table
        return pages

    def check(self) -> None:
        self.index.check()
        self.component_pages.check()


# --- Matching ---


def test_forty_pages_whose_last_snapshot_is_at_thirty_two_restore_thirty_two() -> None:
    bench = Bench(state())
    leaf = bench.put(*range(40))
    bench.enter("state", leaf, 7, 31)
    assert bench.component_pages.probe_prefix("", keys(*range(40))) == (32, 0)
    match = bench.component_pages.match("", keys(*range(50)))
    assert (match.device_pages, match.host_pages, match.device_node.depth_pages) == (32, 0, 32)
    assert bench.component_pages.probe_prefix("", keys(*range(31))) == (8, 0)
    assert bench.component_pages.probe_prefix("", keys(*range(7))) == (0, 0)
    assert bench.component_pages.probe_prefix("other", keys(1)) == (0, 0)
    bench.check()


def test_a_prompt_shorter_than_the_window_needs_all_of_its_pages() -> None:
    bench = Bench(window(8))
    leaf = bench.put(1, 2, 3)
    bench.enter("window", leaf, 1, 2)
    assert bench.component_pages.probe_prefix("", keys(1, 2, 3)) == (0, 0)
    bench.enter("window", leaf, 0)
    assert bench.component_pages.probe_prefix("", keys(1, 2, 3)) == (3, 0)
    assert bench.component_pages.probe_prefix("", keys(1, 2, 9)) == (2, 0)


def test_full_pages_without_window_are_passable_and_no_end() -> None:
    bench = Bench(window(2))
    first = bench.put(1, 2, 3)
    bench.enter("window", first, 1, 2)
    leaf = bench.put(1, 2, 3, 4, 5, 6)
    assert bench.component_pages.probe_prefix("", keys(1, 2, 3, 4, 5, 6)) == (3, 0)
    # Boundary 6 needs [4, 6): the tombstone at 3 does not matter.
    bench.enter("window", leaf, 4, 5)
    assert bench.component_pages.probe_prefix("", keys(1, 2, 3, 4, 5, 6)) == (6, 0)
    assert bench.component_pages.probe_prefix("", keys(1, 2, 3, 4, 5)) == (3, 0)
    bench.component_pages.drop("device", "window", first)
    assert bench.component_pages.probe_prefix("", keys(1, 2, 3, 4, 5, 6)) == (6, 0)
    bench.check()


def test_component_pages_may_be_partly_on_the_device_and_partly_on_the_host() -> None:
    bench = Bench(window(4), state())
    leaf = bench.put(*range(8))
    bench.to_host(leaf)
    upper = bench.index.split(leaf, 6)
    bench.enter("window", leaf, *range(4, 8), tier="host")
    on_device = bench.enter("window", upper, 4, 5)
    bench.enter("state", leaf, 7, tier="host")
    bench.index.drop_device(leaf)
    bench.check()
    assert bench.component_pages.probe_prefix("", keys(*range(8)), use_host=False) == (0, 0)
    assert bench.component_pages.probe_prefix("", keys(*range(8))) == (6, 2)
    host = {
        at: page for node in (upper, leaf) for at, page in bench.component_pages.host["window"].pages_of(node).items()
    }
    assert bench.component_pages.sources("window", leaf, 4) == (dict(zip((4, 5), on_device, strict=True)), host)
    assert bench.component_pages.sources("window", leaf, 6) == ({}, {6: host[6], 7: host[7]})
    assert bench.component_pages.positions("", keys(*range(8)), "state", 0) == {7}
    # All of it is kept, on both sides, until it is released.
    lock = bench.component_pages.lock(upper, bench.component_pages.firsts(8))
    pin = bench.component_pages.pin(leaf, bench.component_pages.firsts(8))
    assert bench.component_pages.evict("host", "window", 9) == bench.component_pages.evict("device", "window", 9) == 0
    assert bench.index.flush("host") == (0, 8)
    bench.component_pages.unlock(lock)
    bench.component_pages.unpin(pin)
    bench.check()
    assert bench.component_pages.evict("host", "window", 9) == 4


def test_matching_renews_what_is_evicted_last() -> None:
    bench = Bench(state())
    for tokens in ((1, 2), (3, 4), (5, 6)):
        bench.enter("state", bench.put(*tokens), 1)
    bench.component_pages.match("", keys(1, 2))
    bench.component_pages.evict("device", "state", 2)
    assert [bench.component_pages.probe_prefix("", keys(*tokens)) for tokens in ((1, 2), (3, 4), (5, 6))] == [
        (2, 0),
        (0, 0),
        (0, 0),
    ]


def test_void_pages_end_a_match_of_components_too() -> None:
    bench = Bench(state())
    bench.enter("state", bench.put(1), 0)
    root = bench.index.match("", keys(1)).device_node
    node = bench.index.insert_pending(root, "", keys(2), bench.device.take(1))
    bench.enter("state", node, 1)
    bench.index.set_reclaiming(node)
    assert bench.component_pages.probe_prefix("", keys(1, 2)) == (1, 0)
    with pytest.raises(BrokenInvariant, match="no full device pages"):
        bench.enter("state", node, 1)
    pages = bench.index.drop_reclaiming(node)
    assert pages is not None
    bench.device.settle(pages)
    assert bench.component_pages.device["state"].pool.cached == 1
    bench.check()


def test_a_match_without_pending_pages_ends_before_a_load() -> None:
    bench = Bench(state())
    bench.enter("state", bench.put(1), 0)
    root = bench.index.match("", keys(1)).device_node
    node = bench.index.insert_pending(root, "", keys(2), bench.device.take(1), object())
    bench.enter("state", node, 1)
    assert bench.component_pages.match("", keys(1, 2), use_host=False).device_pages == 2
    assert bench.component_pages.match("", keys(1, 2), use_host=False, with_pending=False).device_pages == 1


# --- Taking ---


def test_pages_are_taken_whole_or_not_at_all_and_not_from_under_a_receipt() -> None:
    bench = Bench(window(2, device_pages=6))
    leaf, other = bench.put(1, 2, 3), bench.put(7, 8, 9)
    bench.enter("window", leaf, 1, 2)
    bench.enter("window", other, 1, 2)
    lock = bench.component_pages.lock(leaf, bench.component_pages.firsts(3))
    assert bench.component_pages.take("device", "window", 5) is None
    assert bench.component_pages.device["window"].evictable == 2
    # Two are free, two are those of the other prompt.
    pages = bench.component_pages.take("device", "window", 4)
    assert pages is not None and len(pages) == 4
    assert bench.component_pages.probe_prefix("", keys(7, 8, 9)) == (0, 0)
    assert bench.component_pages.probe_prefix("", keys(1, 2, 3)) == (3, 0)
    bench.check()
    bench.component_pages.give_back({"window": pages})
    bench.component_pages.unlock(lock)


def test_of_a_cut_node_only_the_part_that_a_receipt_reaches_into_is_kept() -> None:
    bench = Bench(window(2))
    leaf = bench.put(*range(8))
    bench.enter("window", leaf, *range(8))
    receipt = bench.component_pages.lock(leaf, bench.component_pages.firsts(8))
    component_tier = bench.component_pages.device["window"]
    assert (component_tier.evictable, component_tier.protected) == (0, 8)
    upper = bench.index.split(leaf, 5)
    bench.check()
    assert (component_tier.evictable, component_tier.protected) == (5, 3)
    assert bench.component_pages.evict("device", "window", 1) == 5 and not component_tier.pages_of(upper)
    assert bench.component_pages.probe_prefix("", keys(*range(8))) == (8, 0)
    bench.component_pages.unlock(receipt)
    bench.check()


def test_a_lock_keeps_the_component_pages_of_its_boundary_even_if_the_device_ends_before() -> None:
    bench = Bench(window(4))
    leaf = bench.put(*range(8))
    bench.to_host(leaf)
    middle = bench.index.split(leaf, 6)
    bench.index.split(middle, 4)
    bench.enter("window", middle, 2, 3, 4, 5)
    bench.index.drop_device(leaf)
    # Boundary 8 needs [4, 8): pages before that are of no use to it.
    lock = bench.component_pages.lock(middle, bench.component_pages.firsts(8))
    component_tier = bench.component_pages.device["window"]
    assert (component_tier.protected, component_tier.evictable) == (2, 2)
    bench.check()
    bench.component_pages.unlock(lock)


def test_of_unguarded_component_pages_the_first_ones_go_first() -> None:
    bench = Bench(window(4))
    leaf = bench.put(*range(8))
    upper = bench.index.split(leaf, 6)
    bench.enter("window", leaf, 4, 5, 6, 7)
    bench.component_pages.unlock(bench.component_pages.lock(leaf, bench.component_pages.firsts(8)))
    assert bench.component_pages.evict("device", "window", 1) == 2
    assert not bench.component_pages.device["window"].pages_of(upper)


def test_what_is_entered_below_a_receipt_is_kept_by_it() -> None:
    bench = Bench(window(2))
    leaf = bench.put(1, 2, 3)
    receipt = bench.component_pages.lock(leaf, bench.component_pages.firsts(3))
    bench.enter("window", leaf, 1, 2)
    assert bench.component_pages.evict("device", "window", 2) == 0
    bench.component_pages.unlock(receipt)
    assert bench.component_pages.evict("device", "window", 2) == 2


def test_the_indexs_own_component_pages_are_no_duplicates() -> None:
    bench = Bench(window(3))
    leaf = bench.put(1, 2, 3)
    known = page_ids(bench.enter("window", leaf, 0, 1))
    pool = bench.component_pages.device["window"].pool
    fresh, other = pool.take(1), pool.take(1)
    assert bench.component_pages.insert("device", "window", leaf, 0, known + fresh) == (known + fresh, page_ids())
    assert bench.component_pages.insert("device", "window", leaf, 1, known[1:] + other) == (known[1:] + fresh, other)
    pool.give_back(other)
    bench.check()


# --- Wrong calls ---


def test_two_components_cannot_have_one_name() -> None:
    with pytest.raises(InvalidConfig, match="one name each"):
        Bench(state(), state())


def test_component_pages_need_full_pages_of_their_tier() -> None:
    bench = Bench(window(2))
    leaf = bench.put(1, 2)
    pages = bench.component_pages.host["window"].pool.take(1)
    with pytest.raises(BrokenInvariant, match="no full host pages"):
        bench.component_pages.insert("host", "window", leaf, 1, pages)
    for first in (-1, 2):
        with pytest.raises(BrokenInvariant, match="not above the end"):
            bench.component_pages.insert(
                "device", "window", leaf, first, bench.component_pages.device["window"].pool.take(1)
            )
    bench.check()


def test_receipts_are_given_back_once_and_as_what_they_are() -> None:
    bench = Bench(state())
    leaf = bench.put(1)
    lock, pin = (
        bench.component_pages.lock(leaf, bench.component_pages.firsts(1)),
        bench.component_pages.pin(leaf, bench.component_pages.firsts(1)),
    )
    for wrong in (lambda: bench.component_pages.unpin(lock), lambda: bench.component_pages.unlock(pin)):
        with pytest.raises(BrokenInvariant, match="not such a receipt"):
            wrong()
    bench.component_pages.unlock(lock)
    bench.component_pages.unpin(pin)
    with pytest.raises(BrokenInvariant, match="given back before"):
        bench.component_pages.unlock(lock)
    bench.check()


def test_what_a_receipt_keeps_cannot_be_dropped() -> None:
    bench = Bench(state())
    leaf = bench.put(1)
    bench.enter("state", leaf, 0)
    receipt = bench.component_pages.lock(leaf, bench.component_pages.firsts(1))
    with pytest.raises(BrokenInvariant, match="that are guarded"):
        bench.component_pages.drop("device", "state", leaf)
    bench.component_pages.unlock(receipt)
    bench.component_pages.drop("device", "state", leaf)
    bench.component_pages.drop("device", "state", leaf)
    bench.check()


def test_check_finds_what_does_not_add_up() -> None:
    bench = Bench(state())
    leaf = bench.put(1)
    bench.enter("state", leaf, 0)
    component_tier = bench.component_pages.device["state"]
    receipt = bench.component_pages.lock(leaf, bench.component_pages.firsts(1))

    def fails(words: str) -> None:
        with pytest.raises(BrokenInvariant, match=words):
            bench.check()

    component_tier.receipts += 1
    fails("guards reach into")
    component_tier.receipts -= 1
    component_tier.protected += 1
    fails("counted")
    component_tier.protected -= 1
    bench.index.unlock(receipt.full)
    fails("without its guards")
    receipt.full.released = False
    leaf.anchored += 1
    bench.index.device_tier.receipts += 1
    bench.index.device_tier.guard(leaf)
    component_tier.pool.own_cached(page_ids([0]))
    fails("not the cached pages")
    component_tier.pool.to_cache(page_ids([0]))
    bench.component_pages.unlock(receipt)
    bench.check()
    # Pages that were withdrawn take nothing with them.
    bench.index.withdraw_device(leaf)
    fails("no full pages in this tier")
