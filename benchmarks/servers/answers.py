"""Answers of a serving engine over HTTP: tokens with their times, and requests that were not answered to their end."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from tidekv.states.errors import TidekvError

ANSWER_S = 300.0


class RequestLost(TidekvError):
    """A server did not answer a request to its end: no connection, a connection that broke, or an error."""


class HttpError(RequestLost):
    """A server refused a request by its HTTP status, or ended a stream with an error."""

    def __init__(self, url: str, status: int, reason: str) -> None:
        """`status`: 200 for an error within a stream."""
        super().__init__(f"{url} answered {status}: {reason}")
        self.status = status
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Answer:
    """A completion. Times are in seconds since the request was sent."""

    tokens: tuple[int, ...]
    first_s: float
    total_s: float


class HttpClient:
    """Sends requests over its own connections until `close`."""

    def __init__(self, *, limit_s: float = ANSWER_S) -> None:
        """`limit_s`: maximum seconds between two pieces of an answer."""
        self._http = httpx.AsyncClient(timeout=limit_s, limits=httpx.Limits(max_connections=None))

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def post(self, url: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Any:
        """Return the JSON of an answer that is no stream. Raises RequestLost."""
        try:
            response = await self._http.post(url, json=body, headers=headers)
        except httpx.HTTPError as error:
            raise RequestLost(f"{url}: {type(error).__name__} {error}") from error
        if not response.is_success:
            raise _refusal(url, response.status_code, response.content)
        return response.json()

    async def stream(
        self, url: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[Any, None]:
        """Yield the JSON of each event of a stream. Raises RequestLost.

        Cancellation closes the connection, upon which a server aborts the request.
        """
        try:
            async with self._http.stream("POST", url, json=body, headers=headers) as response:
                if not response.is_success:
                    raise _refusal(url, response.status_code, await response.aread())
                async for line in response.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise HttpError(url, response.status_code, str(event["error"]))
                    yield event
        except httpx.HTTPError as error:
            raise RequestLost(f"{url}: {type(error).__name__} {error}") from error


class Stopwatch:
    """Tokens of one answer as they arrive, and when the first of them did."""

    def __init__(self) -> None:
        """Start it: the request is sent now."""
        self._started_s = time.perf_counter()
        self._first_s = 0.0
        self.tokens: list[int] = []

    def set(self, tokens: list[int]) -> None:
        """Take all tokens so far."""
        self.tokens = tokens
        if tokens and not self._first_s:
            self._first_s = time.perf_counter() - self._started_s

    def answer(self, url: str, count: int) -> Answer:
        """Return the answer. Raises RequestLost unless it has `count` tokens."""
        if len(self.tokens) != count:
            raise RequestLost(f"{url} answered {len(self.tokens)} of {count} tokens")
        return Answer(tuple(self.tokens), self._first_s, time.perf_counter() - self._started_s)


def _refusal(url: str, status: int, text: bytes) -> HttpError:
    return HttpError(url, status, text.decode(errors="replace")[:300])
