"""Copies between pools: the right bytes at the right pages, in order, and an end for each, even without a waiter."""

from __future__ import annotations

import asyncio
import itertools
import threading
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.thorough import examples
from tidekv.backends.copies.copier import PageCopier
from tidekv.backends.copies.cpu_moves import PageCloner, PageMover, page_runs
from tidekv.backends.copies.cuda import StagedCloner
from tidekv.backends.copies.lanes import CopyLanes
from tidekv.backends.copies.pieces import IndexPieces
from tidekv.backends.copies.staged import StagedMover
from tidekv.backends.copies.streams import InlineStreams
from tidekv.backends.copies.stretches import SingleCopies
from tidekv.backends.device.pool import DevicePool
from tidekv.backends.host.pool import HostPool
from tidekv.backends.layout import KVLayout
from tidekv.backends.memory import PageIndex
from tidekv.backends.page_layout import Layout, PageLayout
from tidekv.states.errors import CopyFailed, EngineClosed, InvalidConfig, InvalidRequest
from tidekv.states.types import page_ids

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=4, dtype="float16", page_size=4)
ODD = KVLayout(num_layers=3, num_kv_heads=1, head_dim=5, dtype="uint8", page_size=3, kind="mla")
ODD_OF_FOUR = KVLayout(num_layers=1, num_kv_heads=1, head_dim=5, dtype="uint8", page_size=4, kind="mla")
BIG = KVLayout(num_layers=1, num_kv_heads=2, head_dim=1024, dtype="float32", page_size=1)
# Fp8 KV with a scale for each token, and a draft model of other heads: pieces of 32, 16 and 12 bytes.
GROUPS = PageLayout.of(
    full=KVLayout(num_layers=2, num_kv_heads=2, head_dim=4, dtype="float8_e4m3fn", page_size=4),
    scales=KVLayout(num_layers=2, num_kv_heads=1, head_dim=1, dtype="float32", page_size=4),
    draft=KVLayout(num_layers=1, num_kv_heads=1, head_dim=3, dtype="uint8", page_size=4),
    indexer=ODD_OF_FOUR,
)
PAGES = 24


class Gate:
    """Stands before a mover: nothing is moved until it is opened, and what is in `failing` never is."""

    def __init__(self, mover: PageMover) -> None:
        self.mover = mover
        self.opened = threading.Event()
        self.failing: set[int] = set()

    def to_device(self, host_pages: PageIndex, device_pages: PageIndex) -> None:
        self.opened.wait()
        if self.failing & set(host_pages.tolist()):
            raise OSError(f"pages {host_pages} are cursed")
        self.mover.to_device(host_pages, device_pages)

    def to_host(self, device_pages: PageIndex, host_pages: PageIndex) -> None:
        self.opened.wait()
        self.mover.to_host(device_pages, host_pages)


def device_pool(layout: Layout = LAYOUT, *, wrapped: bool = False) -> DevicePool:
    if not wrapped:
        return DevicePool.allocate(layout, PAGES)
    if isinstance(layout, PageLayout):
        return DevicePool.join(**{name: device_pool(shape, wrapped=True) for name, shape in layout.groups})
    k, v = (
        [torch.zeros(PAGES, *layout.piece_shape, dtype=layout.torch_dtype) for _ in range(layout.num_layers)]
        for _ in range(2)
    )
    return DevicePool.wrap(k, None if layout.kind == "mla" else v, layout)


@cache
def random_bytes(size_bytes: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(np.random.default_rng(seed).bytes(size_bytes), dtype=np.uint8).copy())


def filled(pool: DevicePool | HostPool, seed: int) -> torch.Tensor:
    everything = random_bytes(PAGES * pool.layout.page_bytes, seed).clone().view(PAGES, -1)
    pool.write_pages(range(PAGES), everything)
    return everything


