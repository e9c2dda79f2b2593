"""The prefix index by example: what is found, the owner of each page after an insert, what receipts and loads keep."""

from __future__ import annotations

import pytest

from tests.support.prefixes import keys
from tidekv.states.errors import BrokenInvariant
from tidekv.states.pages.page_pool import PagePool, PageState
from tidekv.states.prefix.index import Node, PrefixIndex
from tidekv.states.types import PageIds, page_ids


class Bench:
    """An index with its pools, and the calls of a request in one line each."""

    def __init__(self, device_pages: int = 64, host_pages: int = 64) -> None:
        self.device = PagePool("device", device_pages)
        self.host = PagePool("host", host_pages)
        self.index = PrefixIndex(key_bytes=4, device=self.device, host=self.host)

    def put(self, *tokens: int) -> Node:
        inserted = self.index.insert("", keys(*tokens), self.device.take(len(tokens)))
        self.device.give_back(inserted.duplicates)
        self.check()
        return inserted.node

    def host_only(self, *tokens: int) -> Node:
        node = self.put(*tokens)
        for above in self.index.path(node):
            if above.host is None:
                self.index.give_host(above, self.host.take(above.page_count))
        self.index.evict_device(node.page_count)
        self.check()
        return node

    def pending(self, parent: Node, *tokens: int) -> Node:
        return self.index.insert_pending(parent, "", keys(*tokens), self.device.take(len(tokens)), Splits())

    def check(self) -> None:
        self.index.check()
        self.device.check()
        self.host.check()


class Splits:
    """A load that remembers what was split."""

    def __init__(self) -> None:
        self.seen: list[tuple[Node, Node]] = []

    def split(self, upper: Node, lower: Node) -> None:
        self.seen.append((upper, lower))


@pytest.fixture
def bench() -> Bench:
    return Bench()


# --- Finding ---


def test_match_ends_inside_a_node_at_the_exact_page(bench: Bench) -> None:
    leaf = bench.put(1, 2, 3, 4, 5)
    match = bench.index.match("", keys(1, 2, 3, 9, 5))
    assert (match.device_pages, match.host_pages) == (3, 0)
    assert match.device_node is match.host_node is leaf.parent
    assert bench.index.device_path(match.device_node).tolist() == [0, 1, 2]
    assert leaf.edge == keys(4, 5)
    bench.check()


@pytest.mark.parametrize("asked", [1, 2, 63, 64, 65, 99, 100, 101, 150])
@pytest.mark.parametrize("differs_at", [1, 2, 50, 63, 64, 65, 99, 200])
def test_split_page_is_found_wherever_it_is(asked: int, differs_at: int) -> None:
    bench = Bench(device_pages=128)
    bench.put(*range(100))
    prompt = keys(*(number if number != differs_at else 7777 for number in range(asked)))
    expected = min(asked, differs_at, 100)
    assert bench.index.probe_prefix("", prompt) == (expected, 0)
    assert bench.index.match("", prompt).device_pages == expected
    assert bench.index.probe_prefix("", prompt) == (expected, 0)
    bench.check()


def test_match_goes_on_into_host_memory(bench: Bench) -> None:
    host_leaf = bench.host_only(1, 2, 3)
    bench.put(1, 2)
    match = bench.index.match("", keys(1, 2, 3, 4))
    assert (match.device_pages, match.host_pages) == (2, 1)
    assert match.host_node is host_leaf and match.device_node is host_leaf.parent


def test_probe_prefix_changes_nothing(bench: Bench) -> None:
    leaf = bench.put(1, 2, 3)
    before = (bench.index.tree.tick, leaf.hits, leaf.tick, list(bench.index.nodes()))
    assert bench.index.probe_prefix("", keys(1, 2)) == (2, 0)
    assert bench.index.probe_prefix("other", keys(1, 2)) == (0, 0)
    assert (bench.index.tree.tick, leaf.hits, leaf.tick, list(bench.index.nodes())) == before
    assert list(bench.index.tree.roots) == [""]


