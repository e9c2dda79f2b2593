"""Copies of the storage role between vLLM's blocks and host pages: their order with the model's stream.

Streams are advanced at random, each in its order: a wait that is left out gives other bytes for some of the seeds.
"""

from __future__ import annotations

import pytest
import torch

from tests.support.scrambled_streams import ScrambledStreams
from tidekv import HostPool, KVLayout
from tidekv.backends.copies.block_order import BlockCopies, PagedBlocks

LAYERS, HEADS, DIM, BLOCK, BLOCKS = 2, 2, 4, 4, 12
LAYOUT = KVLayout(num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM, dtype="float32", page_size=BLOCK)


class Device:
    """A model's tensors on a device that stands in for a GPU, and the copies of a worker."""

    def __init__(self, seed: int) -> None:
        self.streams = ScrambledStreams(seed, may_wait=True)
        self.tensors = torch.zeros(LAYERS, BLOCKS, HEADS, BLOCK, 2 * DIM)
        self.blocks = PagedBlocks(list(self.tensors), layout=LAYOUT, block_size=BLOCK, num_blocks=BLOCKS)
        self.host = HostPool.allocate(LAYOUT, BLOCKS, pin=False)
        self.copies = BlockCopies(self.blocks, self.host, self.streams)

    def forward(self, values: torch.Tensor) -> None:
        """Enqueue a step of the model, which writes to all blocks."""
        self.streams.current().run(lambda: self.tensors.copy_(values))


@pytest.mark.parametrize("seed", range(30))
def test_a_save_reads_its_blocks_between_the_step_that_filled_them_and_the_next(seed: int) -> None:
    device = Device(seed)
    waits, saved = [], []
    for step in range(3):
        values = torch.randn_like(device.tensors)
        device.forward(values)
        blocks, pages = [1, 7, 3], [3 * step, 3 * step + 1, 3 * step + 2]
        waits.append(device.copies.read(blocks, pages))
        saved.append((values[:, blocks], pages))
    device.forward(torch.zeros_like(device.tensors))
    for wait, (values, pages) in zip(waits, saved, strict=True):
        assert wait() == 3
        again = Device(seed)
        again.blocks.write(device.host.buffer[pages], [0, 1, 2])
        assert torch.equal(again.tensors[:, :3], values)


@pytest.mark.parametrize("seed", range(30))
def test_a_load_writes_behind_the_last_use_of_its_blocks_and_is_there_when_it_returns(seed: int) -> None:
    device = Device(seed)
    values = torch.randn_like(device.tensors)
    device.forward(values)
    device.copies.read([0, 1, 2], [4, 5, 6])()
    for _ in range(3):
        device.forward(torch.full_like(values, 7.0))
    after = device.copies.mark()
    device.copies.write([4, 5, 6], [9, 8, 10], skip=0, after=after)
    assert torch.equal(device.tensors[:, [9, 8, 10]], values[:, :3])
    device.streams.finish()
    assert torch.equal(device.tensors[:, [9, 8, 10]], values[:, :3])
