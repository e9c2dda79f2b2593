"""A client of SGLang's own API, and the route of its routers: a request goes to prefill and to decode at once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, Final

from benchmarks.ports import HOST
from benchmarks.servers.answers import Answer, HttpClient, HttpError, RequestLost, Stopwatch
from benchmarks.servers.program import Program
from benchmarks.sglang_pair.server import Server

ABORT_S: Final = 5.0


class Client(HttpClient):
    """Sends requests over its own connections until `close`."""

    async def complete(
        self, url: str, prompt: list[int], *, count: int, request_id: str, room: Mapping[str, Any] | None = None
    ) -> Answer:
        """Return `count` greedy tokens, read as a stream. `room`: where prefill and decode meet. Raises RequestLost."""
        watch = Stopwatch()
        body = {**_body(prompt, count, request_id, room), "stream": True}
        async with aclosing(self.stream(f"{url}/generate", body)) as events:
            async for event in events:
                ending = event["meta_info"].get("finish_reason") or {}
                if ending.get("type") == "abort":
                    # The status that it had without a stream.
                    raise HttpError(url, int(ending.get("status_code") or 500), _short(str(ending.get("message"))))
                watch.set(event.get("output_ids") or watch.tokens)
        return watch.answer(url, count)

    async def prefill(
        self, url: str, prompt: list[int], *, count: int, request_id: str, room: Mapping[str, Any]
    ) -> None:
        """Let prefill compute a prompt and send its KV. Raises RequestLost.

        A request whose connection broke is sent once more, as routers do: a server that was stopped for longer than its
        limit on idle connections closes them before it reads what has arrived.
        """
        body = _body(prompt, count, request_id, room)
        try:
            await self.post(f"{url}/generate", body)
        except HttpError:
            raise
        except RequestLost:
            await self.post(f"{url}/generate", body)

    async def abort(self, url: str, request_id: str) -> None:
        """Abort a request, if the server knows it. An error is no concern of an aborted request."""
        with suppress(RequestLost, TimeoutError, ValueError):  # The answer has no body.
            async with asyncio.timeout(ABORT_S):
                await self.post(f"{url}/abort_request", {"rid": request_id})


@dataclass
class PrefillAndDecode:
    """Names a room, and sends a request to prefill and to decode, as SGLang's router does.

    A conversation stays with its servers; the next prefill takes the requests of one that is down.
    """

    client: Client
    prefills: Sequence[Server]
    decodes: Sequence[Server]
    _rooms: random.Random = field(default_factory=random.SystemRandom)

    @property
    def servers(self) -> Sequence[Program]:
        """See Route."""
        return (*(self._serving() or self.prefills), *self.decodes)

    def _serving(self) -> list[Server]:
        return [prefill for prefill in self.prefills if prefill.serving.is_set()]

    async def complete(self, prompt: list[int], *, count: int, conversation: int, name: str) -> Answer:
        """See Route. An error of prefill alone is none of the request."""
        prefill = self.prefills[conversation % len(self.prefills)]
        if not prefill.serving.is_set() and self._serving():
            prefill = self._serving()[conversation % len(self._serving())]
        decode = self.decodes[conversation % len(self.decodes)]
        room = {
            "bootstrap_host": HOST,
            "bootstrap_port": prefill.bootstrap_port,
            "bootstrap_room": self._rooms.randrange(1 << 62),
        }
        prefilling = asyncio.create_task(
            self.client.prefill(prefill.url, prompt, count=count, request_id=name, room=room),
            name=f"prefill of {name}",
        )
        try:
            return await self.client.complete(decode.url, prompt, count=count, request_id=name, room=room)
        except asyncio.CancelledError:
            for server in (decode, prefill):
                await self.client.abort(server.url, name)
            raise
        finally:
            # Its answer comes before decode's; after a failure of decode it is not waited for.
            prefilling.cancel()
            await asyncio.gather(prefilling, return_exceptions=True)


def _body(prompt: list[int], count: int, request_id: str, room: Mapping[str, Any] | None) -> dict[str, Any]:
    return {
        "input_ids": prompt,
        "rid": request_id,
        "sampling_params": {"max_new_tokens": count, "temperature": 0, "ignore_eos": True},
        **(room or {}),
    }


def _short(reason: str) -> str:
    """Return the reason without what differs between requests, so that equal ones are counted together."""
    return reason.rpartition("): ")[2][:120] or reason[:120]
