"""Both forms of copies, without a GPU: the order that their streams are given, and which form is chosen when.

The kernel is stood in for by memmove here; `test_piece_kernel.py` has the real one.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.scrambled_streams import ScrambledStreams
from tests.support.thorough import examples
from tidekv.backends.copies.cuda import KERNEL_BELOW_BYTES, CopyChoice, CopyForm, CudaMover, KernelMover, LayerMover
from tidekv.backends.copies.pieces import IndexPieces, KernelPieces, PagePairs, PieceShape
from tidekv.backends.copies.staged import StagedMover
from tidekv.backends.copies.streams import InlineStreams, Mark
from tidekv.backends.copies.stretches import BatchedCopies, SingleCopies, Stretches, stretch_copies
from tidekv.backends.device.pool import DevicePool
from tidekv.backends.host.pool import HostPool
from tidekv.backends.layout import KVLayout
from tidekv.backends.memory import consecutive
from tidekv.backends.page_layout import Layout, PageLayout
from tidekv.states.errors import InvalidConfig

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=4, dtype="float16", page_size=4)
# Pieces of 32, 16, 12 and 20 bytes, and layers in unlike numbers.
GROUPS = PageLayout.of(
    full=KVLayout(num_layers=3, num_kv_heads=2, head_dim=4, dtype="float8_e4m3fn", page_size=4),
    scales=KVLayout(num_layers=2, num_kv_heads=1, head_dim=1, dtype="float32", page_size=4),
    draft=KVLayout(num_layers=1, num_kv_heads=1, head_dim=3, dtype="uint8", page_size=4),
    indexer=KVLayout(num_layers=4, num_kv_heads=1, head_dim=5, dtype="uint8", page_size=4, kind="mla"),
)
PAGES = 24
MOVERS = ["by kernel", "by torch"]


def memmove_launch(
    addresses: torch.Tensor,
    pages: torch.Tensor,
    row_ids: torch.Tensor,
    page_ids: torch.Tensor,
    *,
    pairs: range,
    pieces: range,
    shape: PieceShape,
    to_rows: bool,
) -> None:
    """What the kernel does, a piece at a time."""
    for pair in pairs:
        for piece in pieces:
            row = int(addresses[piece]) + int(row_ids[pair]) * shape.piece_bytes
            start = shape.start_bytes + piece * shape.piece_bytes
            page = pages.data_ptr() + int(page_ids[pair]) * shape.page_bytes + start
            ctypes.memmove(*((row, page) if to_rows else (page, row)), shape.piece_bytes)


class MemmoveRuntime:
    """NVIDIA's runtime with memmove in the place of its copies, which it makes in a random order."""

    cudaMemcpyAttributes = SimpleNamespace  # noqa: N815  # The runtime's own name.
    cudaMemcpySrcAccessOrder = SimpleNamespace(cudaMemcpySrcAccessOrderStream=1)  # noqa: N815  # As above.
    status = 0

    @classmethod
    def cudaMemcpyBatchAsync(  # noqa: N802  # As above.
        cls,
        targets: list[int],
        sources: list[int],
        sizes: list[int],
        count: int,
        attributes: list[SimpleNamespace],
        attribute_starts: list[int],
        attribute_count: int,
        stream: int,
    ) -> tuple[int]:
        assert len(targets) == len(sources) == len(sizes) == count > 0
        assert (attribute_starts, attribute_count, attributes[0].srcAccessOrder, stream) == ([0], 1, 1, 7)
        for number in random.sample(range(count), count):
            ctypes.memmove(targets[number], sources[number], sizes[number])
        return (cls.status,)


