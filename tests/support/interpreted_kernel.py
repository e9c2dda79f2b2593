"""The Triton kernel as Triton's interpreter runs it, against numpy. `test_piece_kernel.py` runs this in a process with
TRITON_INTERPRET=1: one that has begun to interpret cannot compile, and the other way round.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tidekv.backends.copies.cuda import KernelMover
from tidekv.backends.copies.pieces import KernelPieces, PagePairs, PieceShape
from tidekv.backends.copies.streams import InlineStreams
from tidekv.backends.device.pool import DevicePool
from tidekv.backends.host.pool import HostPool
from tidekv.backends.layout import KVLayout
from tidekv.backends.page_layout import PageLayout

PAGES = 6


@pytest.fixture(scope="module")
def interpreted() -> ModuleType:
    """The kernel with few programs and small blocks: each costs a millisecond."""
    assert os.environ["TRITON_INTERPRET"] == "1"
    module = importlib.import_module("tidekv.backends.copies.kernel")
    module.BUS_PROGRAMS, module.BLOCK_BYTES = 3, 64  # type: ignore[attr-defined]  # The process is this file's own.
    return module


@st.composite
def layouts(draw: st.DrawFn) -> PageLayout:
    """Up to three groups; their pieces are no multiple of a block, nor of each other, nor of an element's size."""

    def group() -> KVLayout:
        kind = draw(st.sampled_from(["mha", "mla"]))
        return KVLayout(
            num_layers=draw(st.integers(1, 3)),
            num_kv_heads=1 if kind == "mla" else draw(st.integers(1, 3)),
            head_dim=draw(st.integers(1, 40)),
            dtype=draw(st.sampled_from(["uint8", "float16", "float32", "float64"])),
            page_size=page_size,
            kind=kind,
        )

    page_size = draw(st.integers(1, 4))
    names = ("draft", "scales")[: draw(st.integers(0, 2))]
    return PageLayout.of(full=group(), **{name: group() for name in names})


@settings(max_examples=40)
@given(layout=layouts(), data=st.data())
def test_the_kernel_moves_what_numpy_does(interpreted: ModuleType, layout: PageLayout, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, 4))
    rows, pages = (np.array(data.draw(st.permutations(range(PAGES)))[:count], dtype=np.int64) for _ in range(2))
    device, host = DevicePool.allocate(layout, PAGES), HostPool.allocate(layout, PAGES)
    on_device, on_host = (np.random.default_rng(seed).integers(0, 256, host.array.shape, np.uint8) for seed in (1, 2))
    device.write_pages(range(PAGES), torch.from_numpy(on_device))
    host.write_pages(range(PAGES), torch.from_numpy(on_host))
    pieces = KernelPieces(device, interpreted.launch)
    mover = KernelMover(device, host, streams=InlineStreams(), pieces=pieces)
    if data.draw(st.booleans()):
        mover.to_device(pages, rows)
        on_device[rows] = on_host[pages]
    elif data.draw(st.booleans()):
        pairs = PagePairs(rows, pages, device.device)
        pairs.upload()
        pieces.move(host.buffer, pairs, range(count), to_rows=False)
        on_host[pages] = on_device[rows]
    else:
        told: list[object] = []
        mover.to_device_by_layer(pages, rows, told.append)
        on_device[rows] = on_host[pages]
        assert len(told) == max(group.layout.num_layers for group in layout.groups)
    assert np.array_equal(device.read_pages(range(PAGES)).numpy(), on_device)
    assert np.array_equal(host.array, on_host)


def test_a_part_of_the_pairs_and_one_layer_are_no_more_than_that(interpreted: ModuleType) -> None:
    layout = KVLayout(num_layers=3, num_kv_heads=2, head_dim=5, dtype="float16", page_size=3)
    device, host = DevicePool.allocate(layout, PAGES), HostPool.allocate(layout, PAGES)
    host.buffer.fill_(1)
    pieces = KernelPieces(device, interpreted.launch)
    pairs = PagePairs(np.arange(PAGES), np.arange(PAGES), device.device)
    pairs.upload()
    pieces.move(host.buffer, pairs, range(2, 5), to_rows=True)
    assert device.read_pages(range(PAGES)).sum(dim=1).tolist() == [0, 0, *[layout.page_bytes] * 3, 0]
    host.buffer.fill_(2)
    pieces.move_layer(host.buffer, pairs, 1, to_rows=True)
    assert [int(tensor.view(torch.uint8).max()) for tensor in (*device.k, *device.v)] == [1, 2, 1, 1, 2, 1]


def test_pages_beyond_4_gib_are_reached(interpreted: ModuleType) -> None:
    """Page 5 of pages of 1 GiB, that begin 5 GiB before the one that is there: counted in 32 bits it is elsewhere."""
    row, page = torch.zeros(8, dtype=torch.uint8), torch.full((8,), 7, dtype=torch.uint8)
    shape = PieceShape(element_bytes=1, piece_bytes=8, page_bytes=2**30, start_bytes=-5 * 2**30, aligned=False)
    address, first, fifth = (torch.tensor([number]) for number in (row.data_ptr(), 0, 5))
    interpreted.launch(address, page, first, fifth, pairs=range(1), pieces=range(1), shape=shape, to_rows=True)
    assert row.tolist() == [7] * 8
