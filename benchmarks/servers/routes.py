"""Routes of a request through servers. A request that a killed or broken server loses is sent again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from benchmarks.servers.answers import Answer, RequestLost
from benchmarks.servers.program import Program

RETRY_S: Final = 0.5
RETRIES_S: Final = 180.0
"""Seconds for which a lost request is retried; those in which a killed server starts again are not counted.

vllm-router takes some of them to find out that a server has returned.
"""


class Route(Protocol):
    """Serves a request of a conversation."""

    @property
    def servers(self) -> Sequence[Program]:
        """The programs that a request needs now."""

    async def complete(self, prompt: list[int], *, count: int, conversation: int, name: str) -> Answer:
        """Return the answer, with the time to its first token from the first request on. Raises RequestLost."""


class Completes(Protocol):
    """A client of one server's API."""

    async def complete(self, url: str, prompt: list[int], *, count: int, request_id: str) -> Answer:
        """Return `count` greedy tokens. Raises RequestLost."""

    async def close(self) -> None:
        """Close all connections."""


@dataclass(frozen=True, slots=True)
class OneServer:
    """Sends everything to one server, or to a router."""

    client: Completes
    server: Program
    behind: Sequence[Program] = ()
    """The servers behind a router."""

    @property
    def servers(self) -> Sequence[Program]:
        """See Route."""
        return (self.server, *self.behind)

    async def complete(self, prompt: list[int], *, count: int, conversation: int, name: str) -> Answer:
        """See Route."""
        return await self.client.complete(self.server.url, prompt, count=count, request_id=name)


async def complete_with_retries(
    route: Route,
    prompt: list[int],
    *,
    count: int,
    conversation: int,
    name: str,
    failed: Callable[[RequestLost], None] = lambda error: None,
) -> tuple[Answer, int]:
    """Return the answer and how often the request was sent again. Raises the last RequestLost after RETRIES_S.

    `failed` is called with each RequestLost.
    """
    left_s, attempt = RETRIES_S, 0
    while True:
        started_s = time.perf_counter()
        try:
            # A retry is a request of its own: connectors identify rooms by it.
            again = f"{name}-{attempt}" if attempt else name
            answer = await route.complete(prompt, count=count, conversation=conversation, name=again)
        except RequestLost as error:
            failed(error)
            left_s -= time.perf_counter() - started_s
            if attempt and left_s <= 0:
                raise
            attempt += 1
            await asyncio.sleep(RETRY_S)
            left_s -= RETRY_S
            for server in route.servers:
                await server.serving.wait()  # Its start has a limit, after which the whole run fails.
        else:
            return answer, attempt
