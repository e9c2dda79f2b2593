"""The async form of copies: pages cross the bus by asynchronous copies, and are spread or gathered in device memory.

Scattered pieces would be thousands of small copies over the bus. Instead whole pages cross it, in as few stretches as
the host pages allow, and the rest is done in fast device memory:

    to device    host stretches ──bus──▶ staged [pages, page_bytes] ──spread──▶ each piece's tensor
    to host      each piece's tensor ──gather──▶ staged ──bus──▶ host stretches

Each direction has a few slots, each with staged memory and a stream of its own, which take the parts of a copy in turn.
While one slot is spread, the others keep the bus busy; and copies of several streams overlap on the bus, which short
stretches need: one stream moves stretches of 256 KiB at 83 % of the bus, two at 90 % (one H100).

    slot 0   bring part 0 │ spread 0 │ bring part 2 │ spread 2 │ …
    slot 1   bring part 1 │ spread 1 │ bring part 3 │ …

A slot's own stream orders the use of its memory. The slots begin behind the lane's earlier work, and the lane continues
behind all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import torch

from tidekv.backends.copies.pieces import PagePairs, Pieces
from tidekv.backends.copies.streams import Stream, Streams
from tidekv.backends.copies.stretches import StretchCopies, Stretches
from tidekv.backends.device.pool import DevicePool
from tidekv.backends.host.pool import HostPool
from tidekv.backends.memory import PageIndex, consecutive

# Long enough to hide the launch of a part (about 100 µs of CPU) behind its way over the bus (300 µs at 55 GB/s); short,
# because the bus waits for the first part to be gathered, and for the last to be spread.
SLOT_BYTES: Final = 16 << 20
SLOTS: Final = 2


class StagedMover:
    """Enqueues page copies on the current stream; returns before they are done. Works on any torch device.

    Copies of one direction must be enqueued on one stream: they share their slots in its order. Each direction
    allocates its own at its first use.
    """

    def __init__(
        self,
        device: DevicePool,
        host: HostPool,
        *,
        streams: Streams,
        pieces: Pieces,
        copies: StretchCopies,
        slot_bytes: int = SLOT_BYTES,
    ) -> None:
        self._device = device.device
        self._host = host.buffer
        self._streams = streams
        self._pieces = pieces
        self._copies = copies
        self._slot_pages = max(1, slot_bytes // device.layout.page_bytes)
        self._page_bytes = device.layout.page_bytes
        self._up: list[_Slot] = []
        self._down: list[_Slot] = []

    def to_device(self, host_pages: PageIndex, device_pages: PageIndex) -> None:
        """Enqueue copies of host pages to device pages, pairwise."""

        def enqueue(staged: torch.Tensor, pairs: PagePairs, part: range) -> None:
            self._bring(staged, host_pages[part.start : part.stop])
            self._pieces.move(staged, pairs, part, to_rows=True)

        self._move(self._up, device_pages, enqueue)

    def to_host(self, device_pages: PageIndex, host_pages: PageIndex) -> None:
        """Enqueue copies of device pages to host pages, pairwise."""

        def enqueue(staged: torch.Tensor, pairs: PagePairs, part: range) -> None:
            self._pieces.move(staged, pairs, part, to_rows=False)
            self._take(staged, host_pages[part.start : part.stop])

        self._move(self._down, device_pages, enqueue)

    def _move(
        self, slots: list[_Slot], device_pages: PageIndex, enqueue: Callable[[torch.Tensor, PagePairs, range], None]
    ) -> None:
        """Enqueue the parts of a copy on the slots in turn, between the lane's earlier and its later work."""
        count = len(device_pages)
        lane = self._streams.current()
        if not slots:
            # The memory is allocated on the lane, where it may still be in use: the slots begin behind the lane.
            shape = (self._slot_pages, self._page_bytes)
            for _ in range(SLOTS):
                staged = torch.empty(shape, dtype=torch.uint8, device=self._device)
                slots.append(_Slot(self._streams.make(), staged))
        pairs = PagePairs(device_pages, positions(count) % self._slot_pages, self._device)
        lane.run(pairs.upload)
        begin = lane.mark()
        used = slots[: -(-count // self._slot_pages)]
        with ExitStack() as ways_out:
            for slot in used:
                slot.stream.follow(begin)
                # However the copy ends: nothing of it may come after later work of the lane.
                ways_out.callback(_continue_behind, lane, slot)
            for number, start in enumerate(range(0, count, self._slot_pages)):
                slot, part = slots[number % SLOTS], range(start, min(start + self._slot_pages, count))
                slot.stream.run(partial(enqueue, slot.staged, pairs, part))

    def _bring(self, staged: torch.Tensor, host_pages: PageIndex) -> None:
        from_rows, to_rows, counts = consecutive(host_pages, positions(len(host_pages)))
        self._copies.enqueue([Stretches(staged, self._host, to_rows, from_rows, counts)])

    def _take(self, staged: torch.Tensor, host_pages: PageIndex) -> None:
        to_rows, from_rows, counts = consecutive(host_pages, positions(len(host_pages)))
        self._copies.enqueue([Stretches(self._host, staged, to_rows, from_rows, counts)])


@dataclass(frozen=True, slots=True)
class _Slot:
    """Staged memory, uint8 [pages, page_bytes], and the stream that orders its use."""

    stream: Stream
    staged: torch.Tensor


def _continue_behind(lane: Stream, slot: _Slot) -> None:
    lane.follow(slot.stream.mark())


def positions(count: int) -> PageIndex:
    """Return 0 to `count`, as page ids."""
    return np.arange(count, dtype=np.int64)
