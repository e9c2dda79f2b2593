"""Order: a forward pass spins on its stream while its pages are stored and loaded, and reused at once.

Each rule is checked over many rounds, and then once more with its wait taken out, on purpose: a check that does not see
that is no check.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.gpu.copy_rig import ASYNC, CYCLES_PER_MS, FORMS, CopyRig, Forward
from benchmarks.gpu.report import Report, Setting
from benchmarks.gpu.thread_streams import ThreadStream
from tidekv.backends.copies.copier import LayeredCopy
from tidekv.backends.copies.pieces import IndexPieces, PagePairs, Pieces
from tidekv.backends.copies.staged import StagedMover
from tidekv.backends.copies.stream_lane import StreamLane
from tidekv.backends.copies.streams import CudaStream
from tidekv.backends.copies.stretches import stretch_copies
from tidekv.backends.device.pool import DevicePool
from tidekv.backends.host.pool import HostPool
from tidekv.backends.layout import KVLayout

SPIN_MS = 20.0
SLOW_MS = 3.0


class Order:
    """Pools whose every page holds one byte, repeated, so that a page of another round is seen."""

    def __init__(self, rig: CopyRig, *, pages: int, layers: int) -> None:
        layout = KVLayout(num_layers=layers, num_kv_heads=4, head_dim=64, dtype="bfloat16", page_size=16)
        self.rig = rig
        self.pages = pages
        self.device = DevicePool.allocate(layout, pages, device=rig.device)
        self.host = HostPool.allocate(layout, pages)
        self.forward, self.reader = Forward(rig), Forward(rig)
        self._random = np.random.default_rng(5)
        self._indices: list[torch.Tensor] = []

    def some_pages(self) -> tuple[np.ndarray, np.ndarray]:
        """Return half of the pages of each pool."""
        both = [self._random.permutation(self.pages)[: self.pages // 2].astype(np.int64) for _ in range(2)]
        return both[0], both[1]

    def fill_device(self, pages: np.ndarray, value: int) -> Callable[[], None]:
        """Return a kernel that writes pages as a forward pass does."""
        index = self._index(pages)

        def fill() -> None:
            for row in self.device.rows:
                row.index_fill_(0, index, value)

        return fill

    def read_device(self, pages: np.ndarray, seen: list[torch.Tensor], layer: int | None = None) -> Callable[[], None]:
        """Return a kernel that reads pages as a forward pass does."""
        index = self._index(pages)
        rows = self.device.rows if layer is None else self.device.rows[2 * layer : 2 * layer + 2]
        return lambda: seen.extend(row.index_select(0, index) for row in rows)

    def _index(self, pages: np.ndarray) -> torch.Tensor:
        """Bring page ids to the device before this returns: other streams read them, at any later time.

        They are kept: torch would reuse their memory once no kernel of this thread's own stream needs it.
        """
        index = torch.from_numpy(pages).to(self.rig.device)
        self._indices.append(index)
        if index.is_cuda:
            torch.cuda.current_stream(index.device).synchronize()
        return index


async def stores(order: Order, form: str, rounds: int) -> int:
    """Store pages that the forward pass is about to write, and write them again at once. Counts wrong rounds."""
    wrong = 0
    async with order.rig.copier(order.device, order.host, form) as copier:
        for number in range(rounds):
            above, below = order.some_pages()
            fill = order.fill_device(above, number % 200 + 1)
            order.rig.synchronize()
            order.forward.spin(SPIN_MS)
            order.forward.do(fill)
            with order.forward.current():
                storing = copier.to_host(above, below)
            await storing
            # The page is free now, and the next user writes to it while the bytes below are looked at.
            order.forward.do(order.fill_device(above, 255))
            wrong += not (order.host.buffer[below] == number % 200 + 1).all().item()
    order.rig.synchronize()
    return wrong


async def loads(order: Order, form: str, rounds: int) -> int:
    """Load into pages that the forward pass still has to read. Counts wrong rounds."""
    wrong = 0
    async with order.rig.copier(order.device, order.host, form) as copier:
        for number in range(rounds):
            above, below = order.some_pages()
            order.forward.do(order.fill_device(above, 255))
            order.rig.synchronize()
            order.host.buffer[below] = number % 200 + 1
            seen: list[torch.Tensor] = []
            read = order.read_device(above, seen)
            order.forward.spin(SPIN_MS)
            order.forward.do(read)
            with order.forward.current():
                loading = copier.to_device(below, above)
            await loading
            after: list[torch.Tensor] = []
            order.forward.do(order.read_device(above, after))
            order.rig.synchronize()
            wrong += not (
                all((row == 255).all() for row in seen) and all((row == number % 200 + 1).all() for row in after)
            )
    return wrong


async def layers(order: Order, form: str, rounds: int) -> int:
    """Read each layer on the stream of the forward pass as soon as its mark allows. Counts wrong rounds."""
    wrong = 0
    async with order.rig.copier(order.device, order.host, form) as copier:
        for number in range(rounds):
            above, below = order.some_pages()
            order.reader.do(order.fill_device(above, 255))
            order.rig.synchronize()
            order.host.buffer[below] = number % 200 + 1
            seen: list[torch.Tensor] = []
            reads = [order.read_device(above, seen, layer) for layer in range(len(order.device.k))]
            # The copy is held back by the work of another stream, so that a reader that does not wait is too early.
            order.forward.spin(SPIN_MS)
            with order.forward.current():
                copy = copier.to_device_by_layer(below, above)
            await copy.launched
            for layer, read in enumerate(reads):
                with order.reader.current():
                    copy.follow(layer)
                order.reader.do(read)
            await copy.done
            order.rig.synchronize()
            wrong += not all((row == number % 200 + 1).all() for row in seen)
    return wrong


async def both_ways(order: Order, form: str, rounds: int) -> int:
    """Store half of the pages and load the other half at once, behind a spinning forward pass. Counts wrong rounds."""
    wrong = 0
    half = order.pages // 2
    async with order.rig.copier(order.device, order.host, form) as copier:
        for number in range(rounds):
            device = order._random.permutation(order.pages).astype(np.int64)
            host = order._random.permutation(order.pages).astype(np.int64)
            up, down = (host[:half], device[:half]), (host[half:], device[half:])
            stored, loaded = number % 100 + 1, number % 100 + 101
            order.rig.synchronize()
            order.host.buffer[up[0]] = loaded
            order.forward.spin(SPIN_MS / 4)
            order.forward.do(order.fill_device(down[1], stored))
            with order.forward.current():
                copies = [copier.to_device(up[0], up[1]), copier.to_host(down[1], down[0])]
            await asyncio.gather(*copies)
            after: list[torch.Tensor] = []
            order.forward.do(order.read_device(up[1], after))
            order.forward.do(order.fill_device(down[1], 255))
            wrong += not (order.host.buffer[down[0]] == stored).all().item()
            order.rig.synchronize()
            wrong += not all((row == loaded).all() for row in after)
    return wrong


class SlowPieces:
    """Spreads and gathers late, so that a slot which is not waited for is read or overwritten before."""

    def __init__(self, pieces: Pieces, device: torch.device) -> None:
        self._pieces = pieces
        self._device = device

    def move(self, pages: torch.Tensor, pairs: PagePairs, part: range, *, to_rows: bool) -> None:
        """Spin, and move."""
        if self._device.type == "cuda":
            torch.cuda._sleep(int(SLOW_MS * CYCLES_PER_MS))  # type: ignore[no-untyped-call]  # A kernel that only takes time.
        else:
            time.sleep(SLOW_MS / 1000)
        self._pieces.move(pages, pairs, part, to_rows=to_rows)


async def slots(order: Order, _: str, rounds: int) -> int:
    """Copy many times what is staged, with gathers that are later than the bus. Counts wrong rounds."""
    wrong = 0
    lane = order.rig.streams.make()
    pieces = SlowPieces(IndexPieces(order.device), order.rig.device)
    mover = StagedMover(
        order.device,
        order.host,
        streams=order.rig.streams,
        pieces=pieces,
        copies=stretch_copies(order.rig.device),
        slot_bytes=2 * order.device.layout.page_bytes,
    )
    random = torch.Generator().manual_seed(3)
    for _number in range(rounds):
        above, below = order.some_pages()
        shape = (len(below), order.device.layout.page_bytes)
        wanted = torch.randint(0, 256, shape, dtype=torch.uint8, generator=random)
        order.host.write_pages(below, wanted)
        order.rig.synchronize()
        lane.run(partial(mover.to_device, below, above))
        lane.mark().wait()
        # In the lane's own order: whatever is missing now was not waited for.
        seen: list[torch.Tensor] = []
        order.forward.do(partial(lambda seen, above: seen.append(order.device.read_pages(above)), seen, above))
        order.forward.synchronize()
        wrong += not torch.equal(seen[0].cpu(), wanted)
        order.rig.synchronize()
        lane.run(partial(mover.to_host, above, below[::-1].copy()))
        lane.mark().wait()
        wrong += not torch.equal(order.host.read_pages(below[::-1].copy()), wanted)
        order.rig.synchronize()
    return wrong


@contextmanager
def lane_without_wait(order: Order) -> Iterator[None]:
    """Take out the wait of a lane for the work of its caller's stream: it follows an idle one."""
    submit, idle = StreamLane.submit, Forward(order.rig)

    def planted(*arguments: object, **options: object) -> object:
        with idle.current():
            return submit(*arguments, **options)  # type: ignore[arg-type]  # They are passed on as they are.

    with patch.object(StreamLane, "submit", planted):
        yield


