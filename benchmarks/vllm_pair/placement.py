"""Whether the published router places prompts at the decode server whose host memory or storage has their prefix.

    prompt n ──▶ decode server n mod 2, which keeps it     then: each server's own prefix cache is emptied
    prompt n, and some tokens ──▶ vllm-router, policy kv_aware ──▶ the server of prompt n, if it is right

The router listens to vLLM's KV events of the decode servers, among which are those of the connector. Its mode for
prefill and decode takes events of prefill servers only, so the decode servers are plain ones to it.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final
from uuid import uuid4

import httpx
import msgspec
import zmq
import zmq.asyncio

from benchmarks.ports import HOST, free_port
from benchmarks.servers.cluster import start
from benchmarks.servers.conversations import FIRST_WORD
from benchmarks.servers.file_storage import FILES
from benchmarks.servers.samples import add_samples
from benchmarks.vllm_pair.client import Client
from benchmarks.vllm_pair.router import Router
from benchmarks.vllm_pair.server import MODEL, Server, ServerOptions
from benchmarks.vllm_pair.variants import VARIANTS
from tidekv.states.errors import TidekvError

SERVERS: Final = 2
FURTHER: Final = 8
"""Tokens by which a prompt is longer when it is asked again."""
EVENTS: Final = "tcp://*:0"
"""vLLM binds to a port of VLLM_HOST_IP for this endpoint. To one with another host than `*` it connects, so that no
listener hears it, and vllm-router takes none but `tcp://HOST:PORT`.
"""
LISTEN_S: Final = 5.0
"""Seconds that the router has for events that this program has heard."""
AGREE_S: Final = 60.0
POLL_S: Final = 0.1
SERVED: Final = "vllm:request_success_total"
SOURCE: Final = "vllm:prompt_tokens_by_source_total{{{}}}"
RESTORED: Final = "vllm:tidekv_restore_tokens_{}_total"


class NotPlaced(TidekvError):
    """The placement could not be measured: a server did not do in time what the text says."""


@dataclass(frozen=True, slots=True)
class Placement:
    """How many prompts were placed, and how many of them right.

    Tokens that the servers took from their own caches, from host memory and from storage when the prompts came again.
    """

    prompts: int
    right: int
    own_tokens: int
    host_tokens: int
    storage_tokens: int


@dataclass
class PlacingRouter(Router):
    """A vllm-router in front of servers that are all alike. `sources`: of each, where its KV events and replay are."""

    block_size: int = 32
    sources: Sequence[tuple[str, str]] = ()

    def command(self) -> list[str]:
        """See Program."""
        command = [str(Path(sys.executable).with_name("vllm-router")), f"--host={HOST}", f"--port={self.port}"]
        command += ["--policy=kv_aware", f"--kv-event-block-size={self.block_size}", f"--kv-event-model={MODEL}"]
        for server, (events, replay) in zip(self.decodes, self.sources, strict=True):
            command += ["--kv-event-source", f"{server.url}={events}"]
            command += ["--kv-event-replay-source", f"{server.url}={replay}"]
        command += [f"--prometheus-port={free_port()}", f"--prometheus-host={HOST}", "--log-level=debug"]
        return [*command, "--worker-urls", *(server.url for server in self.decodes)]


class Listener:
    """The blocks of one server by medium, as its KV events say."""

    def __init__(self, endpoint: str) -> None:
        """Connect to the publisher. What it publishes before that is not heard."""
        self._socket: zmq.asyncio.Socket = zmq.asyncio.Context.instance().socket(zmq.SUB)
        self._socket.connect(endpoint)
        self._socket.subscribe(b"")
        self._held: dict[str, set[int]] = {}

    @property
    def media(self) -> set[str]:
        """The media that have blocks."""
        return {medium for medium, held in self._held.items() if held}

    @property
    def blocks(self) -> int:
        """Number of blocks in any medium."""
        return len(set[int]().union(*self._held.values()))

    async def hear(self) -> None:
        """Take what arrives, until cancelled."""
        while True:
            *_, payload = await self._socket.recv_multipart()
            self.take(payload)

    def take(self, payload: bytes) -> None:
        """Take one batch."""
        _, events, *_ = msgspec.msgpack.decode(payload)
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self._held.clear()
            elif event["type"] == "BlockStored":
                self._held.setdefault(event["medium"], set()).update(event["block_hashes"])
            else:
                self._held.get(event["medium"], set()).difference_update(event["block_hashes"])

    def close(self) -> None:
        """Close the connection."""
        self._socket.close(linger=0)


async def measure_placement(options: ServerOptions, folder: Path, *, prompts: int, tokens: int) -> Placement:
    """Serve prompts by the decode servers by turns, empty their own caches, and ask the router for each prompt.

    Raises NotPlaced, and what starting servers raises.
    """
    servers = [_server(options, folder, number) for number in range(SERVERS)]
    words = random.Random("placement")
    asked = [[words.randrange(FIRST_WORD, 2048) for _ in range(tokens)] for _ in range(prompts)]
    blocks = tokens // options.block_size
    client = Client()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(client.close)
        await start(stack, *servers)
        sources = [await _sources(server) for server in servers]
        listeners = [Listener(events) for events, _ in sources]
        hearing = await stack.enter_async_context(asyncio.TaskGroup())
        for listener in listeners:
            stack.callback(listener.close)
            stack.callback(hearing.create_task(listener.hear()).cancel)
        router = PlacingRouter("router", folder, decodes=servers, block_size=options.block_size, sources=sources)
        await start(stack, router)
        for number, prompt in enumerate(asked):
            await client.complete(servers[number % SERVERS].url, prompt, count=2, request_id=f"first-{number}")
        for number, (server, listener) in enumerate(zip(servers, listeners, strict=True)):
            await _emptied(client, server, listener, blocks=blocks * len(asked[number::SERVERS]))
        await asyncio.sleep(LISTEN_S)
        before = await _metrics(servers)
        right = 0
        for number in words.sample(range(prompts), prompts):
            served = await _served(servers)
            more = [words.randrange(FIRST_WORD, 2048) for _ in range(FURTHER)]
            await client.post(f"{router.url}/v1/completions", _plain([*asked[number], *more]))
            right += await _placed(servers, served) == number % SERVERS
        after = await _metrics(servers)

    def since(name: str) -> int:
        return int(after.get(name, 0.0) - before.get(name, 0.0))

    return Placement(
        prompts,
        right,
        own_tokens=since(SOURCE.format("local_cache_hit")),
        host_tokens=since(RESTORED.format("l2")),
        storage_tokens=since(RESTORED.format("l3")),
    )


def _plain(prompt: list[int]) -> dict[str, object]:
    """Return a request that the router places by its prompt: with a field that it does not know, such as
    `return_token_ids` or `kv_transfer_params`, vllm-router 0.1.17 places it by load.
    """
    return {"model": MODEL, "prompt": prompt, "max_tokens": 2, "temperature": 0}


def _server(options: ServerOptions, folder: Path, number: int) -> Server:
    published = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": EVENTS, "replay_endpoint": EVENTS}
    own = replace(options, further=(*options.further, "--kv-events-config", json.dumps(published)))
    storage = f"file:{folder / f'{FILES}-{number}'}?capacity=1GB"
    return VARIANTS["tidekv"].server("decode", number, options=own, folder=folder, storage=storage)


async def _sources(server: Server) -> tuple[str, str]:
    """Return the endpoints of a server's KV events and of their replay, as it names them."""
    async with httpx.AsyncClient() as client:
        found = await client.get(f"{server.url}/kv_event_sources", timeout=30.0)
    found.raise_for_status()
    (source,) = found.json().values()
    return source["endpoint"], source["replay_endpoint"]


