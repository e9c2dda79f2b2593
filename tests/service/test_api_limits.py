"""What the example service refuses before its worker sees it: large bodies, and pages of other sites."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from examples.service import api
from tidekv import HintOutcome, InvalidRequest, PromptLookUp, StorageFailed, StoragePolicy
from tidekv.states.storage_policy import changed_policy


@pytest.fixture
async def client() -> AsyncIterator[tuple[httpx.AsyncClient, list[tuple[str, ...]]]]:
    flushed: list[tuple[str, ...]] = []

    async def flush(tiers: tuple[str, ...], *, namespace: str | None) -> dict[str, int]:
        assert namespace is None
        flushed.append(tiers)
        return {"dropped": 0}

    worker = SimpleNamespace(engine=SimpleNamespace(flush=flush, is_running=True), is_draining=False)
    transport = httpx.ASGITransport(app=api.Api(worker).app())  # type: ignore[arg-type]  # What these routes use of it.
    async with httpx.AsyncClient(transport=transport, base_url="http://service:8000") as opened:
        yield opened, flushed


async def test_a_look_up_counts_the_tokens_of_each_tier() -> None:
    async def look_up(tokens: list[int], *, namespace: str) -> PromptLookUp:
        assert namespace == "tenant"
        return PromptLookUp(l1=len(tokens), l2=0, l3=0, transfer=0, recompute=0, ready_s=None, not_asked="")

    tokenizer = SimpleNamespace(encode=lambda text: list(text.encode()))
    worker = SimpleNamespace(engine=SimpleNamespace(look_up=look_up), model=SimpleNamespace(tokenizer=tokenizer))
    transport = httpx.ASGITransport(app=api.Api(worker).app())  # type: ignore[arg-type]  # What the route uses of it.
    async with httpx.AsyncClient(transport=transport, base_url="http://service:8000") as http:
        answer = await http.post("/look_up", json={"prompt": ["abc", [1, 2]], "cache_salt": "tenant"})
        assert [one["l1"] for one in answer.json()] == [3, 2]
        assert (await http.post("/look_up", json={"prompt": 5})).status_code == 400


FLUSH = '{"tiers": ["l1"]}'


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content-Type": "application/json"}, 200),
        ({"Content-Type": "application/json; charset=utf-8", "Origin": "http://service:8000"}, 200),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({}, 415),
        ({"Content-Type": "application/json", "Origin": "http://evil"}, 403),
        ({"Content-Type": "application/json", "Origin": "http://service:8000.evil"}, 403),
        ({"Content-Type": "application/json", "Origin": "null"}, 403),
    ],
)
async def test_a_page_of_another_site_flushes_nothing(client, headers: dict[str, str], status: int) -> None:
    http, flushed = client
    answer = await http.post("/flush", content=FLUSH, headers=headers)
    assert answer.status_code == status
    assert flushed == ([("l1",)] if status == 200 else [])


@pytest.mark.parametrize("path", ["/flush", "/look_up", "/v1/completions", "/v1/chat/completions"])
async def test_a_body_above_the_limit_is_refused_as_it_comes(client, path: str) -> None:
    http, flushed = client
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(1000):
            sent += 1 << 20
            yield bytes(1 << 20)
            await asyncio.sleep(0)

    answer = await http.post(path, content=endless(), headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert f"more than {api.BODY_BYTES_MAX} bytes" in answer.json()["error"]["message"]
    assert sent <= api.BODY_BYTES_MAX + (2 << 20)
    assert flushed == []


async def test_hints_of_an_orchestrator_are_answered_and_what_is_no_envelope_is_refused() -> None:
    async def hint(envelope: object) -> list[HintOutcome]:
        if envelope != {"message_id": "m"}:
            raise InvalidRequest("this is no envelope")
        return [HintOutcome("a", "accepted", 32)]

    worker = SimpleNamespace(engine=SimpleNamespace(hint=hint))
    transport = httpx.ASGITransport(app=api.Api(worker).app())  # type: ignore[arg-type]  # What the route uses of it.
    async with httpx.AsyncClient(transport=transport, base_url="http://service:8000") as http:
        answer = await http.post("/hints", json={"message_id": "m"})
        assert answer.json() == [{"action_id": "a", "outcome": "accepted", "tokens": 32, "cause": ""}]
        assert (await http.post("/hints", json=[])).status_code == 400
        foreign = await http.post("/hints", json={"message_id": "m"}, headers={"Origin": "http://other"})
        assert foreign.status_code == 403


class OperatedEngine:
    """The calls of an engine that an operator reaches over HTTP."""

    def __init__(self) -> None:
        self.policy = StoragePolicy()
        self.storage: str | None = "redis://cache"
        self.is_there = True

    def change_policy(self, **changes: object) -> StoragePolicy:
        self.policy = changed_policy(self.policy, changes)
        return self.policy

    def change_request(self, request_id: str, *, priority: int | None, deadline_s: float | None) -> bool:
        if priority is None and deadline_s is None:
            raise InvalidRequest("give a priority or a deadline_s")
        return request_id == "cmpl-1" and (priority, deadline_s) == (3, None)

    async def attach_storage(self, uri: str) -> None:
        if not self.is_there:
            raise StorageFailed("nothing listens there")
        self.storage = uri

    async def detach_storage(self) -> None:
        self.storage = None


@pytest.fixture
async def operated() -> AsyncIterator[tuple[httpx.AsyncClient, OperatedEngine]]:
    engine = OperatedEngine()
    worker: Any = SimpleNamespace(engine=engine)  # What these routes use of it.
    app = api.Api(worker, storage="redis://cache").app()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://service:8000") as http:
        yield http, engine


async def test_an_operator_reads_and_changes_the_storage_policy(operated) -> None:
    http, engine = operated
    assert (await http.get("/policy")).json()["prefetch"] == "soonest"
    changed = await http.post("/policy", json={"prefetch": "best_effort"})
    assert (changed.status_code, changed.json()["prefetch"]) == (200, "best_effort")
    for wrong in ({"prefech": "timeout"}, {"breaker_failures": "many"}, {"prefetch": None}, []):
        assert (await http.post("/policy", json=wrong)).status_code == 400, wrong
    assert engine.policy == StoragePolicy(prefetch="best_effort")


async def test_an_operator_detaches_the_storage_and_attaches_the_same_again(operated) -> None:
    http, engine = operated
    for wrong in ({}, {"attached": "file:/data"}, {"attached": True, "uri": "file:/data"}):
        assert (await http.post("/storage", json=wrong)).status_code == 400, wrong
    foreign = await http.post("/storage", json={"attached": False}, headers={"Origin": "http://other"})
    assert (foreign.status_code, engine.storage) == (403, "redis://cache")
    assert (await http.post("/storage", json={"attached": False})).json() == {"attached": False}
    assert engine.storage is None
    engine.is_there = False
    assert (await http.post("/storage", json={"attached": True})).status_code == 503
    engine.is_there = True
    assert (await http.post("/storage", json={"attached": True})).json() == {"attached": True}
    assert engine.storage == "redis://cache"
    worker: Any = SimpleNamespace(engine=engine)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=api.Api(worker).app()), base_url="http://s") as bare:
        assert (await bare.post("/storage", json={"attached": True})).status_code == 400


async def test_an_operator_changes_a_request_that_waits(operated) -> None:
    http, _ = operated
    assert (await http.post("/requests/cmpl-1", json={"priority": 3})).json() == {"changed": True}
    assert (await http.post("/requests/cmpl-9", json={"priority": 3})).json() == {"changed": False}
    assert (await http.post("/requests/cmpl-1", json={})).status_code == 400
    assert (await http.post("/requests/cmpl-1", json={"priorty": 3})).status_code == 400
