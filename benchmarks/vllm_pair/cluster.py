"""The servers of one vLLM variant, started together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.servers.cluster import Cluster, start
from benchmarks.servers.events import STORAGE
from benchmarks.servers.file_storage import FILES
from benchmarks.servers.model_server import strike
from benchmarks.servers.redis_server import RedisServer
from benchmarks.servers.routes import OneServer, Route
from benchmarks.vllm_pair.client import Client
from benchmarks.vllm_pair.router import Router
from benchmarks.vllm_pair.routes import PrefillAndDecode, PrefillReadsDecode, PrefillThenDecode, RestOnDecode
from benchmarks.vllm_pair.server import Server, ServerOptions
from benchmarks.vllm_pair.variants import Variant


@asynccontextmanager
async def running(
    variant: Variant,
    options: ServerOptions,
    folder: Path,
    *,
    prefills: int = 1,
    decodes: int = 1,
    decode_kv_bytes: int | None = None,
    decode_ranks: int | None = None,
    on_redis: bool = False,
    router_policy: str | None = None,
) -> AsyncIterator[Cluster]:
    """Start the servers of a variant in `folder`, and end them when the block is left.

    `decode_kv_bytes`, `decode_ranks`: of decode servers, if not as in `options`. `on_redis`: storage is a redis-server,
    not files. `router_policy`: a vllm-router with this policy is in front.
    """
    decode_options = replace(options, kv_bytes=decode_kv_bytes or options.kv_bytes, ranks=decode_ranks or options.ranks)
    redis = RedisServer(STORAGE, folder) if on_redis else None
    storage = f"file:{folder / FILES}?capacity=4GB" if redis is None else redis.uri
    folder_servers = partial(_servers, variant, folder=folder, storage=storage)
    prefill_servers = folder_servers("prefill", prefills if variant.is_pair else 0, options)
    decode_servers = folder_servers("decode", decodes if variant.is_pair else 1, decode_options)
    router = None
    if router_policy is not None and variant.is_pair:
        router = Router("router", folder, policy=router_policy, prefills=prefill_servers, decodes=decode_servers)

    def connect() -> tuple[Client, Route]:
        client = Client()
        if router is not None:
            return client, OneServer(client, router, (*prefill_servers, *decode_servers))
        if not prefill_servers:
            return client, OneServer(client, decode_servers[0])
        if variant.is_concurrent:
            return client, PrefillAndDecode(client, prefill_servers, decode_servers)
        pattern = RestOnDecode if variant.rests_on_decode else PrefillThenDecode
        pattern = PrefillReadsDecode if variant.reads_decode else pattern
        return client, pattern(client, prefill_servers, decode_servers)

    others = {} if redis is None else {STORAGE: partial(strike, redis)}
    async with AsyncExitStack() as stack:
        if redis is not None:
            await start(stack, redis)
        await start(stack, *prefill_servers, *decode_servers)
        if router is not None:
            await start(stack, router)
        yield Cluster(variant, prefill_servers, decode_servers, connect, others)


def _servers(
    variant: Variant, role: str, count: int, options: ServerOptions, *, folder: Path, storage: str
) -> list[Server]:
    return [variant.server(role, number, options=options, folder=folder, storage=storage) for number in range(count)]
