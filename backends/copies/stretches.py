"""Asynchronous copies of stretches of rows over the bus: many in one call of the driver, or one by one.

A copy engine moves each stretch; multiprocessors take no part. One call of torch costs the CPU 14 µs for each stretch
and keeps the bus idle between stretches below 1 MiB; a call of `cudaMemcpyBatchAsync` costs 1 to 1.5 µs for each
(one H100). The batch needs NVIDIA's `cuda-bindings`, which comes with torch's CUDA builds, and a driver for CUDA 12.8;
without them stretches are copied one by one.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from tidekv.backends.memory import PageIndex

BATCHES_SINCE: Final = 12080  # CUDA 12.8, as cudaDriverGetVersion counts.


@dataclass(frozen=True, slots=True)
class Stretches:
    """Copies of rows of `source` to rows of `target`, uint8 [rows, width] both.

    Stretch i copies `counts[i]` rows that begin at row `from_rows[i]` of the source and at row `to_rows[i]` of the
    target. The two tensors must live until the copies have ended.
    """

    target: torch.Tensor
    source: torch.Tensor
    to_rows: PageIndex
    from_rows: PageIndex
    counts: PageIndex


class StretchCopies(Protocol):
    """A way to enqueue copies of stretches."""

    def enqueue(self, copies: Iterable[Stretches]) -> None:
        """Enqueue the copies on the current stream, in any order among themselves. Raises what the device reports."""


class SingleCopies:
    """One call of torch for each stretch; on any device."""

    def enqueue(self, copies: Iterable[Stretches]) -> None:
        """See `StretchCopies.enqueue`."""
        for one in copies:
            rows = zip(one.to_rows.tolist(), one.from_rows.tolist(), one.counts.tolist(), strict=True)
            for to_row, from_row, count in rows:
                one.target[to_row : to_row + count].copy_(one.source[from_row : from_row + count], non_blocking=True)


class BatchedCopies:
    """One call of the driver for all stretches."""

    def __init__(self, runtime: Any, device: torch.device) -> None:  # NVIDIA's module has no types.
        self._runtime = runtime
        self._index = device.index
        attributes = runtime.cudaMemcpyAttributes()
        # Sources are read in the order of the stream: neither before its earlier work, nor after its later work.
        attributes.srcAccessOrder = runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
        self._attributes = [attributes]

    def enqueue(self, copies: Iterable[Stretches]) -> None:
        """See `StretchCopies.enqueue`."""
        targets: list[int] = []
        sources: list[int] = []
        sizes: list[int] = []
        for one in copies:
            to_rows, from_rows, counts = _contiguous(one)
            targets += _addresses(one.target, to_rows).tolist()
            sources += _addresses(one.source, from_rows).tolist()
            sizes += (counts * one.target.shape[1]).tolist()
        if not sizes:
            return
        stream = torch.cuda.current_stream(self._index).cuda_stream
        # Later versions of CUDA return the error alone, earlier ones the number of the stretch that failed beside it.
        error, *_ = self._runtime.cudaMemcpyBatchAsync(
            targets, sources, sizes, len(sizes), self._attributes, [0], 1, stream
        )
        if int(error):
            raise RuntimeError(f"a batch of {len(sizes)} asynchronous copies was refused: {error!r}")


def stretch_copies(device: torch.device) -> StretchCopies:
    """Return batched copies where this machine has them, single ones elsewhere."""
    if device.type != "cuda":
        return SingleCopies()
    try:
        runtime = importlib.import_module("cuda.bindings.runtime")
    except ImportError:
        return SingleCopies()
    error, version = runtime.cudaDriverGetVersion()
    if int(error) or version < BATCHES_SINCE or not hasattr(runtime, "cudaMemcpyBatchAsync"):
        return SingleCopies()
    return BatchedCopies(runtime, device)


def _contiguous(one: Stretches) -> tuple[PageIndex, PageIndex, PageIndex]:
    """Return stretches whose bytes are adjacent on both sides: single rows, if other bytes lie between rows."""
    width = one.target.shape[1]
    if one.target.stride(0) == one.source.stride(0) == width or not (one.counts > 1).any():
        return one.to_rows, one.from_rows, one.counts
    steps = np.arange(one.counts.sum()) - np.repeat(np.cumsum(one.counts) - one.counts, one.counts)
    to_rows, from_rows = (np.repeat(rows, one.counts) + steps for rows in (one.to_rows, one.from_rows))
    return to_rows, from_rows, np.ones(len(steps), dtype=np.int64)


def _addresses(tensor: torch.Tensor, rows: PageIndex) -> npt.NDArray[np.int64]:
    return tensor.data_ptr() + rows * tensor.stride(0)
