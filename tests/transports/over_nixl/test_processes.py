"""NIXL between processes that are killed, stopped and started again."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from benchmarks.nixl_child import Add, Content, Done, Failed, NixlChild, NumpyPool, ReadPage, Write
from tests.support.waits import LIMIT_S
from tidekv.engine.poller import PollerThread
from tidekv.states.errors import TransferFailed
from tidekv.states.types import Identity, page_ids
from tidekv.transports import wire
from tidekv.transports.nixl.transport import NixlOptions, NixlTransport

pytestmark = pytest.mark.nixl

PIECES = (65536, 4096)
PAGES = 64
ALL = list(range(PAGES))
# Long enough for what must happen; what must not happen is looked for in a bounded number of observations.

Spawn = Callable[..., Awaitable[NixlChild]]


@pytest.fixture
async def spawn() -> AsyncIterator[Spawn]:
    children: list[NixlChild] = []

    async def spawn(**settings: Any) -> NixlChild:
        child = await NixlChild.spawn(**({"pages": PAGES, "pieces": PIECES} | settings))
        children.append(child)
        return child

    yield spawn
    for child in children:
        child.end()


@pytest.fixture(scope="module")
def friend() -> Iterator[NixlChild]:
    """A child that tests share, since none of them does it harm: starting one takes seconds."""
    child = asyncio.run(NixlChild.spawn(pages=PAGES, pieces=PIECES, seed=4))
    yield child
    child.end()


class Here:
    """Our own side."""

    def __init__(self, *, seed: int | None, options: Mapping[str, Any]) -> None:
        self.pool = NumpyPool(PAGES + 5, PIECES, seed=seed)
        self.poller = PollerThread()
        self.transport = NixlTransport("here", nixl=NixlOptions(close_timeout_s=0.2, **options))

    async def know(self, child: NixlChild) -> Any:
        ready = child.ready
        return await self.transport.add_peer(ready.instance, ready.metadata, ready.memory)

    async def introduce_to(self, child: NixlChild) -> None:
        told = await child.ask(Add(self.transport.instance, self.transport.metadata(), self.pool.memory))
        assert told == Done()


@asynccontextmanager
async def here(*, seed: int | None = None, **options: Any) -> AsyncIterator[Here]:
    side = Here(seed=seed, options=options)
    side.poller.start()
    await side.transport.start(poller=side.poller)
    await side.transport.register(side.pool.memory)
    yield side
    await side.transport.close()
    assert await side.poller.close() == 0


def hello_of(child: NixlChild, *, host: str | None = None) -> wire.Hello:
    mark = child.ready.process
    return wire.Hello(
        version=wire.VERSION,
        instance=child.ready.instance,
        identity=Identity("m", "mha", "uint8", 1, 1, 1, 1, sum(PIECES), PIECES),
        rank=0,
        ranks=1,
        metadata=child.ready.metadata,
        memory=child.ready.memory,
        process=mark if host is None else wire.ProcessMark(host=host, pid=mark.pid, started=mark.started),
        lease_s=10.0,
    )


async def test_bytes_cross_to_another_process_and_back(friend: NixlChild) -> None:
    child = friend
    async with here(seed=5) as side:
        peer = await side.know(child)
        assert await side.transport.write(peer, page_ids([7, 68, 0]), page_ids([1, 0, 63])) == 3 * sum(PIECES)
        for ours, theirs in ((7, 1), (68, 0), (0, 63)):
            assert await child.ask(ReadPage(theirs)) == Content(side.pool.page(ours))
        await side.introduce_to(child)
        assert await child.ask(Write([1, 2], [40, 41])) == Done(2 * sum(PIECES))
        assert side.pool.page(40) == side.pool.page(7)
        assert await child.ask(ReadPage(2)) == Content(side.pool.page(41))
        refused = await child.ask(Write([0], [PAGES + 5]))
        assert isinstance(refused, Failed)
        assert "page 69 is not of here" in refused.text


async def test_bytes_that_arrive_over_tcp_wake_the_progress_thread(spawn: Spawn) -> None:
    """Over TCP a write ends only with the target's help. Without an event this one would take a quarter of an hour."""
    child = await spawn(seed=4, environment={"UCX_TLS": "tcp"})
    async with here(progress_delay_us=1_000_000_000) as side, asyncio.timeout(LIMIT_S):
        await side.introduce_to(child)
        for page in range(20):
            assert await child.ask(Write([page], [page])) == Done(sum(PIECES))
            await asyncio.sleep(0.01 * (page % 5))
        assert await child.ask(Write(ALL, ALL)) == Done(PAGES * sum(PIECES))
        assert await child.ask(ReadPage(19)) == Content(side.pool.page(19))


async def test_an_idle_agent_wakes_some_five_times_a_second() -> None:
    others = _sleeps_by_thread()
    async with here():
        before, started_s = _sleeps_by_thread(), time.monotonic()
        await asyncio.sleep(1.0)
        after, seconds = _sleeps_by_thread(), time.monotonic() - started_s
    started = before.keys() - others.keys()
    assert started, "the agent has a progress thread"
    assert sum(after.get(thread, 0) - before[thread] for thread in started) <= 15 * seconds


