"""Page keys: the exact bytes of the chain, and which tokens are tokens."""

from __future__ import annotations

import hashlib
import itertools
import struct
from array import array
from collections import deque

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tidekv.backends.keys.chain import namespace_seed, pack_tokens, page_digests, storage_namespace
from tidekv.backends.layout import KVLayout
from tidekv.states.errors import InvalidRequest
from tidekv.states.types import GroupIdentity

TOKENS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40)
NAMESPACES = st.text(max_size=5)
DRAFT = GroupIdentity(name="draft", kind="mha", dtype="bfloat16", layers=1, kv_heads=2, head_dim=64)
SCALES = GroupIdentity(name="scales", kind="mha", dtype="float32", layers=2, kv_heads=2, head_dim=1)
IDENTITY = KVLayout(num_layers=2, num_kv_heads=2, head_dim=4, dtype="float16", page_size=4).identity("llama")


def chain_by_hand(tokens: list[int], page_size: int, namespace: str) -> list[bytes]:
    previous = b""
    if namespace:
        name = namespace.encode()
        previous = hashlib.sha256(
            b"sglang-cache-namespace-v1" + b"\x01" + struct.pack("<Q", len(name)) + name + b"\x00"
        ).digest()
    digests = []
    for start in range(0, len(tokens) // page_size * page_size, page_size):
        words = b"".join(struct.pack("<I", token) for token in tokens[start : start + page_size])
        previous = hashlib.sha256(previous + words).digest()
        digests.append(previous)
    return digests


def test_golden_chain() -> None:
    packed = pack_tokens([1, 2, 3, 4, 5, 6, 7, 2**32 - 1, 9])
    assert [digest.hex() for digest in page_digests(packed, 4)] == [
        "cf97adeedb59e05bfd73a2b4c2a8885708c4f4f70c84c64b27120e72ab733b72",
        "8e05bb0bda6419b08711bd289fa2445f6a48ba2d85859f30d59d93a94e7ae841",
    ]


def test_golden_namespace() -> None:
    assert namespace_seed("lora-a").hex() == "407c773a7c02b33bd4a62af6bf5fc77997c2c8067811ecf2b39e3839c3f4284b"
    salted = "43601f36bb365a5bdb202f3b4398e5edcdc529750311c8aa2028ce19293f8d6e"
    assert namespace_seed("", salt="salt").hex() == salted
    assert namespace_seed("") == b""
    assert [digest.hex() for digest in page_digests(pack_tokens([1, 2, 3, 4]), 4, namespace="lora-a")] == [
        "e4f68dc4af99b6de199d5a048add282da40aa4ef97942ce9eca321bccada9376"
    ]


def test_golden_chain_of_bigrams() -> None:
    packed = pack_tokens([1, 2, 3, 4, 5, 6, 7, 2**32 - 1, 9])
    assert [digest.hex() for digest in page_digests(packed, 4, bigrams=True)] == [
        "f721fe42aac11dcbfd1a17f24cc5765a0d5b6bc264d1c0b6581d775a7344c11f",
        "5dde2b802c32def578d7cc912cc96ed4836aeff99e70bb2f3b833bccf478e249",
    ]
    # The last position of the second page has no token after it.
    assert len(page_digests(packed[:-4], 4, bigrams=True)) == 1
    assert page_digests(packed[:4], 1, bigrams=True) == page_digests(b"", 1, bigrams=True) == []
    assert page_digests(packed[:20], 4, namespace="lora-a", bigrams=True)[0].hex() == (
        "3e3715f5401eb0af3a173640cd644bb184d5a4e9ccb470f01d73ebcd804deb49"
    )


@given(TOKENS, st.integers(1, 5), NAMESPACES)
def test_bigrams_are_a_chain_over_pairs(tokens: list[int], page_size: int, namespace: str) -> None:
    pairs = [token for pair in itertools.pairwise(tokens) for token in pair]
    assert page_digests(pack_tokens(tokens), page_size, namespace=namespace, bigrams=True) == chain_by_hand(
        pairs, 2 * page_size, namespace
    )


@given(TOKENS, st.integers(1, 5), NAMESPACES)
def test_chain_equals_the_one_by_hand(tokens: list[int], page_size: int, namespace: str) -> None:
    assert page_digests(pack_tokens(tokens), page_size, namespace=namespace) == chain_by_hand(
        tokens, page_size, namespace
    )


@given(TOKENS, st.integers(1, 4), NAMESPACES, st.integers(0, 10))
def test_a_chain_can_be_continued_from_any_page(tokens: list[int], page_size: int, namespace: str, cut: int) -> None:
    packed = pack_tokens(tokens)
    whole = page_digests(packed, page_size, namespace=namespace)
    cut = min(cut, len(whole))
    head, tail = packed[: cut * page_size * 4], packed[cut * page_size * 4 :]
    first = page_digests(head, page_size, namespace=namespace)
    prefix = first[-1] if first else b""
    assert first + page_digests(memoryview(tail), page_size, namespace=namespace, prefix=prefix) == whole


@given(TOKENS, TOKENS, st.integers(1, 4), NAMESPACES, NAMESPACES)
def test_digests_are_equal_exactly_as_far_as_prefixes_are(
    ours: list[int], theirs: list[int], page_size: int, our_namespace: str, their_namespace: str
) -> None:
    theirs = ours[: len(theirs)] + theirs
    first = page_digests(pack_tokens(ours), page_size, namespace=our_namespace)
    second = page_digests(pack_tokens(theirs), page_size, namespace=their_namespace)
    for page, (one, other) in enumerate(zip(first, second, strict=False)):
        end = (page + 1) * page_size
        assert (one == other) == (ours[:end] == theirs[:end] and our_namespace == their_namespace)


def test_namespace_and_salt_do_not_run_into_each_other() -> None:
    seeds = [namespace_seed("ab"), namespace_seed("a", salt="b"), namespace_seed("", salt="ab")]
    seeds += [namespace_seed("a", salt=""), namespace_seed("a"), namespace_seed("", salt="")]
    assert len(set(seeds)) == len(seeds)


def test_wrong_chain_arguments_are_refused() -> None:
    packed = pack_tokens([1])
    with pytest.raises(InvalidRequest, match="page_size must be at least 1, not 0"):
        page_digests(packed, 0)
    with pytest.raises(InvalidRequest, match="prefix must be a digest of 32 bytes or empty, not 31"):
        page_digests(packed, 1, prefix=b"x" * 31)
    with pytest.raises(InvalidRequest, match="not valid text"):
        page_digests(packed, 1, namespace="\ud800")


def test_storage_namespace_tells_every_difference() -> None:
    names = {
        storage_namespace(IDENTITY),
        storage_namespace(IDENTITY, ranks=2),
        storage_namespace(IDENTITY, rank=1, ranks=2),
    }
    for field in msgspec.structs.fields(IDENTITY):
        value = getattr(IDENTITY, field.name)
        if field.name == "groups":
            names.add(storage_namespace(msgspec.structs.replace(IDENTITY, groups=(DRAFT,))))
            continue
        if field.name == "bigram_keys":
            # The bytes of a page are the same, and its name is another one anyway.
            names.add(storage_namespace(msgspec.structs.replace(IDENTITY, bigram_keys=True)))
            continue
        other = {str: lambda v: v + "x", int: lambda v: v + 1, tuple: lambda v: (*v, 1)}[type(value)](value)
        names.add(storage_namespace(msgspec.structs.replace(IDENTITY, **{field.name: other})))
    for field in msgspec.structs.fields(DRAFT):
        value = getattr(DRAFT, field.name)
        other = msgspec.structs.replace(DRAFT, **{field.name: value + ("x" if isinstance(value, str) else 1)})
        names.add(storage_namespace(msgspec.structs.replace(IDENTITY, groups=(other,))))
    for groups in ((DRAFT, SCALES), (SCALES, DRAFT)):
        names.add(storage_namespace(msgspec.structs.replace(IDENTITY, groups=groups)))
    assert len(names) == 3 + len(msgspec.structs.fields(IDENTITY)) - 1 + len(msgspec.structs.fields(DRAFT)) + 2
    assert all(len(name) == 32 for name in names)
    with pytest.raises(InvalidRequest, match="rank must be from 0 to 1, not 2"):
        storage_namespace(IDENTITY, rank=2, ranks=2)


def test_storage_namespace_stays_what_it_was() -> None:
    # A change here orphans every stored page: raise STORAGE_FORMAT, and note it in the changelog.
    assert storage_namespace(IDENTITY).hex() == "777e88039319cc4eb81be1d3a51482dd94e0cfe97360e07cc7e00ac2cdbe06ac"


@given(st.lists(st.integers(0, 100), min_size=1))
def test_all_forms_of_tokens_pack_alike(tokens: list[int]) -> None:
    packed = struct.pack(f"<{len(tokens)}I", *tokens)
    forms = [tokens, tuple(tokens), deque(tokens), packed, bytearray(packed), memoryview(packed)]
    forms += [array(code, tokens) for code in "bBhHiIlLqQ"]
    forms += [memoryview(array("q", tokens)), [np.int64(token) for token in tokens]]
    forms += [np.array(tokens, dtype=kind) for kind in ("i1", "u1", "<i2", ">i4", "<u4", ">u4", "i8", "u8")]
    forms.append(np.array(tokens + tokens, dtype=np.int32)[: len(tokens)][::1])
    forms += [torch.tensor(tokens, dtype=kind) for kind in (torch.int64, torch.int32, torch.uint8)]
    for form in forms:
        assert pack_tokens(form) == packed
    assert pack_tokens(range(3)) == struct.pack("<3I", 0, 1, 2)
    assert pack_tokens(np.arange(6)[::2]) == struct.pack("<3I", 0, 2, 4)


@pytest.mark.parametrize("count", [16_383, 16_384, 16_385, 70_001])
def test_long_arrays_pack_alike_however_they_are_written(count: int) -> None:
    tokens = np.random.default_rng(count).integers(0, 2**32, count)
    before = tokens.copy()
    packed = pack_tokens(tokens)
    assert type(packed) is bytes and packed == tokens.astype("<u4").tobytes()
    # A returned packing is exclusive to its caller: neither the array nor the next packing changes it.
    assert pack_tokens(tokens[::-1].copy()) != packed == before.astype("<u4").tobytes()
    for wrong in (-1, 2**32, -(2**63), 2**63 - 1):
        tokens[count - 2] = wrong
        with pytest.raises(InvalidRequest, match=f"token {wrong} at position {count - 2} is not from 0 to 4294967295"):
            pack_tokens(tokens)
    assert packed == before.astype("<u4").tobytes()


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        ([], "tokens are empty"),
        (b"", "tokens are empty"),
        (np.array([], dtype=np.int32), "tokens are empty"),
        (b"12345", "packed tokens are 5 bytes, which is not a multiple of 4"),
        ([1, -1], "token -1 at position 1 is not from 0 to 4294967295"),
        ([1, 2, 2**32], "token 4294967296 at position 2"),
        ([2**70], "at position 0"),
        ([1, 2.0], "token 2.0 at position 1 is not an int"),
        (["1"], "token '1' at position 0 is not an int"),
        ([None], "token None at position 0 is not an int"),
        ([7, True], "token True at position 1 is not an int"),
        ((1, 0, False), "token False at position 2 is not an int"),
        ("123", "token '1' at position 0 is not an int"),
        ("", "must be a sequence of ints, not str"),
        ({1, 2}, "must be a sequence of ints, an array or bytes, not set"),
        (7, "not int"),
        (None, "not NoneType"),
        (np.array([1, -2]), "token -2 at position 1"),
        (np.array([1, -2], dtype=np.int8), "token -2 at position 1"),
        (np.array([2**32], dtype=np.uint64), "token 4294967296 at position 0"),
        (array("q", [0, 2**40]), "token 1099511627776 at position 1"),
        (np.array([1.0]), "flat array of ints, not 1-d float64"),
        (np.array([True]), "flat array of ints, not 1-d bool"),
        (np.array([[1]]), "flat array of ints, not 2-d int64"),
        (array("d", [1.0]), "flat array of ints"),
    ],
)
def test_what_is_no_token_is_named_with_its_position(tokens: object, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        pack_tokens(tokens)  # type: ignore[arg-type]  # Wrong on purpose.


def test_token_beyond_the_vocabulary_is_named() -> None:
    assert pack_tokens([0, 99], vocabulary=100)
    with pytest.raises(InvalidRequest, match="token 100 at position 0"):
        pack_tokens([100], vocabulary=100)
    for tokens in ([5, 100, 101], np.array([5, 100, 101]), struct.pack("<3I", 5, 100, 101)):
        with pytest.raises(InvalidRequest, match="token 100 at position 1 is not below the vocabulary, 100"):
            pack_tokens(tokens, vocabulary=100)
