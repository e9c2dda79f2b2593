"""Two prefill workers that are killed, stopped and started again at random, under a load that aborts at random.

Nothing is known beforehand but what must hold: a request that is READY has the right bytes, now and when everything
has settled; one that failed reports that prefill was lost, or was aborted; none hangs; and nothing is held at the end.
"""

from __future__ import annotations

import asyncio
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.fault_workers import finish_turn
from tests.support.inside import calls_of
from tests.support.waits import LIMIT_S
from tidekv import PrefillCause, RequestFailed, open_storage
from tidekv.states.errors import CapacityError

pytestmark = [pytest.mark.nixl, pytest.mark.slow]

FAULTS = 8
LANES = 6
PROMPTS = 16
LOST = {cause.value for cause in PrefillCause if cause.retryable}


class Worker:
    """One prefill worker at a fixed address, whatever process serves it at the moment."""

    def __init__(self, spawn: Any, name: str, source: random.Random) -> None:
        self._spawn = spawn
        self._name = name
        self._source = source
        self.address = "127.0.0.1:0"

    async def start(self) -> None:
        environment = {"UCX_TLS": self._source.choice(("tcp", "all"))}
        self.child = await self._spawn(environment, name=self._name, listen=self.address)
        self.address = self.child.ready.address

    async def suffer(self) -> None:
        """One fault, and its end."""
        lasts_s = self._source.choice((0.0, 0.05, 0.3, 1.5))
        kind = self._source.choice(("kill", "kill", "stop", "stop and kill"))
        if "stop" in kind:
            self.child.signal(signal.SIGSTOP)
            await pass_s(lasts_s)
        if "kill" in kind:
            self.child.signal(signal.SIGKILL)
            await self.child.wait_ended()
            await self.start()
        else:
            self.child.signal(signal.SIGCONT)


async def pass_s(seconds: float) -> None:
    """Let time pass: a fault lasts, a load runs."""
    await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=seconds)


class Load:
    """Requests in lanes, each verified when it is READY, and again before it is finished."""

    def __init__(self, decode: Any, workers: list[Worker], prompt: Any, source: random.Random) -> None:
        self.ends: dict[str, int] = {}
        self.is_over = False
        self._decode = decode
        self._workers = workers
        self._prompt = prompt
        self._source = source

    async def run(self, lane: int) -> None:
        while not self.is_over:
            end = await self._one(f"lane{lane}")
            self.ends[end] = self.ends.get(end, 0) + 1

    async def _one(self, request_id: str) -> str:
        decode, source = self._decode, self._source
        tokens = self._prompt(source.randrange(PROMPTS), source.randrange(1, 24), tail=source.randrange(16))
        addresses = source.sample([worker.address for worker in self._workers], source.randrange(1, 3))
        restore = decode.start(request_id, tokens, prefill=addresses)
        if source.random() < 0.2:
            await asyncio.wait([restore], timeout=source.random() * 0.02)
            await decode.engine.abort(request_id)
        try:
            ready = await restore
        except RequestFailed as failed:
            assert failed.cause in LOST | {"aborted"}, failed
            return failed.cause
        if not calls_of(decode.engine).is_live(request_id):
            return "aborted when ready"
        if source.random() < 0.3:
            await pass_s(source.random() * 0.1)
        output = list(range(source.randrange(1, 40)))
        assert decode.wrong(ready, tokens) == []
        try:
            await finish_turn(decode.engine, decode.kv, ready, tokens, output)
        except CapacityError:
            await decode.engine.finish(ready)
        return "served"


@pytest.mark.parametrize("seed", [1, 2])
async def test_any_fault_of_prefill_at_any_time(
    tmp_path: Path, spawn_prefill: Any, decode_over_nixl: Any, prompt: Any, seed: int
) -> None:
    source = random.Random(seed)
    workers = [Worker(spawn_prefill, name, source) for name in ("first", "second")]
    for worker in workers:
        await worker.start()
    storage = open_storage(f"file:{tmp_path}?capacity=8MiB&segment=1MiB")
    settings = {"device_pages": 80, "host_pages": 64, "heartbeat_s": 0.25, "peer_silence_s": 1.0}
    async with (
        asyncio.timeout(LIMIT_S),
        decode_over_nixl([], storage=storage, **settings) as decode,
        asyncio.TaskGroup() as group,
    ):
        load = Load(decode, workers, prompt, source)
        lanes = [group.create_task(load.run(lane)) for lane in range(LANES)]
        for _ in range(FAULTS):
            await pass_s(source.random() * 0.3)
            await source.choice(workers).suffer()
        load.is_over = True
        await asyncio.wait(lanes)
        # Everybody lives by now: what is in the quarantine is confirmed, or its writer is proven dead.
        await decode.assert_nothing_held()
        for worker in workers:
            await decode.serve("again", prompt(99, 4), prefill=worker.address)
        assert load.ends["served"] >= 20, load.ends
        await decode.assert_nothing_held()
