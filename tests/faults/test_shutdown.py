"""The engine is closed, or its loop shut down, in each state of a request: it ends in time, and nothing is held."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop

from tests.support.configs import engine_config
from tests.support.inside import calls_of, core_of, runtime_of
from tests.support.waits import LIMIT_S
from tidekv import (
    DecodeEngine,
    DecodeRequest,
    DevicePool,
    HostPool,
    KVLayout,
    LoopbackTransport,
    PrefillConfig,
    PrefillPeer,
    RequestFailed,
    open_storage,
)
from tidekv.engine.synthetic.prefill import SyntheticPrefill
from tidekv.states.records.stages import State
from tidekv.states.types import PageIds
from tidekv.transports.loopback import LoopbackNetwork

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", page_size=4)
PROMPT = list(range(100, 140))
STATES = ["PREALLOC", "PREALLOC with a query", "PREFETCH", "LOCAL_RESTORE", "TRANSFER", "READY"]


class Held:
    """Holds requests in one state, by what that state waits for, until it is let go."""

    def __init__(self, state: str) -> None:
        self.state = state
        self.let_go = asyncio.Event()
        self.is_on = False
        self.storage = HeldStorage(self)
        self.network = LoopbackNetwork()
        self.network.before_write = self.before_write

    async def pass_in(self, state: str) -> None:
        if self.is_on and state == self.state:
            await self.let_go.wait()

    async def before_write(self, *_: object) -> None:
        await self.pass_in("TRANSFER")

    def hold_copies(self, copier: Any) -> None:
        """Copies to the device begin when they are let go."""
        copy = copier.to_device

        async def later(host_pages: PageIds, device_pages: PageIds) -> None:
            await self.pass_in("LOCAL_RESTORE")
            await copy(host_pages, device_pages)

        copier.to_device = lambda *pages: asyncio.ensure_future(later(*pages))


class HeldStorage:
    """Storage in memory with answers that a test can hold."""

    def __init__(self, held: Held) -> None:
        self._held = held
        self._inner = open_storage("memory:?capacity=1MiB")

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    async def exists(self, keys: Sequence[bytes], *, timeout_s: float) -> list[bool]:
        await self._held.pass_in("PREALLOC with a query")
        return await self._inner.exists(keys, timeout_s=timeout_s)

    async def get_into(self, keys: Sequence[bytes], pages: PageIds, *, timeout_s: float) -> list[bool]:
        await self._held.pass_in("PREFETCH")
        return await self._inner.get_into(keys, pages, timeout_s=timeout_s)


@asynccontextmanager
async def open_peer(held: Held) -> AsyncIterator[PrefillPeer]:
    pool = DevicePool.allocate(LAYOUT, 64)
    async with PrefillPeer(
        PrefillConfig(listen="prefill"),
        device=pool,
        transport=LoopbackTransport("prefill", held.network),
        on_room=SyntheticPrefill(pool).serve,
    ) as peer:
        yield peer


def make_engine(held: Held, **config: Any) -> DecodeEngine:
    return DecodeEngine(
        engine_config(
            prefetch_threshold_tokens=0,
            query_deadline_s=60.0,
            prefetch_base_s=60.0,
            # With another policy the request does not wait for a query that is held.
            prefetch="wait_complete" if "query" in held.state else "timeout",
            **config,
        ),
        device=DevicePool.allocate(LAYOUT, 24),
        host=HostPool.allocate(LAYOUT, 32),
        storage=held.storage,  # type: ignore[arg-type]  # It passes on what it does not hold.
        transport=LoopbackTransport("decode", held.network),
    )


def request(request_id: str, tokens: Sequence[int]) -> DecodeRequest:
    return DecodeRequest(request_id=request_id, tokens=tokens, prefill="prefill", send_prompt=True)


async def enter_state(engine: DecodeEngine, held: Held) -> asyncio.Task[Any]:
    """A request that waits in the state; in all but its own tiers everything is as it was."""
    await engine.finish(await engine.restore(request("warm", PROMPT)))
    await engine.wait_settled()
    await engine.flush(("l1",) if held.state == "LOCAL_RESTORE" else ("l1", "l2"))
    if held.state == "PREALLOC":
        await engine.restore(request("first", range(1000, 1080)))
    held.is_on = True
    held.hold_copies(runtime_of(engine).copier)
    tokens = PROMPT if held.state != "TRANSFER" else range(2000, 2040)
    waiting = asyncio.create_task(engine.restore(request("held", tokens)))

    def is_there() -> bool:
        found = core_of(engine).request("held")
        return found is not None and found.state is State[held.state.split()[0]]

    await calls_of(engine).wait_until(is_there)
    return waiting


def assert_nothing_held(engine: DecodeEngine) -> None:
    core = core_of(engine)
    core.check()
    assert core.is_idle
    counts = core.statistics()
    for pool in ("device", "host"):
        assert counts[f"{pool}_free"] + counts[f"{pool}_cached"] == counts[f"{pool}_total"], counts


@pytest.mark.parametrize("state", STATES)
async def test_closing_tells_the_caller_at_once_and_waits_for_what_is_in_flight(state: str) -> None:
    held = Held(state)
    async with asyncio.timeout(LIMIT_S), open_peer(held):
        engine = make_engine(held)
        async with engine:
            waiting = await enter_state(engine, held)
            # What is in flight continues after the caller was notified, and not before.
            waiting.add_done_callback(lambda _: held.let_go.set())
        if state == "READY":
            await waiting
        else:
            with pytest.raises(RequestFailed, match="engine closed"):
                await waiting
        assert_nothing_held(engine)


@pytest.mark.parametrize("state", STATES)
async def test_closing_ends_in_time_where_something_hangs(state: str, caplog: pytest.LogCaptureFixture) -> None:
    held = Held(state)
    async with asyncio.timeout(LIMIT_S), open_peer(held):
        engine = make_engine(held, close_deadline_s=0.2)
        async with engine:
            waiting = await enter_state(engine, held)
        assert waiting.done()
        waiting.exception()
        if state in ("PREFETCH", "LOCAL_RESTORE", "TRANSFER"):
            assert "with work in flight" in caplog.text
        held.let_go.set()


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("state", STATES)
def test_shutting_the_loop_down_ends_the_engine(state: str, new_loop: Callable[[], Any]) -> None:
    """What `asyncio.run` does at its end: it cancels every task there is, ours and the caller's, all at once."""
    engines: list[DecodeEngine] = []

    async def serve(held: Held, entered: asyncio.Event) -> None:
        async with open_peer(held):
            engines.append(make_engine(held, close_deadline_s=0.2))
            async with engines[0] as engine:
                waiting = await enter_state(engine, held)
                entered.set()
                await waiting
                await asyncio.Event().wait()

    async def main() -> asyncio.Task[None]:
        held, entered = Held(state), asyncio.Event()
        serving = asyncio.create_task(serve(held, entered))
        async with asyncio.timeout(LIMIT_S):
            await entered.wait()
        return serving

    with asyncio.Runner(loop_factory=new_loop) as runner:
        serving = runner.run(main())
    assert serving.cancelled()
    assert not runtime_of(engines[0]).is_open
    assert not calls_of(engines[0]).live_ids()
