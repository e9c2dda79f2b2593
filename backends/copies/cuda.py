"""Copies between a device pool on a GPU and pinned host memory, in one of two forms.

    async    each stretch of host pages crosses by one asynchronous copy, to or from staged pages on the device
    kernel   one launch reads the pinned host pages over the bus, piece by piece

An asynchronous copy keeps the GPU's multiprocessors free and runs at the speed of the bus once it has begun. Its
start-up cost is paid for each stretch of consecutive host pages, so it needs stretches of some length. The kernel
starts once, however scattered the pages are; but its programs occupy multiprocessors for as long as the bus takes.

Copies to the host never take the kernel: multiprocessors that write host memory hold up all other work of the GPU (a
memory-bound step beside them took 1.8 to 1.9 times as long; beside reads, 1.07 times).

All copies are enqueued on the current stream; nothing here waits. In a copy by layers each layer is marked when it was
enqueued, so that a forward pass can follow the first while others still arrive.
"""

from __future__ import annotations

import enum
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from tidekv.backends.copies.pieces import IndexPieces, KernelPieces, Launch, PagePairs, Pieces, layer_count
from tidekv.backends.copies.staged import StagedMover, positions
from tidekv.backends.copies.streams import Mark, Streams, streams_of
from tidekv.backends.copies.stretches import StretchCopies, Stretches, stretch_copies
from tidekv.backends.device.pool import DevicePool
from tidekv.backends.host.pool import HostPool
from tidekv.backends.memory import PageIndex, consecutive
from tidekv.backends.page_layout import group_offsets
from tidekv.states.errors import InvalidConfig

# Where both forms are equally fast to the device: at stretches of 64 KiB on an H100 (`gpu_h100.json` of the results).
KERNEL_BELOW_BYTES: Final = 64 << 10


def triton_launch() -> Launch | None:
    """Return the launch function of the kernel, or None without Triton. Raises what a broken Triton raises."""
    if importlib.util.find_spec("triton") is None:
        return None
    # Imported only when needed: it takes a second, and a CPU has no use for it.
    kernel = importlib.import_module("tidekv.backends.copies.kernel")
    launch: Launch = kernel.launch
    return launch


class CopyForm(enum.Enum):
    """The form in which pages cross the bus."""

    KERNEL = "kernel"
    ASYNC = "async"


@dataclass(frozen=True, slots=True)
class CopyChoice:
    """Chooses the kernel for copies to the device whose stretches of host memory have fewer bytes than this on average.

    0 never chooses it. Raises InvalidConfig for a negative number.
    """

    kernel_below_bytes: int = KERNEL_BELOW_BYTES

    def __post_init__(self) -> None:
        if type(self.kernel_below_bytes) is not int or self.kernel_below_bytes < 0:
            raise InvalidConfig(f"copies: kernel_below_bytes must be an int from 0, not {self.kernel_below_bytes!r}")

    def form(self, *, total_bytes: int, stretch_count: int, has_kernel: bool) -> CopyForm:
        """Return the form for a copy of `total_bytes` in `stretch_count` stretches."""
        if has_kernel and total_bytes < stretch_count * self.kernel_below_bytes:
            return CopyForm.KERNEL
        return CopyForm.ASYNC


OnLayer = Callable[[Mark], None]
"""Receives the mark after each layer, from layer 0 on."""


class KernelMover:
    """The kernel form: one launch for each group, directly from pinned host pages to the pool's tensors."""

    def __init__(self, device: DevicePool, host: HostPool, *, streams: Streams, pieces: KernelPieces) -> None:
        self._device = device
        self._pages = host.buffer
        self._streams = streams
        self._pieces = pieces
        self._layers = layer_count(device)

    def to_device(self, host_pages: PageIndex, device_pages: PageIndex) -> None:
        """Enqueue copies of host pages to device pages, pairwise."""
        pairs = PagePairs(device_pages, host_pages, self._device.device)

        def enqueue() -> None:
            pairs.upload()
            self._pieces.move(self._pages, pairs, range(pairs.count), to_rows=True)

        self._streams.current().run(enqueue)

    def to_device_by_layer(self, host_pages: PageIndex, device_pages: PageIndex, on_layer: OnLayer) -> None:
        """As `to_device`, layer 0 first; calls `on_layer` after each."""
        stream = self._streams.current()
        pairs = PagePairs(device_pages, host_pages, self._device.device)
        stream.run(pairs.upload)
        for layer in range(self._layers):
            stream.run(partial(self._pieces.move_layer, self._pages, pairs, layer, to_rows=True))
            on_layer(stream.mark())

    def warm_up(self) -> None:
        """Compile what the launches need, and move nothing."""
        pairs = PagePairs(positions(1), positions(1), self._device.device)
        stream = self._streams.current()
        stream.run(pairs.upload)
        for to_rows in (True, False):
            stream.run(partial(self._pieces.move, self._pages, pairs, range(0), to_rows=to_rows))