@pytest.fixture(autouse=True)
def stream_seven(monkeypatch: pytest.MonkeyPatch) -> None:
    """A current stream, on a machine without any."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=7))


def pools(layout: Layout) -> tuple[DevicePool, HostPool, torch.Tensor, torch.Tensor]:
    """Pools, and the bytes that they hold."""
    device, host = DevicePool.allocate(layout, PAGES), HostPool.allocate(layout, PAGES)
    contents = []
    for seed, pool in enumerate((device, host)):
        generator = torch.Generator().manual_seed(seed)
        written = torch.randint(0, 256, (PAGES, layout.page_bytes), dtype=torch.uint8, generator=generator)
        pool.write_pages(range(PAGES), written)
        contents.append(written)
    return device, host, contents[0], contents[1]


def mover_of(
    kind: str, device: DevicePool, host: HostPool, streams: ScrambledStreams | InlineStreams, slot_pages: int = 2
) -> StagedMover:
    pieces = IndexPieces(device) if kind == "by torch" else KernelPieces(device, memmove_launch)
    slot_bytes = slot_pages * device.layout.page_bytes
    copies = SingleCopies() if kind == "by torch" else BatchedCopies(MemmoveRuntime, device.device)
    return StagedMover(device, host, streams=streams, pieces=pieces, copies=copies, slot_bytes=slot_bytes)


@st.composite
def page_lists(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """As many pages of one pool as of the other: scattered, or in stretches."""
    count = draw(st.integers(0, PAGES))
    scattered = draw(st.booleans())
    both = [np.array(draw(st.permutations(range(PAGES)))[:count], dtype=np.int64) for _ in range(2)]
    return both[0], both[1] if scattered else np.sort(both[1])


@pytest.mark.parametrize("layout", [LAYOUT, GROUPS], ids=["mha", "groups"])
@pytest.mark.parametrize("kind", MOVERS)
@examples(20)
@given(up=page_lists(), down=page_lists(), slot_pages=st.integers(1, 5), seed=st.integers())
def test_copies_are_right_in_whatever_order_streams_advance(
    layout: Layout,
    kind: str,
    up: tuple[np.ndarray, np.ndarray],
    down: tuple[np.ndarray, np.ndarray],
    slot_pages: int,
    seed: int,
) -> None:
    """Two copies a direction, and then what the lane has next."""
    device, host, on_device, on_host = pools(layout)
    streams = ScrambledStreams(seed)
    mover = mover_of(kind, device, host, streams, slot_pages)
    seen: list[torch.Tensor] = []
    for _ in range(2):
        mover.to_device(up[0], up[1])
        on_device[up[1]] = on_host[up[0]]
        mover.to_host(down[0], down[1])
        on_host[down[1]] = on_device[down[0]]
    streams.lane.run(lambda: seen.extend((device.read_pages(range(PAGES)), host.read_pages(range(PAGES)))))
    streams.finish()
    assert torch.equal(seen[0], on_device)
    assert torch.equal(seen[1], on_host)


@pytest.mark.parametrize("kind", MOVERS)
def test_a_copy_waits_for_what_the_lane_had_before(kind: str) -> None:
    for seed in range(20):
        device, host, _, _ = pools(LAYOUT)
        streams = ScrambledStreams(seed)
        mover = mover_of(kind, device, host, streams)
        # Read after it was computed; and overwritten after it was last used.
        streams.lane.run(lambda device=device: device.rows[0].fill_(7))
        mover.to_host(np.arange(5), np.arange(5))
        streams.lane.run(lambda host=host: host.buffer.zero_())
        mover.to_device(np.arange(PAGES), np.arange(PAGES))
        streams.finish()
        assert not device.read_pages(range(PAGES)).any()


@pytest.mark.parametrize("kind", MOVERS)
@pytest.mark.parametrize("to_device", [True, False])
def test_a_copy_that_fails_half_way_leaves_nothing_behind_the_lane(kind: str, *, to_device: bool) -> None:
    for seed in range(20):
        device, host, _, _ = pools(LAYOUT)
        streams = ScrambledStreams(seed)
        mover = mover_of(kind, device, host, streams, slot_pages=2)
        move = mover.to_device if to_device else mover.to_host
        pages = np.arange(10)
        move(pages, pages)
        run, calls = streams.streams[-1].run, iter(range(100))

        def failing(work: Callable[[], None]) -> None:
            if next(calls) == 1:  # noqa: B023  # Called before the next round.
                raise RuntimeError("cudaErrorUnknown")
            run(work)  # noqa: B023  # As above.

        streams.streams[-1].run = failing  # type: ignore[method-assign]  # The device's own error.
        with pytest.raises(RuntimeError, match="cudaErrorUnknown"):
            move(pages, pages)
        streams.finish(until=streams.lane.mark())
        assert not any(stream.queue for stream in streams.streams)


@pytest.mark.parametrize("by_kernel", [True, False])
@pytest.mark.parametrize("layout", [LAYOUT, GROUPS], ids=["mha", "groups"])
def test_layers_come_in_order_each_with_its_mark(layout: Layout, *, by_kernel: bool) -> None:
    device, host, _, on_host = pools(layout)
    streams = ScrambledStreams(seed=1)
    pages = np.random.default_rng(1).permutation(PAGES)[:11]
    targets = np.random.default_rng(2).permutation(PAGES)[:11]
    mover = (
        KernelMover(device, host, streams=streams, pieces=KernelPieces(device, memmove_launch))
        if by_kernel
        else LayerMover(device, host, streams=streams, copies=BatchedCopies(MemmoveRuntime, device.device))
    )
    before = device.read_pages(range(PAGES))
    marks: list[Mark] = []
    mover.to_device_by_layer(pages, targets, marks.append)
    assert len(marks) == max(group.layout.num_layers for group in layout.groups)
    # A forward on a stream of its own, which reads each layer behind its mark and nothing else.
    forward = streams.make()
    seen: dict[int, torch.Tensor] = {}
    for layer, mark in enumerate(marks):
        forward.follow(mark)
        forward.run(lambda layer=layer: seen.update({layer: layer_of(device, device.read_pages(range(PAGES)), layer)}))
    expected = before.clone()
    expected[targets] = on_host[pages]
    streams.finish(until=marks[0])
    now = device.read_pages(range(PAGES))
    assert torch.equal(layer_of(device, now, 0), layer_of(device, expected, 0))
    assert torch.equal(layer_of(device, now, 1), layer_of(device, before, 1))
    streams.finish()
    assert torch.equal(device.read_pages(range(PAGES)), expected)
    for layer in range(len(marks)):
        assert torch.equal(seen[layer], layer_of(device, expected, layer))


def layer_of(device: DevicePool, pages: torch.Tensor, layer: int) -> torch.Tensor:
    """The bytes of one layer of pages, in all groups that have it."""
    parts, start = [], 0
    for group in device.groups:
        width = group.layout.piece_bytes * group.layout.tensors_per_layer
        if layer < group.layout.num_layers:
            parts.append(pages[:, start + layer * width :][:, :width])
        start += group.layout.page_bytes
    return torch.cat(parts, dim=1)


def test_the_form_is_chosen_by_the_bytes_of_a_stretch() -> None:
    choice = CopyChoice(kernel_below_bytes=1000)

    def form(total_bytes: int, stretch_count: int) -> CopyForm:
        return choice.form(total_bytes=total_bytes, stretch_count=stretch_count, has_kernel=True)

    assert [form(total, 1) for total in (1, 999, 1000, 5000)] == [CopyForm.KERNEL] * 2 + [CopyForm.ASYNC] * 2
    assert [form(5000, stretches) for stretches in (5, 6)] == [CopyForm.ASYNC, CopyForm.KERNEL]
    assert choice.form(total_bytes=1, stretch_count=1, has_kernel=False) is CopyForm.ASYNC
    never = CopyChoice(kernel_below_bytes=0)
    assert never.form(total_bytes=0, stretch_count=0, has_kernel=True) is CopyForm.ASYNC
    assert CopyChoice().kernel_below_bytes == KERNEL_BELOW_BYTES
    for wrong in (-1, 1.5, True):
        with pytest.raises(InvalidConfig, match="kernel_below_bytes must be an int"):
            CopyChoice(kernel_below_bytes=wrong)  # type: ignore[arg-type]  # That is what is tested.


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_both_lists_of_ids_begin_where_16_bytes_do(count: int) -> None:
    pairs = PagePairs(np.arange(count), np.arange(count)[::-1], torch.device("cpu"))
    pairs.upload()
    assert pairs.rows.tolist() == list(range(count))
    assert pairs.pages.tolist() == list(range(count))[::-1]
    assert {ids.storage_offset() * ids.itemsize % 16 for ids in (pairs.rows, pairs.pages)} == {0}


def test_a_copy_of_nothing_enqueues_nothing() -> None:
    device, host, _, _ = pools(LAYOUT)
    streams, recorder = ScrambledStreams(seed=1), Recorder()
    mover = CudaMover(device, host, CopyChoice(1 << 40), streams=streams, find_launch=lambda: recorder)
    nothing = np.arange(0)
    mover.warm_up()
    streams.finish()
    mover.to_device(nothing, nothing)
    mover.to_host(nothing, nothing)
    assert not any(stream.queue for stream in streams.streams)
    marks: list[Mark] = []
    mover.to_device_by_layer(nothing, nothing, marks.append)
    streams.finish()
    assert [mark.is_reached() for mark in marks] == [True] * LAYOUT.num_layers
    assert recorder.moved == 0


class Recorder:
    """Counts launches of the kernel."""

    def __init__(self) -> None:
        self.moved = 0

    def __call__(self, *args: object, pairs: range, **options: object) -> None:
        self.moved += len(pairs)
        memmove_launch(*args, pairs=pairs, **options)  # type: ignore[arg-type]  # As it came.


def test_scattered_pages_take_the_kernel_and_long_stretches_do_not() -> None:
    device, host, _, on_host = pools(LAYOUT)
    recorder = Recorder()
    choice = CopyChoice(kernel_below_bytes=3 * LAYOUT.page_bytes)
    mover = CudaMover(device, host, choice, streams=InlineStreams(), find_launch=lambda: recorder)
    scattered, stretch = np.array([1, 3, 5, 6]), np.arange(4)
    assert mover.form(scattered) is CopyForm.ASYNC
    assert not mover.has_kernel
    mover.warm_up()
    assert (mover.has_kernel, recorder.moved) == (True, 0)
    assert mover.form(scattered) is CopyForm.KERNEL
    assert mover.form(stretch) is CopyForm.ASYNC
    # Stretches are those of host memory; where pages are on the device does not count.
    mover.to_device(stretch, scattered)
    mover.to_device(scattered, stretch)
    expected = on_host[[0, 1, 2, 3]]
    assert torch.equal(device.read_pages([5, 6]), expected[2:])
    assert torch.equal(device.read_pages(stretch), on_host[scattered])
    assert mover.layer_form() is CopyForm.KERNEL
    # No multiprocessor writes host memory: one pair more is launched for each page, to gather it on the device.
    launched = recorder.moved
    mover.to_host(scattered, np.array([8, 10, 12, 14]))
    assert recorder.moved == launched + 4
    assert torch.equal(host.read_pages([8, 10, 12, 14]), device.read_pages(scattered))


def test_where_there_is_no_triton_all_copies_are_asynchronous() -> None:
    device, host, _, on_host = pools(GROUPS)
    mover = CudaMover(device, host, CopyChoice(), streams=InlineStreams(), find_launch=lambda: None)
    mover.warm_up()
    assert not mover.has_kernel
    pages = np.array([5, 1, 9])
    assert mover.form(pages) is mover.layer_form() is CopyForm.ASYNC
    marks: list[Mark] = []
    mover.to_device_by_layer(pages, pages[::-1], marks.append)
    assert torch.equal(device.read_pages([9, 1, 5]), on_host[pages])
    mover.to_device(pages, pages)
    mover.to_host(pages, np.array([0, 2, 4]))
    assert torch.equal(host.read_pages([0, 2, 4]), on_host[pages])


def test_a_kernel_that_cannot_be_compiled_is_left_out() -> None:
    device, host, _, on_host = pools(LAYOUT)

    def broken(*args: object, **options: object) -> None:
        raise RuntimeError("Failed to find C compiler")

    mover = CudaMover(device, host, CopyChoice(), streams=InlineStreams(), find_launch=lambda: broken)
    with pytest.raises(RuntimeError, match="C compiler"):
        mover.warm_up()
    assert not mover.has_kernel
    pages = np.array([5, 1, 9])
    mover.to_device(pages, pages)
    assert torch.equal(device.read_pages(pages), on_host[pages])


@given(pairs=page_lists())
def test_stretches_are_the_longest_that_are_consecutive_on_both_sides(pairs: tuple[np.ndarray, np.ndarray]) -> None:
    first, second, counts = consecutive(*pairs)
    rows = [(int(a) + step, int(b) + step) for a, b, n in zip(first, second, counts, strict=True) for step in range(n)]
    assert rows == list(zip(pairs[0].tolist(), pairs[1].tolist(), strict=True))
    starts = list(zip(first.tolist(), second.tolist(), strict=True))
    ends = [(a + n, b + n) for (a, b), n in zip(starts, counts.tolist(), strict=True)]
    assert all(end != start for end, start in zip(ends, starts[1:], strict=False))


@pytest.mark.parametrize("copies", [SingleCopies(), BatchedCopies(MemmoveRuntime, torch.device("cpu"))])
def test_stretches_of_rows_with_other_bytes_between_them(copies: SingleCopies | BatchedCopies) -> None:
    source = torch.randint(0, 256, (9, 10), dtype=torch.uint8)
    target = torch.zeros(9, 4, dtype=torch.uint8)
    rows = Stretches(target, source[:, 3:7], np.array([0, 5]), np.array([2, 6]), np.array([3, 2]))
    copies.enqueue([rows, Stretches(target, source[:, :4], np.array([8]), np.array([0]), np.array([1]))])
    expected = torch.zeros(9, 4, dtype=torch.uint8)
    expected[0:3], expected[5:7], expected[8] = source[2:5, 3:7], source[6:8, 3:7], source[0, :4]
    assert torch.equal(target, expected)
    copies.enqueue([])


def test_a_batch_that_the_driver_refuses_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemmoveRuntime, "status", 1)
    copies = BatchedCopies(MemmoveRuntime, torch.device("cpu"))
    one = Stretches(torch.zeros(1, 4), torch.zeros(1, 4), np.array([0]), np.array([0]), np.array([1]))
    with pytest.raises(RuntimeError, match="a batch of 1 asynchronous copies was refused"):
        copies.enqueue([one])


@pytest.mark.parametrize(("version", "batched"), [(12080, True), (13000, True), (12040, False), (None, False)])
def test_copies_are_batched_where_the_driver_can(
    version: int | None, batched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = None if version is None else MemmoveRuntime
    monkeypatch.setattr(MemmoveRuntime, "cudaDriverGetVersion", lambda: (0, version), raising=False)
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", runtime)
    assert isinstance(stretch_copies(torch.device("cuda")), BatchedCopies) is batched
    assert isinstance(stretch_copies(torch.device("cpu")), SingleCopies)