def test_namespaces_never_meet_and_empty_ones_go(bench: Bench) -> None:
    bench.put(1, 2)
    index = bench.index
    match = index.match("adapter", keys(1, 2))
    assert match.device_pages == 0
    lock, pin = index.lock(match.device_node), index.pin(match.host_node)
    index.unlock(lock)
    assert list(index.tree.roots) == ["", "adapter"]
    lock = index.lock(match.device_node)
    index.unpin(pin)
    assert list(index.tree.roots) == ["", "adapter"]
    index.unlock(lock)
    assert list(index.tree.roots) == [""]
    # The end of a match may be locked after its namespace went: it comes back, unless another one took its place.
    index.unlock(index.lock(match.device_node))
    second = index.match("adapter", keys(1)).device_node
    index.insert_pending(second, "adapter", keys(1), bench.device.take(1))
    with pytest.raises(BrokenInvariant, match="not in the tree"):
        index.lock(match.device_node)
    bench.check()
    index.flush("device")
    assert not index.tree.roots


def test_split_keeps_what_is_known_of_both_parts(bench: Bench) -> None:
    node = bench.index.insert("", keys(1, 2, 3), bench.device.take(3), priority=5).node
    bench.index.match("", keys(1, 2, 3))
    bench.index.mark_stored(node)
    receipt = bench.index.lock(node)
    tick = node.tick
    bench.put(7)
    upper = bench.index.split(node, 2)
    for part in (upper, node):
        assert (part.hits, part.tick, part.born, part.priority, part.stored) == (1, tick, 1, 5, True)
        assert part.lock_ref == 1
    assert (upper.depth_pages, node.depth_pages) == (2, 3)
    assert receipt.node is node
    bench.check()


def test_split_of_a_load_tells_it(bench: Bench) -> None:
    root = bench.index.match("", b"").device_node
    node = bench.pending(root, 1, 2, 3)
    load = node.load
    match = bench.index.match("", keys(1, 9))
    assert load.seen == [(match.device_node, node)]
    assert match.device_node.load is node.load is load
    assert bench.index.device_protected == 3
    bench.check()


# --- Inserting ---


def test_what_the_tree_has_wins_and_ours_is_a_duplicate(bench: Bench) -> None:
    bench.put(1, 2, 3)
    ours = bench.device.take(4)
    inserted = bench.index.insert("", keys(1, 2, 8, 9), ours)
    assert inserted.pages.tolist() == [0, 1, ours[2], ours[3]]
    assert inserted.duplicates == ours[:2]
    assert inserted.inserted_count == 2 and not inserted.rejected
    assert bench.device.holds(ours[:2], PageState.OWNED)
    bench.check()


def test_the_trees_own_pages_are_no_duplicates(bench: Bench) -> None:
    bench.put(1, 2)
    inserted = bench.index.insert("", keys(1, 2, 3), page_ids([0, 1]) + bench.device.take(1))
    assert not inserted.duplicates and inserted.inserted_count == 1
    bench.check()


def test_host_copies_get_our_pages_on_the_device(bench: Bench) -> None:
    host_leaf = bench.host_only(1, 2, 3)
    inserted = bench.index.insert("", keys(1, 2, 7), bench.device.take(3))
    assert inserted.inserted_count == 3 and not inserted.duplicates
    assert bench.index.probe_prefix("", keys(1, 2, 3)) == (2, 1)
    assert host_leaf.device is None and host_leaf.host is not None
    bench.check()


def test_insert_stops_before_a_foreign_load_and_passes_its_own(bench: Bench) -> None:
    node = bench.pending(bench.put(1), 2, 3)
    foreign = bench.device.take(4)
    inserted = bench.index.insert("", keys(1, 2, 3, 4), foreign)
    assert inserted.rejected == foreign[1:] and inserted.duplicates == foreign[:1]
    assert inserted.pages.tolist() == [0, *foreign[1:]]
    assert inserted.node is node.parent
    shared = page_ids([0]) + node.device + foreign[3:]
    assert bench.index.insert("", keys(1, 2, 3, 4), shared).inserted_count == 1
    bench.check()


