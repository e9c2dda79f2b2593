"""The prefix index at its edges: wrong calls, planted damage that `check` must see, and very deep trees."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.prefixes import keys
from tidekv.states.errors import BrokenInvariant
from tidekv.states.pages.page_pool import PagePool
from tidekv.states.prefix.index import Node, PrefixIndex
from tidekv.states.types import page_ids


def make(pages: int = 32) -> tuple[PrefixIndex, PagePool, PagePool]:
    device, host = PagePool("device", pages), PagePool("host", pages)
    return PrefixIndex(key_bytes=4, device=device, host=host), device, host


def put(index: PrefixIndex, device: PagePool, *tokens: int) -> Node:
    inserted = index.insert("", keys(*tokens), device.take(len(tokens)))
    device.give_back(inserted.duplicates)
    return inserted.node


WRONG_CALLS: dict[str, Callable[[PrefixIndex, PagePool, Node], object]] = {
    "keys of no whole number of pages": lambda index, device, node: index.match("", b"123"),
    "probe_prefix of no whole number of pages": lambda index, device, node: index.probe_prefix("", b"123"),
    "pages for other keys": lambda index, device, node: index.insert("", keys(1, 2), device.take(1)),
    "pages nobody owns": lambda index, device, node: index.insert("", keys(7, 8), page_ids([20, 21])),
    "child that is there": lambda index, device, node: index.insert_pending(node, "", keys(4), device.take(1)),
    "child of nothing": lambda index, device, node: index.insert_pending(node, "", b"", page_ids()),
    "child with other pages": lambda index, device, node: index.insert_pending(node, "", keys(9), device.take(2)),
    "child in another namespace": lambda index, device, node: index.insert_pending(node, "x", keys(9), device.take(1)),
    "second device copy": lambda index, device, node: index.give_device(node, device.take(3)),
    "host copy of another length": lambda index, device, node: index.give_host(node, page_ids([0])),
    "host copy below none": lambda index, device, node: index.give_host(leaf_of(node), page_ids([0])),
    "drop above a child": lambda index, device, node: index.drop_device(node),
    "drop of no host copy": lambda index, device, node: index.drop_host(node),
    "drop of what is not in RECLAIMING": lambda index, device, node: index.drop_reclaiming(node),
    "split before the first page": lambda index, device, node: index.split(node, 0),
    "split after the last page": lambda index, device, node: index.split(node, 3),
    "load on a root": lambda index, device, node: index.set_load(root_of(node), object()),
    "root in RECLAIMING": lambda index, device, node: index.set_reclaiming(root_of(node)),
}


def leaf_of(node: Node) -> Node:
    return next(iter(node.children.values()))


def root_of(node: Node) -> Node:
    assert node.parent is not None
    return node.parent


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_wrong_call_is_refused_and_enters_nothing(name: str) -> None:
    index, device, _ = make()
    node = put(index, device, 1, 2, 3)
    put(index, device, 1, 2, 3, 4)
    before = [(repr(node), node.guarded) for node in index.nodes()]
    with pytest.raises(BrokenInvariant):
        WRONG_CALLS[name](index, device, node)
    assert [(repr(node), node.guarded) for node in index.nodes()] == before
    assert device.cached == 4
    index.check()


def test_locked_pages_and_pages_under_load_cannot_be_dropped() -> None:
    index, device, host = make()
    node = put(index, device, 1)
    index.give_host(node, host.take(1))
    lock, pin = index.lock(node), index.pin(node)
    with pytest.raises(BrokenInvariant, match="guarded"):
        index.drop_device(node)
    with pytest.raises(BrokenInvariant, match="guarded"):
        index.drop_host(node)
    index.unlock(lock)
    index.unpin(pin)
    index.drop_device(node)
    with pytest.raises(BrokenInvariant, match="has no device pages to lock"):
        index.lock(node)
    with pytest.raises(BrokenInvariant, match="has no device pages"):
        index.device_path(node)
    with pytest.raises(BrokenInvariant, match="that a load could fill"):
        index.set_load(node, object())  # type: ignore[arg-type]  # Refused before any use.
    with pytest.raises(BrokenInvariant, match="no device pages to reclaim"):
        index.set_reclaiming(node)
    index.drop_host(node)
    for refused in (index.lock, index.pin, index.drop_device, index.drop_host, index.mark_stored):
        with pytest.raises(BrokenInvariant, match="not in the tree"):
            refused(node)
    assert device.free == host.free == 32


def test_nothing_grows_below_pages_that_are_not_there() -> None:
    index, device, host = make()
    node = put(index, device, 1, 2)
    upper = index.split(node, 1)
    for part in (upper, node):
        index.give_host(part, host.take(1))
    index.drop_device(node)
    with pytest.raises(BrokenInvariant, match="no device pages to add a child to"):
        index.insert_pending(node, "", keys(3), device.take(1))
    index.set_reclaiming(upper)
    with pytest.raises(BrokenInvariant, match="has no device pages"):
        index.give_device(node, device.take(1))
    with pytest.raises(BrokenInvariant, match="cannot be split"):
        index.split(upper, 1)
    index.check()


DAMAGE: dict[str, Callable[[PrefixIndex, Node], object]] = {
    "lost guard": lambda index, node: setattr(node, "guarded", 0),
    "lost receipt": lambda index, node: setattr(node, "anchored", node.anchored - 1),
    "extra host guard": lambda index, node: setattr(node, "host_guarded", node.host_guarded + 1),
    "wrong depth": lambda index, node: setattr(node, "depth_pages", 7),
    "lost parent": lambda index, node: setattr(node, "parent", None),
    "wrong edge": lambda index, node: setattr(node, "keys", b"????" + node.edge[4:]),
    "kept edge": lambda index, node: setattr(node, "keys", memoryview(bytes(99) + node.edge)[99:]),
    "edge that may change": lambda index, node: setattr(node, "keys", memoryview(bytearray(node.edge))),
    "empty edge": lambda index, node: setattr(node, "keys", b""),
    "lost copy": lambda index, node: setattr(node, "device", None),
    "closure": lambda index, node: setattr(root_of(node), "host", None),
    "page used twice": lambda index, node: node.device.__setitem__(0, root_of(node).device[0]),
    "page of nobody": lambda index, node: node.device.__setitem__(0, 31),
    "load on host pages": lambda index, node: setattr(root_of(node), "load", object()),
    "RECLAIMING in the pool only": lambda index, node: setattr(node, "is_reclaiming", True),
    "evictable": lambda index, node: setattr(index.device_tier, "evictable", 9),
    "protected": lambda index, node: setattr(index.host_tier, "protected", 9),
    "children": lambda index, node: setattr(root_of(node), "device_children", 2),
    "not queued": lambda index, node: index.host_tier.queue._queued.clear(),
    "queued twice": lambda index, node: index.device_tier.queue._line.append(index.device_tier.queue._line[0]),
    "line out of order": lambda index, node: index.host_tier.queue._line.append(index.host_tier.queue._heap.pop()),
    "namespace": lambda index, node: setattr(node, "namespace", "x"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_check_sees_planted_damage(name: str) -> None:
    index, device, host = make()
    leaf = put(index, device, 1, 2, 3)
    upper = index.split(leaf, 1)
    for node in (upper, leaf):
        index.give_host(node, host.take(node.page_count))
    index.lock(leaf)
    index.check()
    DAMAGE[name](index, leaf)
    with pytest.raises(BrokenInvariant):
        index.check()


def test_fifty_thousand_nodes_deep() -> None:
    depth = 50_000
    index, device, host = make(depth + 1)
    prompt = b"".join(number.to_bytes(4, "little") for number in range(depth))
    node = index.match("", b"").device_node
    for number in range(depth):
        node = index.insert_pending(node, "", prompt[number * 4 : number * 4 + 4], device.take(1))
    index.check()
    receipt = index.lock(node)
    assert index.match("", prompt).device_node is node
    assert index.probe_prefix("", prompt) == (depth, 0)
    assert len(index.device_path(node)) == depth == index.device_protected
    assert node.lock_ref == 1 and index.path(node)[0].lock_ref == 1
    pages = device.take(1)
    assert index.insert("", prompt + keys(9), index.device_path(node) + pages).inserted_count == 1
    assert index.evict_device(depth) == 1
    index.unlock(receipt)
    for above in index.path(node)[:100]:
        index.give_host(above, host.take(1))
    index.check()
    index.set_reclaiming(index.path(node)[1])
    assert index.drop_reclaiming(index.path(node)[1]) is not None
    assert index.flush("device") == (1, 0) and index.flush("host") == (100, 0)
    assert not list(index.nodes())


def test_queue_does_not_grow_with_nodes_that_come_and_go() -> None:
    index, device, _ = make()
    kept = put(index, device, 1)
    for token in range(2, 2000):
        index.drop_device(put(index, device, token))
    assert len(index.device_tier.queue) < 200
    index.check()
    assert index.evict_device(1) == 1 and kept.parent is None
    # Nothing is left to evict: those that went otherwise are passed over, and no longer counted.
    assert index.evict_device(1) == 0 and not len(index.device_tier.queue)
    index.check()
