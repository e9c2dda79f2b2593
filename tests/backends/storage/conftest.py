"""A host pool of plain memory, a poller of one thread, and engines on temporary directories."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from tidekv.backends.base import Pollable
from tidekv.states.shapes import PoolMemory, Segment


class ThreadPoller:
    """Drives each operation to its end on one thread, oldest first. `pause` holds back what is submitted."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._work: queue.SimpleQueue[tuple[Pollable, asyncio.Future[None]] | None] = queue.SimpleQueue()
        self.gate = threading.Event()
        self.gate.set()
        self.submitted = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="test-poller")
        self._thread.start()

    def submit(self, pollable: Pollable) -> asyncio.Future[None]:
        future: asyncio.Future[None] = self._loop.create_future()
        self._work.put((pollable, future))
        self.submitted.set()
        return future

    def close(self) -> None:
        self._work.put(None)
        self.gate.set()
        self._thread.join()

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            pollable, future = item
            self.gate.wait()
            outcome: BaseException | None = None
            try:
                over = pollable.post()
                while not over:
                    over = pollable.check()
            except RuntimeError as error:
                outcome = error
            pollable.release()
            self._loop.call_soon_threadsafe(self._finish, future, outcome)

    @staticmethod
    def _finish(future: asyncio.Future[None], outcome: BaseException | None) -> None:
        if not future.done():
            if outcome is None:
                future.set_result(None)
            else:
                future.set_exception(outcome)


@dataclass
class Pool:
    """Host pages in one numpy array, page first."""

    array: np.ndarray

    @classmethod
    def make(cls, page_count: int, page_bytes: int) -> Pool:
        # Offset to a multiple of 4096, as the real pool is.
        raw = np.zeros(page_count * page_bytes + 4096, np.uint8)
        start = -raw.ctypes.data % 4096
        return cls(raw[start : start + page_count * page_bytes].reshape(page_count, page_bytes))

    @property
    def memory(self) -> PoolMemory:
        count, page_bytes = self.array.shape
        segment = Segment(
            address=self.array.ctypes.data, piece_bytes=page_bytes, stride_bytes=page_bytes, page_count=count
        )
        return PoolMemory(segments=(segment,), page_count=count)

    def page(self, page: int) -> memoryview:
        return memoryview(self.array[page])

    def fill(self, page: int, content: bytes) -> None:
        """Fill a page with a pattern that depends on `content` and position."""
        self.array[page] = np.frombuffer(pattern(content, self.array.shape[1]), np.uint8)

    def holds(self, page: int, content: bytes) -> bool:
        return self.array[page].tobytes() == pattern(content, self.array.shape[1])


def pattern(content: bytes, page_bytes: int) -> bytes:
    """Return page bytes that no other content has at any position."""
    seed = int.from_bytes(content[:8].ljust(8, b"\1"), "little")
    return np.random.default_rng(seed).integers(0, 256, page_bytes, np.uint8).tobytes()


@pytest.fixture
async def poller() -> AsyncIterator[ThreadPoller]:
    made = ThreadPoller()
    yield made
    made.close()
