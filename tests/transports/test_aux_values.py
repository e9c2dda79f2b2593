"""The embedder's values: what passes, and what a peer cannot make decode do."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.transports.test_wire import VALUES
from tidekv.states.errors import InvalidRequest, RemoteProtocolError
from tidekv.transports.aux_values import AUX_BYTES_MAX, AUX_DEPTH_MAX, AUX_VALUES_MAX, decode_aux, encode_aux

PRIMES = (11400714785074694791, 14029467366897019727, 2870177450012600261)
"""Constants of the hash of tuples in Python, which is the same in every process."""


@given(st.dictionaries(st.text(), VALUES, max_size=3))
def test_values_of_every_kind_pass_unchanged(values: dict[str, object]) -> None:
    assert decode_aux(encode_aux(values)) == values


@given(st.dictionaries(st.text(), VALUES, max_size=3), st.data())
def test_damaged_values_are_refused_or_values(values: dict[str, object], data: st.DataObject) -> None:
    raw = bytearray(encode_aux(values))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        found = decode_aux(bytes(raw))
    except RemoteProtocolError:
        return
    assert isinstance(found, dict)


def colliding_pairs(count: int) -> list[tuple[int, int]]:
    """Pairs of integers whose tuples have one hash, in every process."""
    first, second, third = PRIMES
    whole = (1 << 64) - 1

    def rotated(value: int, by: int) -> int:
        return ((value << by) | (value >> (64 - by))) & whole

    wanted = rotated(0x1234567 * pow(first, -1, 1 << 64) & whole, 64 - 31)
    pairs: list[tuple[int, int]] = []
    one = 1
    while len(pairs) < count:
        one += 1
        lane = rotated((third + one * second) & whole, 31) * first & whole
        other = (wanted - lane) * pow(second, -1, 1 << 64) & whole
        if other < 2**61 - 1:
            pairs.append((one, other))
    return pairs


def test_a_map_whose_keys_are_arrays_of_one_hash_is_refused_before_it_is_built() -> None:
    pairs = colliding_pairs(1000)
    assert len(set(map(hash, pairs))) == 1
    keys = b"".join(msgspec.msgpack.encode(list(pair)) + b"\x00" for pair in pairs)
    raw = b"\x81\xa1x\xde" + len(pairs).to_bytes(2, "big") + keys
    with pytest.raises(RemoteProtocolError, match="a key that is not text"):
        decode_aux(raw)


@pytest.mark.parametrize(
    "raw",
    [
        b"\x81\x01\x02",
        b"\x81\xa1x\x81\x01\x02",
        b"\x81\xa1x\x92\x00\x81\xc4\x01a\x02",
        b"\x81\xa1x\xdf\x00\x00\x00\x01\xcb" + bytes(8) + b"\x02",
        b"\x82\xa1x\x90\x80\x01",
    ],
    ids=["outermost", "nested", "bytes in a list", "a float", "after an empty list"],
)
def test_a_key_that_is_not_text_is_refused_wherever_it_is(raw: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="a key that is not text"):
        decode_aux(raw)


@pytest.mark.parametrize(
    ("raw", "cause"),
    [
        (b"", "no message"),
        (b"\x90", "Expected `object`"),
        (b"\xc1", "no kind"),
        (b"\x81\xa1x\xd6\xff" + bytes(4), "extension"),
        (b"\x81\xa1x\xdd\xff\xff\xff\xff", "no message"),
        (b"\x81\xa1x\xdb\xff\xff\xff\xff", "no message"),
        (b"\x81\xa1x" + b"\x91" * 40 + b"\x01", "nested more than"),
        (b"\x81\xa1x\xdc\x80\x00" + bytes(0x8000), "more than"),
        (bytes(AUX_BYTES_MAX + 1), "bytes"),
    ],
)
def test_what_is_no_map_of_bounded_size_is_refused(raw: bytes, cause: str) -> None:
    with pytest.raises(RemoteProtocolError, match=cause):
        decode_aux(raw)


def test_values_that_decode_would_refuse_are_refused_as_they_are_given() -> None:
    deep: object = 1
    for _ in range(AUX_DEPTH_MAX):
        deep = [deep]
    for values in (
        {"x": bytes(AUX_BYTES_MAX)},
        {"x": [0] * AUX_VALUES_MAX},
        {"x": {1: 2}},
        {"x": deep},
        {"x": object()},
        {"x": 2**64},
    ):
        with pytest.raises(InvalidRequest, match="cannot be sent"):
            encode_aux(values)
