"""The poller: each operation is driven to one end and released once, whatever waits; idleness costs nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.threads import started
from tidekv.engine.poller import PollerThread
from tidekv.states.errors import BrokenInvariant, EngineClosed

Main = Callable[[], Coroutine[None, None, None]]
Run = Callable[[Main], None]


@dataclass
class Fake:
    """A scripted operation: over after `checks` checks, or not before `gate` opens; call `fails_at` raises `error`."""

    checks: int = 0
    rounds: int = 0
    fails_at: int = -1
    release_fails: bool = False
    error: BaseException = field(default_factory=lambda: OSError("no route"))
    gate: threading.Event | None = None
    calls: list[str] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)

    def post(self) -> bool:
        return self._ask("post")

    def check(self) -> bool:
        return self._ask("check")

    def release(self) -> None:
        self._note("release")
        if self.release_fails:
            raise OSError("release went wrong")

    def _ask(self, name: str) -> bool:
        self._note(name)
        asked = len(self.calls) - 1
        if asked == self.fails_at:
            raise self.error
        return asked >= self.checks and (self.gate is None or self.gate.is_set())

    def _note(self, name: str) -> None:
        self.calls.append(name)
        self.threads.add(threading.get_ident())


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Run a test's coroutine on one of the two loops, and find no further thread afterwards."""
    factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop

    def run_on_loop(main: Main) -> None:
        # A transport of an earlier test may still have one.
        before = set(threading.enumerate())
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(main())
        assert not [
            thread for thread in threading.enumerate() if thread.name == "tidekv-poller" and thread not in before
        ]

    return run_on_loop


@pytest.mark.parametrize("checks", [0, 1, 2, 50])
@pytest.mark.parametrize("rounds", [0, 3])
def test_an_operation_is_posted_asked_until_it_is_over_and_released(run: Run, checks: int, rounds: int) -> None:
    async def main() -> None:
        poller = started()
        fake = Fake(checks=checks, rounds=rounds)
        assert await poller.submit(fake) is None
        assert fake.calls == ["post", *["check"] * checks, "release"]
        assert len(fake.threads) == 1
        assert threading.get_ident() not in fake.threads
        assert await poller.close() == 0
        statistics = poller.statistics()
        assert (statistics.in_flight, statistics.posted, statistics.completed, statistics.failed) == (0, 1, 1, 0)
        assert statistics.cpu_s > 0

    run(main)


@pytest.mark.parametrize("fails_at", [0, 1, 7])
def test_what_is_raised_is_the_outcome_and_the_operation_is_still_released(run: Run, fails_at: int) -> None:
    async def main() -> None:
        poller = started()
        fake, other = Fake(checks=99, fails_at=fails_at), Fake(checks=20)
        failing, going_on = poller.submit(fake), poller.submit(other)
        with pytest.raises(OSError, match="no route"):
            await failing
        await going_on
        assert fake.calls == ["post", *["check"] * fails_at, "release"]
        assert await poller.close() == 0
        assert poller.statistics().failed == 1

    run(main)


def test_a_failing_release_is_part_of_the_outcome(run: Run) -> None:
    async def main() -> None:
        poller = started()
        with pytest.raises(OSError, match="release went wrong"):
            await poller.submit(Fake(release_fails=True))
        with pytest.raises(OSError, match="no route") as caught:
            await poller.submit(Fake(fails_at=0, release_fails=True))
        assert caught.value.__notes__ == ["its release failed too: OSError('release went wrong')"]
        await poller.close()

    run(main)


@pytest.mark.parametrize("error", [StopIteration("end"), SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()])
def test_what_no_future_can_carry_is_reported_as_a_bug_and_ends_nothing_else(run: Run, error: BaseException) -> None:
    async def main() -> None:
        poller = started()
        with pytest.raises(BrokenInvariant, match="which is no error") as caught:
            await poller.submit(Fake(fails_at=0, error=error))
        assert caught.value.__cause__ is error
        await poller.submit(Fake(checks=3))
        await poller.close()

    run(main)


def test_a_cancelled_waiter_releases_nothing_before_the_end(run: Run) -> None:
    async def main() -> None:
        poller = started()
        fake = Fake(gate=threading.Event())
        waiting = asyncio.ensure_future(poller.submit(fake))
        await poller.submit(Fake(checks=5))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        # The other one's checks show that rounds went on since.
        await poller.submit(Fake(checks=5))
        assert "release" not in fake.calls
        assert poller.statistics().in_flight == 1
        assert fake.gate is not None
        fake.gate.set()
        assert await poller.close() == 0
        assert fake.calls[-1] == "release"
        assert fake.calls.count("release") == 1

    run(main)


def test_close_waits_for_what_is_in_flight_and_takes_nothing_new(run: Run) -> None:
    async def main() -> None:
        poller = started()
        fakes = [Fake(checks=30) for _ in range(10)]
        futures = [poller.submit(fake) for fake in fakes]
        closing = asyncio.ensure_future(poller.close())
        await asyncio.sleep(0)
        with pytest.raises(EngineClosed, match="not running"):
            poller.submit(Fake())
        assert await closing == 0
        assert all(future.done() for future in futures)
        assert all(fake.calls[-1] == "release" for fake in fakes)
        assert await poller.close() == 0

    run(main)


