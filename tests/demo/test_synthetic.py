"""Synthetic KV: what is filled verifies, and every kind of wrong page is found."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.thorough import examples
from tidekv.backends.device.pool import DevicePool
from tidekv.backends.keys.chain import pack_tokens, page_digests
from tidekv.backends.layout import KVLayout
from tidekv.engine.synthetic.kv import SyntheticKV, prompt_digests
from tidekv.states.errors import InvalidRequest

PAGE_SIZE = 4


def layout(*, dtype: str = "float32", head_dim: int = 8, kind: str = "mha") -> KVLayout:
    heads = 1 if kind == "mla" else 2
    return KVLayout(num_layers=3, num_kv_heads=heads, head_dim=head_dim, dtype=dtype, page_size=PAGE_SIZE, kind=kind)


def filled(shape: KVLayout, tokens: bytes) -> tuple[DevicePool, SyntheticKV, list[int], list[bytes]]:
    pool = DevicePool.allocate(shape, 24)
    synthetic = SyntheticKV(pool)
    digests = prompt_digests(tokens, PAGE_SIZE)
    pages = list(range(20, 20 - len(digests), -1))
    synthetic.fill(pages, digests)
    return pool, synthetic, pages, digests


LAYOUTS = [
    layout(),
    layout(dtype="bfloat16"),
    layout(dtype="float64"),
    layout(kind="mla", dtype="float16", head_dim=9),  # Pieces of 72 bytes.
    layout(dtype="float8_e4m3fn", head_dim=7),  # Pieces of 56 bytes.
    layout(kind="mla", dtype="uint8", head_dim=3),  # Pieces of 12 bytes: no whole number of words.
    KVLayout(num_layers=2, num_kv_heads=1, head_dim=3, dtype="uint8", page_size=1),  # Pieces of 3 bytes.
]


@pytest.mark.parametrize("shape", LAYOUTS, ids=lambda shape: f"{shape.kind}-{shape.dtype}-{shape.piece_bytes}")
def test_filled_pages_verify_and_survive_a_copy(shape: KVLayout) -> None:
    pool, synthetic, pages, digests = filled(shape, pack_tokens([*range(30)]))
    assert synthetic.verify(pages, digests) == []
    elsewhere = DevicePool.allocate(shape, 24)
    elsewhere.write_pages(list(range(len(pages))), pool.read_pages(pages))
    assert SyntheticKV(elsewhere).verify(list(range(len(pages))), digests) == []
    # Zeroed pages, which were never filled, are all wrong.
    assert synthetic.verify([0, 1], digests[:2]) == [0, 1]


def other_prefix(pool: DevicePool, pages: list[int]) -> None:
    changed = prompt_digests(pack_tokens([99, *range(1, 30)]), PAGE_SIZE)
    SyntheticKV(pool).fill([pages[3]], [changed[3]])


def other_position(pool: DevicePool, pages: list[int]) -> None:
    pool.write_pages([pages[3]], pool.read_pages([pages[4]]))


def shifted_by_a_piece(pool: DevicePool, pages: list[int]) -> None:
    page = pool.read_pages([pages[3]])
    pool.write_pages([pages[3]], page.roll(pool.layout.piece_bytes, dims=1))


def swapped_k_and_v(pool: DevicePool, pages: list[int]) -> None:
    for k, v in zip(pool.k, pool.v, strict=True):
        k[pages[3]], v[pages[3]] = v[pages[3]].clone(), k[pages[3]].clone()


def shifted_by_a_token(pool: DevicePool, pages: list[int]) -> None:
    pool.k[1][pages[3]] = pool.k[1][pages[3]].roll(1, 0)


def last_layer_missing(pool: DevicePool, pages: list[int]) -> None:
    pool.v[-1][pages[3]] = 0


def half_a_page_of_another(pool: DevicePool, pages: list[int]) -> None:
    page = pool.read_pages([pages[3]])
    half = pool.layout.page_bytes // 2
    page[:, half:] = pool.read_pages([pages[2]])[:, half:]
    pool.write_pages([pages[3]], page)


@pytest.mark.parametrize(
    "damage",
    [
        other_prefix,
        other_position,
        shifted_by_a_piece,
        swapped_k_and_v,
        shifted_by_a_token,
        last_layer_missing,
        half_a_page_of_another,
    ],
)
def test_a_wrong_page_is_found(damage: Callable[[DevicePool, list[int]], None]) -> None:
    pool, synthetic, pages, digests = filled(layout(), pack_tokens([*range(30)]))
    damage(pool, pages)
    assert synthetic.verify(pages, digests) == [3]


@examples(60)
@given(st.data())
def test_one_flipped_bit_anywhere_is_found(data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from(LAYOUTS))
    pool, synthetic, pages, digests = filled(shape, pack_tokens([*range(30)]))
    position = data.draw(st.integers(0, len(pages) - 1))
    offset = data.draw(st.integers(0, shape.page_bytes - 1))
    page = pool.read_pages([pages[position]])
    page[0, offset] ^= 1 << data.draw(st.integers(0, 7))
    pool.write_pages([pages[position]], page)
    assert synthetic.verify(pages, digests) == [position]


@given(st.integers(0, 255))
def test_every_bit_of_a_digest_matters(bit: int) -> None:
    digest = hashlib.sha256(b"page").digest()
    changed = (int.from_bytes(digest, "little") ^ (1 << bit)).to_bytes(32, "little")
    pool = DevicePool.allocate(layout(), 1)
    synthetic = SyntheticKV(pool)
    synthetic.fill([0], [digest])
    assert synthetic.verify([0], [digest]) == []
    assert synthetic.verify([0], [changed]) == [0]


def test_content_is_the_same_in_every_process() -> None:
    pool, _, pages, _ = filled(layout(), pack_tokens([*range(8)]))
    # A prefill worker and a decode worker must agree on it, whatever their versions.
    assert hashlib.sha256(pool.read_pages(pages).numpy().tobytes()).hexdigest()[:16] == "b2fdd6025423f598"


def test_a_partial_page_has_the_digest_of_its_tail() -> None:
    whole, cut = pack_tokens([*range(8)]), pack_tokens([*range(7)])
    assert prompt_digests(whole, PAGE_SIZE) == page_digests(whole, PAGE_SIZE)
    assert prompt_digests(cut, PAGE_SIZE)[0] == prompt_digests(whole, PAGE_SIZE)[0]
    component_pages = [prompt_digests(pack_tokens([*range(count)]), PAGE_SIZE)[-1] for count in range(1, 9)]
    assert len(set(component_pages)) == 8
    # A short prompt's tail is seeded by the namespace like a full page.
    short = pack_tokens([1, 2])
    assert prompt_digests(short, PAGE_SIZE) != prompt_digests(short, PAGE_SIZE, namespace="adapter")


def test_batches_cut_anywhere_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, synthetic, pages, digests = filled(layout(), pack_tokens([*range(60)]))
    before = pool.read_pages(pages)
    pool.k[0][pages[1]] = 0
    monkeypatch.setattr("tidekv.engine.synthetic.kv.BATCH_BYTES", 2 * layout().piece_bytes)
    assert synthetic.verify(pages, digests) == [1]
    synthetic.fill(pages, digests)
    assert torch.equal(pool.read_pages(pages), before)
    assert synthetic.verify([], []) == []


def test_bad_calls_are_refused_and_write_nothing() -> None:
    pool, synthetic, pages, digests = filled(layout(), pack_tokens([*range(12)]))
    before = pool.read_pages(list(range(24)))
    with pytest.raises(InvalidRequest, match="3 pages but 2 digests"):
        synthetic.fill(pages, digests[:2][::-1])
    with pytest.raises(InvalidRequest, match="32 bytes, not 4"):
        synthetic.fill(pages, [*digests[:2], b"four"])
    with pytest.raises(InvalidRequest, match="24"):
        synthetic.fill([*pages[:2], 24], digests[::-1])
    assert torch.equal(pool.read_pages(list(range(24))), before)
