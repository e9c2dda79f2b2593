"""Routes of a request through vLLM's servers: the sequential pattern of its proxies, both ends at once, decode alone.

    prefill: one token, "do_remote_decode" ──▶ its kv_transfer_params ──▶ decode: the answer
    prefill: one token, "do_remote_decode", a room ─┬─ at once
    decode: the answer, prefill's address, the room ┘
    prefill and decode for the first turn of a conversation; later turns: decode alone
    prefill, which reads from decode what that has of the conversation ──▶ decode

A conversation stays with its servers, so that their prefix caches serve it.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from benchmarks.servers.answers import Answer
from benchmarks.servers.program import Program
from benchmarks.vllm_pair.client import Client
from benchmarks.vllm_pair.server import Server


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

    def named(self, conversation: int, decode: Server) -> dict[str, object]:
        """Return what prefill is told of decode: nothing."""
        return {}

    async def complete(self, prompt: list[int], *, count: int, conversation: int, name: str) -> Answer:
        """See Route."""
        prefill = self.prefills[conversation % len(self.prefills)]
        decode = self.decodes[conversation % len(self.decodes)]
        started_s = time.perf_counter()
        wanted = {
            **self.named(conversation, decode),
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
class RestOnDecode(PrefillThenDecode):
    """As above for the first turn of a conversation. Later ones go to decode alone, which computes what is new."""

    begun: set[int] = field(default_factory=set)
    """Conversations that had a turn."""

    async def complete(self, prompt: list[int], *, count: int, conversation: int, name: str) -> Answer:
        """See Route."""
        if conversation in self.begun:
            decode = self.decodes[conversation % len(self.decodes)]
            return await self.client.complete(decode.url, prompt, count=count, request_id=name)
        # Without zero arguments: a dataclass with slots is another class than the one that its methods know.
        answer = await PrefillThenDecode.complete(self, prompt, count=count, conversation=conversation, name=name)
        self.begun.add(conversation)
        return answer


@dataclass(frozen=True, slots=True)
class PrefillReadsDecode(PrefillThenDecode):
    """As above, and names to prefill what decode has of the conversation, whose answers prefill never had."""

    kept: dict[int, int] = field(default_factory=dict)
    """Tokens of each conversation whose KV decode has computed: all but the last one of the last answer."""

    def named(self, conversation: int, decode: Server) -> dict[str, object]:
        """Return the place and the number of tokens, as decode's answer has them unless it is a stream."""
        host, _, port = decode.peer_address.rpartition(":")
        tokens = self.kept.get(conversation, 0)
        return {"remote_kv_source": {"remote_host": host, "remote_port": int(port), "tokens": tokens}} if tokens else {}

    async def complete(self, prompt: list[int], *, count: int, conversation: int, name: str) -> Answer:
        """See Route."""
        answer = await PrefillThenDecode.complete(self, prompt, count=count, conversation=conversation, name=name)
        self.kept[conversation] = len(prompt) + count - 1
        return answer


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
