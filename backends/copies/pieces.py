"""Movement of pieces between a device pool, where each piece has a tensor, and whole pages that the device can reach.

Two ways that move the same bytes: one launch of a Triton kernel for each group of layers, and torch's gather and
scatter, a launch for each piece. Both enqueue on the current stream, and return before anything is moved.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from tidekv.backends.device.pool import DevicePool, PoolGroup
from tidekv.backends.memory import PageIndex
from tidekv.backends.page_layout import group_offsets
from tidekv.states.errors import InvalidRequest

ELEMENTS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
# Bytes that one thread loads at a time, if addresses allow it.
VECTOR_BYTES = 16


class PagePairs:
    """Pairs of pages of the tensors and whole pages. `upload` copies the ids to the device.

    Call it within the stream that uses them: their memory may be reused in that stream's order.
    """

    def __init__(self, rows: PageIndex, pages: PageIndex, device: torch.device) -> None:
        self.count = len(rows)
        # An even number of ids, so that both lists are aligned to 16 bytes: Triton compiles another kernel for a
        # pointer that is not.
        self._ids = np.zeros((2, self.count + self.count % 2), dtype=np.int64)
        self._ids[0, : self.count], self._ids[1, : self.count] = rows, pages
        self._device = device
        self._uploaded: torch.Tensor | None = None

    def upload(self) -> None:
        """Enqueue the copy of the ids to the device."""
        ids = torch.from_numpy(self._ids)
        if self._device.type == "cuda":
            # From pageable memory the driver would first wait, on this thread, for all earlier work of the stream.
            ids = ids.pin_memory().to(self._device, non_blocking=True)
        self._uploaded = ids

    @property
    def rows(self) -> torch.Tensor:
        """Ids of pages in the tensors, int64 [count]."""
        assert self._uploaded is not None, "upload comes first"
        return self._uploaded[0, : self.count]

    @property
    def pages(self) -> torch.Tensor:
        """Ids of whole pages, int64 [count]."""
        assert self._uploaded is not None, "upload comes first"
        return self._uploaded[1, : self.count]


@dataclass(frozen=True, slots=True)
class PieceShape:
    """Layout of a group's pieces, in bytes. `aligned`: all addresses are multiples of VECTOR_BYTES."""

    element_bytes: int
    piece_bytes: int
    page_bytes: int
    start_bytes: int
    aligned: bool


class Launch(Protocol):
    """`tidekv.backends.copies.kernel.launch`."""

    def __call__(
        self,
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
        """Enqueue the copy of these pieces of these pairs."""


class Pieces(Protocol):
    """One way to move pieces."""

    def move(self, pages: torch.Tensor, pairs: PagePairs, part: range, *, to_rows: bool) -> None:
        """Enqueue copies between the pairs `part` of the pool's tensors and `pages`, uint8 [n, page_bytes], which the
        device can reach and which hold all pages of the pairs.
        """


class KernelPieces:
    """By the kernel. The whole pages may lie in device memory or in pinned host memory."""

    def __init__(self, device: DevicePool, launch: Launch) -> None:
        self._launch = launch
        self._groups = [
            (
                torch.tensor([row.data_ptr() for row in group.rows], dtype=torch.int64, device=device.device),
                _shape(group, page_bytes=device.layout.page_bytes, start_bytes=start),
            )
            for group, (_, start) in zip(device.groups, group_offsets(device.layout), strict=True)
        ]
        self._layers = [(group.layout.num_layers, group.layout.tensors_per_layer) for group in device.groups]

    def move(self, pages: torch.Tensor, pairs: PagePairs, part: range, *, to_rows: bool) -> None:
        """Enqueue one launch for each group."""
        for addresses, shape in self._groups:
            self._start(addresses, shape, pages, pairs, part, range(len(addresses)), to_rows=to_rows)

    def move_layer(self, pages: torch.Tensor, pairs: PagePairs, layer: int, *, to_rows: bool) -> None:
        """Enqueue one layer of all pairs: that of each group which has as many."""
        for (addresses, shape), (layer_count, step) in zip(self._groups, self._layers, strict=True):
            if layer < layer_count:
                pieces = range(layer * step, (layer + 1) * step)
                self._start(addresses, shape, pages, pairs, range(pairs.count), pieces, to_rows=to_rows)

    def _start(
        self,
        addresses: torch.Tensor,
        shape: PieceShape,
        pages: torch.Tensor,
        pairs: PagePairs,
        part: range,
        pieces: range,
        *,
        to_rows: bool,
    ) -> None:
        elements = pages.view(ELEMENTS[shape.element_bytes])
        self._launch(
            addresses, elements, pairs.rows, pairs.pages, pairs=part, pieces=pieces, shape=shape, to_rows=to_rows
        )


class IndexPieces:
    """By torch. The whole pages are staged on the device, in the order of the pairs: pair `part[i]` is page i."""

    def __init__(self, device: DevicePool) -> None:
        # The widest elements that all pieces allow: a thread of torch's gather moves one.
        aligned = all(row.shape[1] % 8 == 0 and row.storage_offset() % 8 == 0 for row in device.rows)
        self._element = torch.int64 if aligned else torch.uint8
        self._rows = [row.view(self._element) for row in device.rows]
        self._widths = [row.shape[1] for row in self._rows]

    def move(self, pages: torch.Tensor, pairs: PagePairs, part: range, *, to_rows: bool) -> None:
        """Enqueue a gather or scatter for each piece."""
        index = pairs.rows[part.start : part.stop]
        staged = torch.split_with_sizes(pages[: len(part)].view(self._element), self._widths, dim=1)
        for row, piece in zip(self._rows, staged, strict=True):
            if to_rows:
                row.index_copy_(0, index, piece)
            else:
                piece.copy_(row.index_select(0, index))

    def clone(self, pairs: PagePairs) -> None:
        """Enqueue copies within the tensors: from the pairs' rows to the rows of their pages."""
        for row in self._rows:
            row.index_copy_(0, pairs.pages, row.index_select(0, pairs.rows))


def layer_count(device: DevicePool) -> int:
    """Return the number of layers of the deepest group."""
    return max(group.layout.num_layers for group in device.layout.groups)


def check_layer(layer: int, *, of: int) -> None:
    """Raise InvalidRequest for a layer that does not exist."""
    if not 0 <= layer < of:
        raise InvalidRequest(f"copy by layers: layers are 0 to {of - 1}; layer {layer} is not one")


def _shape(group: PoolGroup, *, page_bytes: int, start_bytes: int) -> PieceShape:
    addresses = [row.data_ptr() for row in group.rows]
    piece_bytes = group.layout.piece_bytes
    common = math.gcd(piece_bytes, page_bytes, start_bytes, *addresses)
    return PieceShape(
        element_bytes=math.gcd(common, max(ELEMENTS)),
        piece_bytes=piece_bytes,
        page_bytes=page_bytes,
        start_bytes=start_bytes,
        aligned=all(address % VECTOR_BYTES == 0 for address in addresses),
    )
