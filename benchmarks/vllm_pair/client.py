"""A client of vLLM's OpenAI API: one completion of a prompt of token ids, with the time to its first token."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.vllm_pair.server import MODEL
from tidekv.states.errors import TidekvError

ANSWER_S = 300.0


class RequestLost(TidekvError):
    """A server did not answer a request to its end: no connection, a connection that broke, or an error."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A completion. Times are in seconds since the request was sent."""

    tokens: tuple[int, ...]
    first_s: float
    total_s: float


class Client:
    """Sends requests over its own connections until `close`."""

    def __init__(self, *, limit_s: float = ANSWER_S) -> None:
        """`limit_s`: maximum seconds between two pieces of an answer."""
        self._http = httpx.AsyncClient(timeout=limit_s, limits=httpx.Limits(max_connections=None))

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def complete(
        self,
        url: str,
        prompt: list[int],
        *,
        count: int,
        request_id: str,
        transfer: Mapping[str, Any] | None = None,
    ) -> Answer:
        """Return `count` greedy tokens, read as a stream. Raises RequestLost.

        Cancellation closes the connection, upon which vLLM aborts the request.
        """
        body = {**_body(prompt, count, transfer), "stream": True}
        started_s = time.perf_counter()
        first_s, tokens = 0.0, list[int]()
        try:
            async with self._http.stream(
                "POST", f"{url}/v1/completions", json=body, headers={"X-Request-Id": request_id}
            ) as response:
                if not response.is_success:
                    raise RequestLost(_refusal(url, response.status_code, await response.aread()))
                async for line in response.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise RequestLost(f"{url} answered an error: {event['error']}")
                    for choice in event["choices"]:
                        tokens += choice.get("token_ids") or ()
                    if tokens and not first_s:
                        first_s = time.perf_counter() - started_s
        except httpx.HTTPError as error:
            raise RequestLost(f"{url}: {type(error).__name__} {error}") from error
        if len(tokens) != count:
            raise RequestLost(f"{url} answered {len(tokens)} of {count} tokens")
        return Answer(tuple(tokens), first_s, time.perf_counter() - started_s)

    async def prefill(
        self, url: str, prompt: list[int], *, request_id: str, transfer: Mapping[str, Any]
    ) -> Mapping[str, Any] | None:
        """Run a prompt and return the `kv_transfer_params` of the response, which are for decode.

        vLLM returns them only if the response is not a stream. Raises RequestLost.
        """
        try:
            response = await self._http.post(
                f"{url}/v1/completions", json=_body(prompt, 1, transfer), headers={"X-Request-Id": request_id}
            )
        except httpx.HTTPError as error:
            raise RequestLost(f"{url}: {type(error).__name__} {error}") from error
        if not response.is_success:
            raise RequestLost(_refusal(url, response.status_code, response.content))
        returned: Mapping[str, Any] | None = response.json().get("kv_transfer_params")
        return returned


def _body(prompt: list[int], count: int, transfer: Mapping[str, Any] | None) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return body if transfer is None else {**body, "kv_transfer_params": dict(transfer)}


def _refusal(url: str, status: int, text: bytes) -> str:
    return f"{url} answered {status}: {text.decode(errors='replace')[:300]}"
