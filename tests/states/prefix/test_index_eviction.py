"""In which order the prefix index forgets, and how much of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.prefixes import keys
from tidekv.states.pages.page_pool import PagePool
from tidekv.states.prefix.index import Node, PrefixIndex
from tidekv.states.prefix.node import TierName
from tidekv.states.prefix.policies import FIFO, LFU, LRU, PRIORITY, SLRU, EvictionPolicy


class Cache:
    """An index that remembers what was evicted, as the first token of each node's pages."""

    def __init__(self, policy: EvictionPolicy = LRU) -> None:
        self.device, self.host = PagePool("device", 48), PagePool("host", 48)
        self.index = PrefixIndex(key_bytes=4, device=self.device, host=self.host, policy=policy)
        self.gone: list[tuple[TierName, list[int]]] = []
        self.index.on_evict.append(self.note)

    def note(self, node: Node, tier: TierName) -> None:
        edge = node.edge
        self.gone.append((tier, [int.from_bytes(edge[at : at + 4], "little") for at in range(0, len(edge), 4)]))

    def put(self, *tokens: int, priority: int = 0) -> Node:
        inserted = self.index.insert("", keys(*tokens), self.device.take(len(tokens)), priority=priority)
        self.device.give_back(inserted.duplicates)
        return inserted.node

    def touch(self, *tokens: int) -> None:
        self.index.match("", keys(*tokens))

    def evicted(self, count: int) -> list[list[int]]:
        self.gone.clear()
        assert self.index.evict_device(count) == count
        self.index.check()
        return [tokens for _, tokens in self.gone]


def test_least_recently_used_goes_first_and_leaves_before_parents() -> None:
    cache = Cache()
    cache.put(1, 2)
    cache.put(1, 2, 3)
    cache.put(4)
    cache.put(1, 2, 5)
    cache.touch(4)
    # (1, 2) was used with its child 5, before 4.
    assert cache.evicted(5) == [[3], [5], [1, 2], [4]]


def test_only_the_tail_of_the_last_victim_goes() -> None:
    cache = Cache()
    leaf = cache.put(1, 2, 3, 4, 5)
    cache.put(6)
    assert cache.evicted(2) == [[4, 5]]
    assert leaf.parent is None
    assert cache.index.probe_prefix("", keys(1, 2, 3, 4, 5)) == (3, 0)
    # What is left is as old as the whole was.
    assert cache.evicted(4) == [[1, 2, 3], [6]]


def test_tail_with_a_host_copy_stays_in_host_memory() -> None:
    cache = Cache()
    leaf = cache.put(1, 2, 3)
    cache.index.give_host(leaf, cache.host.take(3))
    assert cache.evicted(1) == [[3]]
    assert cache.index.probe_prefix("", keys(1, 2, 3)) == (2, 1)
    assert cache.index.evict_host(2) == 2
    assert cache.index.probe_prefix("", keys(1, 2, 3)) == (2, 0)
    cache.index.check()


def test_locked_prefix_stays_and_what_hangs_below_goes() -> None:
    cache = Cache()
    cache.put(1, 2, 3)
    receipt = cache.index.lock(cache.index.match("", keys(1, 2)).device_node)
    assert cache.index.evict_device(64) == 1
    assert (cache.index.device_evictable, cache.index.device_protected) == (0, 2)
    cache.index.unlock(receipt)
    assert cache.evicted(2) == [[1, 2]]


def test_eviction_frees_no_more_than_there_is() -> None:
    cache = Cache()
    assert cache.index.evict_device(5) == 0
    cache.put(1, 2)
    assert cache.index.evict_device(0) == 0
    assert cache.index.evict_device(5) == 2
    assert cache.device.free == 48


def test_flush_says_what_it_dropped_and_spared() -> None:
    cache = Cache()
    node = cache.put(1, 2)
    cache.put(3, 4, 5)
    cache.index.give_host(node, cache.host.take(2))
    receipt = cache.index.lock(node)
    assert cache.index.flush("device") == (3, 2)
    assert cache.index.flush("host") == (2, 0)
    cache.index.unlock(receipt)
    cache.index.check()