def test_insert_stops_before_void_pages_and_rejects_only_what_is_ours(bench: Bench) -> None:
    node = bench.pending(bench.put(1), 2, 3)
    given_up: PageIds = node.device
    bench.index.set_reclaiming(node)
    inserted = bench.index.insert("", keys(1, 2, 3, 4), page_ids([0]) + given_up + bench.device.take(1))
    assert inserted.rejected == page_ids([3]) and not inserted.inserted_count
    assert inserted.pages.tolist() == [0, *given_up, 3]
    bench.check()


def test_insert_looks_for_ours_in_all_that_hangs_below_void_pages(bench: Bench) -> None:
    node = bench.pending(bench.put(1), 2, 3)
    below = bench.pending(node, 4, 5)
    bench.index.set_load(below, None)
    shared = bench.index.lock(below)
    path = page_ids([0]) + node.device + below.device
    bench.index.set_reclaiming(node)
    # All of these are the tree's, to the last one: nothing of them is to be given back.
    assert bench.index.insert("", keys(1, 2, 3, 4, 5), path).rejected == page_ids()
    foreign = bench.device.take(2)
    inserted = bench.index.insert("", keys(1, 2, 3, 4, 9), path[:3] + foreign)
    assert inserted.rejected == foreign
    assert bench.index.insert("", keys(1, 2, 3, 4), path[:3] + foreign[:1]).rejected == foreign[:1]
    bench.device.give_back(foreign)
    bench.index.unlock(shared)
    bench.check()


def test_refused_insert_enters_nothing(bench: Bench) -> None:
    bench.host_only(1, 2)
    pages = bench.device.take(3)
    bench.device.give_back(pages[2:])
    with pytest.raises(BrokenInvariant, match="is free"):
        bench.index.insert("", keys(1, 2, 3), pages)
    assert bench.index.probe_prefix("", keys(1, 2, 3)) == (0, 2)
    assert bench.device.owned == 2
    bench.check()


def test_empty_prompt_is_found_and_inserted_as_nothing(bench: Bench) -> None:
    match = bench.index.match("", b"")
    assert match.device_node.is_root and match.device_pages == 0
    assert bench.index.insert("", b"", page_ids()).node.is_root
    bench.check()


# --- Receipts, loads and pages in RECLAIMING ---


def test_receipts_are_given_back_once_and_as_what_they_are(bench: Bench) -> None:
    node = bench.put(1, 2)
    lock, pin = bench.index.lock(node), bench.index.pin(node)
    with pytest.raises(BrokenInvariant, match="is not a host receipt"):
        bench.index.unpin(lock)
    with pytest.raises(BrokenInvariant, match="is not a device receipt"):
        bench.index.unlock(pin)
    bench.index.unlock(lock)
    bench.index.unpin(pin)
    with pytest.raises(BrokenInvariant, match="given back before"):
        bench.index.unlock(lock)
    with pytest.raises(BrokenInvariant, match="given back before"):
        bench.index.unpin(pin)
    bench.check()


def test_pin_is_anchored_where_the_host_pages_end(bench: Bench) -> None:
    leaf = bench.put(1, 2, 3)
    upper = bench.index.split(leaf, 1)
    bench.index.give_host(upper, bench.host.take(1))
    receipt = bench.index.pin(leaf)
    assert receipt.node is upper and bench.index.host_protected == 1
    assert bench.index.evict_host(1) == 0
    bench.index.unpin(receipt)
    assert bench.index.evict_host(1) == 1


def test_load_guards_its_path_and_host_source(bench: Bench) -> None:
    node = bench.host_only(1, 2)
    bench.index.give_device(node, bench.device.take(2), Splits())
    assert (bench.index.device_evictable, bench.index.host_evictable) == (0, 0)
    assert bench.index.flush("device") == (0, 2) and bench.index.flush("host") == (0, 2)
    bench.check()
    bench.index.set_load(node, None)
    assert bench.index.flush("host") == (2, 0) and bench.index.flush("device") == (2, 0)
    bench.check()


