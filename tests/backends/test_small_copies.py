"""Small copies on the event loop: the same bytes, outcomes and order as by threads, and only where nothing waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from typing import Literal, TypeAlias

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.thorough import examples
from tidekv.backends.copies.copier import CopierStatistics, PageCopier
from tidekv.backends.copies.cpu_moves import PageMover
from tidekv.backends.copies.lanes import TO_DEVICE, CopyLanes
from tidekv.backends.copies.stream_lane import StreamLane
from tidekv.backends.copies.streams import InlineStreams
from tidekv.backends.device.pool import DevicePool
from tidekv.backends.host.pool import HostPool
from tidekv.backends.layout import KVLayout
from tidekv.backends.memory import PageIndex
from tidekv.states.errors import EngineClosed

# A small copy has at most 4 of its 32 KiB pages, or 32 of the other's: each has two tensors, and so takes two steps.
LAYOUT = KVLayout(num_layers=1, num_kv_heads=2, head_dim=512, dtype="float16", page_size=8)
TINY = KVLayout(num_layers=1, num_kv_heads=1, head_dim=4, dtype="uint8", page_size=4)
PAGES, SMALL_PAGES = 16, 4
LONG_S = 60.0

Direction: TypeAlias = Literal["to_device", "to_host", "clone"]
Copy: TypeAlias = "tuple[Direction, list[int], list[int]]"


class Watched:
    """Stands before a mover: notes which thread moves what, fails for what is cursed, and waits for its gate."""

    def __init__(self, copier: PageCopier) -> None:
        assert isinstance(copier._mover, PageMover)
        self._mover = copier._mover
        self.moved: list[tuple[int, bool]] = []
        self.cursed: set[int] = set()
        self.gate = threading.Event()
        self.gate.set()
        copier._mover = self  # type: ignore[assignment]  # Stands in for one.

    def to_device(self, host_pages: PageIndex, device_pages: PageIndex) -> None:
        self._note(host_pages)
        self._mover.to_device(host_pages, device_pages)

    def to_host(self, device_pages: PageIndex, host_pages: PageIndex) -> None:
        self._note(device_pages)
        self._mover.to_host(device_pages, host_pages)

    def _note(self, sources: PageIndex) -> None:
        on_loop = threading.current_thread() is threading.main_thread()
        if not on_loop:
            self.gate.wait()
        self.moved.append((int(sources[0]), on_loop))
        if self.cursed & set(sources.tolist()):
            raise OSError(f"pages {sources} are cursed")


@cache
def content(seed: int) -> torch.Tensor:
    random = np.random.default_rng(seed)
    return torch.from_numpy(random.integers(0, 256, (PAGES, LAYOUT.page_bytes), dtype=np.uint8))


def pools() -> tuple[DevicePool, HostPool]:
    device, host = DevicePool.allocate(LAYOUT, PAGES), HostPool.allocate(LAYOUT, PAGES)
    device.write_pages(range(PAGES), content(1))
    host.write_pages(range(PAGES), content(2))
    return device, host


@asynccontextmanager
async def copying(device: DevicePool, host: HostPool, *, inline_turn_s: float = LONG_S) -> AsyncIterator[PageCopier]:
    lanes = CopyLanes(device.device, inline_turn_s=inline_turn_s)
    lanes.start()
    copier = PageCopier(device, host, lanes=lanes)
    copier.start()
    yield copier
    await copier.close()
    await lanes.close()


@st.composite
def copies(draw: st.DrawFn) -> Copy:
    direction: Direction = draw(st.sampled_from(("to_device", "to_host", "clone")))
    count = draw(st.integers(0, SMALL_PAGES + 2))
    order = draw(st.permutations(range(PAGES)))
    return direction, list(order[:count]), list(order[count : 2 * count])


async def outcomes_of(
    made: list[Copy], cursed: set[int], left: set[int], *, inline_turn_s: float
) -> tuple[list[str], list[int], CopierStatistics, bytes]:
    """Make copies all at once; the outcome of each, in which order each lane reported them, statistics, and all bytes.

    A caller marked in `left` cancels its waiter right after its call. Copies of one lane only: two have no order.
    """
    device, host = pools()
    told: list[int] = []
    async with copying(device, host, inline_turn_s=inline_turn_s) as copier:
        Watched(copier).cursed = cursed
        waiters = []
        for number, (direction, sources, targets) in enumerate(made):
            waiter = getattr(copier, direction)(sources, targets)
            assert not waiter.done(), "nobody is told from within the call"
            waiter.add_done_callback(lambda _, number=number: told.append(number))
            if number in left:
                waiter.cancel()
            waiters.append(waiter)
        results = await asyncio.gather(*waiters, return_exceptions=True)
    everything = device.read_pages(range(PAGES)).numpy().tobytes() + host.read_pages(range(PAGES)).numpy().tobytes()
    return [repr(result) for result in results], told, copier.statistics(), everything


@examples(30)
@given(data=st.data())
async def test_on_the_loop_and_by_threads_copies_bring_the_same_bytes_outcomes_and_order(data: st.DataObject) -> None:
    lane = data.draw(st.sampled_from((("to_device", "clone"), ("to_host",))))
    made = data.draw(st.lists(copies().filter(lambda copy: copy[0] in lane), max_size=12))
    cursed = set(data.draw(st.lists(st.integers(0, PAGES - 1), max_size=2)))
    left = set(data.draw(st.lists(st.integers(0, 11), max_size=3)))
    by_threads = await outcomes_of(made, cursed, left, inline_turn_s=0.0)
    # All that may be made on the loop, or about one a turn.
    assert await outcomes_of(made, cursed, left, inline_turn_s=LONG_S) == by_threads
    assert await outcomes_of(made, cursed, left, inline_turn_s=1e-9) == by_threads


async def test_a_small_copy_is_made_at_once_and_a_large_one_by_a_thread() -> None:
    device, host = pools()
    async with copying(device, host) as copier:
        watched = Watched(copier)
        small = copier.to_device(range(SMALL_PAGES), range(SMALL_PAGES))
        assert watched.moved == [(0, True)]
        assert copier.statistics().completed == 0
        await small
        await copier.to_device(range(1, SMALL_PAGES + 2), range(1, SMALL_PAGES + 2))
        assert watched.moved[1:] == [(1, False)]
        assert (copier.statistics().completed, copier.statistics().submitted) == (2, 2)
    assert torch.equal(device.read_pages(range(5)), host.read_pages(range(5)))


async def test_what_is_before_a_small_copy_in_its_lane_is_made_before_it() -> None:
    device, host = pools()
    async with copying(device, host) as copier:
        watched = Watched(copier)
        watched.gate.clear()
        large = copier.to_device(range(5), range(5))
        behind = copier.to_device([7], [0])
        # The other lane has nothing to wait for.
        await copier.to_host([9], [9])
        assert (9, True) in watched.moved
        assert (7, True) not in watched.moved
        watched.gate.set()
        await asyncio.gather(large, behind)
        assert [entry for entry in watched.moved if entry[0] != 9] == [(0, False), (7, False)]
        await copier.to_device([8], [8])
        assert watched.moved[-1] == (8, True)
    assert torch.equal(device.read_pages([0]), host.read_pages([7]))


async def test_a_crowd_of_small_copies_keeps_the_loop_for_one_turns_share_only() -> None:
    device, host = pools()
    async with copying(device, host, inline_turn_s=1e-9) as copier:
        watched = Watched(copier)
        await asyncio.gather(*(copier.to_device([page], [page]) for page in range(6)))
        assert watched.moved == [(0, True), *((page, False) for page in range(1, 6))]
        # Both directions are the same loop's.
        up, down = copier.to_device([1], [1]), copier.to_host([2], [2])
        await asyncio.gather(up, down)
        assert watched.moved[6:] == [(1, True), (2, False)]


async def test_tensors_that_lie_apart_make_a_copy_of_few_bytes_a_large_one() -> None:
    k, v = ([torch.zeros(64, *TINY.piece_shape, dtype=torch.uint8) for _ in range(TINY.num_layers)] for _ in range(2))
    host = HostPool.allocate(TINY, 64)
    async with copying(DevicePool.wrap(k, v, TINY), host) as copier:
        watched = Watched(copier)
        await copier.to_device(range(32), range(32))
        await copier.to_device(range(33), range(33))
        assert [on_loop for _, on_loop in watched.moved] == [True, False]


async def test_a_lane_of_a_gpu_never_makes_a_copy_on_the_loop() -> None:
    lanes = CopyLanes(torch.device("cpu"), inline_turn_s=LONG_S)
    lanes._lanes[TO_DEVICE] = StreamLane(InlineStreams(), name="tidekv-copy-small")
    threads: list[str] = []
    await lanes.submit(TO_DEVICE, lambda: threads.append(threading.current_thread().name), is_small=True)
    await lanes.close()
    assert threads == ["tidekv-copy-small-launch"]


async def test_what_is_no_error_is_the_loops_and_no_outcome() -> None:
    device, host = pools()

    def interrupt(*_: PageIndex) -> None:
        raise KeyboardInterrupt

    async with copying(device, host) as copier:
        mover = copier._mover
        copier._mover = type("Interrupted", (), {"to_device": staticmethod(interrupt)})()
        with pytest.raises(KeyboardInterrupt):
            copier.to_device([1], [1])
        assert copier.statistics().submitted == 0
        copier._mover = mover
        await copier.to_device([1], [1])
    with pytest.raises(EngineClosed):
        copier.to_device([1], [1])
