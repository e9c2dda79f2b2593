"""The faster forms of the prefix index beside plain ones: parts of keys that are not copied."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidekv.states.accounts import PageAccount
from tidekv.states.index import Node, PrefixIndex
from tidekv.states.node import KEPT_MAX, Keys, part_of


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


def enter(index: PrefixIndex, device: PageAccount, prompt: bytes) -> Node:
    match = index.match("", prompt)
    pages = index.device_path(match.device_node) + device.take(len(prompt) - match.device_pages)
    return index.insert("", prompt, pages).node


def test_a_long_rest_shares_its_prompt_and_a_short_one_does_not() -> None:
    device = PageAccount("device", 64)
    index = PrefixIndex(key_bytes=1, device=device, host=PageAccount("host", 0))
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
        assert kept_bytes(node.keys) <= KEPT_MAX * max(1, len(node.keys))
        index.check()
