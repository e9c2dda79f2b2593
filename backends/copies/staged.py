"""The async form of copies: pages cross the bus by asynchronous copies, and are spread or gathered in device memory.

Scattered pieces would be thousands of small copies over the bus. Instead whole pages cross it, in as few stretches as
the host pages allow, and the rest is done in fast device memory:

    to device    host stretches ──bus──▶ staged [pages, page_bytes] ──spread──▶ each piece's tensor
    to host      each piece's tensor ──gather──▶ staged ──bus──▶ host stretches

Two halves are staged, and two streams at work, so that the bus never waits for a gather:

    lane   bring half 0 │ bring half 1 │ bring half 0 │ …        follows "spread half 0" before it brings it again
    side                │ spread 0     │ spread 1     │ …        follows "brought half 0" before it spreads it
"""

from __future__ import annotations

from functools import partial
from typing import Final

import numpy as np
import torch

from tidekv.backends.copies.cpu_moves import page_runs
from tidekv.backends.copies.pieces import PagePairs, Pieces
from tidekv.backends.copies.streams import Mark, Stream, Streams
from tidekv.backends.device.pool import DevicePool
from tidekv.backends.host.pool import HostPool
from tidekv.backends.memory import PageIndex

# Bytes of one half. Long enough to hide the launch cost (about 50 µs) behind its way over the bus (150 µs at 55 GB/s);
# short, because the bus waits for the first half to be gathered, and for the last to be spread.
HALF_BYTES: Final = 8 << 20


class StagedMover:
    """Enqueues page copies on the current stream; returns before they are done. Works on any torch device.

    Copies of one direction must be enqueued on one stream: they share their halves in its order. Each direction
    allocates its own at its first use.
    """

    def __init__(
        self,
        device: DevicePool,
        host: HostPool,
        *,
        streams: Streams,
        pieces: Pieces,
        half_bytes: int = HALF_BYTES,
    ) -> None:
        self._device = device.device
        self._host = host.buffer
        self._streams = streams
        self._pieces = pieces
        self._half_pages = max(1, half_bytes // device.layout.page_bytes)
        self._page_bytes = device.layout.page_bytes
        self._up = _Staging(streams.make())
        self._down = _Staging(streams.make())

    def to_device(self, host_pages: PageIndex, device_pages: PageIndex) -> None:
        """Enqueue copies of host pages to device pages, pairwise."""
        lane, side = self._streams.current(), self._up.side
        pairs, parts = self._begin(self._up, lane, device_pages)
        spread: list[Mark] = []
        try:
            for number, part in enumerate(parts):
                half = self._up.halves[number % 2]
                if number >= 2:
                    lane.follow(spread[number - 2])
                lane.run(partial(self._bring, half, host_pages[part.start : part.stop]))
                side.follow(lane.mark())
                side.run(partial(self._pieces.move, half, pairs, part, to_rows=True))
                spread.append(side.mark())
        finally:
            # However the copy ends: nothing of it may come after later work of the lane.
            lane.follow(side.mark())

    def to_host(self, device_pages: PageIndex, host_pages: PageIndex) -> None:
        """Enqueue copies of device pages to host pages, pairwise."""
        lane, side = self._streams.current(), self._down.side
        pairs, parts = self._begin(self._down, lane, device_pages)
        taken: list[Mark] = []
        try:
            for number, part in enumerate(parts):
                half = self._down.halves[number % 2]
                if number >= 2:
                    side.follow(taken[number - 2])
                side.run(partial(self._pieces.move, half, pairs, part, to_rows=False))
                lane.follow(side.mark())
                lane.run(partial(self._take, half, host_pages[part.start : part.stop]))
                taken.append(lane.mark())
        finally:
            lane.follow(side.mark())

    def _begin(self, staging: _Staging, lane: Stream, device_pages: PageIndex) -> tuple[PagePairs, list[range]]:
        """Allocate the halves, order `side` behind the lane, and upload the ids."""
        count = len(device_pages)
        if not staging.halves:
            # Allocated within the lane: the memory may still be in use there, and `side` follows it.
            shape = (self._half_pages, self._page_bytes)
            staging.halves = [torch.empty(shape, dtype=torch.uint8, device=self._device) for _ in range(2)]
        staging.side.follow(lane.mark())
        pairs = PagePairs(device_pages, positions(count) % self._half_pages, self._device)
        staging.side.run(pairs.upload)
        starts = range(0, count, self._half_pages)
        return pairs, [range(start, min(start + self._half_pages, count)) for start in starts]

    def _bring(self, half: torch.Tensor, host_pages: PageIndex) -> None:
        for source, target, count in page_runs(host_pages, positions(len(host_pages))):
            half[target : target + count].copy_(self._host[source : source + count], non_blocking=True)

    def _take(self, half: torch.Tensor, host_pages: PageIndex) -> None:
        for target, source, count in page_runs(host_pages, positions(len(host_pages))):
            self._host[target : target + count].copy_(half[source : source + count], non_blocking=True)


class _Staging:
    """One direction's halves, and the stream that spreads or gathers."""

    def __init__(self, side: Stream) -> None:
        self.side = side
        self.halves: list[torch.Tensor] = []


def positions(count: int) -> PageIndex:
    """Return 0 to `count`, as page ids."""
    return np.arange(count, dtype=np.int64)
