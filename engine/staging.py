"""The staging ring of a worker, and its memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tidekv.backends.copies.slice_moves import SliceCopier
from tidekv.states.types import PoolMemory, Segment
from tidekv.transports.staging import Staging, StagingRing


class WorkerStaging(NamedTuple):
    """A staging ring, what owns its memory, and the thread that copies; the owner closes `copier` at its end."""

    region: npt.NDArray[np.uint8]
    copier: SliceCopier
    staging: Staging


def make_staging(size_bytes: int, pools: Sequence[PoolMemory]) -> WorkerStaging | None:
    """Make the staging ring of a worker with these pools; None if it is disabled or pages are in GPU memory."""
    if not size_bytes or any(memory.kind != "DRAM" for memory in pools):
        return None
    # Zeroed by the kernel when first touched: a worker whose peers have as many heads never touches it.
    region = np.zeros(size_bytes, np.uint8)
    segment = Segment(address=region.ctypes.data, piece_bytes=size_bytes, stride_bytes=size_bytes, page_count=1)
    copier = SliceCopier()
    return WorkerStaging(region, copier, Staging(StagingRing(PoolMemory(segments=(segment,), page_count=1)), copier))
