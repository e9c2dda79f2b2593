"""The faster forms of the prefix index beside plain ones: parts of keys that are not copied, a queue that is a line."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidekv.states.pages.page_pool import PagePool
from tidekv.states.prefix.index import Node, PrefixIndex
from tidekv.states.prefix.node import KEPT_MAX, Keys, part_of
from tidekv.states.prefix.policies import LRU, EvictionQueue


def kept_bytes(keys: Keys) -> int:
    """How many bytes live as long as these keys."""
    return len(keys) if isinstance(keys, bytes) else memoryview(keys.obj).nbytes


@given(keys=st.binary(max_size=64), cuts=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=6))
def test_part_of_a_part_is_what_slices_are_and_keeps_little_else(keys: bytes, cuts: list[tuple[float, float]]) -> None:
    plain, part = keys, keys
    for one, other in cuts:
        first, end = sorted((round(one * len(plain)), round(other * len(plain))))
        plain = plain[first:end]
        part = part_of(part, first, end)
        assert bytes(part) == plain
        assert kept_bytes(part) <= max(len(plain), KEPT_MAX * len(plain))


def enter(index: PrefixIndex, device: PagePool, prompt: bytes) -> Node:
    match = index.match("", prompt)
    pages = index.device_path(match.device_node) + device.take(len(prompt) - match.device_pages)
    return index.insert("", prompt, pages).node


def test_a_long_rest_shares_its_prompt_and_a_short_one_does_not() -> None:
    device = PagePool("device", 48)
    index = PrefixIndex(key_bytes=1, device=device, host=PagePool("host", 0))
    enter(index, device, b"abcd")
    prompt = b"abcdefghijklmnop"
    node = enter(index, device, prompt)
    assert isinstance(node.keys, memoryview) and node.keys.obj is prompt
    assert node.edge == b"efghijklmnop"
    turn = enter(index, device, prompt + b"qrs")
    assert isinstance(turn.keys, bytes)
    # What is left of it after evictions keeps no more alive than it may, either.
    index.drop_device(turn)
    for _ in range(11):
        assert index.evict_device(1) == 1
        for left in index.nodes():
            assert kept_bytes(left.keys) <= KEPT_MAX * len(left.keys)
        index.check()


def test_a_rest_that_stays_in_host_memory_keeps_no_more_keys_than_it_may() -> None:
    device, host = PagePool("device", 16), PagePool("host", 16)
    index = PrefixIndex(key_bytes=1, device=device, host=host)
    node = enter(index, device, b"abcdefghijklmnop")
    index.give_host(node, host.take(16))
    assert index.evict_device(1) == 1
    assert node.edge == b"p" and node.device is None and kept_bytes(node.keys) == 1
    index.check()
    assert index.evict_host(1) == 1
    assert [left.edge for left in index.nodes()] == [b"abcdefghijklmno"]
    index.check()


@given(calls=st.lists(st.tuples(st.sampled_from(["push", "push", "touch", "block", "pop", "pop"]), st.integers(0, 15))))
def test_the_queue_gives_what_a_look_at_all_nodes_would(calls: list[tuple[str, int]]) -> None:
    nodes = [
        Node(number, namespace="", keys=b"k", first_key=b"k", page_count=1, parent=None, tick=0) for number in range(16)
    ]
    queued: set[int] = set()
    blocked: set[int] = set()
    queue = EvictionQueue(LRU, lambda node: node.node_id not in blocked)
    for node in nodes:
        # In the tree, as far as the queue knows.
        node.parent = nodes[0]
    for tick, (call, number) in enumerate(calls, 1):
        if call == "push":
            queue.push(nodes[number])
            queued.add(number)
        elif call == "touch":
            nodes[number].tick = tick
        elif call == "block":
            blocked ^= {number}
        else:
            ready = queued - blocked
            first = min(ready, key=lambda one: (nodes[one].tick, one), default=None)
            popped = queue.pop()
            assert (None if popped is None else popped.node_id) == first
            # A node that was not ready was passed over, and has to be pushed again.
            queued = {one for one in queued if nodes[one] in queue}
            assert first not in queued and ready - {first} <= queued
        queue.check()