def test_hooks_hear_of_every_tier_before_the_pages_go() -> None:
    cache = Cache()
    node = cache.put(1)
    cache.index.give_host(node, cache.host.take(1))
    cached: list[int] = []
    cache.index.on_evict.append(lambda node, tier: cached.append(cache.device.cached + cache.host.cached))
    cache.index.flush("device")
    cache.index.flush("host")
    assert cache.gone == [("device", [1]), ("host", [1])]
    assert cached == [2, 1]


@pytest.mark.parametrize("tier", ["device", "host"])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_hook_that_raises_at_one_victim_leaks_no_page_of_it_nor_of_those_before(tier: TierName, at: int) -> None:
    cache = Cache()
    for first in (1, 4, 7):
        node = cache.put(first, first + 1, first + 2)
        cache.index.give_host(node, cache.host.take(3))
    seen: list[Node] = []

    def hook(node: Node, tier: TierName) -> None:
        seen.append(node)
        if len(seen) == at:
            raise RuntimeError("the hook is broken")

    cache.index.on_evict.append(hook)
    with pytest.raises(RuntimeError, match="the hook is broken"):
        cache.index.flush(tier)
    cache.index.check()
    pool = cache.device if tier == "device" else cache.host
    pool.check()
    assert (pool.free, pool.cached) == (48 - 9 + 3 * (at - 1), 9 - 3 * (at - 1))
    assert cache.index.flush(tier) == (9 - 3 * (at - 1), 0)
    assert pool.free == 48


class RaisesOnce(EvictionPolicy):
    """Raises when it is asked for the second time after it is armed."""

    def __init__(self) -> None:
        self.left = 0

    def priority(self, node: Node) -> tuple[int, ...]:
        if self.left:
            self.left -= 1
            if not self.left:
                raise RuntimeError("the policy is broken")
        return (node.tick,)


@pytest.mark.parametrize("call", [lambda index: index.evict_device(3), lambda index: index.first_to_go("device", 3)])
def test_a_policy_that_raises_loses_no_node(call: Callable[[PrefixIndex], object]) -> None:
    policy = RaisesOnce()
    cache = Cache(policy)
    for token in (1, 2, 3):
        cache.put(token)
    policy.left = 2
    with pytest.raises(RuntimeError, match="the policy is broken"):
        call(cache.index)
    cache.index.check()
    cache.index.flush("device")
    assert cache.device.free == 48


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        (LRU, [[3], [2], [1]]),
        (FIFO, [[1], [2], [3]]),
        (LFU, [[2], [1], [3]]),
        (SLRU, [[2], [3], [1]]),
        (PRIORITY, [[3], [1], [2]]),
    ],
)
def test_each_policy_has_its_order(policy: EvictionPolicy, order: list[list[int]]) -> None:
    cache = Cache(policy)
    cache.put(1)
    cache.put(2, priority=3)
    cache.put(3)
    for token in (3, 3, 3, 2, 1, 1):
        cache.touch(token)
    assert cache.evicted(3) == order


@pytest.mark.parametrize(("policy", "priority"), [(PRIORITY, 2), (LRU, 0)])
def test_longer_prompt_keeps_its_prefix_longer(policy: EvictionPolicy, priority: int) -> None:
    cache = Cache(policy)
    cache.put(1)
    cache.put(2, priority=1)
    longer = cache.put(1, 9, priority=priority)
    cache.index.drop_device(longer)
    assert cache.evicted(2) == [[2], [1]]


def test_a_prefix_of_which_the_first_pages_are_in_host_memory_alone_gets_device_pages_of_its_own() -> None:
    cache = Cache()
    leaf = cache.put(1, 2, 3)
    cache.index.give_host(leaf, cache.host.take(3))
    assert cache.index.evict_device(3) == 3
    inserted = cache.index.insert("", keys(1, 2, 3, 4, 5), cache.device.take(5))
    assert inserted.inserted_count == 5
    assert leaf.device == inserted.pages[:3]
    assert inserted.node.device == inserted.pages[3:]
    cache.index.check()
