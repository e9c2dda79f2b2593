"""The servers of one SGLang variant, started together."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final
from uuid import uuid4

from benchmarks.ports import HOST
from benchmarks.servers.cluster import Cluster, start
from benchmarks.servers.conversations import FIRST_WORD
from benchmarks.servers.events import STORAGE, Event
from benchmarks.servers.file_storage import FILES
from benchmarks.servers.routes import OneServer, Route, complete_with_retries
from benchmarks.sglang_pair.client import Client, PrefillAndDecode
from benchmarks.sglang_pair.server import PLAIN, Server, ServerOptions
from benchmarks.sglang_pair.storage import StorageFolder
from benchmarks.sglang_pair.variants import Place, Variant

WARM_UP_TOKENS: Final = 40
"""A length that no prompt of a load has."""


@dataclass
class SglangCluster(Cluster):
    """A cluster whose decode servers tell what they had as they asked prefill."""

    async def warm_up(self) -> None:
        """Send each pair of servers a request, since the first one pays for connections and imports."""
        client, route = self.connect()
        try:
            for number in range(max(len(self.prefills), len(self.decodes))):
                prompt = [FIRST_WORD + number] * WARM_UP_TOKENS
                await complete_with_retries(route, prompt, count=4, conversation=number, name=f"warm-{uuid4().hex[:8]}")
        finally:
            await client.close()

    async def promises(self) -> dict[int, list[int]]:
        """Return requests, and tokens that decode had in L1, L2 and L3, by length of the prompt."""
        sums: dict[int, list[int]] = {}
        for server in self.decodes:
            assert isinstance(server, Server)
            for tokens, given in (await server.promises()).items():
                kept = sums.setdefault(tokens, [0] * len(given))
                kept[:] = [one + other for one, other in zip(kept, given, strict=True)]
        return sums


@asynccontextmanager
async def running(
    variant: Variant,
    options: ServerOptions,
    folder: Path,
    *,
    prefills: int = 1,
    decodes: int = 1,
    decode_tokens: int | None = None,
    decode_ranks: int | None = None,
    events: Sequence[Event] = (),
) -> AsyncIterator[SglangCluster]:
    """Start the servers of a variant in `folder`, and end them when the block is left.

    `decode_tokens`, `decode_ranks`: of a decode server, if not as in `options`. `events`: those to come, for which
    storage is prepared. One server has one rank.
    """
    options = options if variant.is_pair else replace(options, ranks=1)
    on_storage = {event.action for event in events if event.server == STORAGE}
    storage = StorageFolder(folder / FILES)
    storage.path.mkdir(parents=True)
    place = Place(
        storage,
        decode_tokens or options.tokens,
        options.tokens,
        options.page_size,
        options.shape.kv_bytes_per_token,
        hangs="hang" in on_storage,
    )
    decode_options = replace(options, tokens=place.device_tokens, ranks=decode_ranks or options.ranks)

    def servers(role: str, count: int, given: ServerOptions) -> list[Server]:
        return [variant.server(role, number, options=given, folder=folder, place=place) for number in range(count)]

    prefill_servers = servers("prefill", prefills if variant.is_pair else 0, options)
    place = replace(place, prefills=[f"{HOST}:{server.bootstrap_port}" for server in prefill_servers])
    decode_servers = servers("decode", decodes, decode_options) if variant.is_pair else servers(PLAIN, 1, options)

    def connect() -> tuple[Client, Route]:
        client = Client()
        if not prefill_servers:
            return client, OneServer(client, decode_servers[0])
        return client, PrefillAndDecode(client, prefill_servers, decode_servers)

    async with AsyncExitStack() as stack:
        if "fill" in on_storage:
            storage.mount()
            stack.callback(storage.unmount)
        await start(stack, *prefill_servers, *decode_servers)
        yield SglangCluster(variant, prefill_servers, decode_servers, connect, {STORAGE: storage.act})
