"""The same promises on a GPU: pools, both forms of copies, layers, and the order with the caller's stream.

Without one these are skipped; `test_copy_forms.py`, `test_stream_lane.py` and `test_piece_kernel.py` run anywhere.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
import torch

from tidekv.backends.copies.copier import PageCopier
from tidekv.backends.copies.cuda import CopyChoice, triton_launch
from tidekv.backends.device.pool import DevicePool
from tidekv.backends.host.pool import HostPool
from tidekv.backends.layout import KVLayout
from tidekv.backends.page_layout import Layout, PageLayout
from tidekv.states.errors import InvalidConfig, OutOfMemory

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LAYOUT = KVLayout(num_layers=4, num_kv_heads=2, head_dim=64, dtype="bfloat16", page_size=16)
PAGES = 64


# Pieces of 15 bytes, which no thread can load more than one of at a time.
ODD = KVLayout(num_layers=3, num_kv_heads=1, head_dim=5, dtype="uint8", page_size=3)
GROUPS = PageLayout.of(
    full=KVLayout(num_layers=4, num_kv_heads=2, head_dim=64, dtype="float8_e4m3fn", page_size=16),
    scales=KVLayout(num_layers=4, num_kv_heads=2, head_dim=1, dtype="float32", page_size=16),
    draft=KVLayout(num_layers=1, num_kv_heads=1, head_dim=5, dtype="bfloat16", page_size=16),
)


def random_pages(count: int = PAGES, *, layout: Layout = LAYOUT) -> torch.Tensor:
    return torch.randint(0, 256, (count, layout.page_bytes), dtype=torch.uint8)


def device_pool(layout: Layout = LAYOUT, *, wrapped: bool) -> DevicePool:
    if not wrapped:
        return DevicePool.allocate(layout, PAGES, device="cuda")
    if isinstance(layout, PageLayout):
        return DevicePool.join(**{name: device_pool(shape, wrapped=True) for name, shape in layout.groups})
    k, v = (
        [
            torch.zeros(PAGES, *layout.piece_shape, dtype=layout.torch_dtype, device="cuda")
            for _ in range(layout.num_layers)
        ]
        for _ in range(2)
    )
    return DevicePool.wrap(k, v, layout)


def test_pool_in_gpu_memory_keeps_bytes_and_says_where_it_is() -> None:
    pool = device_pool(wrapped=False)
    written = random_pages()
    pool.write_pages(range(PAGES), written)
    assert torch.equal(pool.read_pages(range(PAGES)).cpu(), written)
    assert (pool.memory.kind, pool.memory.device) == ("VRAM", torch.cuda.current_device())
    with pytest.raises(OutOfMemory, match="device pool needs"):
        DevicePool.allocate(LAYOUT, 2**31 - 1, device="cuda")
    with pytest.raises(InvalidConfig, match="CUDA devices"):
        DevicePool.allocate(LAYOUT, 1, device="cuda:99")


def test_tensors_on_two_devices_are_refused() -> None:
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, dtype="uint8", page_size=1)
    buffer = torch.zeros(4, 1, 1, 1, dtype=torch.uint8)
    with pytest.raises(InvalidConfig, match=r"v_buffers\[0\] is on cpu"):
        DevicePool.wrap([buffer.cuda()], [buffer], layout)


@asynccontextmanager
async def copier_of(device: DevicePool, host: HostPool, form: str) -> AsyncIterator[PageCopier]:
    """A copier that copies in one form only, once its kernel is there."""
    if form == "kernel" and triton_launch() is None:
        pytest.skip("needs Triton, which comes with torch's CUDA builds")
    copier = PageCopier(device, host, choice=CopyChoice(1 << 60 if form == "kernel" else 0))
    copier.start()
    await copier.to_device([], [])  # Behind the warm-up.
    if triton_launch() is not None:
        assert copier.statistics().kernel == "ready"
    yield copier
    await copier.close()


def move_page_by_page(device: torch.Tensor, host: torch.Tensor, pairs: list[tuple[int, int]]) -> None:
    """What a copy is compared with: one page after the other, between bytes of all pages."""
    for source, target in pairs:
        host[target] = device[source]


@pytest.mark.parametrize("form", ["kernel", "async"])
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("layout", [LAYOUT, GROUPS, ODD], ids=["mha", "groups", "odd"])
async def test_copies_equal_a_page_by_page_model(layout: Layout, wrapped: bool, form: str) -> None:
    """Both ways, with pages at random and in stretches, in odd and even numbers."""
    device, host = device_pool(layout, wrapped=wrapped), HostPool.allocate(layout, PAGES)
    assert host.pinned
    on_device, on_host = random_pages(layout=layout), random_pages(layout=layout)
    device.write_pages(range(PAGES), on_device)
    host.write_pages(range(PAGES), on_host)
    random = np.random.default_rng(7)
    async with copier_of(device, host, form) as copier:
        for count, in_stretches in itertools.product((0, 1, 2, 7, 33, PAGES), (False, True)):
            above, below = random.permutation(PAGES)[:count], random.permutation(PAGES)[:count]
            if in_stretches:
                below.sort()
            await copier.to_host(above, below)
            move_page_by_page(on_device, on_host, list(zip(above.tolist(), below.tolist(), strict=True)))
            assert torch.equal(host.read_pages(range(PAGES)), on_host)
            above, below = random.permutation(PAGES)[:count], random.permutation(PAGES)[:count]
            await copier.to_device(below, above)
            move_page_by_page(on_host, on_device, list(zip(below.tolist(), above.tolist(), strict=True)))
            assert torch.equal(device.read_pages(range(PAGES)).cpu(), on_device)


@pytest.mark.parametrize("form", ["kernel", "async"])
async def test_copies_of_more_than_both_halves_and_many_at_once(form: str) -> None:
    """24 MiB a copy, where 16 are staged; four copies a direction in flight, of pages that none of the others has."""
    layout = KVLayout(num_layers=8, num_kv_heads=4, head_dim=128, dtype="bfloat16", page_size=64)
    count = 24 * (1 << 20) // layout.page_bytes
    device, host = DevicePool.allocate(layout, 8 * count, device="cuda"), HostPool.allocate(layout, 8 * count)
    on_device, on_host = (random_pages(8 * count, layout=layout) for _ in range(2))
    device.write_pages(range(8 * count), on_device)
    host.write_pages(range(8 * count), on_host)
    above, below = (np.random.default_rng(seed).permutation(8 * count).reshape(8, count) for seed in (1, 2))
    async with copier_of(device, host, form) as copier:
        up = [copier.to_device(below[part], above[part]) for part in range(4)]
        down = [copier.to_host(above[part], below[part]) for part in range(4, 8)]
        await asyncio.gather(*up, *down)
        for part in range(4):
            assert torch.equal(device.read_pages(above[part]).cpu(), on_host[below[part]])
        for part in range(4, 8):
            assert torch.equal(host.read_pages(below[part]), on_device[above[part]])


@pytest.mark.parametrize("form", ["kernel", "async"])
@pytest.mark.parametrize("layout", [LAYOUT, GROUPS], ids=["mha", "groups"])
async def test_a_forward_reads_each_layer_as_soon_as_its_mark_is_reached(layout: Layout, form: str) -> None:
    device, host = device_pool(layout, wrapped=False), HostPool.allocate(layout, PAGES)
    on_host = random_pages(layout=layout)
    host.write_pages(range(PAGES), on_host)
    above, below = (np.random.default_rng(seed).permutation(PAGES) for seed in (1, 2))
    forward = torch.cuda.Stream()
    async with copier_of(device, host, form) as copier:
        copy = copier.to_device_by_layer(below, above)
        await copy.launched
        read = []
        with torch.cuda.stream(forward):
            for layer in range(copy.layer_count):
                copy.follow(layer)
                # On the device, and in the forward's own stream: nothing here waits for the copy.
                read.append([row.clone() for row in rows_of_layer(device, layer)])
        forward.synchronize()
        # What was read had its bytes, although the whole copy may not have ended then.
        assert all(copy.is_ready(layer) for layer in range(copy.layer_count))
        await copy.done
        expected = torch.empty_like(on_host)
        expected[above] = on_host[below]
        assert torch.equal(device.read_pages(range(PAGES)).cpu(), expected)
        for layer, rows in enumerate(read):
            for row, now in zip(rows, rows_of_layer(device, layer), strict=True):
                assert torch.equal(row, now)


@pytest.mark.parametrize("form", ["kernel", "async"])
async def test_layers_are_reached_in_order(form: str) -> None:
    device, host = device_pool(wrapped=False), HostPool.allocate(LAYOUT, PAGES)
    async with copier_of(device, host, form) as copier:
        torch.cuda._sleep(500_000_000)  # type: ignore[no-untyped-call]  # The only way to keep a stream busy for sure.
        copy = copier.to_device_by_layer(range(PAGES), range(PAGES))
        await copy.launched
        # The copy waits for the caller's stream, so it is launched and not begun.
        assert not copy.is_ready(0)
        while not copy.done.done():
            ready = [copy.is_ready(layer) for layer in reversed(range(copy.layer_count))]
            # Asked from the last to the first: one that is behind is never there before one that is ahead.
            assert ready == sorted(ready)
            await asyncio.sleep(0)
        assert all(copy.is_ready(layer) for layer in range(copy.layer_count))


def rows_of_layer(device: DevicePool, layer: int) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for group in device.groups:
        step = group.layout.tensors_per_layer
        found.extend(group.rows[layer * step : (layer + 1) * step])
    return found


@pytest.mark.parametrize("layout", [LAYOUT, GROUPS], ids=["mha", "groups"])
async def test_pages_are_cloned_within_the_device(layout: Layout) -> None:
    device = device_pool(layout, wrapped=True)
    copier = PageCopier(device, None)
    copier.start()
    written = random_pages(layout=layout)
    device.write_pages(range(PAGES), written)
    half = PAGES // 2
    await copier.clone(range(half), range(half, 2 * half))
    assert torch.equal(device.read_pages(range(half, 2 * half)).cpu(), written[:half])
    await copier.close()


async def test_a_copy_reads_what_the_callers_stream_has_still_to_write() -> None:
    device, host = device_pool(wrapped=False), HostPool.allocate(LAYOUT, PAGES)
    copier = PageCopier(device, host)
    copier.start()
    # The loop's thread queues 50 ms of waiting and then the write: a copy that did not wait would find zeros.
    torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]  # The only way to keep a stream busy for sure.
    for tensor in (*device.k, *device.v):
        tensor.fill_(1.0)
    await copier.to_host(range(PAGES), range(PAGES))
    assert (host.buffer.view(torch.bfloat16) == 1.0).all()
    await copier.close()


async def test_a_cancelled_copy_is_still_finished_by_close() -> None:
    device, host = device_pool(wrapped=False), HostPool.allocate(LAYOUT, PAGES)
    copier = PageCopier(device, host)
    copier.start()
    written = random_pages()
    host.write_pages(range(PAGES), written)
    torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]  # As above.
    copy = copier.to_device(range(PAGES), range(PAGES))
    copy.cancel()
    with pytest.raises(asyncio.CancelledError):
        await copy
    await copier.close()
    assert torch.equal(device.read_pages(range(PAGES)).cpu(), written)
    assert copier.statistics().completed == 1


def test_copies_need_pinned_memory() -> None:
    with pytest.raises(InvalidConfig, match="needs a pinned host pool"):
        PageCopier(device_pool(wrapped=False), HostPool.allocate(LAYOUT, PAGES, pin=False))
