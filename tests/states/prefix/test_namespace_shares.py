"""Eviction takes from namespaces above their share first, under every policy: compared with a model that recounts."""

from __future__ import annotations

from collections import Counter
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulation.rig import Rig
from tidekv.backends.keys.chain import pack_tokens
from tidekv.states.pages.page_pool import PagePool
from tidekv.states.prefix.index import Node, PrefixIndex, Receipt
from tidekv.states.prefix.node import TierName
from tidekv.states.prefix.policies import POLICIES

PAGES = 40
NAMESPACES = ("a", "b", "c")


class Cache:
    """An index with shares, and what it has evicted."""

    def __init__(self, policy: str = "lru", share: float = 0.25, pages: int = PAGES) -> None:
        self.device = PagePool("device", pages)
        self.host = PagePool("host", pages)
        self.policy = POLICIES[policy]  # type: ignore[index]  # A name of POLICIES.
        self.index = PrefixIndex(
            key_bytes=4, device=self.device, host=self.host, policy=self.policy, namespace_share=share
        )
        self.victims: list[tuple[str, int]] = []
        self.index.on_evict.append(self.note)

    def note(self, node: Node, tier: TierName) -> None:
        self.victims.append((node.namespace, node.page_count))

    def put(self, namespace: str, tokens: list[int], priority: int = 0) -> Node:
        inserted = self.index.insert(namespace, pack_tokens(tokens), self.device.take(len(tokens)), priority=priority)
        self.device.give_back(inserted.duplicates)
        return inserted.node

    def pages(self) -> Counter[str]:
        found = Counter[str]()
        for node in self.index.nodes():
            if node.device is not None:
                found[node.namespace] += node.page_count
        return found

    def ready(self) -> list[Node]:
        return [node for node in self.index.nodes() if self.index.device_tier.is_ready(node)]

    def expected(self, wanted: int) -> tuple[Node, int]:
        """The next victim by the rule, counted from scratch, and how many of its pages go."""
        limit, pages = self.index.device_tier.shares.share_pages, self.pages()  # type: ignore[union-attr]  # Has shares.
        over = [
            namespace
            for namespace in self.index.device_tier.shares._over  # type: ignore[union-attr]  # Only for the order.
            if pages[namespace] > limit and any(node.namespace == namespace for node in self.ready())
        ]
        assert set(over) == {node.namespace for node in self.ready() if pages[node.namespace] > limit}
        nodes = [node for node in self.ready() if not over or node.namespace == over[0]]
        victim = min(nodes, key=lambda node: (self.policy.priority(node), node.node_id))
        if over:
            wanted = min(wanted, pages[over[0]] - limit)
        # A pool of so few pages has no slack: the last victim is split.
        return victim, min(victim.page_count, wanted)


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(("put", "put", "match", "lock", "unlock", "evict", "evict")),
        st.sampled_from(NAMESPACES),
        st.lists(st.integers(0, 2), min_size=1, max_size=8),
        st.integers(0, 3),
    ),
    max_size=40,
)


@pytest.mark.parametrize("policy", POLICIES)
@given(share=st.sampled_from((0.05, 0.2, 0.5, 0.9)), operations=OPERATIONS)
def test_every_victim_is_the_one_of_the_rule(policy: str, share: float, operations: list[tuple]) -> None:  # type: ignore[type-arg]  # Drawn.
    cache = Cache(policy, share)
    receipts: list[Receipt] = []
    for name, namespace, tokens, number in operations:
        if name == "put" and cache.device.free >= len(tokens):
            cache.put(namespace, tokens, priority=number)
        elif name == "match":
            cache.index.match(namespace, pack_tokens(tokens))
        elif name == "lock":
            receipts.append(cache.index.lock(cache.index.match(namespace, pack_tokens(tokens)).device_node))
        elif name == "unlock" and receipts:
            cache.index.unlock(receipts.pop(number % len(receipts)))
        elif name == "evict":
            wanted = min(number + 1, cache.index.device_evictable)
            while wanted:
                victim, pages = cache.expected(wanted)
                namespace = victim.namespace
                assert cache.index.first_to_go("device", wanted)[0] is victim
                cache.victims.clear()
                assert cache.index.evict_device(pages) == pages
                assert cache.victims == [(namespace, pages)]
                wanted -= pages
        cache.index.check()


