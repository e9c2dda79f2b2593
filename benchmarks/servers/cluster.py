"""The servers of one variant: driven by actions between and amid turns, measured, and ended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from benchmarks.servers.answers import HttpClient
from benchmarks.servers.conversations import Answers, Load, Outcome, run_load
from benchmarks.servers.events import WHEN, Event
from benchmarks.servers.model_server import ModelServer
from benchmarks.servers.program import Program
from benchmarks.servers.routes import Route
from benchmarks.servers.samples import add_samples

SETTLE_S: Final = 90.0
"""Maximum seconds after the last answer for servers to release what finished and aborted requests held.

Longer than the leases of both connectors: prefill holds a prompt whose request was aborted before decode asked for it.
"""


class Variant(Protocol):
    """A set-up of servers that is compared with others."""

    @property
    def name(self) -> str:
        """Its word on the command line."""

    @property
    def title(self) -> str:
        """What it is called in tables."""

    def bytes_from_prefill(self, decode: Mapping[str, float], prefill: Mapping[str, float]) -> float | None:
        """Return the bytes of KV that prefill sent, by the metrics of both; None if none of them counts."""


@dataclass(frozen=True)
class Figures:
    """What one variant did: the outcome of the load, metrics by role, CPU seconds by role and part of a server."""

    variant: Variant
    outcome: Outcome
    metrics: dict[str, float]
    """Of decode servers."""
    cpu_s: dict[str, float]
    held: dict[str, float] = field(default_factory=dict)
    """By server, the share of its KV blocks that is still held after the last answer."""
    prefill_metrics: dict[str, float] = field(default_factory=dict)

    @property
    def bytes_from_prefill(self) -> float | None:
        """Bytes of KV that prefill sent; None if nothing counts them."""
        return self.variant.bytes_from_prefill(self.metrics, self.prefill_metrics)


@dataclass
class Cluster:
    """Running servers of a variant, by name; "decode-0" answers if it is a single server."""

    variant: Variant
    prefills: Sequence[ModelServer]
    decodes: Sequence[ModelServer]
    connect: Callable[[], tuple[HttpClient, Route]]
    """Return a client, which the caller closes, and the route of its requests through the servers."""
    others: Mapping[str, Callable[[str], Awaitable[None]]] = field(default_factory=dict)
    """What else an event may name, and what acts for it."""

    @property
    def servers(self) -> dict[str, ModelServer]:
        """All servers of the engine by name."""
        return {server.name: server for server in (*self.prefills, *self.decodes)}

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
        client, route = self.connect()
        # What servers compile and connect at their first requests is not in the figures.
        await run_load(replace(load, conversations=1, turns=2, copies=1, aborts=0.0, seed=-1), route, expected=None)
        cpu_s = self._cpu_s()
        before = await self._metrics()

        async def act(turn: int, when: str) -> None:
            for event in events:
                if event.turn == turn and WHEN[event.action] == when:
                    if event.server in self.others:
                        await self.others[event.server](event.action)
                    elif event.server in self.servers:
                        await self.servers[event.server].act(event.action)

        async def figures(outcome: Outcome) -> Figures:
            after = await self._metrics()
            return Figures(
                self.variant,
                outcome,
                _since(before["decode"], after["decode"]),
                _since(cpu_s, self._cpu_s()),
                prefill_metrics=_since(before["prefill"], after["prefill"]),
            )

        async def after_turn(outcome: Outcome) -> None:
            if progress is not None:
                progress(await figures(outcome))

        try:
            outcome = await run_load(
                load,
                route,
                expected=expected,
                action=act if events else None,
                alternation=alternation,
                after_turn=after_turn,
            )
            held = await self._held()
        finally:
            await client.close()
        return replace(await figures(outcome), held=held)

    @property
    def _roles(self) -> dict[str, Sequence[ModelServer]]:
        return {"prefill": self.prefills, "decode": self.decodes}

    def _cpu_s(self) -> dict[str, float]:
        spent: dict[str, float] = {}
        for role, servers in self._roles.items():
            for server in servers:
                spent = add_samples(spent, {f"{role} {part}".strip(): s for part, s in server.cpu_s().items()})
        return spent

    async def _metrics(self) -> dict[str, dict[str, float]]:
        """Return the metrics of all servers by role."""
        total: dict[str, dict[str, float]] = {role: {} for role in self._roles}
        for role, servers in self._roles.items():
            for server in servers:
                total[role] = add_samples(total[role], await server.metrics())
        return total

    async def _held(self) -> dict[str, float]:
        """Return the share of blocks held by server, once none is, or after SETTLE_S."""
        held: dict[str, float] = {}
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                while True:
                    held = {name: await server.held() for name, server in self.servers.items()}
                    if not any(held.values()):
                        break
                    await asyncio.sleep(0.5)
        return held


async def start(stack: AsyncExitStack, *programs: Program) -> None:
    """Start programs side by side, and end them when the block of `stack` is left."""
    for program in programs:
        stack.push_async_callback(program.end)
        program.start()
    for program in programs:
        await program.wait_ready()


def _since(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in after.items()}
