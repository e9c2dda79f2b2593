"""The log of a service with two tenants, in the usual set-up of structlog: JSON, trace ids by contextvars.

No record has the trace id of another request, and none has a token of a prompt, at any level.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from structlog.contextvars import bound_contextvars, merge_contextvars

from tests.support.inside import calls_of
from tidekv import (
    DecodeEngine,
    DecodeRequest,
    DevicePool,
    EngineConfig,
    EngineThread,
    KVLayout,
    LoopbackTransport,
    PrefillConfig,
    PrefillPeer,
    RequestFailed,
)
from tidekv.engine.decode.values import RecomputeJob
from tidekv.engine.synthetic.prefill import SyntheticPrefill
from tidekv.states.request.restore import Restore
from tidekv.transports.loopback import LoopbackNetwork
from tidekv.transports.prefill.prefill_room import Room

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", page_size=4)
TENANTS = {"a": range(3_133_700, 3_133_730), "b": range(4_244_800, 4_244_830)}
"""The prompt of each; every request of a tenant is named after it."""


@pytest.fixture
def records() -> Iterator[io.StringIO]:
    """The output of an application with the usual set-up, which renders the locals of tracebacks as well."""
    out = io.StringIO()
    structlog.configure(
        processors=[
            merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.dict_tracebacks,
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.PrintLoggerFactory(out),
    )
    logger = logging.getLogger("tidekv")
    level = logger.level
    logger.setLevel(logging.DEBUG)
    try:
        yield out
    finally:
        logger.setLevel(level)
        structlog.reset_defaults()


def read(out: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.getvalue().splitlines()]


def assert_no_foreign_id(found: list[dict[str, Any]]) -> None:
    for record in found:
        trace_id = record.get("trace_id")
        assert trace_id is None or record.get("request_id", "")[:1] == trace_id[-1:], record


def assert_no_token(text: str) -> None:
    for prompt in TENANTS.values():
        packed = b"".join(token.to_bytes(4, "little") for token in prompt)
        assert not [token for token in prompt if str(token) in text]
        assert str(packed[:4]) not in text
        assert base64.b64encode(packed)[:8].decode() not in text


def assert_told(found: list[dict[str, Any]], event: str, request_id: str, **fields: object) -> None:
    """One record of the request, with its own trace id, a time, a level, a logger and an instance."""
    (record,) = [one for one in found if one["event"] == event and one.get("request_id") == request_id]
    assert record["trace_id"] == f"trace of {request_id[0]}"
    assert {"timestamp", "level", "logger", "instance"} <= set(record)
    assert {name: record[name] for name in fields} == fields


async def restore(engine: DecodeEngine, request_id: str, *, prefill: str = "prefill") -> str:
    """Restore the prompt of the tenant that the id begins with, in its context; returns "ready" or the cause."""
    with bound_contextvars(trace_id=f"trace of {request_id[0]}"):
        request = DecodeRequest(
            request_id=request_id, tokens=list(TENANTS[request_id[0]]), prefill=prefill, send_prompt=True
        )
        try:
            ready = await engine.restore(request)
            await engine.finish(ready, [1, 2])
        except RequestFailed as failed:
            return failed.cause
        return "ready"


async def test_no_record_has_the_id_or_a_token_of_another_tenant(
    records: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, network = DevicePool.allocate(LAYOUT, 64), LoopbackNetwork()
    prefill = SyntheticPrefill(pool)
    seen: dict[str, object] = {}

    async def serve(room: Room) -> None:
        tokens = list(bytes(room.tokens or b""))
        if "raises" in room.request_id:
            raise ValueError(f"a prompt of {len(tokens)} bytes")
        await prefill.serve(room)

    async def recompute(job: RecomputeJob) -> tuple[int, dict[str, object]]:
        tokens = list(job.request.tokens)
        seen[job.request.request_id] = structlog.contextvars.get_contextvars()
        raise ValueError(f"{len(tokens)} tokens are too many")

    fix_plan, raised = Restore.fix_plan, list[int]()

    def fails_once(self: Restore, *given: Any) -> None:
        if not raised:
            raised.append(1)
            raise ZeroDivisionError("a bug")
        fix_plan(self, *given)

    monkeypatch.setattr(Restore, "fix_plan", fails_once)
    peer = PrefillPeer(
        PrefillConfig(listen="prefill"), device=pool, transport=LoopbackTransport("prefill-0", network), on_room=serve
    )
    engine = DecodeEngine(
        EngineConfig(loop_stall_report_s=0.05),
        device=DevicePool.allocate(LAYOUT, 64),
        transport=LoopbackTransport("decode-0", network),
    )
    engine.recompute_with(recompute)
    # Both are entered within a request, as in a service that starts them lazily.
    with bound_contextvars(trace_id="trace of a"):
        await peer.__aenter__()
        await engine.__aenter__()
    try:
        # The first one dials; the tasks of its link serve all later ones.
        assert await restore(engine, "a1") == "ready"
        assert await restore(engine, "b1 raises") == "recompute failed"
        assert await restore(engine, "b2", prefill="nobody") == "recompute failed"
        assert await asyncio.gather(restore(engine, "a3"), restore(engine, "b3")) == ["ready", "ready"]
        waiting = asyncio.create_task(restore(engine, "a4"))
        while not calls_of(engine).is_live("a4"):  # noqa: ASYNC110  # It has no event.
            await asyncio.sleep(0)
        time.sleep(0.2)  # noqa: ASYNC251  # The stall that is to be logged, with the stack.
        assert await waiting == "ready"
    finally:
        await engine.__aexit__(None, None, None)
        await peer.__aexit__(None, None, None)
    found = read(records)
    assert_no_foreign_id(found)
    assert_no_token(records.getvalue())
    assert seen == {name: {"trace_id": "trace of b"} for name in ("b1 raises", "b2")}
    assert_told(found, "a request arrived", "a1", tokens=30, prefills=["prefill"])
    assert_told(found, "a request is ready", "b3")
    assert_told(found, "a request failed", "b2", cause="recompute failed")
    events = {record["event"] for record in found}
    assert events >= {
        "prefill is listening", "the engine is running", "connected to a prefill", "a decode worker is connected",
        "a room opened", "a room ended", "prefill ended a room", "on_room raised, the room fails",
        "a rule of the core raised, the request falls back", "a decode worker has left", "the engine closes",
    }  # fmt: skip
    assert {record["logger"] for record in found} == {"tidekv.engine", "tidekv.transports"}
    (listening,) = [record for record in found if record["event"] == "prefill is listening"]
    assert listening["address"] == "prefill"
    assert listening["instance"].startswith("prefill-0-")
    (failure,) = [record for record in found if record["event"] == "on_room raised, the room fails"]
    assert "ValueError: a prompt of 120 bytes" in failure["exception"]


def test_requests_from_other_threads_keep_their_own_ids(records: io.StringIO) -> None:
    async def recompute(job: RecomputeJob) -> tuple[int, dict[str, object]]:
        return 1, dict(structlog.contextvars.get_contextvars())

    engine = DecodeEngine(
        EngineConfig(),
        device=DevicePool.allocate(LAYOUT, 64),
        transport=LoopbackTransport("decode-0", LoopbackNetwork()),
    )
    engine.recompute_with(recompute)
    thread = EngineThread(engine)
    outcomes: list[Any] = []
    with thread:
        for tenant in TENANTS:
            with bound_contextvars(trace_id=f"trace of {tenant}"):
                thread.submit(DecodeRequest(request_id=tenant, tokens=list(TENANTS[tenant]), prefill="nobody"))
        while len(outcomes) < len(TENANTS):
            outcomes += thread.poll(30.0)
    found = read(records)
    assert {one.request_id: one.ready.aux for one in outcomes} == {
        tenant: {"trace_id": f"trace of {tenant}"} for tenant in TENANTS
    }
    assert_no_foreign_id(found)
    assert_told(found, "a request is ready", "a")
    assert_told(found, "a request is ready", "b")
