"""Copies of slices of pages between two places in host memory: gathering them into dense pages, or scattering them.

Both places are described by segments (see `PoolMemory`), pairwise of the same size. Rows of a slice lie at equal
distances, and so do the pieces of most pools: such segments are one strided array, and a page of it is one assignment.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from tidekv.backends.copies.cpu_moves import page_runs
from tidekv.states.errors import InvalidConfig
from tidekv.states.types import PageIds, PoolMemory, Segment

INLINE_BYTES_MAX: Final = 64 << 10
"""Maximum bytes that the event loop copies itself: a thread and back take longer."""
WORDS: Final = ((8, np.uint64), (4, np.uint32), (2, np.uint16), (1, np.uint8))
"""Strided copies move one element at a time: the widest that fits is several times as fast as bytes."""

BeginCopy: TypeAlias = "Callable[[PageIds, PageIds], asyncio.Future[None]]"
Words: TypeAlias = "npt.NDArray[np.unsignedinteger[npt.NBitBase]]"


class SliceMover:
    """Copies pages of one place over pages of another, pairwise; blocks until done. The memory must outlive it.

    Raises InvalidConfig for GPU memory, and for segments of different sizes.
    """

    def __init__(self, source: PoolMemory, target: PoolMemory) -> None:
        if "VRAM" in (source.kind, target.kind):
            raise InvalidConfig("slices of pages are copied in host memory; these are in GPU memory")
        pairs = list(zip(source.segments, target.segments, strict=True))
        if any(one.piece_bytes != other.piece_bytes for one, other in pairs):
            raise InvalidConfig("slices of pages can only be copied over slices of the same sizes")
        self.page_bytes = source.page_bytes
        self._blocks = [_blocks(run) for run in _runs_of_runs(pairs)]

    def move(self, sources: PageIds, targets: PageIds) -> None:
        """Copy pages over other pages, pairwise."""
        runs = list(page_runs(np.asarray(sources, np.int64), np.asarray(targets, np.int64)))
        for source, target in self._blocks:
            for first, other, count in runs:
                target[other : other + count] = source[first : first + count]


class SliceCopier:
    """Copies slices for the event loop, on one thread that starts when it is first needed."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tidekv-slices")

    def copying(self, source: PoolMemory, target: PoolMemory) -> BeginCopy:
        """Return a function that begins to copy pages of `source` over pages of `target`, pairwise.

        Call it on a running loop. Its future is done at once if there are few bytes; cancelling it does not stop the
        copy. Raises InvalidConfig, see `SliceMover`.
        """
        return partial(self._begin, SliceMover(source, target))

    async def close(self) -> None:
        """Wait for the copy that runs, and end the thread."""
        await asyncio.get_running_loop().run_in_executor(None, self._thread.shutdown)

    def _begin(self, mover: SliceMover, sources: PageIds, targets: PageIds) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        if len(sources) * mover.page_bytes > INLINE_BYTES_MAX:
            return loop.run_in_executor(self._thread, mover.move, sources, targets)
        done: asyncio.Future[None] = loop.create_future()
        mover.move(sources, targets)
        done.set_result(None)
        return done


Pair: TypeAlias = tuple[Segment, Segment]


def _runs_of_runs(pairs: list[Pair]) -> list[list[list[Pair]]]:
    """Split pairs of segments into rows at equal distances, and those into pieces at equal distances, on both sides."""
    rows: list[list[Pair]] = []
    for pair in pairs:
        if rows and _shape(rows[-1][0]) == _shape(pair) and _continues([[each] for each in rows[-1]], [pair]):
            rows[-1].append(pair)
        else:
            rows.append([pair])
    pieces: list[list[list[Pair]]] = []
    for row in rows:
        if pieces and _is_like(pieces[-1][0], row) and _continues(pieces[-1], row):
            pieces[-1].append(row)
        else:
            pieces.append([row])
    return pieces


def _shape(pair: Pair) -> tuple[int, int, int]:
    return pair[0].piece_bytes, pair[0].stride_bytes, pair[1].stride_bytes


def _is_like(one: list[Pair], other: list[Pair]) -> bool:
    return len(one) == len(other) and _shape(one[0]) == _shape(other[0]) and _step(one) == _step(other)


def _step(row: list[Pair]) -> tuple[int, int]:
    """Return the distances from row to row, on both sides; 0 for a single one."""
    if len(row) == 1:
        return 0, 0
    return row[1][0].address - row[0][0].address, row[1][1].address - row[0][1].address


def _continues(run: list[list[Pair]], row: list[Pair]) -> bool:
    """Whether a row lies as far behind the last one of a run as the second lies behind the first, on both sides."""
    if len(run) == 1:
        return True
    return _step([run[-1][0], row[0]]) == _step([run[0][0], run[1][0]])


def _blocks(run: list[list[Pair]]) -> tuple[Words, Words]:
    """Return both sides of a run as arrays [pages, pieces, rows, words], in place."""
    across = _step([run[0][0], run[1][0]]) if len(run) > 1 else (0, 0)
    down = _step(run[0])
    size = run[0][0][0].piece_bytes
    numbers = [size, *across, *down]
    for segment in run[0][0]:
        numbers += [segment.address, segment.stride_bytes]
    width, word = next((width, word) for width, word in WORDS if not any(number % width for number in numbers))
    sides = []
    for side, segment in enumerate(run[0][0]):
        shape = (segment.page_count, len(run), len(run[0]), size // width)
        # One word at the address is enough to start from; the shape and strides are those of the pool.
        start = np.frombuffer(memoryview((ctypes.c_uint8 * width).from_address(segment.address)), word)
        strides = (segment.stride_bytes, across[side], down[side], width)
        sides.append(np.lib.stride_tricks.as_strided(start, shape, strides, writeable=True))
    return sides[0], sides[1]
