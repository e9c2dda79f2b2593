"""The balance of an engine, for tests of an embedding: a property test finds a request that was not given back."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tidekv
from tests.support.thorough import examples

LAYOUT = tidekv.KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32", page_size=4)
Turns = list[tuple[int, int, str]]
TURN = st.tuples(st.integers(0, 2), st.integers(1, 20), st.sampled_from(["finish", "abort", "retract"]))


async def prefill(room: tidekv.Room) -> None:
    await room.send(range(-(-room.prompt_tokens // 4)), start_token=0)
    await room.finish(first_token=1)
    await room.received()


async def play(turns: Turns, *, leaks: bool) -> dict[str, tidekv.PoolBalance]:
    """Restore, grow and give back prompts; with `leaks` the finish of one in three is left out."""
    network = tidekv.LoopbackNetwork()
    pools = [tidekv.DevicePool.allocate(LAYOUT, 64) for _ in range(2)]
    ends = [tidekv.LoopbackTransport(name, network) for name in ("p", "d")]
    peer = tidekv.PrefillPeer(
        tidekv.PrefillConfig(listen="prefill"), device=pools[0], transport=ends[0], on_room=prefill
    )
    host = tidekv.HostPool.allocate(LAYOUT, 16)
    async with (
        peer,
        tidekv.DecodeEngine(tidekv.EngineConfig(), device=pools[1], host=host, transport=ends[1]) as engine,
    ):
        for number, (first, length, end) in enumerate(turns):
            request = tidekv.DecodeRequest(
                request_id=f"r{number}", tokens=[first, *range(length)], prefill="prefill", send_prompt=True
            )
            ready = await engine.restore(request)
            engine.grow(ready, length % 5)
            if leaks and number % 3 == 0:
                continue
            if end == "finish":
                await engine.finish(ready)
            elif end == "abort":
                await engine.abort(ready.request_id)
            else:
                engine.drop(await engine.retract(ready))
            engine.check()
        if not leaks:
            await engine.wait_settled()
        return engine.balance()


def is_settled(balance: dict[str, tidekv.PoolBalance]) -> bool:
    return all(pool.free + pool.cached == pool.total and not pool.protected for pool in balance.values())


@examples(25)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 20), st.sampled_from(["finish", "abort", "retract"])), max_size=6
    )
)
def test_every_page_is_free_or_cached_once_all_requests_were_given_back(turns: Turns) -> None:
    assert is_settled(asyncio.run(play(turns, leaks=False)))


def test_a_request_that_was_not_given_back_shows() -> None:
    balance = asyncio.run(play([(1, 9, "finish"), (2, 9, "finish")], leaks=True))
    assert not is_settled(balance)
    assert balance["device"].owned > 0


def test_an_engine_that_was_not_started_has_no_balance() -> None:
    transport = tidekv.LoopbackTransport("d", tidekv.LoopbackNetwork())
    engine = tidekv.DecodeEngine(
        tidekv.EngineConfig(), device=tidekv.DevicePool.allocate(LAYOUT, 4), transport=transport
    )
    for call in (engine.check, engine.balance):
        with pytest.raises(tidekv.EngineClosed, match="not started"):
            call()
