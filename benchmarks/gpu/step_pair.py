"""A whole engine and two prefill workers in processes of their own, over NIXL, through all tiers, with faults.

Conversations with synthetic KV are served while one prefill worker is stopped for a while, and later killed; some
requests are aborted. Each restored page is compared on the device, byte for byte. Nothing may be left at the end.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import uvloop

from benchmarks.gpu.report import Report, Setting
from benchmarks.gpu.ucx_log import logging_to, tell_path
from demo.conversations import SOURCES
from demo.phase import held_by
from demo.prefill_process import PrefillOrder, PrefillProcess
from tidekv.backends.device.pool import DevicePool
from tidekv.backends.host.pool import HostPool
from tidekv.backends.keys.chain import pack_tokens
from tidekv.backends.layout import KVLayout
from tidekv.backends.storage.uri import open_storage
from tidekv.engine.config.engine_config import AdmissionOptions, EngineConfig, PeerOptions, StorageOptions
from tidekv.engine.decode.decode_engine import DecodeEngine
from tidekv.engine.decode.values import DecodeRequest, ReadyRequest
from tidekv.engine.synthetic.kv import SyntheticKV, prompt_digests
from tidekv.states.errors import OutOfPages, RequestFailed, TransferFailed
from tidekv.transports.nixl.transport import NixlTransport

MODEL = "gpu-pair"
VOCABULARY = 50_000
OUTPUT_TOKENS, USER_TOKENS = 33, 31
SETTLE_S = 15.0


@dataclass(frozen=True, kw_only=True)
class Load:
    """How much is served, and when faults come, in requests begun."""

    conversations: int
    turns: int
    at_once: int
    system_tokens: int
    prompt_tokens: int
    device_pages: int
    host_pages: int
    stopped_s: float
    abort_share: float = 0.08

    @property
    def requests(self) -> int:
        """Number of requests in all."""
        return self.conversations * self.turns


@dataclass
class Served:
    """What was served so far."""

    begun: int = 0
    restored: int = 0
    wrong_pages: int = 0
    pages: int = 0
    causes: Counter[str] = field(default_factory=Counter)
    sources: Counter[str] = field(default_factory=Counter)


class Conversations:
    """Clients of a decode engine, and what they saw."""

    def __init__(self, engine: DecodeEngine, device: DevicePool, load: Load, prefills: list[str]) -> None:
        self.engine = engine
        self.kv = SyntheticKV(device)
        self.load = load
        self.prefills = prefills
        self.page_size = device.layout.page_size
        self.served = Served()
        self._random = np.random.default_rng(11)
        self._system = self._tokens(load.system_tokens)
        self._changed = asyncio.Event()
        self._free = asyncio.Semaphore(load.at_once)

    def _tokens(self, count: int) -> list[int]:
        found: list[int] = self._random.integers(0, VOCABULARY, count).tolist()
        return found

    async def begun(self, share: float) -> None:
        """Wait until this share of the requests was begun."""
        while self.served.begun < share * self.load.requests:
            self._changed.clear()
            await self._changed.wait()

    async def run(self) -> None:
        """Serve all of them in turns, so that the pages of each are evicted between two of its turns."""
        async with asyncio.TaskGroup() as group:
            for number in range(self.load.conversations):
                group.create_task(self._converse(number))

    async def _converse(self, number: int) -> None:
        prompt = [*self._system, *self._tokens(int(self._random.integers(1, self.load.prompt_tokens)))]
        for turn in range(self.load.turns):
            async with self._free:
                self.served.begun += 1
                self._changed.set()
                prompt = await self._ask(number, turn, prompt)

    async def _ask(self, number: int, turn: int, prompt: list[int]) -> list[int]:
        """Serve one turn; returns the next prompt, which is the same one if this turn has failed."""
        order = self.prefills if (number + turn) % 2 else self.prefills[::-1]
        request_id = f"conversation {number} turn {turn}"
        request = DecodeRequest(request_id=request_id, tokens=prompt, prefill=order, send_prompt=True, deadline_s=30)
        try:
            if self._random.random() < self.load.abort_share:
                await self._aborted(request)
                return prompt
            ready = await self.engine.restore(request)
        except RequestFailed as failed:
            self.served.causes[failed.cause] += 1
            return prompt
        return await self._answered(ready, prompt)

    async def _aborted(self, request: DecodeRequest) -> None:
        restoring = asyncio.ensure_future(self.engine.restore(request))
        await asyncio.sleep(float(self._random.random()) * 0.01)
        await self.engine.abort(request.request_id)
        await restoring
        self.served.causes["ready before its abort"] += 1

    async def _answered(self, ready: ReadyRequest, prompt: list[int]) -> list[int]:
        """Compare the pages, generate, and finish; returns the next prompt."""
        digests = prompt_digests(pack_tokens(prompt), self.page_size)
        self.served.wrong_pages += len(self.kv.verify(ready.pages[: len(digests)].tolist(), digests))
        self.served.pages += len(digests)
        self.served.restored += 1
        self.served.sources.update(ready.sources)
        output = [ready.first_token, *self._tokens(OUTPUT_TOKENS - 1)]
        written = [*prompt, *output[:-1]]
        try:
            self.engine.grow(ready, len(output) - 1)
        except OutOfPages:
            # A stopped prefill worker may hold many pages in quarantine.
            await self.engine.finish(ready)
            return prompt
        first = len(prompt) // self.page_size
        digests = prompt_digests(pack_tokens(written), self.page_size)
        self.kv.fill(ready.pages[first : len(digests)].tolist(), digests[first:])
        await self.engine.finish(ready, output)
        return [*prompt, *output, *self._tokens(USER_TOKENS)]


async def serve(setting: Setting, report: Report, load: Load) -> None:
    """Start all workers, serve, and check what is left."""
    layout = KVLayout(num_layers=4, num_kv_heads=4, head_dim=64, dtype="bfloat16", page_size=16)
    order = PrefillOrder(
        name="prefill-a",
        fingerprint=MODEL,
        layout=layout,
        num_pages=2 * load.device_pages,
        chunk_tokens=128,
        vocabulary=VOCABULARY,
        device=str(setting.device),
    )
    other = PrefillOrder(**{name: getattr(order, name) for name in order.__struct_fields__} | {"name": "prefill-b"})
    log = setting.work / "ucx.log"
    device = DevicePool.allocate(layout, load.device_pages, device=setting.device)
    config = EngineConfig(
        model=MODEL,
        storage=StorageOptions(prefetch="wait_complete", prefetch_threshold_tokens=0),
        peer=PeerOptions(lease_s=4.0, heartbeat_s=0.25, silence_s=1.0),
        admission=AdmissionOptions(prefill_share=1.0),
    )
    first = PrefillProcess(order)
    async with (
        first,
        PrefillProcess(other, environment=logging_to(log)) as second,
        DecodeEngine(
            config,
            device=device,
            host=HostPool.allocate(layout, load.host_pages),
            storage=open_storage(f"file:{setting.work / 'storage'}?capacity=4GiB"),
            transport=NixlTransport("decode"),
        ) as engine,
    ):
        conversations = Conversations(engine, device, load, [str(first.address), str(second.address)])
        async with asyncio.TaskGroup() as group:
            group.create_task(conversations.run())
            await conversations.begun(0.3)
            first.signal(signal.SIGSTOP)
            await asyncio.sleep(load.stopped_s)
            first.signal(signal.SIGCONT)
            await conversations.begun(0.6)
            first.signal(signal.SIGKILL)
        judge(report, conversations.served, load)
        with report.checking("nothing is left after the last request, a stopped and a killed prefill"):
            async with asyncio.timeout(SETTLE_S):
                await engine.wait_settled()
            if held := held_by(engine):
                raise RuntimeError(f"held: {held}")
        try:
            counts = await second.counts()
            report.note(f"the other prefill: {counts}")
        except TransferFailed as error:
            report.check("the other prefill lives", False, str(error))
        core = engine.statistics()["core"]
        report.note(f"decode: {core}")
        with report.checking("what is left in all tiers is dropped"):
            await engine.flush(("l1", "l2", "l3"))
    tell_path(report, log)


def judge(report: Report, served: Served, load: Load) -> None:
    """Check what clients saw."""
    report.check(
        "every byte of every restored page", served.wrong_pages == 0, f"{served.wrong_pages} of {served.pages} pages"
    )
    aborted = sum(count for cause, count in served.causes.items() if "abort" in cause)
    failed = {cause: count for cause, count in served.causes.items() if "abort" not in cause}
    report.check("no request failed that was not aborted", not failed, str(failed))
    whole = served.restored + aborted + sum(failed.values()) == load.requests
    report.check(
        f"{load.requests} requests had an outcome", whole, f"{served.restored} restored, {dict(served.causes)}"
    )
    missing = [source for source in SOURCES if not served.sources[source]]
    report.check("every tier served", not missing, f"tokens by source: {dict(served.sources)}")


def run(setting: Setting, report: Report) -> None:
    """Serve 500 requests."""
    os.environ.setdefault("UCX_MODULES", "^ib")
    load = Load(
        conversations=50,
        turns=10,
        at_once=12,
        system_tokens=128,
        prompt_tokens=512,
        device_pages=900,
        host_pages=1200,
        stopped_s=3.0,
    )
    if setting.short:
        load = Load(
            conversations=8,
            turns=6,
            at_once=4,
            system_tokens=32,
            prompt_tokens=64,
            device_pages=80,
            host_pages=90,
            stopped_s=1.5,
            abort_share=0.15,
        )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(setting, report, load))
