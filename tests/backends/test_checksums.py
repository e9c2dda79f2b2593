"""Checksums of pages: the same for the same bytes, wherever and in however many pieces they lie."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tidekv import DevicePool, HostPool, InvalidConfig, KVLayout, PageLayout
from tidekv.backends.checksums import (
    CHECKSUM_BYTES,
    INLINE_BYTES_MAX,
    ChecksumThread,
    HostChecksums,
    PageHasher,
    StorageChecks,
)
from tidekv.backends.copies.copier import PageCopier
from tidekv.states.errors import PagesDamaged
from tidekv.states.types import PoolMemory, page_ids
from tidekv.transports.slices import Cut, exchange_of

SMALL = KVLayout(num_layers=2, num_kv_heads=4, head_dim=8, dtype="float32", page_size=4)
LARGE = KVLayout(num_layers=3, num_kv_heads=8, head_dim=64, dtype="bfloat16", page_size=16)
GROUPS = PageLayout.of(
    full=KVLayout(num_layers=3, num_kv_heads=2, head_dim=16, dtype="bfloat16", page_size=4),
    scales=KVLayout(num_layers=1, num_kv_heads=2, head_dim=1, dtype="float32", page_size=4),
)


def filled(layout: KVLayout | PageLayout, pages: int, seed: int = 0) -> DevicePool:
    pool = DevicePool.allocate(layout, pages)
    generator = torch.Generator().manual_seed(seed)
    for row in pool.rows:
        row.random_(0, 256, generator=generator)
    return pool


def apart(pool: DevicePool) -> DevicePool:
    """The same pages in tensors of their own, one per piece, in no regular order in memory."""
    (group,) = pool.groups
    tensors = [tensor.clone() for tensor in reversed(group.tensors)][::-1]
    return DevicePool.wrap(tensors[::2], tensors[1::2], group.layout)


@pytest.mark.parametrize("layout", [SMALL, LARGE, GROUPS], ids=["small pieces", "large pieces", "groups"])
def test_a_page_has_the_checksum_of_its_bytes_on_both_tiers(layout: KVLayout | PageLayout) -> None:
    device, host = filled(layout, 6), HostPool.allocate(layout, 6)
    host.write_pages(range(6), device.read_pages(range(6)))
    pages = page_ids([4, 0, 5])
    wanted = b"".join(xxhash.xxh3_128_digest(bytes(host.page(page))) for page in pages)
    for pool in (device, host, *([apart(device)] if layout is not GROUPS else [])):
        assert PageHasher(pool.memory).checksums(pages) == wanted
    assert PageHasher(device.memory).checksums(page_ids()) == b""


@given(seed=st.integers(0, 2**32 - 1), heads=st.sampled_from([1, 2, 4]), layout=st.sampled_from([SMALL, LARGE]))
def test_slices_of_heads_have_the_same_checksums_at_both_ends(seed: int, heads: int, layout: KVLayout) -> None:
    random = Random(seed)
    ours = filled(layout, 4, seed=seed)
    first = random.randrange(0, layout.num_kv_heads - heads + 1)
    # The other end holds these heads only, in a pool of its own.
    theirs = DevicePool.allocate(
        KVLayout(
            num_layers=layout.num_layers,
            num_kv_heads=heads,
            head_dim=layout.head_dim,
            dtype=layout.dtype,
            page_size=layout.page_size,
        ),
        4,
    )
    for target, source in zip(theirs.groups[0].tensors, ours.groups[0].tensors, strict=True):
        target.copy_(source[:, :, first : first + heads])
    head_bytes = layout.head_dim * layout.torch_dtype.itemsize
    rows = heads * head_bytes
    step = layout.num_kv_heads * head_bytes
    cuts = [
        Cut(piece, piece, layout.page_size, rows, first * head_bytes, step, 0, rows)
        for piece in range(layout.piece_count)
    ]
    part, whole = exchange_of(cuts, ours=ours.memory, theirs=theirs.memory)
    pages = page_ids([3, 1])
    assert PageHasher(part).checksums(pages) == PageHasher(whole).checksums(pages)
    # A bit of another head changes nothing, one of these heads does.
    before = PageHasher(part).checksums(pages)
    bits = ours.groups[0].tensors[1].view(torch.uint8)
    for head in range(layout.num_kv_heads):
        bits[1, random.randrange(layout.page_size), head, 3] ^= 1
        assert (PageHasher(part).checksums(pages) != before) == (first <= head < first + heads)
        before = PageHasher(part).checksums(pages)


@given(
    flips=st.lists(st.tuples(st.integers(0, 7), st.integers(0, SMALL.page_bytes - 1), st.integers(0, 7)), max_size=3),
)
def test_pages_are_intact_up_to_the_first_flipped_bit(flips: list[tuple[int, int, int]]) -> None:
    device, host = filled(SMALL, 8), HostPool.allocate(SMALL, 8)
    checksums, pages = HostChecksums(host.memory, device.memory), page_ids([3, 1, 4, 0, 5, 7, 2, 6])
    host.write_pages(pages, device.read_pages(pages))
    checksums.note(pages, on_device=pages)
    assert checksums.intact(pages) == checksums.intact(pages, on_device=pages) == 8
    changed: dict[tuple[int, int], int] = {}
    for page, byte, bit in flips:
        host.array[page, byte] ^= 1 << bit
        changed[page, byte] = changed.get((page, byte), 0) ^ 1 << bit
    damaged = {page for (page, _), bits in changed.items() if bits}
    assert checksums.intact(pages) == next((at for at, page in enumerate(pages) if page in damaged), 8)
    checksums.note(pages)
    assert checksums.intact(pages) == 8


async def test_a_copy_to_the_device_reports_the_first_damaged_page() -> None:
    device, host = filled(LARGE, 8), HostPool.allocate(LARGE, 8)
    copier = PageCopier(device, host, checksums=HostChecksums(host.memory, device.memory))
    copier.start()
    pages = page_ids(range(6))
    await copier.to_host(pages, pages)
    await copier.to_device(pages, page_ids([7, 6, 5, 4, 3, 2]))
    host.array[3, -1] ^= 128
    with pytest.raises(PagesDamaged, match="host page 3, number 2 of 4") as caught:
        await copier.to_device(page_ids([1, 2, 3, 4]), page_ids([4, 5, 6, 7]))
    assert caught.value.intact == 2
    await copier.to_device(page_ids([1, 2, 4]), page_ids([4, 5, 7]))
    await copier.close()


@pytest.mark.parametrize("layout", [SMALL, LARGE], ids=["on the loop", "on the thread"])
async def test_the_loop_gets_the_checksums_of_few_and_of_many_bytes(layout: KVLayout) -> None:
    pool, thread = filled(layout, 8), ChecksumThread()
    pages = page_ids(range(8))
    begun = thread.hashing(pool.memory)(pages)
    assert begun.done() == (8 * layout.page_bytes <= INLINE_BYTES_MAX)
    assert await begun == PageHasher(pool.memory).checksums(pages)
    assert len(begun.result()) == 8 * CHECKSUM_BYTES
    # One that is given up is hashed to its end, before the thread ends.
    thread.hashing(pool.memory)(pages).cancel()
    await asyncio.wait_for(thread.close(), 60.0)


@pytest.mark.parametrize("damaged", range(4))
async def test_storage_gets_no_page_from_the_first_damaged_one_on(damaged: int) -> None:
    host, thread, pages = HostPool.allocate(SMALL, 4), ChecksumThread(), page_ids([2, 0, 3, 1])
    checks = StorageChecks(thread, {"": HostChecksums(host.memory, host.memory)})
    await checks.note_read("", pages)
    assert await checks.intact("", pages) is None
    host.array[pages[damaged], -1] ^= 1
    assert await checks.intact("", pages) == damaged
    # Pages of a component without checksums are not compared.
    assert await checks.intact("swa", pages) is None
    await asyncio.wait_for(thread.close(), 60.0)


def test_pages_in_gpu_memory_are_refused() -> None:
    memory = filled(SMALL, 2).memory
    with pytest.raises(InvalidConfig, match="in host memory"):
        PageHasher(PoolMemory(segments=memory.segments, page_count=2, kind="VRAM"))