@given(share=st.sampled_from((0.05, 0.2, 0.5)), operations=OPERATIONS, wanted=st.integers(1, 30))
def test_one_eviction_of_many_pages_is_many_of_one_victim(
    share: float,
    operations: list[tuple],  # type: ignore[type-arg]  # Drawn.
    wanted: int,
) -> None:
    caches = Cache("lru", share), Cache("lru", share)
    for cache in caches:
        for _, namespace, tokens, number in operations:
            if cache.device.free >= len(tokens):
                cache.put(namespace, tokens, priority=number)
        cache.victims.clear()
    one, many = caches
    wanted = min(wanted, one.index.device_evictable)
    assert one.index.evict_device(wanted) == wanted
    while wanted:
        _, pages = many.expected(wanted)
        wanted -= many.index.evict_device(pages)
    assert one.victims == many.victims
    assert one.index.evicted_over_share == many.index.evicted_over_share
    one.index.check()


def test_what_goes_next_is_of_the_namespace_above_its_share_as_far_as_it_is_above() -> None:
    cache = Cache(share=0.25)
    old = cache.put("b", [1, 2])
    first, second = cache.put("a", [3] * 6), cache.put("a", [4] * 6)
    assert cache.index.first_to_go("device", 3) == [
        first,
    ]
    assert cache.index.first_to_go("device", 7) == [first, old]
    assert cache.index.first_to_go("device", 9) == [first, old, second]
    cache.index.check()


def test_one_tenant_does_not_evict_the_pages_of_others() -> None:
    """A tenant with prompts without end, and one with a conversation that stays within its share."""

    def pages_left(share: float) -> int:
        rig = Rig(device_pages=32, host_pages=0, namespace_share=share)
        rig.make_ready("quiet", b"abcdefgh", namespace="quiet")
        rig.finish("quiet", b"abcdefgh")
        tokens = count(100)
        for number in range(20):
            prompt = bytes([next(tokens)]) * 6
            rig.make_ready(f"loud {number}", prompt, namespace="loud")
            rig.finish(f"loud {number}", prompt)
        return rig.core.state.index.probe_prefix("quiet", b"abcdefgh")[0]

    assert pages_left(1.0) == 0
    assert pages_left(0.5) == 8


def test_a_namespace_that_is_alone_uses_the_whole_pool() -> None:
    rig = Rig(device_pages=32, host_pages=0, namespace_share=0.25)
    for number in range(4):
        prompt = bytes([number]) * 8
        rig.make_ready(f"r{number}", prompt, namespace="alone")
        rig.finish(f"r{number}", prompt)
    assert rig.core.statistics()["device_cached"] == 32
    assert rig.core.statistics()["evicted_over_share"] == 0


def test_a_namespace_without_pages_leaves_nothing_behind() -> None:
    cache = Cache(share=0.25)
    for number in range(3):
        cache.put(f"tenant {number}", list(range(12)))
    assert cache.index.evict_device(36) == 36
    shares = cache.index.device_tier.shares
    assert shares is not None
    assert not shares._pages and not shares._over and not shares._by_namespace


def test_pages_within_the_share_that_go_with_a_victim_are_not_counted() -> None:
    cache = Cache(share=0.25, pages=200)
    cache.put("a", [1] * 3)
    cache.put("a", [2] * 49)
    # Two of 52 pages are above the share of 50. The victim is not split for one page more.
    assert cache.index.evict_device(2) == 3
    assert cache.index.evicted_over_share == 2


def test_a_locked_namespace_above_its_share_does_not_protect_the_next_one() -> None:
    cache = Cache(share=0.25)
    cache.index.lock(cache.put("a", list(range(12))))
    cache.put("c", [1, 2])
    cache.put("b", list(range(12)))
    assert cache.index.evict_device(1) == 1
    assert cache.victims == [("b", 1)]
