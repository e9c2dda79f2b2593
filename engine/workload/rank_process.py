"""One rank of a decode instance as a process, with its prefill rank and storage that fails on this rank alone.

A test or a soak starts several of them, has all serve the same requests, compares what they keep, and kills one.
Prefill is synthetic and in the same process: what the ranks say to each other goes over real sockets.
"""

from __future__ import annotations

import asyncio
import hashlib
import multiprocessing
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from random import Random
from typing import TypeAlias

import msgspec

from tidekv.backends.device import DevicePool
from tidekv.backends.host import HostPool
from tidekv.backends.keys import pack_tokens
from tidekv.backends.layout import KVLayout
from tidekv.backends.storage.base import Storage
from tidekv.backends.storage.uri import open_storage
from tidekv.engine.config import EngineConfig
from tidekv.engine.decode_engine import DecodeEngine
from tidekv.engine.prefill_peer import PrefillPeer
from tidekv.engine.rank_group import RankGroup
from tidekv.engine.values import DecodeRequest
from tidekv.engine.workload.synthetic import SyntheticKV, prompt_digests
from tidekv.engine.workload.synthetic_prefill import SyntheticPrefill
from tidekv.states.errors import RankLost, RequestFailed, StorageFailed, TidekvError
from tidekv.states.shapes import PageIds
from tidekv.transports.loopback import LoopbackNetwork, LoopbackTransport

START_S = 60.0
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32", page_size=4)
SESSIONS = 6


class RankPlan(msgspec.Struct, frozen=True):
    """What one rank's process is."""

    rank: int
    ranks: int
    address: str
    device_pages: int = 96
    host_pages: int = 64
    fault_rate: float = 0.0
    """How often a call to storage fails, or finds nothing, on this rank."""
    silence_s: float = 2.0


class Serve(msgspec.Struct, frozen=True, tag=True):
    """Serve so many requests, so many at a time; their prompts follow from the seed → Served."""

    seed: int
    requests: int
    concurrency: int = 8


class Served(msgspec.Struct, frozen=True, tag=True):
    """How requests ended, what was wrong, and a digest of everything that must be the same on all ranks."""

    ends: dict[str, int]
    wrong_pages: int
    sources: dict[str, int]
    books: str
    statistics: dict[str, int | str]
    causes: list[str]
    """Why requests failed, each once."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Leave the group, with all others."""


Request: TypeAlias = Serve | Stop


class FailingStorage:
    """Storage that fails now and then."""

    def __init__(self, inner: Storage, random: Random, rate: float) -> None:
        self._inner = inner
        self._random = random
        self._rate = rate

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    async def exists(self, keys: Sequence[bytes], *, timeout_s: float) -> list[bool]:
        """Whether each is there; or an error."""
        if self._random.random() < self._rate:
            raise StorageFailed("injected")
        return await self._inner.exists(keys, timeout_s=timeout_s)

    async def get_into(self, keys: Sequence[bytes], pages: PageIds, *, timeout_s: float) -> list[bool]:
        """Read; or less than that."""
        flags = await self._inner.get_into(keys, pages, timeout_s=timeout_s)
        if self._random.random() < self._rate:
            good = self._random.randrange(len(flags) + 1)
            return [*flags[:good], *([False] * (len(flags) - good))]
        return flags