@st.composite
def page_pairs(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Sources with repeats, destinations without, in runs as a prompt has them or all over the place."""
    if draw(st.booleans()):
        count = draw(st.integers(0, PAGES))
        return (
            draw(st.lists(st.integers(0, PAGES - 1), min_size=count, max_size=count)),
            draw(st.permutations(range(PAGES)))[:count],
        )
    sources, targets, free = [], [], 0
    for length in draw(st.lists(st.integers(1, 6), max_size=5)):
        start = draw(st.integers(0, PAGES - length))
        end = min(free + length, PAGES)
        sources += range(start, start + end - free)
        targets += range(free, end)
        free = end
    return sources, targets


@given(page_pairs())
def test_runs_are_maximal_and_cover_everything_in_order(pairs: tuple[list[int], list[int]]) -> None:
    sources, targets = pairs
    runs = list(page_runs(np.array(sources, dtype=np.int64), np.array(targets, dtype=np.int64)))
    assert [first + i for first, _, count in runs for i in range(count)] == sources
    assert [second + i for _, second, count in runs for i in range(count)] == targets
    for (a, b, count), (c, d, _) in itertools.pairwise(runs):
        assert (a + count, b + count) != (c, d)


@pytest.mark.parametrize("mover_type", [PageMover, StagedMover])
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("layout", [LAYOUT, ODD, BIG, GROUPS], ids=["mha", "odd", "big", "groups"])
@examples(60)
@given(pairs=page_pairs())
def test_copies_equal_a_page_by_page_model(
    layout: Layout, wrapped: bool, mover_type: type[PageMover | StagedMover], pairs: tuple[list[int], list[int]]
) -> None:
    sources, targets = (np.array(pages, dtype=np.int64) for pages in pairs)
    device, host = device_pool(layout, wrapped=wrapped), HostPool.allocate(layout, PAGES)
    mover = PageMover(device, host)
    if mover_type is StagedMover:
        mover = StagedMover(
            device,
            host,
            streams=InlineStreams(),
            pieces=IndexPieces(device),
            copies=SingleCopies(),
            slot_bytes=3 * layout.page_bytes,
        )
    on_device, on_host = filled(device, 1), filled(host, 2)
    mover.to_device(sources, targets)
    for source, target in zip(*pairs, strict=True):
        on_device[target] = on_host[source]
    assert torch.equal(device.read_pages(range(PAGES)), on_device)
    assert torch.equal(host.read_pages(range(PAGES)), on_host)
    filled(device, 3)
    on_device = device.read_pages(range(PAGES))
    mover.to_host(sources, targets)
    for source, target in zip(*pairs, strict=True):
        on_host[target] = on_device[source]
    assert torch.equal(host.read_pages(range(PAGES)), on_host)
    assert torch.equal(device.read_pages(range(PAGES)), on_device)


def started(device: DevicePool, host: HostPool) -> PageCopier:
    copier = PageCopier(device, host)
    copier.start()
    return copier


def gated(copier: PageCopier) -> Gate:
    """Put a gate before its mover; all copies are made by threads, so that the loop is not kept."""
    copier._lanes._inline_turn_s = 0.0
    gate = Gate(copier._mover)  # type: ignore[arg-type]  # On the CPU it is a PageMover.
    copier._mover = gate  # type: ignore[assignment]  # Stands in for one.
    return gate


def copy_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("tidekv-copy")]


async def test_pages_go_down_and_up_again() -> None:
    device, host = device_pool(), HostPool.allocate(LAYOUT, PAGES)
    copier = started(device, host)
    before = filled(device, 1)
    await copier.to_host(page_ids([3, 4, 5, 9]), page_ids([0, 1, 2, 20]))
    filled(device, 2)
    await copier.to_device(page_ids([20, 0, 1, 2]), page_ids([6, 7, 8, 9]))
    assert torch.equal(device.read_pages([7, 8, 9, 6]), before[[3, 4, 5, 9]])
    statistics = copier.statistics()
    assert (statistics.submitted, statistics.completed, statistics.failed) == (2, 2, 0)
    assert statistics.to_device_bytes == statistics.to_host_bytes == 4 * LAYOUT.page_bytes
    await copier.close()
    assert not copy_threads()


async def test_many_copies_at_once_both_ways() -> None:
    device, host = device_pool(), HostPool.allocate(LAYOUT, PAGES)
    copier = started(device, host)
    on_device, on_host = filled(device, 1), filled(host, 2)
    # Lower halves go up, upper halves go down: no copy touches what another does.
    half = PAGES // 2
    up = [copier.to_device([page], [half - 1 - page]) for page in range(half)]
    down = [copier.to_host([page], [page]) for page in range(half, PAGES)]
    await asyncio.gather(*up, *down)
    assert torch.equal(device.read_pages(range(half)), on_host[:half].flip(0))
    assert torch.equal(host.read_pages(range(half, PAGES)), on_device[half:])
    await copier.close()


async def test_one_direction_keeps_submission_order() -> None:
    device, host = device_pool(), HostPool.allocate(LAYOUT, PAGES)
    copier = started(device, host)
    gate = gated(copier)
    on_host = filled(host, 2)
    ended: list[int] = []
    copies = [copier.to_device([page], [0]) for page in range(10)]
    for page, copy in enumerate(copies):
        copy.add_done_callback(lambda _, page=page: ended.append(page))
    gate.opened.set()
    await asyncio.gather(*copies)
    assert ended == list(range(10))
    assert torch.equal(device.read_pages([0])[0], on_host[9])
    await copier.close()


async def test_a_failed_copy_is_raised_to_its_waiter_and_harms_no_other() -> None:
    device, host = device_pool(), HostPool.allocate(LAYOUT, PAGES)
    copier = started(device, host)
    gate = gated(copier)
    gate.opened.set()
    gate.failing = {3}
    on_host = filled(host, 2)
    results = await asyncio.gather(*(copier.to_device([page], [page]) for page in range(5)), return_exceptions=True)
    assert [type(result) for result in results] == [type(None)] * 3 + [CopyFailed] + [type(None)]
    assert "to_device of 1 pages failed" in str(results[3])
    assert "cursed" in str(results[3])
    assert torch.equal(device.read_pages([0, 1, 2, 4]), on_host[[0, 1, 2, 4]])
    assert copier.statistics().failed == 1
    await copier.close()


async def test_a_cancelled_waiter_does_not_stop_the_copy() -> None:
    device, host = device_pool(), HostPool.allocate(LAYOUT, PAGES)
    copier = started(device, host)
    gate = gated(copier)
    gate.failing = {2}
    on_host = filled(host, 2)
    unheard: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
    waiting = asyncio.ensure_future(copier.to_device([1], [1]))
    failing = copier.to_device([2], [2])
    waiting.cancel()
    failing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert copier.statistics().completed == 0
    gate.opened.set()
    await copier.close()
    assert torch.equal(device.read_pages([1])[0], on_host[1])
    assert (copier.statistics().completed, copier.statistics().failed) == (1, 1)
    assert not unheard


async def test_close_finishes_what_was_started_even_if_close_is_cancelled() -> None:
    device, host = device_pool(), HostPool.allocate(LAYOUT, PAGES)
    copier = started(device, host)
    gate = gated(copier)
    on_host = filled(host, 2)
    copies = [copier.to_device([page], [page]) for page in range(5)]
    first = asyncio.create_task(copier.close())
    await asyncio.sleep(0)
    assert not first.done()
    with pytest.raises(EngineClosed, match="not running"):
        copier.to_host([0], [0])
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    gate.opened.set()
    await copier.close()
    assert all(copy.done() for copy in copies)
    assert torch.equal(device.read_pages(range(5)), on_host[:5])
    assert not copy_threads()
    await copier.close()


async def test_bad_calls_are_refused_and_change_nothing() -> None:
    device, host = device_pool(), HostPool.allocate(LAYOUT, PAGES)
    copier = PageCopier(device, host)
    with pytest.raises(EngineClosed, match="start it first"):
        copier.to_device([0], [0])
    await copier.close()
    copier = started(device, host)
    with pytest.raises(InvalidRequest, match=r"host pool has pages 0 to 23; page 24"):
        copier.to_device([24], [0])
    with pytest.raises(InvalidRequest, match=r"device pool has pages 0 to 23; page -1"):
        copier.to_host([-1], [0])
    with pytest.raises(InvalidRequest, match="2 source pages for 1 destination pages"):
        copier.to_host([0, 1], [0])
    assert copier.statistics().submitted == 0
    await copier.to_host([], [])
    await copier.close()


def test_pools_of_different_layouts_do_not_fit() -> None:
    with pytest.raises(InvalidConfig, match=r"device pool has KVLayout.*host pool has KVLayout"):
        PageCopier(device_pool(), HostPool.allocate(ODD, PAGES))


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("layout", [LAYOUT, ODD, GROUPS], ids=["mha", "odd", "groups"])
@given(data=st.data())
@examples(20)
def test_clones_within_the_device_are_the_pages_that_they_were_made_of(
    layout: Layout, *, wrapped: bool, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(PAGES)))
    count = data.draw(st.integers(0, PAGES // 2))
    sources, targets = order[:count], order[count : 2 * count]
    device = device_pool(layout, wrapped=wrapped)
    for cloner in (PageCloner(device), StagedCloner(device)):
        written = filled(device, 1)
        cloner.clone(np.array(sources, dtype=np.int64), np.array(targets, dtype=np.int64))
        expected = written.clone()
        expected[targets] = written[sources]
        assert torch.equal(device.read_pages(range(PAGES)), expected)


async def test_a_copier_without_a_host_pool_clones_and_does_nothing_else() -> None:
    device = device_pool()
    copier = PageCopier(device, None)
    copier.start()
    written = filled(device, 1)
    await copier.clone([3, 4], [9, 1])
    assert torch.equal(device.read_pages([9, 1]), written[[3, 4]])
    assert copier.statistics().cloned_bytes == 2 * LAYOUT.page_bytes
    with pytest.raises(InvalidRequest, match="without a host pool"):
        copier.to_device([0], [0])
    with pytest.raises(InvalidRequest, match="page 24"):
        copier.clone([24], [0])
    await copier.close()
    with pytest.raises(EngineClosed):
        copier.clone([0], [1])


async def test_copiers_that_share_lanes_run_one_after_the_other_and_leave_them_open() -> None:
    device, host = device_pool(), HostPool.allocate(LAYOUT, PAGES)
    other, other_host = device_pool(ODD), HostPool.allocate(ODD, PAGES)
    lanes, before = CopyLanes(device.device), len(copy_threads())
    first, second = (
        PageCopier(device, host, lanes=lanes),
        PageCopier(other, other_host, lanes=lanes),
    )
    with pytest.raises(EngineClosed):
        first.to_device([0], [0])
    lanes.start()
    assert len(copy_threads()) == before + 2
    gate = gated(first)
    ended: list[str] = []
    copies = [first.to_device([0], [0]), second.to_device([0], [0]), second.clone([0], [1])]
    for name, copy in zip(("first", "second", "clone"), copies, strict=True):
        copy.add_done_callback(lambda _, name=name: ended.append(name))
    await second.to_host([0], [0])
    assert not ended
    gate.opened.set()
    await asyncio.gather(*copies)
    assert ended == ["first", "second", "clone"]
    await first.close()
    await second.to_host([0], [0])
    await second.close()
    await lanes.close()
    assert len(copy_threads()) == before


async def test_a_copier_on_shared_lanes_is_closed_only_when_its_own_copies_have_ended() -> None:
    device, host = device_pool(), HostPool.allocate(LAYOUT, PAGES)
    lanes = CopyLanes(device.device)
    lanes.start()
    first, second = PageCopier(device, host, lanes=lanes), PageCopier(device, host, lanes=lanes)
    on_host = filled(host, 2)
    gate = gated(first)
    copy = first.to_device([0], [0])
    closing = asyncio.create_task(first.close())
    # The other one has nothing in flight: its end waits for nothing, and ends nothing of the first one.
    await second.close()
    await asyncio.wait({closing}, timeout=0)
    assert not closing.done()
    assert not copy.done()
    gate.opened.set()
    await closing
    assert copy.done()
    assert torch.equal(device.read_pages([0])[0], on_host[0])
    await lanes.close()
