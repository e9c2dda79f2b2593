"""Pages between the host pool and segment files by NIXL's POSIX plugin: one transfer for a list of pages.

Worker threads make the agent and register files; only the poller posts, checks and releases transfers. The plugin
reports an error of a transfer once nothing of it is in flight any more (NIXL 1.5.1, AIO and io_uring); plain reads and
writes then find out which page failed.
"""

from __future__ import annotations

import asyncio
import os
import threading
import uuid
from collections.abc import Awaitable, Callable, Sequence
from itertools import groupby
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tidekv.backends.base import Poller
from tidekv.backends.storage.calls import all_settled
from tidekv.backends.storage.file.page_io import LATE, ThreadIO, seal
from tidekv.backends.storage.file.page_verify import verify_headers
from tidekv.backends.storage.file.records import page_checksum
from tidekv.backends.storage.file.segments import index_of, segment_of
from tidekv.states.errors import EngineClosed, StorageFailed
from tidekv.states.types import PoolMemory

# Descriptors that the plugin submits at each poll.
_SUBMITTED_PER_POLL: Final = 64
# Parts of one chunk in flight at once.
_PARTS_IN_FLIGHT_MAX: Final = 2
_QUEUES: Final = {"aio": "use_aio", "uring": "use_uring"}

Indices = npt.NDArray[np.int32]


