"""A decode server that drains to a successor amid conversations, for `vllm_successor` and `sglang_successor`.

Two turns of some conversations are served by one decode server. Its cache is handed over to a second one
(`POST /hand_over`), it is ended, and the last turn goes to the second one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from benchmarks.ports import HOST, free_address, free_port
from benchmarks.servers.answers import HttpClient
from benchmarks.servers.cluster import SETTLE_S, start
from benchmarks.servers.conversations import Answers, Load, run_load
from benchmarks.servers.model_server import ModelServer
from benchmarks.servers.routes import Route

LOAD: Final = Load(conversations=4, turns=3, first=300, last=800, parallel=2)
WITHIN_S: Final = 60.0
S = TypeVar("S", bound=ModelServer)


class Sharing:
    """Addresses of a decode worker whose cache can be handed over: of its status, and where others read."""

    def __init__(self, ranks: int = 1) -> None:
        """Ranks that share an index are read at ports in a row."""
        self.status, self.peer = free_address(), f"{HOST}:{free_port(ranks)}"

    @property
    def engine(self) -> dict[str, object]:
        """Options of its engine."""
        peers = {"enabled": True, "listen": self.peer, "allow": [f"{HOST}:*"], "wait_s": 20.0}
        return {"status": {"listen": self.status}, "cache_peers": peers}


@dataclass
class Replacement(Generic[S]):
    """A prefill server, a decode server and its successor. `route`: that of requests through given decode servers."""

    prefill: S
    old: S
    new: S
    sharing: Sequence[Sharing]
    """Of the two decode servers."""
    client: HttpClient
    route: Callable[[Sequence[S]], Route]

    async def serve(self, expected: Answers) -> str:
        """Serve the load. Returns a line of JSON: the answer to the hand-over, what became of the requests, and the
        counts of the successor.
        """
        decodes, told = [self.old], dict[str, Any]()

        async def act(turn: int, when: str) -> None:
            if (turn, when) == (LOAD.turns - 1, "before"):
                await self._settle()
                body = {"to": self.sharing[1].peer, "within_s": WITHIN_S}
                told.update(await self.client.post(f"http://{self.sharing[0].status}/hand_over", body))
                await self.old.end()
                decodes[:] = [self.new]

        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.client.close)
            await start(stack, self.prefill, self.old, self.new)
            outcome = await run_load(LOAD, self.route(decodes), expected=expected, action=act)
            metrics = await self.new.metrics()
        ours = {name: value for name, value in metrics.items() if "tidekv" in name}
        became = {"wrong": outcome.wrong, "lost": list(outcome.lost.values()), "retries": outcome.retries}
        return json.dumps({"told": told, "requests": len(outcome.answers), **became, "metrics": ours})

    async def _settle(self) -> None:
        """Wait until nothing is held: pages of a prompt are, until they are in host memory, maybe after its answer."""
        async with asyncio.timeout(SETTLE_S):
            while await self.old.held():  # noqa: ASYNC110  # Another process tells it.
                await asyncio.sleep(0.1)
