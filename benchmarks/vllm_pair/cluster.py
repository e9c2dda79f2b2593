"""The servers of one variant: started together, driven by actions between and amid turns, measured, and ended."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import httpx

from benchmarks.servers.program import Program
from benchmarks.servers.redis_server import RedisServer
from benchmarks.vllm_pair.client import Client
from benchmarks.vllm_pair.conversations import Answers, Load, Outcome, run_load
from benchmarks.vllm_pair.router import Router
from benchmarks.vllm_pair.routes import OneServer, PrefillAndDecode, PrefillThenDecode, Route
from benchmarks.vllm_pair.server import Server, ServerOptions, add_samples
from benchmarks.vllm_pair.variants import Variant
from tidekv.states.errors import InvalidConfig

FREEZE_S: Final = 12.0
"""Longer than the lease for which prefill holds the blocks of a decode server that gives no sign of life."""
SETTLE_S: Final = 90.0
"""Maximum seconds after the last answer for servers to release what finished and aborted requests held.

Longer than the leases of both connectors: prefill holds a prompt whose request was aborted before decode asked for it.
"""
WHEN: Final = {
    "restart": "before",
    "damage": "before",
    "reset": "before",
    "forget": "before",
    "kill": "amid",
    "freeze": "amid",
}
STRIKES: Final = ("kill", "freeze")
STORAGE: Final = "storage"
"""Name of the redis-server among the servers of an event."""
FILES: Final = "storage"
"""Folder of a file storage, within the folder of the run."""
DAMAGE_STRIDE: Final = 100_000
"""Bytes of a store from one damaged place to the next."""


@dataclass(frozen=True, slots=True)
class Event:
    """An action on a server at a turn.

    restart: end it and start it again before the turn. damage: so, with bytes of its storage overwritten. reset: empty
    its prefix cache before the turn. forget: so, and the connector's view of storage. kill: SIGKILL amid the turn, and
    start it again. freeze: SIGSTOP for FREEZE_S seconds amid the turn. The server "storage" is redis; it is only killed
    and frozen.
    """

    turn: int
    action: str
    server: str

    @classmethod
    def parse(cls, text: str, servers: Collection[str]) -> Event:
        """Parse "5:kill:decode-0"; `servers` are those that there are. Raises InvalidConfig."""
        turn, _, rest = text.partition(":")
        action, _, server = rest.partition(":")
        if not turn.isdigit() or action not in WHEN or not server:
            raise InvalidConfig(f"an event is TURN:ACTION:SERVER with {', '.join(WHEN)}, not {text!r}")
        if server not in servers:
            raise InvalidConfig(f"{text!r}: there is no server {server!r}; there are {', '.join(sorted(servers))}")
        if server == STORAGE and action not in STRIKES:
            raise InvalidConfig(f"{text!r}: {STORAGE} knows {', '.join(STRIKES)}, not {action}")
        return cls(int(turn), action, server)


@dataclass(frozen=True)
class Figures:
    """What one variant did: the outcome of the load, metrics of its decode servers, CPU seconds by role."""

    variant: Variant
    outcome: Outcome
    metrics: dict[str, float]
    cpu_s: dict[str, float]
    held: dict[str, float] = field(default_factory=dict)
    """By server, the share of its KV blocks that is still held after the last answer."""


@dataclass
class Cluster:
    """Running servers of a variant, by name; "decode-0" answers if it is a single server."""

    variant: Variant
    prefills: Sequence[Server]
    decodes: Sequence[Server]
    redis: RedisServer | None = None
    router: Router | None = None

    @property
    def servers(self) -> dict[str, Server]:
        """All vLLM servers by name."""
        return {server.name: server for server in (*self.prefills, *self.decodes)}

    def route(self, client: Client) -> Route:
        """Return the route of requests through the servers."""
        if self.router is not None:
            return OneServer(client, self.router, tuple(self.servers.values()))
        if not self.prefills:
            return OneServer(client, self.decodes[0])
        pattern = PrefillAndDecode if self.variant.is_concurrent else PrefillThenDecode
        return pattern(client, self.prefills, self.decodes)

    async def serve(
        self,
        load: Load,
        *,
        expected: Answers | None,
        events: Sequence[Event] = (),
        alternation: asyncio.Lock | None = None,
        progress: Callable[[Figures], None] | None = None,
    ) -> Figures:
        """Serve a load, by turns with others that share `alternation`, and return its figures.

        Servers keep what is cached. `progress` gets the figures so far after each turn.
        """
        client = Client()
        cpu_s = self._cpu_s()
        before = await self._decode_metrics()

        async def act(turn: int, when: str) -> None:
            for event in events:
                if event.turn == turn and WHEN[event.action] == when:
                    if event.server == STORAGE and self.redis is not None:
                        await _strike(self.redis, event.action)
                    elif event.server in self.servers:
                        await _act(self.servers[event.server], event.action)

        async def figures(outcome: Outcome) -> Figures:
            after = await self._decode_metrics()
            return Figures(
                self.variant,
                outcome,
                {name: value - before.get(name, 0.0) for name, value in after.items()},
                {role: spent - cpu_s[role] for role, spent in self._cpu_s().items()},
            )

        async def after_turn(outcome: Outcome) -> None:
            if progress is not None:
                progress(await figures(outcome))

        try:
            outcome = await run_load(
                load,
                self.route(client),
                expected=expected,
                action=act if events else None,
                alternation=alternation,
                after_turn=after_turn,
            )
            held = await self._held()
        finally:
            await client.close()
        return replace(await figures(outcome), held=held)

    def _cpu_s(self) -> dict[str, float]:
        roles = {"prefill": self.prefills, "decode": self.decodes}
        return {role: sum(server.cpu_s() for server in servers) for role, servers in roles.items()}

    async def _decode_metrics(self) -> dict[str, float]:
        total: dict[str, float] = {}
        for server in self.decodes:
            total = add_samples(total, await server.metrics())
        return total

    async def _held(self) -> dict[str, float]:
        """Return the share of blocks held by server, once none is, or after SETTLE_S."""
        held: dict[str, float] = {}
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                while True:
                    held = {
                        name: (await server.gauges())["vllm:kv_cache_usage_perc"]
                        for name, server in self.servers.items()
                    }
                    if not any(held.values()):
                        break
                    await asyncio.sleep(0.5)
        return held


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
    cluster = Cluster(
        variant,
        [
            variant.server("prefill", number, options=options, folder=folder, storage=storage)
            for number in range(prefills if variant.is_pair else 0)
        ],
        [
            variant.server("decode", number, options=decode_options, folder=folder, storage=storage)
            for number in range(decodes if variant.is_pair else 1)
        ],
        redis,
    )
    async with AsyncExitStack() as stack:
        if redis is not None:
            await _start(stack, redis)
        await _start(stack, *cluster.servers.values())
        if router_policy is not None and variant.is_pair:
            cluster.router = Router(
                "router", folder, policy=router_policy, prefills=cluster.prefills, decodes=cluster.decodes
            )
            await _start(stack, cluster.router)
        yield cluster


async def _start(stack: AsyncExitStack, *programs: Program) -> None:
    """Start programs side by side, and end them when the block of `stack` is left."""
    for program in programs:
        stack.push_async_callback(program.end)
        program.start()
    for program in programs:
        await program.wait_ready()


def damage(store: Path) -> int:
    """Overwrite bytes every DAMAGE_STRIDE bytes of a file store's pages, and return in how many places."""
    places = 0
    for path in store.glob("*/*.seg"):
        with path.open("r+b") as segment:
            at = 0
            with suppress(OSError):  # From there on, nothing was ever written: the file is sparse.
                while True:
                    at = os.lseek(segment.fileno(), at, os.SEEK_DATA)
                    os.pwrite(segment.fileno(), b"damaged!", at)
                    at, places = at + DAMAGE_STRIDE, places + 1
    return places


async def _act(server: Server, action: str) -> None:
    if action in ("reset", "forget"):
        with suppress(httpx.HTTPError):
            await server.reset_prefix_cache(external=action == "forget")
        return
    if action in STRIKES:
        await _strike(server, action)
        return
    await server.end()
    if action == "damage":
        await asyncio.to_thread(damage, server.folder / FILES)
    server.start()
    await server.wait_ready()


async def _strike(program: Program, action: str) -> None:
    if action == "freeze":
        program.signal(signal.SIGSTOP)
        await asyncio.sleep(FREEZE_S)
        program.signal(signal.SIGCONT)
        return
    await program.kill()
    program.start()
    await program.wait_ready()
