"""A request is live if and only if the core has its event, whatever raises; an abort is never overtaken."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable

import pytest

from tests.support.inside import assert_no_call_waits, calls_of, core_of
from tidekv import DecodeEngine, InvalidRequest, ReadyRequest, RequestFailed
from tidekv.states.commands import ReportReady

PROMPT = list(range(100, 122))


class Injected(Exception):
    """Raised instead of a call."""


class RaisingCalls:
    """Raises `Injected` instead of call number `at` that a piece of work makes, of Python or C, before it begins."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.count = 0
        self.raised_in = ""

    def __call__(self, frame: object, event: str, argument: object) -> None:
        if event not in ("call", "c_call") or argument is next:
            return
        self.count += 1
        if self.count == self.at:
            self.raised_in = f"{frame.f_code.co_qualname} {argument}"  # type: ignore[attr-defined]  # A frame.
            sys.setprofile(None)
            raise Injected


async def step_with(injection: RaisingCalls, work: Awaitable[object]) -> object:
    """Run a coroutine up to its first suspension with an injection, and then to its end without."""

    class FirstStep:
        def __await__(self):  # type: ignore[no-untyped-def]  # A generator of what the loop waits for.
            generator = work.__await__()
            sys.setprofile(injection)
            try:
                waited_for = next(generator)
            except StopIteration as end:
                return end.value
            finally:
                injection.at = 0  # Ending it is a call as well.
                sys.setprofile(None)
            while True:
                try:
                    sent = yield waited_for
                except BaseException as error:
                    waited_for = generator.throw(error)
                else:
                    try:
                        waited_for = generator.send(sent)
                    except StopIteration as end:
                        return end.value

    return await FirstStep()


async def assert_whole(engine: DecodeEngine) -> None:
    """Ids, places in the queue, abort and drain are as if nothing had been asked for."""
    calls = calls_of(engine)
    await engine.wait_settled()
    assert calls.live_ids() == []
    assert calls.arriving(core_of(engine)) == 0
    assert_no_call_waits(engine)
    assert await engine.abort("r1") is False


async def test_a_raise_at_every_call_of_a_restore_leaves_its_id_free_and_its_place_in_the_queue(make_pair) -> None:
    async with make_pair(queue_max=1) as pair:
        at, begun = 0, 0
        request = pair.request("r1", PROMPT)
        while True:
            at += 1
            injection = RaisingCalls(at)
            restoring = asyncio.ensure_future(step_with(injection, pair.engine.restore(request)))
            try:
                ready = await restoring
            except Injected:
                await assert_whole(pair.engine)
                continue
            # Beyond its last call, or in one that the engine survives: the request is served.
            assert pair.wrong_pages(ready, PROMPT) == []
            await pair.engine.finish(ready)
            begun += 1
            if not injection.raised_in:
                break
        assert at > 40, "the calls of a restore were not reached"
        assert (await pair.engine.drain(5.0)).live == []
        await pair.assert_nothing_held()


@pytest.mark.parametrize("way", ["finish", "retract"])
async def test_a_raise_at_every_call_of_giving_back_leaves_the_request_ready_to_be_given_back(
    make_pair, way: str
) -> None:
    async with make_pair() as pair:
        at = 0
        while True:
            at += 1
            ready = await pair.restore("r1", PROMPT)
            injection = RaisingCalls(at)
            give_back: Callable[[ReadyRequest], Awaitable[object]] = getattr(pair.engine, way)
            try:
                answer = await step_with(injection, give_back(ready))
            except Injected:
                calls = calls_of(pair.engine)
                if calls.holds(ready) and not calls.is_given_back("r1"):
                    await pair.engine.finish(ready)
                await assert_whole(pair.engine)
                async with asyncio.timeout(10):
                    await calls.wait_until(lambda: pair.core()["requests_retracted"] == 0)
                continue
            if way == "retract":
                pair.engine.drop(answer)
            if not injection.raised_in:
                break
        await pair.assert_nothing_held()


async def test_an_abort_in_the_turn_in_which_a_request_becomes_ready_is_what_its_restore_raises(
    make_pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The abort is asked for just before the core decides READY, and taken only behind the caller of the restore."""
    async with make_pair() as pair:
        calls = calls_of(pair.engine)
        tell = calls.tell
        aborting: list[asyncio.Task[bool]] = []

        def abort_and_tell(command: object) -> None:
            if isinstance(command, ReportReady):
                abort = pair.engine.abort(command.request_id)
                # Up to its first suspension now: the abort is posted, and the core has not taken it.
                aborting.append(asyncio.ensure_future(abort))
                coroutine_step(aborting[-1])
            tell(command)

        def coroutine_step(task: asyncio.Task[bool]) -> None:
            """Have the task run before whatever the loop runs next."""
            loop = asyncio.get_running_loop()
            ready = loop._ready  # type: ignore[attr-defined]  # The order of callbacks is what is tested.
            ready.appendleft(ready.pop())

        monkeypatch.setattr(calls, "tell", abort_and_tell)
        for round_ in range(50):
            with pytest.raises(RequestFailed, match="aborted"):
                await pair.engine.restore(pair.request(f"r{round_}", PROMPT))
            assert await aborting[-1] is True
            await pair.assert_nothing_held()
        monkeypatch.undo()
        await pair.finish(await pair.restore("r0", PROMPT), PROMPT, [1])
        await pair.assert_nothing_held()


async def test_a_request_that_is_being_aborted_does_not_grow(make_pair) -> None:
    async with make_pair() as pair:
        ready = await pair.restore("r1", PROMPT)
        aborting = asyncio.ensure_future(pair.engine.abort("r1"))
        await asyncio.sleep(0)
        assert not pair.engine.holds(ready)
        with pytest.raises(InvalidRequest):
            pair.engine.grow(ready, 1)
        assert await aborting
        await pair.assert_nothing_held()
