"""Several decode workers, restarts, retries and equal ids at one prefill: each READY has the bytes of its own prompt.

Prefill is asked by name, in any order and for any of the prompts that are under way, or gets the prompt with the
promise. Ids are drawn from two names, so that most of them are in use at several decode workers at the same time.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from contextlib import AsyncExitStack
from random import Random
from typing import Any

import pytest

from tests.support.configs import engine_config
from tests.support.waits import LIMIT_S
from tidekv import (
    DecodeEngine,
    DecodeRequest,
    DevicePool,
    EngineClosed,
    InvalidRequest,
    KVLayout,
    LoopbackNetwork,
    LoopbackTransport,
    NixlTransport,
    PrefillConfig,
    PrefillPeer,
    RequestFailed,
    TransferFailed,
    prompt_digest,
)
from tidekv.backends.keys.chain import pack_tokens
from tidekv.engine.synthetic.kv import SyntheticKV, prompt_digests

PAGE = 4
LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, dtype="float32", page_size=PAGE)
SYSTEM = list(range(8))
PROMPTS = [
    SYSTEM + [100 + at for at in range(6)],
    SYSTEM + [200 + at for at in range(6)],
    SYSTEM + [300 + at for at in range(6)],
    [400 + at for at in range(14)],
]
"""Equally long, so that nothing but their tokens tells them apart."""
PAGES = -(-len(PROMPTS[0]) // PAGE)
NAMESPACES = ["", "tenant"]
Make = Callable[[str], Any]


def first_token(tokens: list[int], namespace: str) -> int:
    return zlib.crc32(pack_tokens(tokens) + namespace.encode()) % 50_000


class Prefill:
    """Computes prompts that a router brings, and asks for their rooms by name; or those that promises bring."""

    def __init__(self, transport: Any, listen: str, *, by_name: bool) -> None:
        self.pool = DevicePool.allocate(LAYOUT, 64)
        self.kv = SyntheticKV(self.pool)
        self.free = list(range(0, 64, PAGES))[:-1]
        self.peer = PrefillPeer(
            PrefillConfig(listen=listen), device=self.pool, transport=transport, on_room=None if by_name else self.serve
        )

    def fill(self, tokens: list[int], namespace: str) -> tuple[int, list[int]]:
        first = self.free.pop()
        pages = list(range(first, first + PAGES))
        self.kv.fill(pages, prompt_digests(pack_tokens(tokens), PAGE, namespace=namespace))
        return first, pages

    async def answer(self, request_id: str, tokens: list[int], namespace: str) -> None:
        first, pages = self.fill(tokens, namespace)
        try:
            async with asyncio.timeout(5.0):
                room = await self.peer.room(request_id, prompt_digest(tokens, namespace=namespace))
            try:
                await room.send(pages, start_token=0)
                await room.finish(first_token=first_token(tokens, namespace))
            finally:
                await room.received()
        except (TimeoutError, TransferFailed, EngineClosed):
            pass
        finally:
            self.free.append(first)

    async def serve(self, room: Any) -> None:
        assert room.tokens is not None
        tokens = [int.from_bytes(room.tokens[at : at + 4], "little") for at in range(0, len(room.tokens), 4)]
        # The promise names no namespace: the tokens of a request say here which one it has.
        namespace = next(each for each in NAMESPACES if prompt_digest(tokens, namespace=each) == room.prompt)
        first, pages = self.fill(tokens, namespace)
        try:
            await room.send(pages, start_token=0)
            await room.finish(first_token=first_token(tokens, namespace))
        except BaseException:
            room.fail("cancelled")
            raise
        finally:
            await room.received()
            self.free.append(first)


class Decode:
    """One decode worker, which is stopped and started again under the same name."""

    def __init__(self, name: str, make: Make) -> None:
        self.name = name
        self.make = make
        self.stack = AsyncExitStack()

    async def start(self) -> None:
        self.pool = DevicePool.allocate(LAYOUT, 32)
        self.kv = SyntheticKV(self.pool)
        config = engine_config(peer_attempts=2, vocabulary=50_000)
        engine = DecodeEngine(config, device=self.pool, transport=self.make(self.name))
        self.engine = await self.stack.enter_async_context(engine)

    async def restart(self) -> None:
        await self.stack.aclose()
        await self.start()


async def run(seed: int, make: Make, listen: str, *, by_name: bool, turns: int) -> int:
    """Run a random story; returns the number of requests that became READY, all of which were compared."""
    random = Random(seed)
    ready_count = 0
    async with AsyncExitStack() as stack:
        prefill = Prefill(make("prefill"), listen, by_name=by_name)
        await stack.enter_async_context(prefill.peer)
        decodes = [Decode(f"decode-{number}", make) for number in range(3)]
        for decode in decodes:
            await decode.start()
            stack.push_async_callback(decode.stack.aclose)

        async def restore(decode: Decode, request: DecodeRequest, tokens: list[int]) -> None:
            nonlocal ready_count
            engine, pool, kv = decode.engine, decode.pool, decode.kv
            try:
                ready = await engine.restore(request)
                assert pool is decode.pool
                digests = prompt_digests(pack_tokens(tokens), PAGE, namespace=request.namespace)
                assert kv.verify(ready.pages[:PAGES].tolist(), digests) == [], (request, ready.sources)
                assert ready.first_token == first_token(tokens, request.namespace)
                ready_count += 1
                await engine.finish(ready)
            except (RequestFailed, EngineClosed, InvalidRequest):
                pass  # Failed by name, the worker restarts, or the id is live at this worker.

        async def turn(tasks: asyncio.TaskGroup) -> None:
            decode, name = random.choice(decodes), random.choice(["r1", "r2"])
            tokens, namespace = random.choice(PROMPTS), random.choice(NAMESPACES)
            request = DecodeRequest(
                request_id=name,
                tokens=tokens,
                namespace=namespace,
                prefill=prefill.peer.address,
                send_prompt=not by_name,
                deadline_s=random.choice([2.0, 10.0]),
            )
            kind = random.random()
            if kind < 0.1:
                decode.engine.decline(request)
            elif kind < 0.2:
                await decode.engine.abort(name)
            elif kind < 0.25:
                await decode.restart()
            else:
                work: list[Any] = [restore(decode, request, tokens)]
                if by_name and len(prefill.free) > 4 and random.random() < 0.9:
                    work.append(prefill.answer(name, tokens, namespace))
                random.shuffle(work)
                for one in work:
                    tasks.create_task(one)
                    for _ in range(random.choice([0, 0, 5, 50])):
                        await asyncio.sleep(0)

        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
            for _ in range(turns):
                await turn(tasks)
    return ready_count


@pytest.mark.parametrize("by_name", [True, False], ids=["by name", "with the prompt"])
@pytest.mark.parametrize("seed", range(6))
async def test_no_byte_of_another_prompt_becomes_ready(seed: int, by_name: bool) -> None:
    network = LoopbackNetwork()
    ready = await run(seed, lambda name: LoopbackTransport(name, network), "prefill", by_name=by_name, turns=40)
    assert ready > 0


@pytest.mark.nixl
@pytest.mark.parametrize("by_name", [True, False], ids=["by name", "with the prompt"])
async def test_no_byte_of_another_prompt_becomes_ready_over_nixl(
    monkeypatch: pytest.MonkeyPatch, by_name: bool
) -> None:
    # UCX's transport within a process aborts if one of its agents ends while another connects to it.
    monkeypatch.setenv("UCX_TLS", "tcp")
    ready = await run(
        1, lambda name: NixlTransport(name, dials=["127.0.0.1:*"]), "127.0.0.1:0", by_name=by_name, turns=25
    )
    assert ready > 0
