"""Pools: bytes come back as they went in, memory lies at the pool's addresses, and bad input changes nothing."""

from __future__ import annotations

import ctypes
from array import array

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tidekv.backends.copies.cpu_moves import PageMover
from tidekv.backends.device.pool import DevicePool
from tidekv.backends.host.pool import HostPool
from tidekv.backends.layout import DTYPES, KVLayout
from tidekv.states.errors import CapacityError, InvalidConfig, InvalidRequest, OutOfMemory
from tidekv.states.types import PoolMemory, page_ids


def small(dtype: str = "float16", kind: str = "mha") -> KVLayout:
    heads = 1 if kind == "mla" else 2
    return KVLayout(num_layers=2, num_kv_heads=heads, head_dim=4, dtype=dtype, page_size=4, kind=kind)


def random_pages(layout: KVLayout, count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, layout.page_bytes), dtype=torch.uint8, generator=generator)


def buffers(layout: KVLayout, num_pages: int = 8, *, flat: bool = False) -> list[torch.Tensor]:
    shape = (num_pages * layout.page_size, *layout.piece_shape[1:]) if flat else (num_pages, *layout.piece_shape)
    return [torch.zeros(shape, dtype=layout.torch_dtype) for _ in range(layout.num_layers)]


def bytes_by_address(memory: PoolMemory, page: int) -> bytes:
    """What a transport would read of a page."""
    return b"".join(
        ctypes.string_at(segment.address + page * segment.stride_bytes, segment.piece_bytes)
        for segment in memory.segments
    )