def test_void_pages_hide_their_node_until_they_are_dropped(bench: Bench) -> None:
    above = bench.put(1)
    node = bench.pending(above, 2, 3)
    below = bench.pending(node, 4)
    bench.index.set_load(below, None)
    shared = bench.index.lock(below)
    bench.index.set_reclaiming(node)
    bench.check()
    assert bench.index.probe_prefix("", keys(1, 2, 3, 4)) == (1, 0)
    assert bench.index.match("", keys(1, 2, 9)).device_node is above
    assert keys(2) in above.children
    assert bench.device.draining == 2 and bench.index.flush("device") == (0, 2)
    assert bench.index.drop_reclaiming(node) is None
    bench.index.unlock(shared)
    pages = bench.index.drop_reclaiming(node)
    assert pages is not None and bench.device.holds(pages, PageState.DRAINING)
    bench.device.settle(pages)
    assert list(bench.index.nodes()) == [above] and bench.index.device_evictable == 1
    bench.check()


def test_void_node_with_a_host_copy_is_found_there_again(bench: Bench) -> None:
    node = bench.host_only(1, 2)
    bench.index.give_device(node, bench.device.take(2), Splits())
    bench.index.set_reclaiming(node)
    bench.check()
    assert bench.index.probe_prefix("", keys(1, 2)) == (0, 0)
    pages = bench.index.drop_reclaiming(node)
    assert pages is not None
    bench.device.settle(pages)
    assert bench.index.probe_prefix("", keys(1, 2)) == (0, 2)
    bench.check()


def test_void_node_is_never_split(bench: Bench) -> None:
    node = bench.host_only(1, 2, 3)
    bench.index.give_device(node, bench.device.take(3), Splits())
    bench.index.set_reclaiming(node)
    assert bench.index.evict_host(1) == 3
    bench.check()
    assert list(bench.index.nodes()) == [node]
    pages = bench.index.drop_reclaiming(node)
    assert pages is not None
    bench.device.settle(pages)
    assert not list(bench.index.nodes())


def test_a_receipt_of_another_tree_is_refused_and_both_stay_as_they_are(bench: Bench) -> None:
    other = Bench()
    lock, pin = bench.index.lock(node := bench.put(1, 2)), bench.index.pin(node)
    other.index.lock(other.put(1, 2))
    with pytest.raises(BrokenInvariant, match="of another tree"):
        other.index.unlock(lock)
    with pytest.raises(BrokenInvariant, match="of another tree"):
        other.index.unpin(pin)
    assert (other.index.device_protected, bench.index.device_protected) == (2, 2)
    bench.index.unlock(lock)
    bench.index.unpin(pin)
    for each in (bench, other):
        each.check()


def test_a_look_at_a_namespace_that_nothing_is_kept_of_leaves_nothing_behind() -> None:
    index = PrefixIndex(key_bytes=4, device=PagePool("device", 4), host=PagePool("host", 4))
    match = index.match("a", bytes(8))
    assert index.insert("b", b"", page_ids()).inserted_count == 0
    with pytest.raises(BrokenInvariant):
        index.insert("c", bytes(4), page_ids([1]))
    assert index.tree.roots == {}
    receipt = index.lock(match.device_node)
    assert set(index.tree.roots) == {"a"}
    index.check()
    index.unlock(receipt)
    assert index.tree.roots == {}


def test_a_probe_may_leave_out_device_pages_that_a_load_is_still_to_fill() -> None:
    bench = Bench()
    bench.put(1, 2)
    index = bench.index
    parent = index.match("", keys(1, 2)).device_node
    node = index.insert_pending(parent, "", keys(3, 4), bench.device.take(2), Pending())
    assert index.probe_prefix("", keys(1, 2, 3, 4)) == (4, 0)
    assert index.probe_prefix("", keys(1, 2, 3, 4), with_pending=False) == (2, 0)
    # A copy from the host to the device is under way: the bytes are on the host.
    index.give_host(parent, bench.host.take(2))
    index.give_host(node, bench.host.take(2))
    assert index.probe_prefix("", keys(1, 2, 3, 4), with_pending=False) == (2, 2)


class Pending:
    """A load of one node."""

    def split(self, upper: Node, lower: Node) -> None:
        raise AssertionError("nothing is split")