class RankWorker:
    """What runs in the process."""

    def __init__(self, plan: RankPlan) -> None:
        self._network = LoopbackNetwork()
        self._device = DevicePool.allocate(LAYOUT, plan.device_pages)
        self._kv = SyntheticKV(self._device)
        prefill_pool = DevicePool.allocate(LAYOUT, 512)
        self.peer = PrefillPeer(
            device=prefill_pool,
            transport=LoopbackTransport(f"prefill-{plan.rank}", self._network),
            listen="prefill",
            on_room=SyntheticPrefill(prefill_pool, chunk_pages=4).serve,
            rank=plan.rank,
            ranks=plan.ranks,
        )
        storage = open_storage("memory:?capacity=16MiB")
        failing = FailingStorage(storage, Random(f"faults of {plan.rank}"), plan.fault_rate)
        self.engine = DecodeEngine(
            EngineConfig(prefetch_threshold_tokens=0, breaker_failures=0, close_deadline_s=5.0),
            device=self._device,
            host=HostPool.allocate(LAYOUT, plan.host_pages),
            storage=failing,  # type: ignore[arg-type]  # It passes everything else on to a real one.
            transport=LoopbackTransport(f"decode-{plan.rank}", self._network),
            ranks=RankGroup(
                rank=plan.rank,
                ranks=plan.ranks,
                address=plan.address,
                silence_s=plan.silence_s,
                vote_timeout_s=2 * plan.silence_s,
            ),
        )

    async def serve(self, work: Serve) -> Served:
        """Serve the requests of a seed: conversations that grow."""
        if (driver := self.engine._parts.ranks) is not None:
            await driver.wait_formed()
        random = Random(work.seed)
        histories = [[session * 1000 + at for at in range(12)] for session in range(SESSIONS)]
        prompts: list[list[int]] = []
        for _ in range(work.requests):
            history = random.choice(histories)
            history += [random.randrange(10_000) for _ in range(random.randint(1, 9))]
            if len(history) > 100:
                del history[12:]
            prompts.append(list(history))
        ends: dict[str, int] = {}
        sources: dict[str, int] = {}
        causes: dict[str, None] = {}
        wrong = 0
        gate = asyncio.Semaphore(work.concurrency)

        async def one(number: int, tokens: list[int]) -> None:
            nonlocal wrong
            async with gate:
                try:
                    ready = await self.engine.restore(
                        DecodeRequest(
                            request_id=f"s{work.seed}-{number}", tokens=tokens, prefill="prefill", prompt="send"
                        )
                    )
                    digests = prompt_digests(pack_tokens(tokens), LAYOUT.page_size)
                    wrong += len(self._kv.verify(ready.pages[: len(digests)].tolist(), digests))
                    for tier, count in ready.sources.items():
                        sources[tier] = sources.get(tier, 0) + count
                    await self.engine.finish(ready)
                    end = "finished"
                except RequestFailed as failed:
                    end = "failed"
                    causes[failed.cause] = None
                except RankLost as lost:
                    end = "refused"
                    causes[str(lost)] = None
                except TidekvError as error:
                    end = type(error).__name__
                    causes[str(error)] = None
                ends[end] = ends.get(end, 0) + 1

        await asyncio.gather(*(one(number, tokens) for number, tokens in enumerate(prompts)))
        await self.engine.wait_settled()
        return Served(ends, wrong, sources, self._books(), self._statistics(), list(causes))

    def _books(self) -> str:
        core = self.engine._core
        core.check()
        digest = hashlib.sha256(core.books.device.free_pages.tobytes() + core.books.host.free_pages.tobytes())
        for node in core.books.index.nodes():
            for part in (node.edge, node.device, node.host):
                digest.update(b"none" if part is None else bytes(part))
        return digest.hexdigest()

    def _statistics(self) -> dict[str, int | str]:
        found = self.engine.statistics()["ranks"]
        assert isinstance(found, dict)
        return found


async def _run(plan: RankPlan, pipe: Connection) -> None:
    worker = RankWorker(plan)
    async with worker.peer, worker.engine:
        pipe.send("ready")
        while True:
            request: Request = await asyncio.to_thread(pipe.recv)
            if isinstance(request, Stop):
                return
            pipe.send(await worker.serve(request))


def run_rank(plan: RankPlan, pipe: Connection) -> None:
    """The process of one rank; both ends of the pipe belong to one test and trust each other."""
    asyncio.run(_run(plan, pipe))


class RankProcess:
    """A rank's process, as whoever started it sees it."""

    def __init__(self, plan: RankPlan) -> None:
        context = multiprocessing.get_context("spawn")
        self.plan = plan
        self._pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=run_rank, args=(plan, theirs))
        self.process.start()
        theirs.close()

    async def hear(self, timeout_s: float = START_S) -> object:
        """What the process says next. Raises TimeoutError."""

        def poll() -> object:
            if not self._pipe.poll(timeout_s):
                raise TimeoutError(f"rank {self.plan.rank} said nothing within {timeout_s:g} s")
            return self._pipe.recv()

        return await asyncio.to_thread(poll)

    def tell(self, request: Request) -> None:
        """Have it do something."""
        self._pipe.send(request)

    async def serve(self, work: Serve) -> Served:
        """Have it serve, and wait for the end."""
        self.tell(work)
        served = await self.hear()
        assert isinstance(served, Served)
        return served

    async def join(self) -> int | None:
        """Wait for its end; its exit code."""
        await asyncio.to_thread(self.process.join, START_S)
        self._pipe.close()
        return self.process.exitcode