class NixlIO:
    """One NIXL agent with the POSIX plugin, for one host pool and one namespace's segments."""

    def __init__(
        self,
        plain: ThreadIO,
        pool: PoolMemory,
        poller: Poller,
        *,
        queue: str,
        chunk_bytes: int,
    ) -> None:
        """Make the agent and register the pool. Blocks; StorageFailed if NIXL or its plugin is not available.

        `plain` has the same segments and host pages, and finds the page that failed; `chunk_bytes` is the approximate
        size of one transfer.
        """
        self._segments = segments = plain.segments
        self._poller = poller
        self._workers = plain.workers
        self._buffer_of = plain.buffer_of
        self._plain = plain
        self._part_pages = max(chunk_bytes // segments.geometry.page_bytes, 1)
        self._lock = threading.Lock()
        self._files: dict[int, tuple[Any, Any]] = {}  # NIXL has no types: registration and prepared list by segment.
        self._agent = _make_agent(_QUEUES[queue])
        memory = pool.segments[0]
        span_bytes = memory.stride_bytes * (memory.page_count - 1) + memory.piece_bytes
        self._pool_registered = self._agent.register_memory([(memory.address, span_bytes, 0, "")], "DRAM")
        rows = np.array([[memory.address, memory.piece_bytes, 0, memory.stride_bytes, memory.page_count]], np.uint64)
        self._pool_list = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", rows, "DRAM")

    async def fetch(
        self, keys: Sequence[bytes], slots: Sequence[int], pages: Sequence[int], may_start: Callable[[], bool]
    ) -> list[str]:
        """Read slots into host pages and verify them; see PageIO."""

        async def part(at: slice) -> list[str]:
            if not await self._transfer("READ", slots[at], pages[at]):
                return await self._plain.fetch(keys[at], slots[at], pages[at], may_start)

            def verify() -> list[str]:
                return verify_headers(self._segments, keys[at], slots[at], self._checksums(pages[at]))

            return await asyncio.get_running_loop().run_in_executor(self._workers, verify)

        return await self._in_parts(part, len(slots), may_start)

    async def store(
        self, keys: Sequence[bytes], slots: Sequence[int], pages: Sequence[int], may_start: Callable[[], bool]
    ) -> list[str]:
        """Write host pages and headers into slots; see PageIO."""
        loop = asyncio.get_running_loop()

        async def part(at: slice) -> list[str]:
            # Checksums are taken while the pages move.
            taken = loop.run_in_executor(self._workers, self._checksums, pages[at])
            try:
                moved = await self._transfer("WRITE", slots[at], pages[at])
            finally:
                await asyncio.wait([taken])
            if not moved:
                return await self._plain.store(keys[at], slots[at], pages[at], may_start)
            causes = [""] * len(slots[at])
            return await loop.run_in_executor(
                self._workers, seal, self._segments, keys[at], slots[at], taken.result(), causes
            )

        return await self._in_parts(part, len(slots), may_start)

    def fetch_cached(self, keys: Sequence[bytes], slots: Sequence[int], pages: Sequence[int]) -> bool:
        """Read a few slots into host pages at once, if the kernel has all of them in memory; see PageIO."""
        return self._plain.fetch_cached(keys, slots, pages)

    def forget(self, segments: Sequence[int]) -> None:
        """Release the files of some segments; see PageIO."""
        with self._lock:
            for segment in segments:
                registered, prepared = self._files.pop(segment, (None, None))
                if registered is not None:
                    self._agent.release_dlist_handle(prepared)
                    self._agent.deregister_memory(registered)

    def close(self) -> None:
        """Release the agent. Blocks; nothing may be in flight."""
        self.forget(list(self._files))
        self._agent.release_dlist_handle(self._pool_list)
        self._agent.deregister_memory(self._pool_registered)
        # Destroying it takes a while, and must not happen later on an event loop.
        self._agent = self._pool_list = self._pool_registered = None

    async def _in_parts(
        self, part: Callable[[slice], Awaitable[list[str]]], count: int, may_start: Callable[[], bool]
    ) -> list[str]:
        """Move a chunk in parts, some at once, so that one part is checksummed while another moves."""
        causes = [LATE] * count
        firsts = iter(range(0, count, self._part_pages))

        async def lane() -> None:
            for first in firsts:
                at = slice(first, min(first + self._part_pages, count))
                if may_start():
                    causes[at] = await part(at)

        if count:
            await all_settled(lane() for _ in range(min(_PARTS_IN_FLIGHT_MAX, -(-count // self._part_pages))))
        return causes

    def _checksums(self, pages: Sequence[int]) -> list[bytes]:
        return [page_checksum(self._buffer_of(page)) for page in pages]

    async def _transfer(self, operation: str, slots: Sequence[int], pages: Sequence[int]) -> bool:
        """Move all pages, one transfer for each segment. False if any of it failed; nothing moves any more either
        way.
        """
        order = sorted(range(len(slots)), key=slots.__getitem__)
        groups = {segment: list(group) for segment, group in groupby(order, key=lambda at: segment_of(slots[at]))}
        if not all(segment in self._files for segment in groups):
            loop = asyncio.get_running_loop()
            try:
                await loop.run_in_executor(self._workers, self._open, list(groups), operation == "WRITE")
            except (OSError, StorageFailed):
                return False
        transfers = [
            _Transfer(
                self._agent,
                operation,
                self._pool_list,
                np.array([pages[at] for at in members], np.int32),
                self._files[segment][1],
                np.array([index_of(slots[at]) for at in members], np.int32),
            )
            for segment, members in groups.items()
        ]
        posted: list[asyncio.Future[None]] = []
        try:
            # One by one: if the poller refuses one, those before it are still awaited.
            for transfer in transfers:
                posted.append(self._poller.submit(transfer))  # noqa: PERF401
        finally:
            if posted:
                await asyncio.wait(posted)
        outcomes = [future.exception() for future in posted]
        for outcome in outcomes:
            if isinstance(outcome, EngineClosed):
                # The poller gave up on a transfer that is still in flight: the state of its pages is unknown.
                raise outcome
        # NIXL's errors share no type but Exception. The plain way finds the cause.
        return not any(outcomes)

    def _open(self, segments: Sequence[int], create: bool) -> None:
        """Register files of segments; OSError if one cannot be opened, StorageFailed if NIXL does not take it."""
        geometry = self._segments.geometry
        with self._lock:
            for segment in segments:
                if segment in self._files:
                    continue
                file = self._segments.file(segment, create=create)
                rows = np.array(
                    [[geometry.data_offset, geometry.page_bytes, file, geometry.page_bytes, geometry.slots]], np.uint64
                )
                try:
                    registered = self._agent.register_memory([(0, geometry.segment_bytes, file, "")], "FILE")
                    self._files[segment] = registered, self._agent.prep_xfer_dlist(self._agent.name, rows, "FILE")
                except Exception as error:  # NIXL's errors share no other type.
                    raise StorageFailed(f"NIXL does not take segment {segment}: {error}") from error


class _Transfer:
    """One transfer, as the poller drives it."""

    def __init__(
        self,
        agent: Any,  # NIXL has no types.
        operation: str,
        local: Any,  # A prepared list of NIXL's.
        local_indices: Indices,
        remote: Any,
        remote_indices: Indices,
    ) -> None:
        self._agent = agent
        self._arguments = (operation, local, local_indices, remote, remote_indices)
        breaks = (np.diff(local_indices) != 1) | (np.diff(remote_indices) != 1)
        # NIXL merges neighbors into one descriptor.
        self.rounds = int(breaks.sum() + 1) // _SUBMITTED_PER_POLL
        self._handle: Any = None

    def post(self) -> bool:
        self._handle = self._agent.make_prepped_xfer(*self._arguments)
        return self._is_over(self._agent.transfer(self._handle))

    def check(self) -> bool:
        return self._is_over(self._agent.check_xfer_state(self._handle))

    def release(self) -> None:
        if self._handle is not None:
            handle, self._handle = self._handle, None
            self._agent.release_xfer_handle(handle)

    @staticmethod
    def _is_over(state: str) -> bool:
        if state == "ERR":
            raise StorageFailed("NIXL reports an error of a file transfer")
        return state == "DONE"


def _make_agent(queue: str) -> Any:  # NIXL has no types.
    # Read when the library is loaded; values that the embedder set stay.
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    try:
        from nixl import _api as nixl

        agent = nixl.nixl_agent(
            f"tidekv-storage-{uuid.uuid4()}",
            nixl.nixl_agent_config(
                enable_prog_thread=False, backends=[], sync_mode=nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
            ),
        )
        agent.create_backend("POSIX", {queue: "true"})
    except Exception as error:  # NIXL's errors share no other type.
        raise StorageFailed(f"NIXL's POSIX plugin cannot be used ({error}); install it, or pass io=threads") from error
    return agent