@contextmanager
def layers_without_wait(_: Order) -> Iterator[None]:
    """Take out the wait of a reader for a layer."""
    with patch.object(LayeredCopy, "follow", lambda *_: None):
        yield


@contextmanager
def streams_without_wait(_: Order) -> Iterator[None]:
    """Take out every wait of one stream for another."""
    with (
        patch.object(CudaStream, "follow", lambda *_: None),
        patch.object(ThreadStream, "follow", lambda *_: None),
    ):
        yield


Check = Callable[[Order, str, int], Coroutine[object, object, int]]
Plant = Callable[[Order], AbstractContextManager[None]]
CHECKS: tuple[tuple[str, Check, Plant | None, tuple[str, ...]], ...] = (
    ("a store waits for the forward pass that writes the pages", stores, lane_without_wait, FORMS),
    ("a load waits for the forward pass that reads the pages", loads, lane_without_wait, FORMS),
    ("a forward pass reads a layer once it is there", layers, layers_without_wait, FORMS),
    ("staged slots are waited for", slots, streams_without_wait, (ASYNC,)),
    ("stores and loads at once, pages reused at once", both_ways, None, FORMS),
)


def run(setting: Setting, report: Report) -> None:
    """Check every rule, and that its check sees a wait that is missing."""
    rig = CopyRig(setting)
    for what, check, plant, forms in CHECKS:
        for form in forms:
            if rig.has_form(form):
                check_rule(setting, report, rig, what, form, check, plant)
            else:
                report.note(f"{what}, {form}: there is no Triton")
    rig.close()


def check_rule(
    setting: Setting, report: Report, rig: CopyRig, what: str, form: str, check: Check, plant: Plant | None
) -> None:
    """Check one rule in one form, then with its wait taken out."""
    rounds, tries = (3, 2) if setting.short else (25, 5)
    order = Order(rig, pages=16 if setting.short else 128, layers=2 if setting.short else 8)
    with report.checking(f"{what}, {form}, {rounds} rounds"):
        wrong = asyncio.run(check(order, form, rounds))
        if wrong:
            raise RuntimeError(f"{wrong} wrong in {rounds} rounds")
    if plant is None:
        return
    with report.checking(f"planted: without that wait the check fails, {form}"):
        with plant(order):
            wrong = asyncio.run(check(order, form, tries))
        rig.synchronize()
        if not wrong:
            raise RuntimeError(f"it was not seen in {tries} rounds")
