"""The same promises on a GPU: pools, copies on their own streams, and the order with the caller's stream."""

from __future__ import annotations

import asyncio

import pytest
import torch

from tidekv.backends.copies import PageCopier
from tidekv.backends.device import DevicePool
from tidekv.backends.host import HostPool
from tidekv.backends.layout import KVLayout
from tidekv.backends.page_layout import Layout, PageLayout
from tidekv.engine.poller import PollerThread
from tidekv.states.errors import InvalidConfig, OutOfMemory

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LAYOUT = KVLayout(num_layers=4, num_kv_heads=2, head_dim=64, dtype="bfloat16", page_size=16)
PAGES = 64


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


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("layout", [LAYOUT, GROUPS], ids=["mha", "groups"])
async def test_scattered_pages_go_down_and_up_again(layout: Layout, wrapped: bool) -> None:
    device, host = device_pool(layout, wrapped=wrapped), HostPool.allocate(layout, PAGES)
    assert host.pinned
    assert host.buffer.is_pinned()
    poller = PollerThread()
    poller.start()
    copier = PageCopier(device, host, poller)
    copier.start()
    written = random_pages(layout=layout)
    device.write_pages(range(PAGES), written)
    down, up = torch.randperm(PAGES).tolist(), torch.randperm(PAGES).tolist()
    await copier.to_host(range(PAGES), down)
    assert torch.equal(host.read_pages(down), written)
    await copier.to_device(down, up)
    assert torch.equal(device.read_pages(up).cpu(), written)
    await copier.close()
    assert await poller.close() == 0


@pytest.mark.parametrize("layout", [LAYOUT, GROUPS], ids=["mha", "groups"])
async def test_pages_are_cloned_within_the_device(layout: Layout) -> None:
    device = device_pool(layout, wrapped=True)
    poller = PollerThread()
    poller.start()
    copier = PageCopier(device, None, poller)
    copier.start()
    written = random_pages(layout=layout)
    device.write_pages(range(PAGES), written)
    half = PAGES // 2
    await copier.clone(range(half), range(half, 2 * half))
    assert torch.equal(device.read_pages(range(half, 2 * half)).cpu(), written[:half])
    await copier.close()
    assert await poller.close() == 0


async def test_a_copy_reads_what_the_callers_stream_has_still_to_write() -> None:
    device, host = device_pool(wrapped=False), HostPool.allocate(LAYOUT, PAGES)
    poller = PollerThread()
    poller.start()
    copier = PageCopier(device, host, poller)
    copier.start()
    # The loop's thread queues 50 ms of waiting and then the write: a copy that did not wait would find zeros.
    torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]  # The only way to keep a stream busy for sure.
    for tensor in (*device.k, *device.v):
        tensor.fill_(1.0)
    await copier.to_host(range(PAGES), range(PAGES))
    assert (host.buffer.view(torch.bfloat16) == 1.0).all()
    await copier.close()
    await poller.close()


async def test_a_cancelled_copy_is_still_finished_by_close() -> None:
    device, host = device_pool(wrapped=False), HostPool.allocate(LAYOUT, PAGES)
    poller = PollerThread()
    poller.start()
    copier = PageCopier(device, host, poller)
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
    await poller.close()


def test_copies_need_pinned_memory() -> None:
    with pytest.raises(InvalidConfig, match="needs a pinned host pool"):
        PageCopier(device_pool(wrapped=False), HostPool.allocate(LAYOUT, PAGES, pin=False), PollerThread())
