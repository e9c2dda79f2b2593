"""Calls that end in another way than by their answer: cancelled, overtaken by an abort, cut off by a bug of ours."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.inside import assert_no_call_waits, calls_of, core_of, driver_of
from tests.support.waits import LIMIT_S
from tidekv import EngineClosed, InvalidRequest, RequestFailed
from tidekv.engine.decode.runtime import EffectGroup
from tidekv.states import events

PROMPT = list(range(100, 122))


async def test_a_finish_behind_an_abort_ends_and_its_id_can_be_used_again(make_pair) -> None:
    async with make_pair() as pair:
        ready = await pair.restore("r1", PROMPT)
        aborting = asyncio.create_task(pair.engine.abort("r1"))
        await asyncio.sleep(0)
        with pytest.raises(RequestFailed, match="aborted"):
            async with asyncio.timeout(LIMIT_S):
                await pair.engine.finish(ready, [1])
        assert await aborting
        await pair.finish(await pair.restore("r1", PROMPT), PROMPT, [1])
        await pair.assert_nothing_held()


@pytest.mark.parametrize("how", ["finish", "retract"])
async def test_a_rule_that_raises_while_a_request_is_given_back_fails_that_call(
    make_pair, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    async with make_pair() as pair:
        ready = await pair.restore("r1", PROMPT)

        def broken(*_: object, **__: object) -> None:
            raise RuntimeError("no luck")

        with monkeypatch.context() as patch:
            patch.setattr(core_of(pair.engine).serving, how, broken)
            with pytest.raises(RequestFailed, match="internal error"):
                async with asyncio.timeout(LIMIT_S):
                    await getattr(pair.engine, how)(ready, [1])
        await pair.finish(await pair.restore("r1", PROMPT), PROMPT, [1])
        await pair.assert_nothing_held()
        assert_no_call_waits(pair.engine)


async def test_a_cancelled_finish_is_done_all_the_same(make_pair) -> None:
    async with make_pair() as pair:
        ready = await pair.restore("r1", PROMPT)
        finishing = asyncio.create_task(pair.engine.finish(ready, [1]))
        await asyncio.sleep(0)
        finishing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await finishing
        await pair.assert_nothing_held()
        assert pair.engine.probe_prefix(PROMPT)["l1"] == 20


@pytest.mark.parametrize("turns", range(6))
async def test_a_cancelled_retract_holds_nothing_in_host_memory(make_pair, turns: int) -> None:
    async with make_pair() as pair:
        ready = await pair.restore("r1", PROMPT)
        retracting = asyncio.create_task(pair.engine.retract(ready))
        for _ in range(turns):
            await asyncio.sleep(0)
        retracting.cancel()
        try:
            pair.engine.drop(await retracting)
        except asyncio.CancelledError:
            if turns == 0:
                # It was cancelled before its first step: nothing has happened.
                await pair.engine.abort("r1")
        await pair.engine.wait_settled()
        await calls_of(pair.engine).wait_until(lambda: not pair.core()["requests_retracted"])
        await pair.assert_nothing_held()
        assert pair.core()["requests_retracted"] == 0


async def test_an_abort_while_a_request_is_retracted_says_that_it_came_too_late(make_pair) -> None:
    async with make_pair() as pair:
        ready = await pair.restore("r1", PROMPT)
        retracting = asyncio.create_task(pair.engine.retract(ready))
        await asyncio.sleep(0)
        assert not await pair.engine.abort("r1")
        retracted = await retracting
        assert retracted.held_tokens == 20
        await pair.engine.finish(await pair.engine.resume(retracted))
        await pair.assert_nothing_held()


async def test_a_late_cancel_does_not_abort_the_next_request_of_that_id(make_pair) -> None:
    async with make_pair() as pair:
        held = asyncio.Event()

        async def hold(*_: object) -> None:
            await held.wait()

        pair.network.before_write = hold
        first = asyncio.create_task(pair.engine.restore(pair.request("r1", PROMPT)))
        await calls_of(pair.engine).wait_until(lambda: pair.core()["requests_transfer"] == 1)
        # The request fails; in the same turn of the loop the next one is started and the first is cancelled.
        driver = driver_of(pair.engine)
        driver.take_now(events.AbortRequested(at_s=driver.clock(), request_id="r1", cause="first"))
        second = pair.engine.restore(pair.request("r1", PROMPT))
        started = asyncio.ensure_future(second)
        asyncio.get_running_loop().call_soon(first.cancel)
        first.cancel()
        # The first one wakes up behind the start of the second.
        with pytest.raises(asyncio.CancelledError):
            await first
        held.set()
        async with asyncio.timeout(LIMIT_S):
            ready = await started
        await pair.engine.finish(ready)
        await pair.assert_nothing_held()


async def test_two_finishes_at_once_are_one_and_a_refusal(make_pair) -> None:
    async with make_pair() as pair:
        ready = await pair.restore("r1", PROMPT)
        outcomes = await asyncio.gather(
            *(pair.engine.finish(ready, [1]) for _ in range(2)), pair.engine.retract(ready), return_exceptions=True
        )
        assert outcomes[0] == 0
        assert all(isinstance(outcome, InvalidRequest) for outcome in outcomes[1:])
        await pair.assert_nothing_held()


async def test_whoever_waits_when_the_engine_breaks_hears_of_it(make_pair) -> None:
    held = asyncio.Event()

    async def hold(*_: object) -> None:
        await held.wait()

    with pytest.raises(ZeroDivisionError):
        async with make_pair(close_deadline_s=0.2) as pair:
            ready = await pair.restore("r1", PROMPT)
            pair.network.before_write = hold
            calls = [
                pair.engine.restore(pair.request("r2", [9] * 9)),
                pair.engine.drain(),
                pair.engine.wait_settled(),
                pair.engine.finish(ready),
                pair.engine.flush(),
            ]
            waiting = [asyncio.create_task(call) for call in calls[:3]]
            await calls_of(pair.engine).wait_until(lambda: pair.core()["requests_transfer"] == 1)
            core_of(pair.engine).step = lambda event: 1 // 0
            waiting += [asyncio.create_task(call) for call in calls[3:]]
            async with asyncio.timeout(LIMIT_S):
                for call in waiting:
                    with pytest.raises(EngineClosed, match="broke"):
                        await call
            held.set()
            for use in (pair.engine.grow, pair.engine.drop):
                with pytest.raises(EngineClosed):
                    use(ready)
            with pytest.raises(EngineClosed):
                await pair.engine.finish(ready)


async def test_a_request_that_is_lost_while_it_grows_says_so_before_anybody_writes(
    make_pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make_pair() as pair:
        ready = await pair.restore("r1", PROMPT[:8])

        def broken(*_: object) -> None:
            raise RuntimeError("no luck")

        monkeypatch.setattr(core_of(pair.engine).serving, "grow", broken)
        with pytest.raises(InvalidRequest, match="no pages any more"):
            pair.engine.grow(ready, 1)
        assert (len(ready.pages), ready.length) == (2, 8)
        await pair.assert_nothing_held()


async def test_a_stopped_driver_takes_nothing_and_does_not_spin(make_pair) -> None:
    async with make_pair() as pair:
        driver = driver_of(pair.engine)
    taken = driver.events_taken
    driver.take_now(events.FlushRequested(at_s=0.0, call=1, tiers=()))
    driver.post(events.FlushRequested(at_s=0.0, call=1, tiers=()))
    assert driver.events_taken == taken


async def test_a_broken_effect_is_told_before_the_others_have_ended() -> None:
    told: list[BaseException] = []
    held, was_told = asyncio.Event(), asyncio.Event()

    async def hang() -> None:
        try:
            await held.wait()
        except asyncio.CancelledError:
            # As a write that nothing can stop: it settles first.
            await held.wait()
            raise

    async def break_down() -> None:
        raise ZeroDivisionError

    def tell(error: BaseException) -> None:
        told.append(error)
        was_told.set()

    group = EffectGroup(tell)
    await group.start()
    group.spawn(hang(), "hang")
    await asyncio.sleep(0)
    group.spawn(break_down(), "break down")
    async with asyncio.timeout(LIMIT_S):
        await was_told.wait()
    held.set()
    assert await group.close(timeout_s=5)
    assert isinstance(told[0], ZeroDivisionError)