def test_close_returns_what_is_left_unreleased_and_tells_its_waiters(run: Run) -> None:
    async def main() -> None:
        poller = started()
        stuck = [Fake(gate=threading.Event()) for _ in range(2)]
        futures = [poller.submit(fake) for fake in stuck]
        cancelled = poller.submit(Fake(gate=threading.Event()))
        cancelled.cancel()
        done = poller.submit(Fake(checks=1))
        assert await poller.close(timeout_s=0.02) == 3
        assert done.result() is None
        for future in futures:
            with pytest.raises(EngineClosed, match="ended with 3 operations in flight"):
                await future
        assert not any("release" in fake.calls for fake in stuck)
        assert poller.statistics().in_flight == 3

    run(main)


def test_close_does_not_wait_for_ever_for_a_call_that_does_not_return(run: Run) -> None:
    async def main() -> None:
        poller = started()
        entered, leave = threading.Event(), threading.Event()

        class Stuck(Fake):
            def check(self) -> bool:
                entered.set()
                leave.wait()
                return True

        future = poller.submit(Stuck(checks=1))
        await asyncio.to_thread(entered.wait)
        assert await poller.close(timeout_s=0.0) == 1
        with pytest.raises(EngineClosed):
            await future
        leave.set()
        assert await poller.close() == 0

    run(main)


def test_nothing_can_be_submitted_before_start(run: Run) -> None:
    async def main() -> None:
        poller = PollerThread()
        with pytest.raises(EngineClosed, match="start it first"):
            poller.submit(Fake())
        assert await poller.close() == 0

    run(main)


def test_no_round_is_made_while_nothing_is_in_flight(run: Run) -> None:
    async def main() -> None:
        poller = started()
        for _ in range(20):
            await poller.submit(Fake())
            # Longer than the spin after activity; a poller that went on asking would make rounds here.
            await asyncio.sleep(0.001)
        await poller.close()
        assert poller.statistics().poll_rounds <= 21

    run(main)


def test_what_ends_together_wakes_the_loop_a_few_times_only() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        wake_ups = 0
        wake = loop.call_soon_threadsafe

        def counted(*args: object) -> asyncio.Handle:
            nonlocal wake_ups
            wake_ups += 1
            return wake(*args)  # type: ignore[arg-type]  # Passed on as they came.

        loop.call_soon_threadsafe = counted  # type: ignore[method-assign,assignment]  # Counts.
        poller = started()
        gate = threading.Event()
        futures = [poller.submit(Fake(gate=gate)) for _ in range(200)]
        gate.set()
        await asyncio.wait(futures)
        assert wake_ups < 50
        await poller.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("wait_s", "rounds"),
    # A wait longer than ended operations may be held back for batching; or a turn before one that has work to post.
    [(0.001, 0), (0.0, 1)],
)
def test_what_has_ended_is_told_before_the_next_one_is_asked_who_may_block(
    run: Run, wait_s: float, rounds: int
) -> None:
    async def main() -> None:
        poller = started()
        told = threading.Event()

        class Long(Fake):
            def check(self) -> bool:
                threading.Event().wait(wait_s)
                return super().check()

        class Blocking(Fake):
            def check(self) -> bool:
                assert told.wait(60.0), "the first one's end is not told while the second is asked"
                return super().check()

        first, second = poller.submit(Long(checks=1)), poller.submit(Blocking(checks=1, rounds=rounds))
        first.add_done_callback(lambda _: told.set())
        await asyncio.wait([first, second])
        assert (first.result(), second.result()) == (None, None)
        assert await poller.close() == 0

    run(main)


def test_a_thread_that_dies_of_a_bug_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[type[BaseException]] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: reported.append(args.exc_type))

    async def main() -> None:
        poller = started()
        poller._next_pause_s = lambda quiet_s: 1 / 0  # type: ignore[method-assign,assignment]  # The bug.
        with pytest.raises(EngineClosed, match="1 operations in flight"):
            await poller.submit(Fake(gate=threading.Event()))
        with pytest.raises(EngineClosed):
            poller.submit(Fake())
        assert await poller.close() == 1

    asyncio.run(main())
    assert reported == [ZeroDivisionError]


SCRIPTS = st.lists(
    st.tuples(st.integers(0, 6), st.integers(-1, 8), st.integers(0, 3), st.booleans(), st.booleans()), max_size=12
)


@settings(max_examples=60)
@given(SCRIPTS)
def test_any_mix_ends_as_scripted(scripts: list[tuple[int, int, int, bool, bool]]) -> None:
    async def main() -> None:
        poller = started()
        fakes = [
            Fake(checks=checks, fails_at=fails_at, rounds=rounds, release_fails=release_fails)
            for checks, fails_at, rounds, release_fails, _ in scripts
        ]
        futures = [poller.submit(fake) for fake in fakes]
        for future, (*_, cancel) in zip(futures, scripts, strict=True):
            if cancel:
                future.cancel()
        results = await asyncio.gather(*futures, return_exceptions=True)
        assert await poller.close() == 0
        failed = 0
        for fake, result, (checks, fails_at, _, release_fails, cancel) in zip(fakes, results, scripts, strict=True):
            fails = 0 <= fails_at <= checks
            assert fake.calls == ["post", *["check"] * (fails_at if fails else checks), "release"]
            failed += fails or release_fails
            if cancel:
                assert isinstance(result, asyncio.CancelledError)
            else:
                assert isinstance(result, OSError) == (fails or release_fails)
        statistics = poller.statistics()
        assert (statistics.in_flight, statistics.failed) == (0, failed)
        assert statistics.posted == statistics.completed + failed == len(scripts)

    asyncio.run(main())
