"""One rank of a decode instance as a process, with its prefill rank and storage that fails on this rank only.

A test starts several of them, has all serve the same requests, compares their state, and kills one. Prefill is
synthetic and runs in the same process; the ranks communicate over real sockets.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from random import Random
from typing import TypeAlias

import msgspec
import torch

from demo.blocks import TraceOptions
from demo.conversations import Transcripts, agent_options, make_workload
from demo.traces import read_trace
from tests.support.inside import core_of, runtime_of
from tests.support.rank_faults import Divergence, FailingCopier, FailingStorage, RankFaults, plant
from tests.support.waits import LEASE_S
from tidekv.backends.device.pool import DevicePool
from tidekv.backends.host.pool import HostPool
from tidekv.backends.keys.chain import pack_tokens
from tidekv.backends.layout import KVLayout
from tidekv.backends.storage.uri import open_storage
from tidekv.engine.config.engine_config import EngineConfig, StorageOptions
from tidekv.engine.decode.decode_engine import DecodeEngine
from tidekv.engine.decode.values import DecodeRequest, ReadyRequest
from tidekv.engine.prefill.prefill_config import PrefillConfig
from tidekv.engine.prefill.prefill_peer import PrefillPeer
from tidekv.engine.ranks.group import RankGroup
from tidekv.engine.synthetic.kv import SyntheticKV, prompt_digests
from tidekv.engine.synthetic.prefill import SyntheticPrefill
from tidekv.states.errors import EngineClosed, LayersLost, RankLost, RequestFailed, TidekvError
from tidekv.states.handover.rank_place import RankPlace
from tidekv.states.ranks.agreement import LEADER
from tidekv.states.types import FULL
from tidekv.transports.nixl.transport import NixlTransport
from tidekv.transports.prefill.prefill_room import Room

START_S = 60.0
LAYOUT = KVLayout(num_layers=3, num_kv_heads=1, head_dim=8, dtype="float32", page_size=4)
SESSIONS = 6
PREFILL_PAGES = 8192
"""Enough for all prompts at once: waiting for pages could deadlock with a room of another rank."""
TRACE_PAGES_MAX = 1024
"""Maximum pages of a prompt; longer requests of a recording are left out, since pools must hold the longest."""


class RankPlan(msgspec.Struct, frozen=True):
    """Options of one rank's process."""

    rank: int
    ranks: int
    address: str
    prefill: str
    """Addresses of all prefill ranks, joined by commas; the one with the same rank runs in this process."""
    device_pages: int = 96
    host_pages: int = 64
    fault_rate: float = 0.0
    """Probability that a call to storage fails, or finds nothing, on this rank."""
    silence_s: float = 20.0


class Serve(msgspec.Struct, frozen=True, tag=True):
    """Serve `requests` requests, `concurrency` at a time. Answered by Served.

    The prompts are derived from the seed: growing conversations, or with `agents` those of coding agents. With `trace`
    they are the requests of that recording from number `first` on, shortened by a factor of 64.
    """

    seed: int
    requests: int
    concurrency: int = 8
    agents: bool = False
    trace: str = ""
    first: int = 0
    midway: int = 0
    """Send `Midway` when so many requests have ended; 0: never."""
    early: bool = False
    """Whether the callers of every other request begin with its first layer; the device is flushed before each."""


class Midway(msgspec.Struct, frozen=True, tag=True):
    """So many requests of `Serve` have ended, and the others go on."""


class Served(msgspec.Struct, frozen=True, tag=True):
    """Ends of requests, errors found, and a digest of the state that must be equal on all ranks."""

    ends: dict[str, int]
    wrong_pages: int
    sources: dict[str, int]
    books: str
    statistics: dict[str, int | str]
    faults: dict[str, int]
    """Faults that struck this rank so far, by kind."""
    causes: list[str]
    """Distinct causes of failed requests."""
    begun_early: int
    """Requests whose callers got the first layer before the last one."""
    layers_lost: int


