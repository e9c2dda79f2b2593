"""Two NIXL agents in this process, each with a pool."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import numpy as np
import pytest

from benchmarks.nixl_child import NumpyPool
from tidekv.engine.poller import PollerThread
from tidekv.states.types import page_ids
from tidekv.transports.nixl.peers import NixlPeer
from tidekv.transports.nixl.transport import NixlTransport

PIECES = (4096, 512, 4096, 512)


class Worker:
    """A transport with a pool."""

    def __init__(self, name: str, poller: PollerThread, pool: NumpyPool) -> None:
        self.transport = NixlTransport(name, dials=["127.0.0.1:*"])
        self.poller = poller
        self.pool = pool

    async def start(self) -> Worker:
        await self.transport.start(poller=self.poller)
        await self.transport.register(self.pool.memory)
        return self


class Pair:
    """A writer with random pages and a target with empty ones, of other counts."""

    def __init__(self, poller: PollerThread, pieces: tuple[int, ...]) -> None:
        self.writer = Worker("writer", poller, NumpyPool(40, pieces, seed=1))
        self.target = Worker("target", poller, NumpyPool(61, pieces, seed=2))
        self.before = [piece.copy() for piece in self.target.pool.pieces]

    async def start(self) -> Pair:
        await self.writer.start()
        await self.target.start()
        self.peer = await self.add()
        return self

    async def add(self) -> NixlPeer:
        target = self.target.transport
        return await self.writer.transport.add_peer(target.instance, target.metadata(), self.target.pool.memory)

    async def write(self, ours: list[int], theirs: list[int]) -> int:
        return await self.writer.transport.write(self.peer, page_ids(ours), page_ids(theirs))

    def check(self, written: dict[int, int]) -> None:
        """The target has exactly these pages of the writer ({theirs: ours}), and what it had before in all others."""
        for source, target, before in zip(self.writer.pool.pieces, self.target.pool.pieces, self.before, strict=True):
            for theirs, ours in written.items():
                before[theirs] = source[ours]
            assert np.array_equal(target, before)

    async def close(self) -> None:
        await self.writer.transport.close()
        await self.target.transport.close()


@pytest.fixture
async def poller() -> AsyncIterator[PollerThread]:
    poller = PollerThread()
    poller.start()
    yield poller
    assert await poller.close() == 0


@pytest.fixture
async def start_pair(poller: PollerThread) -> AsyncIterator[Callable[[], Awaitable[Pair]]]:
    """Starts pairs, which are closed at the end."""
    pairs: list[Pair] = []

    async def start_pair() -> Pair:
        pairs.append(Pair(poller, PIECES))
        return await pairs[-1].start()

    yield start_pair
    for pair in pairs:
        await pair.close()


@pytest.fixture
async def pair(start_pair: Callable[[], Awaitable[Pair]]) -> Pair:
    return await start_pair()


@pytest.fixture
async def start_worker(poller: PollerThread) -> AsyncIterator[Callable[[str, NumpyPool], Awaitable[Worker]]]:
    """Starts single workers, which are closed at the end."""
    workers: list[Worker] = []

    async def start_worker(name: str, pool: NumpyPool) -> Worker:
        workers.append(Worker(name, poller, pool))
        return await workers[-1].start()

    yield start_worker
    for worker in workers:
        await worker.transport.close()