class LayerMover:
    """The async form by layers: an asynchronous copy for each piece of each page, without staging."""

    def __init__(self, device: DevicePool, host: HostPool, *, streams: Streams, copies: StretchCopies) -> None:
        self._streams = streams
        self._copies = copies
        self._rows = [group.rows for group in device.groups]
        self._steps = [group.layout.tensors_per_layer for group in device.groups]
        self._layers = layer_count(device)
        self._parts = [
            [
                host.buffer[
                    :, start + piece * group.layout.piece_bytes : start + (piece + 1) * group.layout.piece_bytes
                ]
                for piece in range(group.layout.piece_count)
            ]
            for group, start in group_offsets(host.layout)
        ]

    def to_device_by_layer(self, host_pages: PageIndex, device_pages: PageIndex, on_layer: OnLayer) -> None:
        """Enqueue copies of host pages to device pages, layer 0 of all pages first; calls `on_layer` after each."""
        stream = self._streams.current()
        for layer in range(self._layers):
            stream.run(partial(self._move_layer, layer, host_pages, device_pages))
            on_layer(stream.mark())

    def _move_layer(self, layer: int, host_pages: PageIndex, device_pages: PageIndex) -> None:
        ones = np.ones(len(host_pages), dtype=np.int64)
        self._copies.enqueue(
            Stretches(row, part, device_pages, host_pages, ones)
            for rows, parts, step in zip(self._rows, self._parts, self._steps, strict=True)
            for row, part in zip(rows[layer * step :][:step], parts[layer * step :][:step], strict=True)
        )


class CudaMover:
    """Chooses a form for each copy. Until `warm_up` has found a kernel, only the async form is available.

    `streams` are those of the device, and `find_launch` looks for Triton, unless a test supplies its own.
    """

    def __init__(
        self,
        device: DevicePool,
        host: HostPool,
        choice: CopyChoice,
        *,
        streams: Streams | None = None,
        find_launch: Callable[[], Launch | None] = triton_launch,
    ) -> None:
        self._device = device
        self._host = host
        self._choice = choice
        self._page_bytes = device.layout.page_bytes
        self._piece_bytes = min(device.layout.pieces)
        self._streams = streams_of(device.device) if streams is None else streams
        self._find_launch = find_launch
        self._copies = stretch_copies(device.device)
        self._staged = self._staged_by(IndexPieces(device))
        self._layers = LayerMover(device, host, streams=self._streams, copies=self._copies)
        self._kernel: KernelMover | None = None

    @property
    def has_kernel(self) -> bool:
        """Whether the kernel form is available."""
        return self._kernel is not None

    def warm_up(self) -> None:
        """Find the kernel and compile it, which takes seconds, off the loop. Raises what that raises; copies then do
        without the kernel, as they do without Triton.
        """
        launch = self._find_launch()
        if launch is None:
            return
        pieces = KernelPieces(self._device, launch)
        kernel = KernelMover(self._device, self._host, streams=self._streams, pieces=pieces)
        kernel.warm_up()
        self._staged = self._staged_by(pieces)
        # Last: the other direction's thread may be choosing right now.
        self._kernel = kernel

    def form(self, host_pages: PageIndex) -> CopyForm:
        """Return the form of a copy of these host pages to the device."""
        _, _, counts = consecutive(host_pages, positions(len(host_pages)))
        total_bytes = len(host_pages) * self._page_bytes
        return self._choice.form(total_bytes=total_bytes, stretch_count=len(counts), has_kernel=self.has_kernel)

    def layer_form(self) -> CopyForm:
        """Return the form of copies by layers: their stretches are pieces, whichever pages they are."""
        return self._choice.form(total_bytes=self._piece_bytes, stretch_count=1, has_kernel=self.has_kernel)

    def to_device(self, host_pages: PageIndex, device_pages: PageIndex) -> None:
        """Enqueue copies of host pages to device pages, pairwise."""
        if not len(host_pages):
            return
        if self._kernel is not None and self.form(host_pages) is CopyForm.KERNEL:
            self._kernel.to_device(host_pages, device_pages)
        else:
            self._staged.to_device(host_pages, device_pages)

    def to_host(self, device_pages: PageIndex, host_pages: PageIndex) -> None:
        """Enqueue copies of device pages to host pages, pairwise."""
        if len(host_pages):
            self._staged.to_host(device_pages, host_pages)

    def to_device_by_layer(self, host_pages: PageIndex, device_pages: PageIndex, on_layer: OnLayer) -> None:
        """Enqueue copies of host pages to device pages, layer 0 of all pages first; calls `on_layer` after each."""
        if len(host_pages) and self._kernel is not None and self.layer_form() is CopyForm.KERNEL:
            self._kernel.to_device_by_layer(host_pages, device_pages, on_layer)
        else:
            self._layers.to_device_by_layer(host_pages, device_pages, on_layer)

    def _staged_by(self, pieces: Pieces) -> StagedMover:
        return StagedMover(self._device, self._host, streams=self._streams, pieces=pieces, copies=self._copies)


class StagedCloner:
    """Enqueues copies within a device pool on the current stream; returns before they are done."""

    def __init__(self, device: DevicePool) -> None:
        self._device = device.device
        self._pieces = IndexPieces(device)

    def clone(self, sources: PageIndex, targets: PageIndex) -> None:
        """Enqueue copies of pages to other pages, pairwise."""
        if not len(sources):
            return
        pairs = PagePairs(sources, targets, self._device)
        pairs.upload()
        self._pieces.clone(pairs)