class Plant(msgspec.Struct, frozen=True, tag=True):
    """Corrupt a part of this rank's state, so that it differs from the other ranks."""

    part: Divergence


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Leave the group, together with all others."""


Request: TypeAlias = Serve | Plant | Stop


def prompts_of(work: Serve) -> list[bytes]:
    """Return the prompts of all requests as packed tokens; equal on every rank."""
    if work.trace:
        options = TraceOptions(length_scale=1 / 64, prompt_tokens_max=LAYOUT.page_size * TRACE_PAGES_MAX)
        requests = itertools.islice(read_trace(work.trace, options), work.first, work.first + work.requests)
        return [request.prompt.packed() for request in requests]
    if work.agents:
        workload = make_workload(agent_options(agents=4, rounds=work.requests, seed=work.seed))
        transcripts, made = Transcripts(workload), []
        for turn in itertools.islice(workload.in_order(), work.requests):
            made.append(pack_tokens(transcripts.prompt(turn)))
            transcripts.answer(turn, turn.new_user_tokens[: turn.output_tokens])
        return made
    random = Random(work.seed)
    histories = [[session * 1000 + at for at in range(12)] for session in range(SESSIONS)]
    prompts = []
    for _ in range(work.requests):
        history = random.choice(histories)
        history += [random.randrange(10_000) for _ in range(random.randint(1, 9))]
        if len(history) > 100:
            del history[12:]
        prompts.append(pack_tokens(history))
    return prompts


class RankWorker:
    """The engine and prefill peer in the process."""

    def __init__(self, plan: RankPlan) -> None:
        self._rank = plan.rank
        self._prefill = plan.prefill
        self._device = DevicePool.allocate(LAYOUT, plan.device_pages)
        self._kv = SyntheticKV(self._device)
        prefill_pool = DevicePool.allocate(LAYOUT, PREFILL_PAGES)
        self._prefill_rank = SyntheticPrefill(prefill_pool, chunk_pages=max(4, plan.device_pages // 32))
        self.peer = PrefillPeer(
            PrefillConfig(
                listen=plan.prefill.split(",")[plan.rank],
                lease_s=LEASE_S,
                place=RankPlace(rank=plan.rank, ranks=plan.ranks),
            ),
            device=prefill_pool,
            transport=NixlTransport(f"prefill-{plan.rank}"),
            on_room=self._serve_room,
        )
        storage = open_storage("memory:?capacity=16MiB")
        self._faults = RankFaults(plan.rank, plan.fault_rate)
        failing = FailingStorage(storage, self._faults)
        self.engine = DecodeEngine(
            EngineConfig(storage=StorageOptions(prefetch_threshold_tokens=0, breaker_failures=0), close_deadline_s=5.0),
            device=self._device,
            host=HostPool.allocate(LAYOUT, plan.host_pages),
            storage=failing,  # type: ignore[arg-type]  # It passes everything else on to a real one.
            transport=NixlTransport(f"decode-{plan.rank}", dials=["127.0.0.1:*"]),
            ranks=RankGroup(
                rank=plan.rank,
                ranks=plan.ranks,
                address=plan.address,
                silence_s=plan.silence_s,
                vote_timeout_s=2 * plan.silence_s,
            ),
        )

    def inject(self) -> None:
        """Make copies of the running engine fail occasionally."""
        executor = runtime_of(self.engine).executor
        failing = FailingCopier(executor._copiers[FULL], self._faults)
        # It passes everything else on to the real one.
        executor._copiers = {**executor._copiers, FULL: failing}  # type: ignore[dict-item]

    def plant(self, part: Divergence) -> None:
        """Corrupt a part of this rank's state."""
        plant(core_of(self.engine), part)

    async def _serve_room(self, room: Room) -> None:
        if self._faults.hits("prefill_fails", 0.1):
            room.fail("injected")
        else:
            await self._prefill_rank.serve(room)

    async def serve(self, work: Serve, tell: Callable[[object], None]) -> Served:
        """Serve the requests of a seed or of a recording."""
        if (driver := runtime_of(self.engine).ranks) is not None:
            await driver.wait_formed()
        prompts = prompts_of(work)
        ends: dict[str, int] = {}
        sources: dict[str, int] = {}
        causes: dict[str, None] = {}
        wrong = begun_early = layers_lost = 0
        gate = asyncio.Semaphore(work.concurrency)

        async def wait_for_all_layers(ready: ReadyRequest) -> None:
            nonlocal begun_early, layers_lost
            begun_early += ready.layers_in_place is not None
            layer = 0
            while layer < LAYOUT.num_layers:
                try:
                    await ready.wait_layer(layer)
                    layer += 1
                except LayersLost:
                    layers_lost += 1
                    layer = 0

        async def one(number: int, tokens: bytes) -> None:
            nonlocal wrong
            early = work.early and number % 2 == 0
            async with gate:
                try:
                    if early and self._rank == LEADER:
                        await self.engine.flush(("l1",))
                    ready = await self.engine.restore(
                        DecodeRequest(
                            request_id=f"s{work.seed}-{work.first + number}",
                            tokens=tokens,
                            prefill=self._prefill,
                            send_prompt=True,
                            early=early,
                        )
                    )
                    await wait_for_all_layers(ready)
                    digests = prompt_digests(tokens, LAYOUT.page_size)
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
                if sum(ends.values()) == work.midway:
                    tell(Midway())

        await asyncio.gather(*(one(number, tokens) for number, tokens in enumerate(prompts)))
        try:
            await self.engine.wait_settled()
        except EngineClosed as error:
            causes[str(error)] = None
        return Served(
            ends=ends,
            wrong_pages=wrong,
            sources=sources,
            books=self._books(),
            statistics=self._statistics(),
            faults=self._faults.counts,
            causes=list(causes),
            begun_early=begun_early,
            layers_lost=layers_lost,
        )

    def _books(self) -> str:
        core = core_of(self.engine)
        core.check()
        digest = hashlib.sha256(core.state.device.free_pages.tobytes() + core.state.host.free_pages.tobytes())
        for node in core.state.index.nodes():
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
        worker.inject()
        pipe.send("ready")
        while True:
            request: Request = await asyncio.to_thread(pipe.recv)
            match request:
                case Stop():
                    return
                case Plant(part=part):
                    worker.plant(part)
                case Serve():
                    pipe.send(await worker.serve(request, pipe.send))


