"""Copies of the storage role between vLLM's blocks and host pages: which blocks a page names, and which are written."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tidekv import HostPool, KVLayout
from tidekv.backends.copies import block_order
from tidekv.backends.copies.block_order import ABSENT, BlockMover, BlockPool, PagedBlocks
from tidekv.backends.copies.copier import PageCopier
from tidekv.states.errors import InvalidRequest

LAYERS, HEADS, DIM, BLOCK, BLOCKS = 2, 2, 4, 4, 12
LAYOUT = KVLayout(num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM, dtype="float32", page_size=2 * BLOCK)


class Device:
    """A model's tensors, full of noise, as a pool of pages of two blocks, and a host pool."""

    def __init__(self) -> None:
        self.tensors = torch.randn(LAYERS, BLOCKS, HEADS, BLOCK, 2 * DIM)
        self.pool = BlockPool(PagedBlocks(list(self.tensors), layout=LAYOUT, block_size=BLOCK, num_blocks=BLOCKS))
        self.host = HostPool.allocate(LAYOUT, 6, pin=False)
        self.mover = BlockMover(self.pool, self.host)


@pytest.mark.parametrize("chunk_bytes", [1, 1 << 20])
def test_pages_come_back_into_the_blocks_that_they_name(monkeypatch: pytest.MonkeyPatch, chunk_bytes: int) -> None:
    monkeypatch.setitem(block_order.CHUNK_BYTES, "cpu", chunk_bytes)
    device, saved = Device(), [1, 7, 3, 0]
    before, host_pages = device.tensors.clone(), np.array([4, 2])
    pages = device.pool.enter(saved)
    assert pages == [7, 0]
    device.mover.to_host(np.array(pages), host_pages)
    device.pool.leave(pages)
    targets = [9, 8, ABSENT, 10]
    pages = device.pool.enter(targets)
    device.mover.to_device(host_pages, np.array(pages))
    assert torch.equal(device.tensors[:, [9, 8, 10]], before[:, [1, 7, 0]])
    others = [block for block in range(BLOCKS) if block not in targets]
    assert torch.equal(device.tensors[:, others], before[:, others])


def test_a_page_that_lacks_its_end_is_named_by_its_last_block() -> None:
    device = Device()
    assert device.pool.enter([5, ABSENT]) == [5]
    assert device.pool.blocks_of(np.array([5])) == [5, ABSENT]


def test_calls_may_use_a_page_at_the_same_time_and_no_other_one_of_its_name() -> None:
    pool = Device().pool
    first, second = pool.enter([1, 2, 3, 4]), pool.enter([1, 2])
    with pytest.raises(InvalidRequest, match="block 4 is used as the end of another page"):
        pool.enter([7, 8, 9, 4])
    pool.leave(first)
    assert pool.blocks_of(np.array(second)) == [1, 2]
    assert pool.enter([9, 4]) == [4]
    with pytest.raises(KeyError):
        pool.blocks_of(np.array([8]))


async def test_blocks_are_copied_by_layers_and_never_to_each_other() -> None:
    device = Device()
    copier = PageCopier(device.pool, device.host)
    copier.start()
    pages = device.pool.enter([1, 2, 3, 4])
    await copier.to_host(pages, [0, 1])
    wanted = device.tensors[:, [1, 2, 3, 4]].clone()
    device.tensors.zero_()
    layered = copier.to_device_by_layer([0, 1], pages)
    await layered.done
    assert all(layered.is_ready(layer) for layer in range(LAYERS))
    assert torch.equal(device.tensors[:, [1, 2, 3, 4]], wanted)
    with pytest.raises(InvalidRequest, match="not copied to each other"):
        copier.clone([1], [2])
    await copier.close()
