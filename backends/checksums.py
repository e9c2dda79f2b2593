"""Checksums of pages in host memory: 16 bytes per page, kept beside a pool or compared with those of a peer.

A checksum covers every byte of a page, a partial last page included: both ends of a transfer move whole pages. Pages in
GPU memory have none, since their bytes would have to be copied to the host first.

PageHasher      checksums of pages of one pool, or of slices of its pages
HostChecksums   the checksums of a host pool's pages
FoundChecksums  the checksums of pages that an earlier process left in a host pool
ChecksumThread  checksums for the event loop: a small number of bytes at once, more on a thread
StorageChecks   checksums of host pages before and after storage
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from tidekv.backends.memory import PageIndex
from tidekv.states.errors import InvalidConfig
from tidekv.states.types import PageIds, PoolMemory, Segment

CHECKSUM_BYTES: Final = 16
INLINE_BYTES_MAX: Final = 128 << 10
"""Maximum bytes that the event loop hashes itself, which takes about 30 µs: a thread and back take longer."""
GATHER_BELOW_BYTES: Final = 4096
"""Pieces below this size are gathered before they are hashed: a call per piece would take longer than the copy."""

T = TypeVar("T")
Pages: TypeAlias = "PageIds | PageIndex | list[int]"
Begin: TypeAlias = "Callable[[PageIds], asyncio.Future[bytes]]"
"""Begins to hash pages; the future has CHECKSUM_BYTES for each, in order."""


def check_hashable(memory: PoolMemory, what: str) -> None:
    """Raise InvalidConfig if pages of this pool cannot be hashed."""
    if memory.kind != "DRAM":
        raise InvalidConfig(
            f"page_checksums needs a {what} in host memory: pages on CUDA device {memory.device} would have to be"
            " copied to the host to be hashed; leave page_checksums off"
        )


class PageHasher:
    """Hashes pages of one pool. `memory` may be a slice of its pages: the bytes are hashed piece by piece, in order.

    The pool's memory must outlive the hasher. Raises InvalidConfig for GPU memory.
    """

    def __init__(self, memory: PoolMemory) -> None:
        check_hashable(memory, "pool")
        self.page_bytes = memory.page_bytes
        self._blocks = [_block(segments) for segments in _evenly_spaced(memory.segments)]

    def checksums(self, pages: Pages) -> bytes:
        """Return CHECKSUM_BYTES for each page, in order. Long pieces are hashed without holding the interpreter."""
        return b"".join(map(self._checksum, pages))

    def _checksum(self, page: int) -> bytes:
        if len(self._blocks) == 1 and len(pieces := self._blocks[0][page]) == 1:
            return xxhash.xxh3_128_digest(pieces[0].data)
        state = xxhash.xxh3_128()
        for block in self._blocks:
            pieces = block[page]
            if pieces.shape[1] < GATHER_BELOW_BYTES:
                state.update(np.ascontiguousarray(pieces).data)
            else:
                for piece in pieces:
                    state.update(piece.data)
        return state.digest()


class HostChecksums:
    """The checksums of the pages of one host pool, as they were when each page was last written.

    Like the pool, it does not know the owners of the pages: whatever writes to a page calls `note` before the page is
    read. Methods may be called from any thread that owns the pages. The pools must outlive it.
    """

    def __init__(self, host: PoolMemory, device: PoolMemory) -> None:
        """`device` is the pool that pages are copied from and to. Raises InvalidConfig for GPU memory."""
        self.page_bytes = host.page_bytes
        self._host = PageHasher(host)
        self._device = PageHasher(device)
        self._noted = np.zeros((host.page_count, CHECKSUM_BYTES), np.uint8)

    def note(self, pages: Pages, *, on_device: Pages | None = None) -> None:
        """Record the checksums of host pages that were written completely, or are about to be copied from `on_device`,
        pairwise.
        """
        self._noted[np.asarray(pages, np.int64)] = self._now(pages, on_device)

    def found(self, pages: Pages, checksums: bytes) -> None:
        """Record checksums of host pages that are known from elsewhere, CHECKSUM_BYTES each."""
        self._noted[np.asarray(pages, np.int64)] = np.frombuffer(checksums, np.uint8).reshape(-1, CHECKSUM_BYTES)

    def noted(self, pages: Pages) -> bytes:
        """Return the noted checksums of host pages."""
        return self._noted[np.asarray(pages, np.int64)].tobytes()

    def intact(self, pages: Pages, *, on_device: Pages | None = None) -> int:
        """Return how many host pages, or their copies `on_device`, from the first on, have the noted checksum."""
        noted = self._noted[np.asarray(pages, np.int64)]
        damaged = (noted != self._now(pages, on_device)).any(axis=1).nonzero()[0]
        return int(damaged[0]) if len(damaged) else len(pages)

    def _now(self, pages: Pages, on_device: Pages | None) -> npt.NDArray[np.uint8]:
        digests = self._host.checksums(pages) if on_device is None else self._device.checksums(on_device)
        return np.frombuffer(digests, np.uint8).reshape(-1, CHECKSUM_BYTES)


class FoundChecksums:
    """The checksums of pages that an earlier process left in a host pool: each is verified once, at its first use.

    Methods may be called from any thread that owns the pages. The pool must outlive it.
    """

    def __init__(self, host: PoolMemory) -> None:
        self.page_bytes = host.page_bytes
        self._hasher = PageHasher(host)
        self._unverified: dict[int, bytes] = {}

    def found(self, pages: Pages, checksums: bytes) -> None:
        """Take the checksums of found pages, CHECKSUM_BYTES each."""
        for at, page in enumerate(pages):
            self._unverified[int(page)] = checksums[at * CHECKSUM_BYTES : (at + 1) * CHECKSUM_BYTES]

    def note(self, pages: Pages) -> None:
        """Forget pages whose bytes change."""
        for page in pages if self._unverified else ():
            self._unverified.pop(int(page), None)

    def is_unverified(self, pages: Pages) -> bool:
        """Whether one of these pages has to be verified before its first use."""
        return bool(self._unverified) and any(int(page) in self._unverified for page in pages)

    def intact(self, pages: Pages) -> int:
        """Return how many pages, from the first on, are verified or have their checksum. These are verified then."""
        for at, page in enumerate(pages if self._unverified else ()):
            wanted = self._unverified.get(int(page))
            if wanted is not None:
                if self._hasher.checksums([int(page)]) != wanted:
                    return at
                self._unverified.pop(int(page), None)
        return len(pages)


class ChecksumThread:
    """Hashes pages for the event loop, on one thread that starts when it is first needed."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tidekv-checksums")

    def hashing(self, memory: PoolMemory) -> Begin:
        """Return a function that begins to hash pages of this pool, or slices of them.

        Call it on a running loop. Its future is done at once if there are few bytes; cancelling it does not stop the
        hashing. Raises InvalidConfig for GPU memory.
        """
        hasher = PageHasher(memory)
        return lambda pages: self._begin(partial(hasher.checksums, pages), len(pages) * hasher.page_bytes)

    def begin(self, work: Callable[[PageIds], T], pages: PageIds, page_bytes: int) -> asyncio.Future[T]:
        """Begin work on pages, such as a method of HostChecksums; as `hashing`."""
        return self._begin(partial(work, pages), len(pages) * page_bytes)

    async def close(self) -> None:
        """Wait for the hashing that runs, and end the thread. Unbounded: the caller sets the deadline."""
        await asyncio.get_running_loop().run_in_executor(None, self._thread.shutdown)

    def _begin(self, work: Callable[[], T], total_bytes: int) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        if total_bytes > INLINE_BYTES_MAX:
            return loop.run_in_executor(self._thread, work)
        done: asyncio.Future[T] = loop.create_future()
        done.set_result(work())
        return done


