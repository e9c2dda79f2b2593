"""Which decode worker a user asks: a router in the path decides, or the user does, in turn or as a service says."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import Protocol

import httpx

from examples.fleet.processes import MODEL

AVOIDED_S = 1.0
"""Time for which a worker that refused a request is asked for no other."""
SERVICE_S = 30.0


@dataclass(slots=True)
class Route:
    """Where one request goes."""

    url: str
    is_only: bool = True
    """No other worker can be asked instead, or the router in the path has tried that."""
    is_refused: bool = False
    """Set it if the worker took no request."""

    async def has_first_token(self) -> None:
        """Note that the prompt is computed."""


class Routes(Protocol):
    """Makes a route for each request."""

    def of(self, prompt: Sequence[int]) -> AbstractAsyncContextManager[Route]:
        """Choose where a prompt goes; the block is the request."""
        ...

    async def close(self) -> None:
        """Close connections."""
        ...


class ThroughRouter:
    """Every request goes to a router, which passes it on."""

    def __init__(self, url: str) -> None:
        self._url = url

    @asynccontextmanager
    async def of(self, prompt: Sequence[int]) -> AsyncIterator[Route]:
        """See `Routes`."""
        yield Route(self._url)

    async def close(self) -> None:
        """See `Routes`."""


class Workers:
    """Workers that users ask themselves, without those that have just refused a request."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.urls = tuple(urls)
        self._avoided_until_s = dict.fromkeys(urls, 0.0)

    def willing(self) -> list[int]:
        """Return the numbers of the workers to choose from; all, if each has refused."""
        now_s = time.monotonic()
        found = [number for number, url in enumerate(self.urls) if self._avoided_until_s[url] <= now_s]
        return found or list(range(len(self.urls)))

    def note(self, route: Route) -> None:
        """Note the end of a request."""
        if route.is_refused:
            self._avoided_until_s[route.url] = time.monotonic() + AVOIDED_S


class InTurn:
    """Users ask one worker after the other."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._workers = Workers(urls)
        self._next = 0

    @asynccontextmanager
    async def of(self, prompt: Sequence[int]) -> AsyncIterator[Route]:
        """See `Routes`."""
        willing = self._workers.willing()
        self._next += 1
        route = Route(self._workers.urls[willing[self._next % len(willing)]], is_only=False)
        try:
            yield route
        finally:
            self._workers.note(route)

    async def close(self) -> None:
        """See `Routes`."""


@dataclass(slots=True)
class _Reservation(Route):
    """A route whose load Dynamo's selection service counts until the request ends."""

    place: str = ""
    http: httpx.AsyncClient | None = None

    async def has_first_token(self) -> None:
        """See `Route`."""
        assert self.http is not None, "the service made this route"
        (await self.http.post(f"{self.place}/prefill_complete")).raise_for_status()


class Selection:
    """Users ask the worker that Dynamo's selection service chooses: by KV events, and by the load that it is told."""

    def __init__(self, service: str, urls: Sequence[str]) -> None:
        """`service` is its address; its workers are numbered from 1, in the order of `urls`."""
        self._http = httpx.AsyncClient(base_url=service, timeout=SERVICE_S)
        self._workers = Workers(urls)
        self._ids = count(1)

    @asynccontextmanager
    async def of(self, prompt: Sequence[int]) -> AsyncIterator[Route]:
        """See `Routes`. Raises httpx.HTTPError if the service chooses none."""
        reservation = f"r{next(self._ids)}"
        answer = await self._http.post(
            "/select_and_reserve",
            json={
                "model_name": MODEL,
                "token_ids": list(prompt),
                "selection_id": reservation,
                "allowed_worker_ids": [number + 1 for number in self._workers.willing()],
            },
        )
        answer.raise_for_status()
        url = self._workers.urls[answer.json()["worker_id"] - 1]
        place = f"/reservations/{reservation}"
        route = _Reservation(url, is_only=False, place=place, http=self._http)
        try:
            yield route
        finally:
            self._workers.note(route)
            (await self._http.delete(place)).raise_for_status()

    async def close(self) -> None:
        """See `Routes`."""
        await self._http.aclose()
