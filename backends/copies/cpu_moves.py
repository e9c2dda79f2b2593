"""Movement of whole pages between a device pool and a host pool by the CPU, without threads or state.

Measured on two cores: one numpy assignment for each run reaches memcpy's speed; torch's index_select and index_copy_
reach a quarter of it; memmove by ctypes loses to its call overhead below 64 KiB a piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeAlias

import numpy as np

from tidekv.backends.copies.pieces import layer_count
from tidekv.backends.copies.streams import InlineMark, Mark
from tidekv.backends.device.pool import DevicePool, PoolGroup
from tidekv.backends.host.pool import HostPool
from tidekv.backends.memory import PageIndex, consecutive
from tidekv.backends.page_layout import group_offsets

# Separate tensors need one assignment for each run and piece. Below this many bytes for each on average, one gather and
# scatter for each piece is cheaper, though it moves each byte twice.
ASSIGNMENT_BYTES_MIN: Final = 8192
Runs: TypeAlias = Sequence[tuple[int, int, int]]


def page_runs(first: PageIndex, second: PageIndex) -> Iterator[tuple[int, int, int]]:
    """Yield (start in first, start in second, count) of the stretches that are consecutive in both."""
    if len(first) < 2:
        yield from ((int(one), int(other), 1) for one, other in zip(first, second, strict=True))
        return
    yield from zip(*(part.tolist() for part in consecutive(first, second)), strict=True)


class PageMover:
    """Moves pages between a device pool in host memory and a host pool of the same layout; blocks until done."""

    def __init__(self, device: DevicePool, host: HostPool) -> None:
        starts = [start for _, start in group_offsets(host.layout)]
        self._groups = [_GroupMover(group, host, start) for group, start in zip(device.groups, starts, strict=True)]
        self._layers = layer_count(device)
        self.steps_a_page = sum(group.steps_a_page for group in self._groups)
        """Assignments for one page without neighbors."""

    def to_device(self, host_pages: PageIndex, device_pages: PageIndex) -> None:
        """Copy host pages to device pages, pairwise."""
        runs = list(page_runs(host_pages, device_pages))
        for group in self._groups:
            group.to_device(host_pages, device_pages, runs)

    def to_device_by_layer(
        self, host_pages: PageIndex, device_pages: PageIndex, on_layer: Callable[[Mark], None]
    ) -> None:
        """Copy host pages to device pages, pairwise, layer 0 of all pages first; calls `on_layer` after each layer."""
        runs = list(page_runs(host_pages, device_pages))
        for layer in range(self._layers):
            for group in self._groups:
                group.layer_to_device(host_pages, device_pages, runs, layer)
            on_layer(InlineMark())

    def to_host(self, device_pages: PageIndex, host_pages: PageIndex) -> None:
        """Copy device pages to host pages, pairwise."""
        runs = list(page_runs(device_pages, host_pages))
        for group in self._groups:
            group.to_host(device_pages, host_pages, runs)


class PageCloner:
    """Copies pages within a device pool in host memory; blocks until done."""

    def __init__(self, device: DevicePool) -> None:
        self._rows = [row.numpy() for row in device.rows]
        self.steps_a_page = len(self._rows)
        """Assignments for one page without neighbors."""

    def clone(self, sources: PageIndex, targets: PageIndex) -> None:
        """Copy pages to other pages, pairwise."""
        for row in self._rows:
            for source, target, count in page_runs(sources, targets):
                row[target : target + count] = row[source : source + count]


class _GroupMover:
    """Moves the part of each page that belongs to one group of layers; it starts at byte `start` of a host page."""

    def __init__(self, group: PoolGroup, host: HostPool, start: int) -> None:
        layout = group.layout
        self._piece_bytes = layout.piece_bytes
        self._layers, self._pieces_a_layer = layout.num_layers, layout.tensors_per_layer
        self._rows = [row.numpy() for row in group.rows]
        self._block = None if group.block is None else group.block.numpy()
        # [pages, pieces, piece_bytes], and the same seen piece by piece; a view, since only the last axis is cut.
        columns = host.array[:, start : start + layout.page_bytes]
        self._pages = columns.reshape(host.num_pages, layout.piece_count, layout.piece_bytes)
        assert np.shares_memory(self._pages[:1], columns[:1]), "copies go to the pool's own memory"
        self._parts = [self._pages[:, piece] for piece in range(layout.piece_count)]
        self.steps_a_page = len(self._rows) if self._block is None else 1

    def to_device(self, host_pages: PageIndex, device_pages: PageIndex, runs: Runs) -> None:
        if self._block is not None:
            for source, target, count in runs:
                self._block[:, target : target + count] = self._pages[source : source + count].swapaxes(0, 1)
        else:
            self._pieces_to_device(range(len(self._rows)), host_pages, device_pages, runs)

    def layer_to_device(self, host_pages: PageIndex, device_pages: PageIndex, runs: Runs, layer: int) -> None:
        """Copy one layer; nothing if the group has fewer."""
        if layer < self._layers:
            pieces = range(layer * self._pieces_a_layer, (layer + 1) * self._pieces_a_layer)
            self._pieces_to_device(pieces, host_pages, device_pages, runs)

    def _pieces_to_device(self, pieces: range, host_pages: PageIndex, device_pages: PageIndex, runs: Runs) -> None:
        is_worth_assigning = self._worth_assigning(len(runs), len(host_pages))
        for piece in pieces:
            row, part = self._rows[piece], self._parts[piece]
            if not is_worth_assigning:
                row[device_pages] = part[host_pages]
                continue
            for source, target, count in runs:
                row[target : target + count] = part[source : source + count]

    def to_host(self, device_pages: PageIndex, host_pages: PageIndex, runs: Runs) -> None:
        if self._block is not None:
            for source, target, count in runs:
                self._pages[target : target + count] = self._block[:, source : source + count].swapaxes(0, 1)
        elif self._worth_assigning(len(runs), len(host_pages)):
            for row, part in zip(self._rows, self._parts, strict=True):
                for source, target, count in runs:
                    part[target : target + count] = row[source : source + count]
        else:
            for row, part in zip(self._rows, self._parts, strict=True):
                part[host_pages] = row[device_pages]

    def _worth_assigning(self, run_count: int, page_count: int) -> bool:
        return page_count * self._piece_bytes >= run_count * ASSIGNMENT_BYTES_MIN
