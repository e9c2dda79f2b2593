"""Memory for pools: aligned, resident, and refused with an error before the kernel kills the process for it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from tidekv.states.errors import InvalidConfig, InvalidRequest, OutOfMemory
from tidekv.states.types import PageIds

# The alignment that O_DIRECT and memory mappings of any file system require.
ALIGNMENT_BYTES: Final = 4096

PageIndex = npt.NDArray[np.int64]


def allocate_host_bytes(total_bytes: int, *, what: str) -> torch.Tensor:
    """Return a uint8 tensor of `total_bytes`, zeroed, resident, starting at a multiple of ALIGNMENT_BYTES.

    Raises OutOfMemory, with the bytes asked for and the bytes available.
    """
    available = _available_bytes()
    if total_bytes > available:
        raise OutOfMemory(f"{what} needs {total_bytes} bytes; this machine has {available} bytes left for it")
    try:
        raw = torch.empty(total_bytes + ALIGNMENT_BYTES, dtype=torch.uint8)
    except RuntimeError as error:  # The CPU allocator of torch has no type of its own for this.
        raise OutOfMemory(f"{what} needs {total_bytes} bytes; the allocator refused: {error}") from error
    start = -raw.data_ptr() % ALIGNMENT_BYTES
    # Fresh pages are mapped on first touch; that cost belongs here, not into the first restore.
    return raw[start : start + total_bytes].zero_()


def _available_bytes() -> int:
    """Return the bytes that can still be touched: those that the kernel has available, within the container's limit."""
    available = 1 << 62
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text(encoding="ascii").strip()) != "max":
        available = min(available, int(text))
    return available


def check_page_count(num_pages: int, *, what: str) -> None:
    """Refuse a pool without pages, or with more than a page id can name (InvalidConfig)."""
    if type(num_pages) is not int or not 1 <= num_pages <= 2**31 - 1:
        raise InvalidConfig(f"{what}: num_pages must be an int from 1 to {2**31 - 1}, not {num_pages!r}")


def page_index(pages: PageIds | npt.ArrayLike, *, num_pages: int, what: str) -> PageIndex:
    """Turn page ids into an index array of a pool; InvalidRequest names the first page that is not in it."""
    found = np.asarray(pages)
    if found.size == 0:
        return np.empty(0, dtype=np.int64)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise InvalidRequest(f"{what}: pages must be a flat list of ints, not {found.ndim}-d {found.dtype}")
    index = found.astype(np.int64, copy=False)
    # As unsigned numbers, negative pages are far beyond the end: one look at the largest finds both faults.
    if np.maximum.reduce(index.view(np.uint64)) >= num_pages:
        position = int(((found < 0) | (found >= num_pages)).argmax())
        raise InvalidRequest(
            f"{what} has pages 0 to {num_pages - 1}; page {found[position]} (number {position}) is not one"
        )
    return index


def consecutive(first: PageIndex, second: PageIndex) -> tuple[PageIndex, PageIndex, PageIndex]:
    """Return (starts in first, starts in second, counts) of the stretches that are consecutive in both."""
    # Plain differences: np.diff and np.flatnonzero cost as much as the copy of a small page.
    breaks = ((first[1:] - first[:-1] != 1) | (second[1:] - second[:-1] != 1)).nonzero()[0]
    starts = np.zeros(len(breaks) + 1 if len(first) else 0, dtype=np.int64)
    starts[1:] = breaks + 1
    ends = np.empty(len(starts), dtype=np.int64)
    ends[:-1], ends[-1:] = starts[1:], len(first)
    return first[starts], second[starts], ends - starts
