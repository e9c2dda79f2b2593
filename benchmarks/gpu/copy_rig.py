"""A copier in one form, and a forward pass beside it, on a GPU or on streams that stand in for it."""

from __future__ import annotations

import ctypes
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from unittest.mock import patch

import torch

from benchmarks.gpu.report import Setting
from benchmarks.gpu.thread_streams import ThreadStream, ThreadStreams
from tidekv.backends.copies import copier as copier_module
from tidekv.backends.copies.copier import PageCopier
from tidekv.backends.copies.cuda import CopyChoice, CudaMover, triton_launch
from tidekv.backends.copies.lanes import TO_DEVICE, TO_HOST, CopyLanes
from tidekv.backends.copies.pieces import Launch, PieceShape
from tidekv.backends.copies.stream_lane import StreamLane
from tidekv.backends.copies.streams import Streams, streams_of
from tidekv.backends.device.pool import DevicePool
from tidekv.backends.host.pool import HostPool

KERNEL, ASYNC = "kernel", "async"
FORMS = (KERNEL, ASYNC)
ALWAYS, NEVER = 1 << 60, 0
CYCLES_PER_MS = 2_000_000


class CopyRig:
    """Streams of the device, real or stood in for. `close` it at the end."""

    def __init__(self, setting: Setting) -> None:
        self.device = setting.device
        self.stand_ins = None if setting.on_cuda else ThreadStreams()
        self.streams: Streams = streams_of(self.device) if self.stand_ins is None else self.stand_ins

    def has_form(self, form: str) -> bool:
        """Whether copies of this form can be made here."""
        return form == ASYNC or self.stand_ins is not None or triton_launch() is not None

    @property
    def find_launch(self) -> Callable[[], Launch | None]:
        """Where the kernel comes from: from Triton, or from a loop of memmove."""
        return triton_launch if self.stand_ins is None else lambda: memmove_launch

    @asynccontextmanager
    async def copier(self, device: DevicePool, host: HostPool, form: str | None) -> AsyncIterator[PageCopier]:
        """A started copier of one form, with its kernel compiled; None: the form that it chooses."""
        choice = CopyChoice() if form is None else CopyChoice(ALWAYS if form == KERNEL else NEVER)
        if self.stand_ins is None:
            copier = PageCopier(device, host, choice=choice)
            copier.start()
            await copier.to_device([], [])
            if form == KERNEL and copier.statistics().kernel != "ready":
                raise RuntimeError(f"the kernel is {copier.statistics().kernel}")
            yield copier
            await copier.close()
            return
        # A copier of pools in host memory has no streams: it gets the movers and the lanes of a GPU.
        lanes = StandInLanes(self.stand_ins)
        lanes.start()
        copier = PageCopier(device, host, lanes=lanes, choice=choice)
        copier._mover = CudaMover(device, host, choice, streams=self.streams, find_launch=self.find_launch)
        copier._small_pages_max = 0
        with patch.object(copier_module, "streams_of", lambda _: self.streams):
            copier.start()
            await copier.to_device([], [])
            yield copier
            await copier.close()
        await lanes.close()

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        if self.stand_ins is None:
            torch.cuda.synchronize(self.device)
        else:
            self.stand_ins.synchronize()

    def close(self) -> None:
        """End the stand-ins."""
        if self.stand_ins is not None:
            self.stand_ins.close()


class Forward:
    """The stream of a model's forward pass: kernels that spin, and work behind them."""

    def __init__(self, rig: CopyRig) -> None:
        self._rig = rig
        self._cuda = torch.cuda.Stream(rig.device) if rig.stand_ins is None else None  # type: ignore[no-untyped-call]  # torch has no types for it.
        self._thread: ThreadStream | None = rig.stand_ins.make() if rig.stand_ins is not None else None

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make it the current stream of this thread: copies that are submitted then follow its work."""
        if self._cuda is not None:
            with torch.cuda.stream(self._cuda):
                yield
        else:
            assert self._rig.stand_ins is not None and self._thread is not None
            with self._rig.stand_ins.using(self._thread):
                yield

    def do(self, work: Callable[[], object]) -> None:
        """Enqueue work."""
        if self._cuda is not None:
            with torch.cuda.stream(self._cuda):
                work()
        else:
            assert self._thread is not None
            self._thread.enqueue(work)

    def spin(self, ms: float) -> None:
        """Enqueue a kernel that spins."""
        if self._cuda is not None:
            self.do(partial(torch.cuda._sleep, int(ms * CYCLES_PER_MS)))
        else:
            self.do(partial(time.sleep, ms / 1000))

    def synchronize(self) -> None:
        """Wait for its end."""
        if self._cuda is not None:
            self._cuda.synchronize()
        else:
            assert self._thread is not None
            self._thread.mark().wait()


class StandInLanes(CopyLanes):
    """The lanes of a GPU, on streams that stand in for its own."""

    def __init__(self, streams: ThreadStreams) -> None:
        super().__init__(torch.device("cpu"), inline_turn_s=0)
        self._streams = streams

    def start(self) -> None:
        """Start both directions."""
        for direction in (TO_DEVICE, TO_HOST):
            self._lanes[direction] = StreamLane(self._streams, name=f"tidekv-copy-{direction}")


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
    """Do what the kernel does, a piece at a time."""
    rows, wholes, starts = row_ids.tolist(), page_ids.tolist(), addresses.tolist()
    for pair in pairs:
        whole = pages.data_ptr() + wholes[pair] * shape.page_bytes + shape.start_bytes
        for piece in pieces:
            row = starts[piece] + rows[pair] * shape.piece_bytes
            page = whole + piece * shape.piece_bytes
            ctypes.memmove(*((row, page) if to_rows else (page, row)), shape.piece_bytes)