async def _emptied(client: Client, server: Server, listener: Listener, *, blocks: int) -> None:
    """Empty a server's own cache, and wait until it publishes `blocks` blocks of the connector, and no other ones."""

    async def is_free() -> bool:
        return not await server.held()

    async def has_published() -> bool:
        # Events travel with steps, which an idle server does not make.
        await client.complete(server.url, [FIRST_WORD], count=4, request_id=f"step-{uuid4().hex[:8]}")
        return listener.blocks == blocks and "GPU" not in listener.media

    # vLLM does not empty it while blocks are held, as those of the last prompt are until they are in host memory.
    await _until(is_free, lambda: f"{server.name} holds blocks")
    await server.reset_prefix_cache()
    await _until(
        has_published, lambda: f"{server.name} publishes {listener.blocks} blocks, not {blocks}: {listener.media}"
    )


async def _placed(servers: Sequence[Server], before: Sequence[float]) -> int:
    """Return the server that has served one request more than before."""
    now = list(before)

    async def is_counted() -> bool:
        now[:] = await _served(servers)
        return sum(now) > sum(before)

    # vLLM counts a request after its client has its last token.
    await _until(is_counted, lambda: "no server has served a request that the router has answered")
    return max(range(len(servers)), key=lambda number: now[number] - before[number])


async def _served(servers: Sequence[Server]) -> list[float]:
    return [(await server.gauges()).get(SERVED, 0.0) for server in servers]


async def _metrics(servers: Sequence[Server]) -> dict[str, float]:
    total: dict[str, float] = {}
    for server in servers:
        total = add_samples(total, await server.metrics())
    return total


async def _until(condition: Callable[[], Awaitable[bool]], problem: Callable[[], str]) -> None:
    """Wait for a condition. Raises NotPlaced with the problem after AGREE_S seconds."""
    with suppress(TimeoutError):
        async with asyncio.timeout(AGREE_S):
            while True:
                if await condition():
                    return
                await asyncio.sleep(POLL_S)
    raise NotPlaced(problem())
