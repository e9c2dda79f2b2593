"""Routes of a request through servers: one server, the sequential pattern of vLLM's proxies, or both ends at once.

    prefill: one token, "do_remote_decode" ──▶ its kv_transfer_params ──▶ decode: the answer
    prefill: one token, "do_remote_decode", a room ─┬─ at once
    decode: the answer, prefill's address, the room ┘

A conversation stays with its servers, so that their prefix caches serve it. A request that a killed or broken server
loses is sent again.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

from benchmarks.servers.program import Program
from benchmarks.vllm_pair.client import Answer, Client, RequestLost
from benchmarks.vllm_pair.server import Server

RETRY_S: Final = 0.5
RETRIES_S: Final = 180.0
"""Seconds for which a lost request is retried; those in which a killed server starts again are not counted.

vllm-router takes some of them to find out that a server has returned.
"""


class Route(Protocol):
    """Serves a request of a conversation."""

    @property
    def servers(self) -> Sequence[Program]:
        """The programs that a request needs."""

    async def complete(self, prompt: list[int], *, count: int, conversation: int, name: str) -> Answer:
        """Return the answer, with the time to its first token from the first request on. Raises RequestLost."""


@dataclass(frozen=True, slots=True)
class OneServer:
    """Sends everything to one server, or to a router."""

    client: Client
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


@dataclass(frozen=True, slots=True)
class PrefillThenDecode:
    """Sends a request to prefill, then to decode with what prefill returned."""

    client: Client
    prefills: Sequence[Server]
    decodes: Sequence[Server]

    @property
    def servers(self) -> Sequence[Program]:
        """See Route."""
        return (*self.prefills, *self.decodes)

    async def complete(self, prompt: list[int], *, count: int, conversation: int, name: str) -> Answer:
        """See Route."""
        prefill = self.prefills[conversation % len(self.prefills)]
        decode = self.decodes[conversation % len(self.decodes)]
        started_s = time.perf_counter()
        wanted = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
        transfer = await self.client.prefill(prefill.url, prompt, request_id=name, transfer=wanted)
        prefill_s = time.perf_counter() - started_s
        answer = await self.client.complete(decode.url, prompt, count=count, request_id=name, transfer=transfer)
        return replace(answer, first_s=prefill_s + answer.first_s, total_s=prefill_s + answer.total_s)


@dataclass(frozen=True, slots=True)
class PrefillAndDecode:
    """Names a room of tidekv's hand-over, and sends a request to prefill and to decode at once."""

    client: Client
    prefills: Sequence[Server]
    decodes: Sequence[Server]

    @property
    def servers(self) -> Sequence[Program]:
        """See Route."""
        return (*self.prefills, *self.decodes)

    async def complete(self, prompt: list[int], *, count: int, conversation: int, name: str) -> Answer:
        """See Route. An error of prefill is not one of the request: decode computes what it does not get."""
        prefill = self.prefills[conversation % len(self.prefills)]
        decode = self.decodes[conversation % len(self.decodes)]
        room = uuid.uuid4().hex
        wanted = {"do_remote_decode": True, "room": room}
        transfer = {"do_remote_prefill": True, "prefill": prefill.handover_address, "room": room}
        prefilling = asyncio.create_task(
            self.client.prefill(prefill.url, prompt, request_id=name, transfer=wanted), name=f"prefill of {name}"
        )
        try:
            return await self.client.complete(decode.url, prompt, count=count, request_id=name, transfer=transfer)
        finally:
            prefilling.cancel()
            await asyncio.gather(prefilling, return_exceptions=True)


async def complete_with_retries(
    route: Route, prompt: list[int], *, count: int, conversation: int, name: str
) -> tuple[Answer, int]:
    """Return the answer and how often the request was sent again. Raises the last RequestLost after RETRIES_S."""
    left_s, attempt = RETRIES_S, 0
    while True:
        started_s = time.perf_counter()
        try:
            # A retry is a request of its own: connectors identify rooms by it.
            again = f"{name}-{attempt}" if attempt else name
            answer = await route.complete(prompt, count=count, conversation=conversation, name=again)
        except RequestLost:
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
