"""Copies between a device pool on a GPU and pinned host memory: launched on a stream of their own, ended by an event.

Scattered pages would be thousands of small copies over PCIe. Instead a block of pages is gathered in device memory,
where that is cheap, and crosses the bus in as few stretches as the host pages allow:

    to device    host runs ──DMA──▶ staging [pages, page_bytes] ──scatter──▶ each piece's tensor
    to host      each piece's tensor ──gather──▶ staging ──DMA──▶ host runs

Staging comes from torch's caching allocator within the stream, so it is reused in stream order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch

from tidekv.backends.device import DevicePool
from tidekv.backends.host import HostPool
from tidekv.backends.memory import PageIndex
from tidekv.backends.moves import page_runs
from tidekv.states.errors import CopyFailed

STAGING_BYTES: Final = 32 << 20


class StagedMover:
    """Enqueues page copies on the current stream; returns before they are done. Works on any torch device."""

    def __init__(self, device: DevicePool, host: HostPool, *, staging_bytes: int = STAGING_BYTES) -> None:
        layout = device.layout
        self._device = device.device
        self._host = host.buffer
        self._page_bytes = layout.page_bytes
        self._block_pages = max(1, staging_bytes // layout.page_bytes)
        self._element, self._rows = _wide_rows(device)
        self._widths = [row.shape[1] for row in self._rows]

    def to_device(self, host_pages: PageIndex, device_pages: PageIndex) -> None:
        """Enqueue copies of host pages to device pages, pairwise."""
        for start in range(0, len(host_pages), self._block_pages):
            part = slice(start, start + self._block_pages)
            staging = self._staging(len(host_pages[part]))
            for source, target, count in page_runs(host_pages[part], _positions(host_pages[part])):
                staging[target : target + count].copy_(self._host[source : source + count], non_blocking=True)
            index = _upload(self._device, device_pages[part])
            for row, piece in zip(self._rows, self._pieces(staging), strict=True):
                row.index_copy_(0, index, piece)

    def to_host(self, device_pages: PageIndex, host_pages: PageIndex) -> None:
        """Enqueue copies of device pages to host pages, pairwise."""
        for start in range(0, len(device_pages), self._block_pages):
            part = slice(start, start + self._block_pages)
            staging = self._staging(len(device_pages[part]))
            index = _upload(self._device, device_pages[part])
            for row, piece in zip(self._rows, self._pieces(staging), strict=True):
                piece.copy_(row.index_select(0, index))
            for target, source, count in page_runs(host_pages[part], _positions(host_pages[part])):
                self._host[target : target + count].copy_(staging[source : source + count], non_blocking=True)

    def _staging(self, page_count: int) -> torch.Tensor:
        return torch.empty(page_count, self._page_bytes, dtype=torch.uint8, device=self._device)

    def _pieces(self, staging: torch.Tensor) -> Sequence[torch.Tensor]:
        """The pieces of staged pages, each [pages, elements of the piece]."""
        return torch.split_with_sizes(staging.view(self._element), self._widths, dim=1)


class StagedCloner:
    """Enqueues copies within a device pool on the current stream; returns before they are done. As StagedMover."""

    def __init__(self, device: DevicePool) -> None:
        self._device = device.device
        _, self._rows = _wide_rows(device)

    def clone(self, sources: PageIndex, targets: PageIndex) -> None:
        """Enqueue copies of pages to other pages, pairwise."""
        source, target = _upload(self._device, sources), _upload(self._device, targets)
        for row in self._rows:
            row.index_copy_(0, target, row.index_select(0, source))


class CudaCopy:
    """One copy as a Pollable: `launch` enqueues it on `stream`, behind the caller's work up to `after`."""

    rounds: Final = 0

    def __init__(self, *, stream: torch.cuda.Stream, after: torch.cuda.Event, launch: Callable[[], None]) -> None:
        self._stream = stream
        self._after = after
        self._launch: Callable[[], None] | None = launch
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no types for it.
        self._error: Exception | None = None

    def post(self) -> bool:
        """Enqueue the copy and the event that ends it."""
        assert self._launch is not None
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._after)
            try:
                self._launch()
            except Exception as error:  # Part of it may be running: the event still has to come first.
                self._error = error
            self._done.record(self._stream)
        return False

    def check(self) -> bool:
        """True once all of it is done; CopyFailed then, if not all of it could be enqueued."""
        try:
            done = bool(self._done.query())  # type: ignore[no-untyped-call]  # As above.
        except RuntimeError as error:
            raise CopyFailed(f"the GPU reported an error during a page copy: {error}") from error
        if done and self._error is not None:
            raise CopyFailed(f"a page copy could not be launched: {self._error}") from self._error
        return done

    def release(self) -> None:
        """Let go of the pages' indices."""
        self._launch = None


def _positions(pages: PageIndex) -> PageIndex:
    return np.arange(len(pages), dtype=np.int64)


def _wide_rows(device: DevicePool) -> tuple[torch.dtype, list[torch.Tensor]]:
    """The pool's rows in the widest elements that all have: a thread of the gather kernel moves one element."""
    aligned = all(row.shape[1] % 8 == 0 and row.storage_offset() % 8 == 0 for row in device.rows)
    element = torch.int64 if aligned else torch.uint8
    return element, [row.view(element) for row in device.rows]


def _upload(device: torch.device, pages: PageIndex) -> torch.Tensor:
    index = torch.from_numpy(np.ascontiguousarray(pages))
    if device.type != "cuda":
        return index
    # From pageable memory the driver would first wait for all that the stream waits for, with the poller in it.
    return index.pin_memory().to(device, non_blocking=True)