@pytest.mark.parametrize("kind", ["mha", "mla"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_come_back_and_lie_where_memory_says(dtype: str, kind: str) -> None:
    layout = small(dtype, kind)
    pages, written = array("i", [5, 0, 7]), random_pages(layout, 3)
    for pool in (DevicePool.allocate(layout, 8), HostPool.allocate(layout, 8)):
        pool.write_pages(pages, written)
        assert torch.equal(pool.read_pages(pages), written)
        assert not pool.read_pages([1, 2, 3, 4, 6]).any()
        assert pool.memory.page_bytes == layout.page_bytes
        assert pool.memory.kind == "DRAM"
        assert pool.memory.page_count == pool.num_pages == 8
        for position, page in enumerate(pages):
            assert bytes_by_address(pool.memory, page) == written[position].numpy().tobytes()


def test_pieces_are_layer_by_layer_k_before_v() -> None:
    layout = small("float32")
    pool = DevicePool.allocate(layout, 3)
    for layer in range(2):
        pool.k[layer][1].fill_(10 * layer + 1)
        pool.v[layer][1].fill_(10 * layer + 2)
    values = pool.read_pages([1]).view(torch.float32).view(4, -1)
    assert values[:, 0].tolist() == [1, 2, 11, 12]
    assert (values == values[:, :1]).all()


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_wrapped_tensors_are_used_in_place(kind: str, flat: bool) -> None:
    layout = small("bfloat16", kind)
    k_buffers = buffers(layout, flat=flat)
    v_buffers = None if kind == "mla" else buffers(layout, flat=flat)
    pool = DevicePool.wrap(k_buffers, v_buffers, layout)
    written = random_pages(layout, 8)
    pool.write_pages(range(8), written)
    assert pool.num_pages == 8
    assert pool.k[1].shape == (8, *layout.piece_shape)
    assert pool.k[1].data_ptr() == k_buffers[1].data_ptr()
    assert len(pool.v) == (0 if kind == "mla" else 2)
    assert torch.equal(k_buffers[0].view(8, -1).view(torch.uint8), written[:, : layout.piece_bytes])


@pytest.mark.parametrize("num_pages", [1, 8])
def test_pages_may_have_bytes_of_others_between_them(num_pages: int) -> None:
    layout = small("float32", "mla")
    both = [torch.full((num_pages, 2, *layout.piece_shape), 7.0) for _ in range(layout.num_layers)]
    first, second = (DevicePool.wrap([layer[:, part] for layer in both], None, layout) for part in range(2))
    written = random_pages(layout, num_pages)
    first.write_pages(range(num_pages), written)
    for page in range(num_pages):
        assert bytes_by_address(first.memory, page) == written[page].numpy().tobytes()
    assert (second.k[0] == 7.0).all()
    # Copies from and to host memory, in single assignments and in one gather for all.
    for pages in (range(num_pages), range(num_pages - 1, -1, -1)):
        index = np.array(list(pages))
        host = HostPool.allocate(layout, num_pages)
        mover = PageMover(second, host)
        host.write_pages(range(num_pages), written)
        mover.to_device(index, index)
        assert torch.equal(second.read_pages(range(num_pages)), written)
        host.write_pages(range(num_pages), torch.zeros_like(written))
        mover.to_host(index, index)
        assert torch.equal(host.read_pages(range(num_pages)), written)
    assert torch.equal(first.read_pages(range(num_pages)), written)
    if num_pages > 1:
        with pytest.raises(InvalidConfig, match="lie in the same memory"):
            DevicePool.wrap([both[0][:, 0], both[0][:, 1]], None, layout)
        with pytest.raises(InvalidConfig, match=r"k_buffers\[0\] is not contiguous"):
            DevicePool.wrap([layer.as_strided(layer[:, 0].shape, (4, 4, 4, 1)) for layer in both], None, layout)


def test_parameters_that_want_gradients_can_be_wrapped() -> None:
    layout = small("float32")
    k_buffers = [buffer.requires_grad_() for buffer in buffers(layout)]
    pool = DevicePool.wrap(k_buffers, buffers(layout), layout)
    pool.write_pages([0], random_pages(layout, 1))
    assert not pool.k[0].requires_grad


def wrong_wraps() -> list[tuple[str, object, object]]:
    layout = small()
    good = buffers(layout)
    overlapping = torch.zeros(12, *layout.piece_shape, dtype=torch.float16)
    return [
        (r"v_buffers must be one tensor a layer", good, None),
        (r"k_buffers has 1 tensors for 2 layers", good[:1], good),
        (r"v_buffers has 3 tensors for 2 layers", good, [*good, good[0]]),
        (r"k_buffers\[1\] is torch.float32, the layout requires float16", [good[0], good[1].float()], buffers(layout)),
        (r"v_buffers\[0\] must be a torch tensor, not ndarray", good, [good[0].numpy(), good[1]]),
        (r"v_buffers\[1\] has shape \[8, 4, 2, 5\]; it must be \[num_pages, 4, 2, 4\]", good,
         [good[0], torch.zeros(8, 4, 2, 5, dtype=torch.float16)]),
        (r"k_buffers\[0\] has shape \[30, 2, 4\]", [torch.zeros(30, 2, 4, dtype=torch.float16), good[1]], good),
        (r"k_buffers\[0\] is not contiguous", [good[0].transpose(0, 1), good[1]], good),
        (r"k_buffers\[1\] is on meta", [good[0], good[1].to("meta")], good),
        (r"v_buffers\[1\] has 9 pages, k_buffers\[0\] has 8", good, [buffers(layout)[0], buffers(layout, 9)[0]]),
        (r"lie in the same memory", good, [good[0], buffers(layout)[0]]),
        (r"lie in the same memory", [overlapping[:8], overlapping[4:]], buffers(layout)),
        (r"num_pages must be an int from 1", buffers(layout, 0), buffers(layout, 0)),
    ]  # fmt: skip


@pytest.mark.parametrize(("text", "k_buffers", "v_buffers"), wrong_wraps())
def test_wrong_tensors_are_named(text: str, k_buffers: list[torch.Tensor], v_buffers: list[torch.Tensor]) -> None:
    with pytest.raises(InvalidConfig, match=text):
        DevicePool.wrap(k_buffers, v_buffers, small())


def test_latent_layout_takes_no_v() -> None:
    layout = small(kind="mla")
    with pytest.raises(InvalidConfig, match="v_buffers must be None for kind 'mla'"):
        DevicePool.wrap(buffers(layout), buffers(layout), layout)


@pytest.mark.parametrize("num_pages", [0, -1, 2**31, 1.5, True])
def test_wrong_page_count_is_refused(num_pages: int) -> None:
    for allocate in (DevicePool.allocate, HostPool.allocate):
        with pytest.raises(InvalidConfig, match="num_pages must be an int from 1"):
            allocate(small(), num_pages)


def test_more_memory_than_there_is_says_how_much_was_asked_for() -> None:
    layout = KVLayout(num_layers=64, num_kv_heads=64, head_dim=256, dtype="float64", page_size=256)
    asked = layout.page_bytes * (2**31 - 1)
    for allocate in (DevicePool.allocate, HostPool.allocate):
        with pytest.raises(OutOfMemory, match=str(asked)) as caught:
            allocate(layout, 2**31 - 1)
        assert isinstance(caught.value, MemoryError)
        assert isinstance(caught.value, CapacityError)


@pytest.mark.parametrize("device", ["tpu", "meta", "cuda:x", ""])
def test_unknown_device_is_refused(device: str) -> None:
    with pytest.raises(InvalidConfig, match="device must be 'cpu', 'cuda' or 'cuda:N'"):
        DevicePool.allocate(small(), 4, device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens without CUDA")
def test_cuda_and_pinning_without_cuda_are_refused() -> None:
    with pytest.raises(InvalidConfig, match="torch sees no CUDA device"):
        DevicePool.allocate(small(), 4, device="cuda")
    with pytest.raises(InvalidConfig, match="pin=True needs a CUDA device"):
        HostPool.allocate(small(), 4, pin=True)
    assert not HostPool.allocate(small(), 4).pinned


@pytest.mark.parametrize(
    ("pages", "text"),
    [
        ([0, 8], r"pages 0 to 7; page 8 \(number 1\) is not one"),
        ([-1], r"page -1 \(number 0\)"),
        ([0.0], "flat list of ints"),
        ([[0]], "flat list of ints"),
        ([True], "flat list of ints"),
        ([2**63], "page 9223372036854775808"),
    ],
)
def test_page_outside_of_the_pool_is_named_and_nothing_is_written(pages: list[int], text: str) -> None:
    layout = small()
    for pool in (DevicePool.allocate(layout, 8), HostPool.allocate(layout, 8)):
        for call in (pool.check_pages, pool.read_pages, lambda p: pool.write_pages(p, random_pages(layout, len(p)))):  # noqa: B023  # Called at once.
            with pytest.raises(InvalidRequest, match=text):
                call(pages)
        assert not pool.read_pages(range(8)).any()


def test_page_bytes_of_a_wrong_shape_are_refused() -> None:
    layout = small()
    for pool in (DevicePool.allocate(layout, 4), HostPool.allocate(layout, 4)):
        for wrong in (random_pages(layout, 2), random_pages(layout, 1)[:, 1:], random_pages(layout, 1).to(torch.int16)):
            with pytest.raises(InvalidRequest, match="page bytes must be uint8"):
                pool.write_pages([1], wrong)
        assert not pool.read_pages(range(4)).any()


def test_no_pages_is_a_valid_list() -> None:
    layout = small()
    for pool in (DevicePool.allocate(layout, 4), HostPool.allocate(layout, 4)):
        assert pool.read_pages(page_ids()).shape == (0, layout.page_bytes)
        pool.write_pages([], torch.empty(0, layout.page_bytes, dtype=torch.uint8))


def test_host_page_is_a_window_into_the_pool() -> None:
    layout = small()
    pool = HostPool.allocate(layout, 4)
    pool.page(2)[:] = b"\x07" * layout.page_bytes
    assert pool.array[2].tolist() == [7] * layout.page_bytes
    assert pool.buffer.data_ptr() % 4096 == 0
    assert not pool.read_pages([0, 1, 3]).any()
    for wrong in (-1, 4):
        with pytest.raises(InvalidRequest, match=f"page {wrong} is not one"):
            pool.page(wrong)


@given(st.lists(st.integers(0, 15), unique=True), st.sampled_from([np.int32, np.int64, np.uint8, np.uint64]))
def test_any_integer_type_names_pages(pages: list[int], dtype: type[np.integer]) -> None:
    layout = small()
    pool = DevicePool.allocate(layout, 16)
    written = random_pages(layout, len(pages))
    pool.write_pages(np.array(pages, dtype=dtype), written)
    assert torch.equal(pool.read_pages(page_ids(pages)), written)
