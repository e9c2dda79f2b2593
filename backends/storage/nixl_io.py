"""Pages between the host pool and segment files by NIXL's POSIX plugin: one transfer for a list of pages.

The agent is made, and files are registered, on worker threads; transfers are posted, checked and released by the poller
only. The plugin reports an error of a transfer once nothing of it is in flight any more (NIXL 1.5.1, AIO and io_uring);
which page it was, plain reads and writes find out afterwards.
"""

from __future__ import annotations

import asyncio
import os
import threading
import uuid
from collections.abc import Sequence
from concurrent.futures import Executor
from itertools import groupby
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tidekv.backends.base import Poller
from tidekv.backends.storage.page_io import ThreadIO
from tidekv.backends.storage.segments import Segments, index_of, segment_of
from tidekv.states.errors import EngineClosed, StorageFailed
from tidekv.states.shapes import PoolMemory

# What the plugin submits at each poll.
_SUBMITTED_PER_POLL: Final = 64
_QUEUES: Final = {"aio": "use_aio", "uring": "use_uring"}

Indices = npt.NDArray[np.int32]


class NixlIO:
    """One NIXL agent with the POSIX plugin, for one host pool and one namespace's segments."""

    def __init__(
        self, segments: Segments, pool: PoolMemory, poller: Poller, workers: Executor, plain: ThreadIO, *, queue: str
    ) -> None:
        """Make the agent and register the pool. Blocks; StorageFailed if NIXL or its plugin cannot be had."""
        self._segments = segments
        self._poller = poller
        self._workers = workers
        self._plain = plain
        self._lock = threading.Lock()
        self._files: dict[int, Any] = {}  # NIXL has no types: prepared lists by segment.
        self._registered: list[Any] = []  # And registrations, to be given back.
        self._agent = _make_agent(_QUEUES[queue])
        memory = pool.segments[0]
        span_bytes = memory.stride_bytes * (memory.page_count - 1) + memory.piece_bytes
        self._registered.append(self._agent.register_memory([(memory.address, span_bytes, 0, "")], "DRAM"))
        rows = np.array([[memory.address, memory.piece_bytes, 0, memory.stride_bytes, memory.page_count]], np.uint64)
        self._pool_list = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", rows, "DRAM")

    async def read(self, slots: Sequence[int], pages: Sequence[int]) -> list[str]:
        """Read slots into host pages; see PageIO."""
        if await self._transfer("READ", slots, pages):
            return [""] * len(slots)
        return await self._plain.read(slots, pages)

    async def write(self, slots: Sequence[int], pages: Sequence[int]) -> list[str]:
        """Write host pages into slots; see PageIO."""
        if await self._transfer("WRITE", slots, pages):
            return [""] * len(slots)
        return await self._plain.write(slots, pages)

    def close(self) -> None:
        """Give the agent back. Blocks; nothing may be in flight."""
        for prepared in [*self._files.values(), self._pool_list]:
            self._agent.release_dlist_handle(prepared)
        self._files.clear()
        for registered in self._registered:
            self._agent.deregister_memory(registered)
        self._registered.clear()

    async def _transfer(self, operation: str, slots: Sequence[int], pages: Sequence[int]) -> bool:
        """Move all, one transfer a segment. False if any of it failed; nothing moves any more either way."""
        loop = asyncio.get_running_loop()
        order = sorted(range(len(slots)), key=slots.__getitem__)
        posted: list[asyncio.Future[None]] = []
        closed: EngineClosed | None = None
        complete = True
        for segment, group in groupby(order, key=lambda at: segment_of(slots[at])):
            members = list(group)
            remote = self._files.get(segment)
            if remote is None:
                try:
                    remote = await loop.run_in_executor(self._workers, self._open, segment, operation == "WRITE")
                except OSError:
                    complete = False
                    continue
            transfer = _Transfer(
                self._agent,
                operation,
                self._pool_list,
                np.array([pages[at] for at in members], np.int32),
                remote,
                np.array([index_of(slots[at]) for at in members], np.int32),
            )
            try:
                posted.append(self._poller.submit(transfer))
            except EngineClosed as error:
                closed = error
        if posted:
            await asyncio.wait(posted)
        for future in posted:
            outcome = future.exception()
            # The poller gave up on a transfer that is still under way: nothing may be said about its pages.
            closed = outcome if isinstance(outcome, EngineClosed) else closed
            # Whatever NIXL raised: its errors share no type but RuntimeError. The plain way finds the cause.
            complete &= outcome is None
        if closed is not None:
            raise closed
        return complete

    def _open(self, segment: int, create: bool) -> Any:  # A prepared list of NIXL, which has no types.
        """Register a segment's file; OSError if it cannot be opened."""
        with self._lock:
            if segment not in self._files:
                file = self._segments.file(segment, create=create)
                geometry = self._segments.geometry
                self._registered.append(self._agent.register_memory([(0, geometry.segment_bytes, file, "")], "FILE"))
                rows = np.array(
                    [[geometry.data_offset, geometry.page_bytes, file, geometry.page_bytes, geometry.slots]], np.uint64
                )
                self._files[segment] = self._agent.prep_xfer_dlist(self._agent.name, rows, "FILE")
            return self._files[segment]


class _Transfer:
    """One transfer, as the poller drives it."""

    def __init__(
        self,
        agent: Any,  # NIXL has no types.
        operation: str,
        local: Any,  # Its prepared lists neither.
        local_indices: Indices,
        remote: Any,
        remote_indices: Indices,
    ) -> None:
        self._agent = agent
        self._arguments = (operation, local, local_indices, remote, remote_indices)
        breaks = (np.diff(local_indices) != 1) | (np.diff(remote_indices) != 1)
        # NIXL makes one descriptor of neighbors.
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
    # Read when the library is loaded; what the embedder set stays.
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
    except (ImportError, RuntimeError) as error:
        raise StorageFailed(f"NIXL's POSIX plugin cannot be used ({error}); install it, or pass io=threads") from error
    return agent
