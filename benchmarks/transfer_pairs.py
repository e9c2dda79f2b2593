"""The two sides of `transfer.py`: writes of the transport, and bare requests of NIXL over the same lists.

    lone        one write after the other, each awaited: latency of a caller
    streamed    several at a time, a new one whenever one has ended, as in a prefill worker: bytes per second

Bare NIXL is one thread that does nothing else and has the interpreter for itself. Streamed, its page lists are checked,
sorted and converted to descriptors before the clock starts; a lone write includes this planning, as in the transport.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.nixl_child import Content, NixlChild, ReadPage, make_pool
from tidekv.engine.poller import PollerThread
from tidekv.states.types import PageIds, page_ids
from tidekv.transports.nixl.agent import NixlAgent, NixlRequest
from tidekv.transports.nixl.peers import NixlPeer
from tidekv.transports.nixl.plan import Part, WritePlan, paired_pages
from tidekv.transports.nixl.transport import NixlTransport

MARGIN_PAGES = 64  # Pages of a pool beyond those of one write.
IN_FLIGHT = 8
LISTS = 16


@dataclass(frozen=True)
class Shape:
    """Shape of a write: number of pages, pieces per page, and bytes per piece."""

    pages: int
    piece_bytes: int
    pieces: int

    @property
    def size_bytes(self) -> int:
        """Bytes of one write."""
        return self.pages * self.piece_bytes * self.pieces

    def __str__(self) -> str:
        return f"{self.pages} x {self.pieces} x {self.piece_bytes // 1024} KiB"


@dataclass(frozen=True)
class Lists:
    """The pages of one write, local and remote."""

    ours: PageIds
    theirs: PageIds


class Rig:
    """A transport with a filled pool, and a process with another pool whose memory was touched."""

    def __init__(self, shape: Shape, *, device: str = "cpu") -> None:
        self.shape = shape
        self._device = device
        self.pool_pages = shape.pages + MARGIN_PAGES
        self._pool = make_pool(self.pool_pages, (shape.piece_bytes,) * shape.pieces, device=device, seed=1)
        self._poller = PollerThread()
        self.transport = NixlTransport("bench", dials=["127.0.0.1:*"])

    async def start(self) -> None:
        """Start the other process and connect to it."""
        pieces = (self.shape.piece_bytes,) * self.shape.pieces
        self._child = await NixlChild.spawn(pages=self.pool_pages, pieces=pieces, seed=2, device=self._device)
        self._poller.start()
        await self.transport.start(poller=self._poller)
        await self.transport.register(self._pool.memory)
        ready = self._child.ready
        self.peer: NixlPeer = await self.transport.add_peer(ready.instance, ready.metadata, ready.memory)

    async def close(self) -> None:
        """Close the transport and end the process."""
        await self.transport.close()
        await self._poller.close()
        self._child.end()

    def page_lists(self, order: str) -> list[Lists]:
        """Return the page lists to write in turn: at random places, or adjacent on both sides."""
        random, pages = np.random.default_rng(0), self.shape.pages
        if order == "random":
            pairs = [tuple(random.permutation(self.pool_pages)[:pages].tolist() for _ in "us") for _ in range(LISTS)]
        else:
            starts = range(0, MARGIN_PAGES, MARGIN_PAGES // LISTS)
            pairs = [(range(at, at + pages), range(MARGIN_PAGES - at, MARGIN_PAGES - at + pages)) for at in starts]
        return [Lists(page_ids(ours), page_ids(theirs)) for ours, theirs in pairs]

    async def has_written(self, our_page: int, their_page: int) -> bool:
        """Whether the other process has the bytes of our page."""
        answer = await self._child.ask(ReadPage(their_page))
        assert isinstance(answer, Content)
        return answer.content == self._pool.page(our_page)

    @property
    def agent(self) -> NixlAgent:
        """The agent below the transport."""
        return self.transport._started()

    def whole(self, lists: Lists) -> Part:
        """Return all descriptors of a write as one request, in the order that NIXL merges best."""
        pages = paired_pages(lists.ours, lists.theirs, numbering=self.peer.numbering, peer="")
        return WritePlan(self.peer.numbering, *pages, part_bytes=2**62, part_descriptors=2**31 - 1).part(0)


def bare_lone(rig: Rig, lists: Lists) -> float:
    """Return seconds of one bare request, from its plan to its release, on this thread."""
    started_at_s = time.perf_counter()
    request = rig.agent.write_request(rig.peer.our_list, rig.peer.their_list, rig.whole(lists))
    done = request.post()
    while not done:
        done = request.check()
    request.release()
    return time.perf_counter() - started_at_s


async def our_lone(rig: Rig, lists: Lists) -> float:
    """Return seconds of one write, from its call to its return."""
    started_at_s = time.perf_counter()
    await rig.transport.write(rig.peer, lists.ours, lists.theirs)
    return time.perf_counter() - started_at_s


def bare_streamed(rig: Rig, parts: list[Part], count: int) -> float:
    """Return seconds of `count` bare requests, `IN_FLIGHT` posted at a time and polled without a pause."""
    agent, our_list, their_list = rig.agent, rig.peer.our_list, rig.peer.their_list
    started_at_s = time.perf_counter()
    in_flight: list[NixlRequest] = []
    begun = 0
    while begun < count or in_flight:
        while begun < count and len(in_flight) < IN_FLIGHT:
            request = agent.write_request(our_list, their_list, parts[begun % len(parts)])
            begun += 1
            if request.post():
                request.release()
            else:
                in_flight.append(request)
        rest: list[NixlRequest] = []
        for request in in_flight:
            if request.check():
                request.release()
            else:
                rest.append(request)
        in_flight = rest
    return time.perf_counter() - started_at_s


async def our_streamed(rig: Rig, lists: list[Lists], count: int) -> float:
    """Return seconds of `count` writes by `IN_FLIGHT` callers, each with one write after the other."""

    async def write_all(turns: Iterator[int]) -> None:
        for turn in turns:
            some = lists[turn % len(lists)]
            await rig.transport.write(rig.peer, some.ours, some.theirs)

    turns = iter(range(count))
    started_at_s = time.perf_counter()
    async with asyncio.TaskGroup() as callers:
        for _ in range(IN_FLIGHT):
            callers.create_task(write_all(turns))
    return time.perf_counter() - started_at_s


class Handed:
    """A thread that runs jobs of the loop one at a time and reports their end; nothing else."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[tuple[Callable[[], object], asyncio.Future[None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    async def seconds(self, job: Callable[[], object]) -> float:
        """Return how long the loop waits for a job."""
        started_at_s = time.perf_counter()
        ended: asyncio.Future[None] = self._loop.create_future()
        self._jobs.put((job, ended))
        await ended
        return time.perf_counter() - started_at_s

    def close(self) -> None:
        """End the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, ended = item
            try:
                job()
            except Exception as error:  # Raised on the loop.
                self._loop.call_soon_threadsafe(ended.set_exception, error)
            else:
                self._loop.call_soon_threadsafe(ended.set_result, None)
