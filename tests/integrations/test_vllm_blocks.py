"""vLLM's paged tensors as pages of tidekv: every layout that vLLM has, element by element."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tidekv import KVLayout
from tidekv.backends.copies.block_order import ABSENT, PagedBlocks
from tidekv.engine.integrations.vllm.settings import in_order
from tidekv.states.errors import InvalidConfig

LAYERS, HEADS, DIM, BLOCK, BLOCKS = 3, 2, 4, 4, 7
# Memory orders of [layer, block, head, token, element]: those of vLLM's KVCacheLayout.
ORDERS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}


def layout_of(kind: str, dtype: str, per_page: int) -> KVLayout:
    return KVLayout(
        num_layers=LAYERS,
        num_kv_heads=HEADS if kind == "mha" else 1,
        head_dim=DIM,
        dtype=dtype,
        page_size=BLOCK * per_page,
        kind=kind,
    )


def tensors_of(layout: KVLayout, order: str, parts: int, seed: int) -> list[torch.Tensor]:
    """One tensor a layer with the strides of that order, [block · part, head, token, element], full of noise."""
    width = layout.tensors_per_layer * DIM
    shape = (LAYERS, BLOCKS * parts, layout.num_kv_heads, BLOCK // parts, width)
    axes = ORDERS[order]
    stored = torch.empty([shape[axis] for axis in axes], dtype=layout.torch_dtype)
    noise = torch.randint(0, 256, (stored.numel() * stored.itemsize,), generator=torch.Generator().manual_seed(seed))
    stored.view(-1).view(torch.uint8).copy_(noise)
    logical = stored.permute(*[axes.index(axis) for axis in range(5)])
    return [logical[layer] for layer in range(LAYERS)]


def page_bytes(tensors: list[torch.Tensor], layout: KVLayout, blocks: list[int], parts: int) -> bytes:
    """A page's bytes, element by element: too simple to be wrong."""
    found = []
    for tensor, part_of_row in itertools.product(tensors, range(layout.tensors_per_layer)):
        for block, token, head in itertools.product(blocks, range(BLOCK), range(layout.num_kv_heads)):
            kernel_block, slot = block * parts + token // (BLOCK // parts), token % (BLOCK // parts)
            found.append(tensor[kernel_block, head, slot, part_of_row * DIM : (part_of_row + 1) * DIM])
    return torch.stack(found).view(torch.uint8).numpy().tobytes()


# vLLM's kernels cut blocks, into parts, only where blocks lie one behind the other.
CUTS = [(order, *cut) for order in ORDERS for cut in ((1, 1), (3, 1), (2, 2)) if cut[1] == 1 or order.startswith("LB")]


@pytest.mark.parametrize(("kind", "dtype"), [("mha", "float32"), ("mha", "bfloat16"), ("mla", "float8_e4m3fn")])
@pytest.mark.parametrize(("order", "per_page", "parts"), CUTS)
def test_a_page_is_read_and_written_byte_for_byte(order: str, kind: str, dtype: str, per_page: int, parts: int) -> None:
    layout = layout_of(kind, dtype, per_page)
    tensors = tensors_of(layout, order, parts, seed=1)
    ours = PagedBlocks(tensors, layout=layout, block_size=BLOCK, num_blocks=BLOCKS)
    blocks = [5, 0, 3, 1, 6, 2][: 2 * per_page]
    pages = [blocks[at * per_page : (at + 1) * per_page] for at in range(2)]
    read = ours.read(blocks)
    assert read.shape == (2, layout.page_bytes)
    assert [row.numpy().tobytes() for row in read] == [page_bytes(tensors, layout, page, parts) for page in pages]
    theirs = tensors_of(layout, order, parts, seed=2)
    before = [page_bytes(theirs, layout, [block], parts) for block in range(BLOCKS)]
    other = PagedBlocks(theirs, layout=layout, block_size=BLOCK, num_blocks=BLOCKS)
    skip = per_page - 1
    other.write(read, [ABSENT] * skip + blocks[skip:])
    expected = {block: page_bytes(tensors, layout, [block], parts) for block in blocks[skip:]}
    after = [page_bytes(theirs, layout, [block], parts) for block in range(BLOCKS)]
    assert after == [expected.get(block, before[block]) for block in range(BLOCKS)]


def test_any_blocks_of_a_page_may_be_left_out() -> None:
    layout = layout_of("mha", "float32", 3)
    tensors = tensors_of(layout, "LBNHC", 1, seed=1)
    ours = PagedBlocks(tensors, layout=layout, block_size=BLOCK, num_blocks=BLOCKS)
    read = ours.read([0, 1, 2])
    before = page_bytes(tensors, layout, [5], 1)
    ours.write(read, [ABSENT, 3, 4])
    assert page_bytes(tensors, layout, [3], 1) == page_bytes(tensors, layout, [1], 1)
    assert page_bytes(tensors, layout, [4], 1) == page_bytes(tensors, layout, [2], 1)
    ours.write(read, [6, ABSENT, ABSENT])
    assert page_bytes(tensors, layout, [6], 1) == page_bytes(tensors, layout, [0], 1)
    assert page_bytes(tensors, layout, [5], 1) == before


def test_tensors_of_another_shape_are_refused_by_layer() -> None:
    layout = layout_of("mha", "float32", 1)
    good = tensors_of(layout, "LBNHC", 1, seed=1)
    for wrong in (good[1][:-1], good[1].transpose(1, 2), good[1].half(), good[1][..., :-1], good[1].flatten(2)):
        with pytest.raises(InvalidConfig, match="KV tensor of layer 1"):
            PagedBlocks([good[0], wrong, good[2]], layout=layout, block_size=BLOCK, num_blocks=BLOCKS)


def test_layers_are_in_the_order_of_their_numbers() -> None:
    names = [f"model.layers.{number}.self_attn.attn" for number in range(12)]
    shuffled = random.Random(1).sample(names, len(names))
    tensors = {name: torch.tensor(names.index(name)) for name in shuffled}
    assert [int(tensor) for tensor in in_order(tensors)] == list(range(12))


@given(st.permutations(list(range(BLOCKS))))
def test_reading_back_what_was_written_gives_the_same(blocks: list[int]) -> None:
    layout = layout_of("mha", "float32", 1)
    tensors = tensors_of(layout, "BHLNC", 1, seed=3)
    ours = PagedBlocks(tensors, layout=layout, block_size=BLOCK, num_blocks=BLOCKS)
    rows = ours.read(list(range(BLOCKS)))
    ours.write(rows, blocks)
    assert torch.equal(ours.read(blocks), rows)