def run_rank(plan: RankPlan, pipe: Connection) -> None:
    """Run the process of one rank. Both ends of the pipe belong to one test and trust each other."""
    torch.set_num_threads(1)
    asyncio.run(_run(plan, pipe))


class RankProcess:
    """The parent's end of a rank's process."""

    def __init__(self, plan: RankPlan) -> None:
        # Forked from a process that has imported everything: each rank would take seconds for that.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "nixl._api"])
        self.plan = plan
        self._pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=run_rank, args=(plan, theirs))
        self.process.start()
        theirs.close()

    async def hear(self, timeout_s: float = START_S) -> object:
        """Return the next message of the process. Raises TimeoutError."""

        def poll() -> object:
            if not self._pipe.poll(timeout_s):
                raise TimeoutError(f"rank {self.plan.rank} sent nothing within {timeout_s:g} s")
            return self._pipe.recv()

        return await asyncio.to_thread(poll)

    def tell(self, request: Request) -> None:
        """Send a request to the process."""
        self._pipe.send(request)

    async def serve(self, work: Serve, timeout_s: float = START_S) -> Served:
        """Send work, and wait for its result. Raises TimeoutError."""
        self.tell(work)
        served = await self.hear(timeout_s)
        assert isinstance(served, Served)
        return served

    async def join(self) -> int | None:
        """Wait for the process to end; returns its exit code."""
        await asyncio.to_thread(self.process.join, START_S)
        self._pipe.close()
        return self.process.exitcode