def _sleeps_by_thread() -> dict[str, int]:
    """How often each thread of this process has gone to sleep."""
    sleeps: dict[str, int] = {}
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # It has ended.
            status = dict(line.split(":", 1) for line in (thread / "status").read_text().splitlines())
            sleeps[thread.name] = int(status["voluntary_ctxt_switches"])
    return sleeps


async def test_killing_the_target_fails_the_write_and_a_new_one_is_reached(spawn: Spawn, friend: NixlChild) -> None:
    child = await spawn()
    async with here(seed=5) as side:
        peer = await side.know(child)

        started = asyncio.Event()

        async def write_until_it_fails() -> None:
            while True:
                await side.transport.write(peer, page_ids(ALL), page_ids(ALL))
                started.set()

        writing = asyncio.create_task(write_until_it_fails())
        await started.wait()
        child.signal(signal.SIGKILL)
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(TransferFailed, match=f"write to peer {child.ready.instance} failed"):
                await writing
            await side.transport.wait_gone(child.ready.instance, hello_of(child))
            # A peer that is dead already fails at once, and is forgotten without complaint.
            with pytest.raises(TransferFailed):
                await side.transport.write(peer, page_ids([0]), page_ids([0]))
            await side.transport.remove_peer(peer)
        assert side.transport.statistics()["writes_in_flight"] == 0
        # What runs now has another instance, as every start of a process has.
        assert friend.ready.instance != child.ready.instance
        await side.transport.write(await side.know(friend), page_ids([3]), page_ids([9]))
        assert await friend.ask(ReadPage(9)) == Content(side.pool.page(3))


async def test_a_stopped_writer_is_not_gone_and_a_killed_one_is(spawn: Spawn) -> None:
    child = await spawn(seed=4)
    async with here() as side:
        await side.introduce_to(child)
        child.tell(Write(ALL, ALL, forever=True))
        assert await child.answer() == Done(PAGES * sum(PIECES))
        child.signal(signal.SIGSTOP)
        gone = asyncio.create_task(side.transport.wait_gone(child.ready.instance, hello_of(child)))
        done, _ = await asyncio.wait([gone], timeout=0.7)
        assert not done, "a stopped process passed for a dead one"
        child.signal(signal.SIGCONT)
        done, _ = await asyncio.wait([gone], timeout=0.3)
        assert not done, "a living process passed for a dead one"
        child.signal(signal.SIGKILL)
        async with asyncio.timeout(LIMIT_S):
            await gone
        # What was proven: nothing of the writer lands any more.
        for piece in side.pool.pieces:
            piece[:] = 7
        await asyncio.wait([asyncio.create_task(asyncio.Event().wait())], timeout=0.2)
        assert all((piece == 7).all() for piece in side.pool.pieces)


async def test_wait_gone_can_be_cancelled(friend: NixlChild) -> None:
    async with here() as side:
        for host in (None, "another host"):
            gone = asyncio.create_task(side.transport.wait_gone(friend.ready.instance, hello_of(friend, host=host)))
            await asyncio.wait([gone], timeout=0.3)
            gone.cancel()
            with pytest.raises(asyncio.CancelledError):
                await gone


async def test_a_peer_of_another_host_is_gone_when_nixl_says_so(spawn: Spawn) -> None:
    child = await spawn(environment={"UCX_TLS": "tcp"})
    async with here() as side:
        hello = hello_of(child, host="another host")
        waiting = [asyncio.create_task(side.transport.wait_gone(child.ready.instance, hello)) for _ in range(2)]
        done, _ = await asyncio.wait(waiting, timeout=1.2)
        assert not done
        child.signal(signal.SIGSTOP)
        done, _ = await asyncio.wait(waiting, timeout=1.2)
        assert not done, "a peer that hangs passed for one that is gone"
        child.signal(signal.SIGKILL)
        async with asyncio.timeout(LIMIT_S):
            await asyncio.gather(*waiting)
            # Dead before the first query.
            await side.transport.wait_gone(child.ready.instance, hello)


@pytest.mark.slow
async def test_a_write_to_a_hanging_peer_ends_when_it_goes_on_or_dies(spawn: Spawn) -> None:
    """Over TCP a stopped target takes no bytes: the writer's call stays, until something is settled."""
    # Buffers of the kernel that are much smaller than what is written: by default they may take all of it.
    tcp = {"UCX_TLS": "tcp", "UCX_TCP_SNDBUF": "64k", "UCX_TCP_RCVBUF": "64k"}
    target, writer = await asyncio.gather(spawn(environment=tcp), spawn(seed=4, environment=tcp))
    ready = target.ready
    assert await writer.ask(Add(ready.instance, ready.metadata, ready.memory)) == Done()
    assert await writer.ask(Write([1], [1])) == Done(sum(PIECES))
    target.signal(signal.SIGSTOP)
    writer.tell(Write(ALL, ALL))
    answer = asyncio.create_task(writer.answer())
    done, _ = await asyncio.wait([answer], timeout=0.7)
    assert not done
    target.signal(signal.SIGCONT)
    async with asyncio.timeout(LIMIT_S):
        assert await answer == Done(PAGES * sum(PIECES))
        target.signal(signal.SIGSTOP)
        writer.tell(Write(ALL, ALL))
        target.signal(signal.SIGKILL)
        failed = await writer.answer()
    assert isinstance(failed, Failed)
    assert failed.error == "TransferFailed"