class StorageChecks:
    """Checksums around storage: of pages that it has read, and of pages before it gets them.

    `by_component` are the checksums of the host pools, that of full pages included. Pages of other pools are not
    checked.
    """

    def __init__(self, thread: ChecksumThread, by_component: Mapping[str, HostChecksums | FoundChecksums]) -> None:
        self._thread = thread
        self._by_component = by_component

    async def note_read(self, component: str, pages: PageIds) -> None:
        """Note the checksums of pages that storage has read and verified."""
        if (checksums := self._by_component.get(component)) is not None:
            await self._thread.begin(checksums.note, pages, checksums.page_bytes)

    async def intact(self, component: str, pages: PageIds) -> int | None:
        """Return how many pages, from the first on, may be stored; None: all of them.

        Storage would take a damaged page for a good one: its own checksum is of the bytes that it is given.
        """
        if (checksums := self._by_component.get(component)) is None:
            return None
        intact = await self._thread.begin(checksums.intact, pages, checksums.page_bytes)
        return None if intact == len(pages) else intact


def _evenly_spaced(segments: tuple[Segment, ...]) -> list[list[Segment]]:
    """Split segments into runs of equal pieces at equal distances, so that one array covers each run."""
    runs: list[list[Segment]] = []
    for segment in segments:
        if runs and _continues(runs[-1], segment):
            runs[-1].append(segment)
        else:
            runs.append([segment])
    return runs


def _continues(run: list[Segment], segment: Segment) -> bool:
    if (segment.piece_bytes, segment.stride_bytes) != (run[0].piece_bytes, run[0].stride_bytes):
        return False
    return len(run) == 1 or segment.address - run[-1].address == run[1].address - run[0].address


def _block(run: list[Segment]) -> npt.NDArray[np.uint8]:
    """Return the pieces of a run as uint8 [pages, pieces, piece_bytes], in place."""
    first = run[0]
    distance = run[1].address - first.address if len(run) > 1 else 0
    shape = (first.page_count, len(run), first.piece_bytes)
    # One byte at the address is enough to start from; the shape and strides below are those of the pool.
    start = np.frombuffer(memoryview((ctypes.c_uint8 * 1).from_address(first.address)), np.uint8)
    return np.lib.stride_tricks.as_strided(start, shape, (first.stride_bytes, distance, 1), writeable=False)
