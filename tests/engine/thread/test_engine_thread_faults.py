"""What becomes of an engine's thread when things go wrong around it, and what is left of it afterwards: nothing."""

from __future__ import annotations

import gc
import os
import pickle
import random
import threading
import warnings
from collections import Counter
from queue import SimpleQueue

import pytest

from tests.support.configs import engine_config
from tests.support.inside import core_of, runtime_of
from tests.support.waits import LIMIT_S
from tidekv import (
    DevicePool,
    EngineClosed,
    EngineThread,
    Failed,
    Finished,
    InvalidConfig,
    KVLayout,
    LoopbackTransport,
    Restored,
    Retracted,
)
from tidekv.engine.decode.decode_engine import DecodeEngine
from tidekv.engine.thread import loop
from tidekv.states.errors import BrokenInvariant, TidekvError
from tidekv.transports.loopback import LoopbackNetwork

WAIT_S = LIMIT_S
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32", page_size=4)


def make_thread(**config: object) -> EngineThread:
    return EngineThread(
        DecodeEngine(
            engine_config(**config),
            device=DevicePool.allocate(LAYOUT, 8),
            transport=LoopbackTransport("decode-0", LoopbackNetwork()),
        )
    )


def threads_of_ours() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("tidekv")}


def test_errors_of_the_start_are_raised_in_the_caller_and_leave_no_thread() -> None:
    before = threads_of_ours()
    thread = make_thread(metrics_listen="256.0.0.1:80")
    with pytest.raises(InvalidConfig, match="metrics cannot be served"):
        thread.start()
    assert threads_of_ours() == before
    with pytest.raises(EngineClosed):
        thread.poll()
    with pytest.raises(EngineClosed, match="started before"):
        thread.start()
    assert thread.close() == []


def test_before_its_start_a_thread_refuses_calls_and_closes_without_one() -> None:
    thread = make_thread()
    with pytest.raises(EngineClosed, match="not started"):
        thread.poll()
    assert thread.close() == []


def test_a_defect_in_following_hints_ends_nothing(
    running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def raise_it(*args: object) -> None:
        raise RuntimeError("by a test")

    with running() as rig:
        monkeypatch.setattr(DecodeEngine, "hint", raise_it)
        rig.thread.hint({})
        assert len(rig.restore("r0").pages) == 6
    assert "because of an error here" in caplog.text


def test_a_broken_invariant_is_told_by_every_outcome_and_every_later_call(running) -> None:
    with pytest.raises(BrokenInvariant, match="by a test"), running(answers=False) as rig:
        tickets = [rig.thread.submit(rig.request(f"r{number}")) for number in range(4)]

        async def break_it(engine: object) -> None:
            runtime_of(engine)._break(BrokenInvariant("by a test"))  # type: ignore[attr-defined]  # As a step of the core.

        rig.thread.call(break_it)
        outcomes = []
        while len(outcomes) < len(tickets):
            outcomes += rig.thread.poll(WAIT_S)
        assert {type(outcome.error) for outcome in outcomes} == {EngineClosed}
        for call in rig.calls():
            with pytest.raises(EngineClosed):
                call()


@pytest.mark.parametrize("how", ["exit in a callback", "loop stopped", "mistake in an order"])
def test_a_dead_loop_is_told_by_every_outcome_and_every_later_call(running, how: str) -> None:
    def leave(outcome: object) -> None:
        raise SystemExit("a callback's idea")

    with pytest.raises((EngineClosed, RuntimeError, ZeroDivisionError)), running(answers=how[0] == "e") as rig:
        waiting = []
        if how == "exit in a callback":
            rig.thread.submit(rig.request("r1"), on_done=leave)
        else:
            loop, held = rig.thread._loop, threading.Event()
            waiting.append(rig.thread.submit(rig.request("r1")))
            # Both in one turn of the loop: this request is not begun when the end comes.
            loop.post(lambda: held.wait(WAIT_S) or None)
            waiting.append(rig.thread.submit(rig.request("r2")))
            loop.post(loop._loop.stop if how == "loop stopped" else lambda: 1 / 0)  # type: ignore[arg-type]
            held.set()
        outcomes = []
        with pytest.raises(EngineClosed):
            while True:
                outcomes += rig.thread.poll(WAIT_S)
        assert sorted(outcome.ticket for outcome in outcomes) == waiting
        assert all(isinstance(outcome, Failed) for outcome in outcomes)
        for call in rig.calls():
            with pytest.raises(EngineClosed):
                call()


def test_a_caller_that_waits_when_the_thread_dies_is_told(running) -> None:
    with pytest.raises(RuntimeError), running(answers=False) as rig:
        rig.thread.submit(rig.request("r1"))
        told: SimpleQueue[BaseException] = SimpleQueue()

        def wait() -> None:
            try:
                rig.thread.drain()
            except EngineClosed as error:
                told.put(error)

        waiter = threading.Thread(target=wait)
        waiter.start()
        # Once it refuses requests, the waiter is there.
        while True:
            try:
                rig.thread.submit(rig.request("r1"))
            except EngineClosed:
                break
            except ValueError:
                continue
        rig.thread._loop.post(rig.thread._loop._loop.stop)
        assert isinstance(told.get(timeout=WAIT_S), EngineClosed)
        waiter.join()


def test_a_thread_that_hangs_is_named_when_it_is_closed_and_can_be_closed_later(
    running, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked, released = threading.Event(), threading.Event()
    with running() as rig:
        # The engine ends as soon as it is released: nothing that needs its loop may be left for the end of the rig.
        rig.thread.call(lambda _: rig.peer.__aexit__(None, None, None))
        rig.thread._loop.post(lambda: (blocked.set(), released.wait(WAIT_S)))
        assert blocked.wait(WAIT_S)
        with monkeypatch.context() as patched:
            patched.setattr(loop, "END_S", 0.01 - rig.thread._engine.config.close_deadline_s)
            with pytest.raises(TidekvError, match=r"did not end within 0[.]01 s: it hangs"):
                rig.thread._loop.stop()
        released.set()
        rig.thread._loop.stop()


def test_a_forked_child_is_told_and_a_spawned_one_cannot_have_it(running) -> None:
    with running() as rig:
        with warnings.catch_warnings():
            # Newer Pythons warn of forking with threads, which is what is tested.
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            told = 0
            for call in rig.calls():
                try:
                    call()
                except EngineClosed:
                    told += 1
            os._exit(told if rig.thread.close() == [] else 99)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == len(rig.calls())
        with pytest.raises(TypeError):
            pickle.dumps(rig.thread)
        rig.thread.finish(rig.restore("r1"))
        assert isinstance(rig.outcome(), Finished)


def test_two_threads_of_one_process_know_nothing_of_each_other(running) -> None:
    with running() as one, running() as two:
        first, second = one.restore("r1"), two.restore("r1")
        one.thread.close()
        with pytest.raises(EngineClosed):
            one.thread.grow(first)
        two.thread.grow(second, 20)
        two.thread.finish(second)
        assert isinstance(two.outcome(), Finished)
        two.assert_nothing_held()


def test_nothing_is_left_of_threads_that_were_closed(running) -> None:
    def live_and_die() -> None:
        with running() as rig:
            rig.restore("r1")
            rig.thread.submit(rig.request("r2"))

    live_and_die()
    gc.collect()
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        live_and_die()
    gc.collect()
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == files


@pytest.mark.parametrize("seed", range(3))
def test_threads_that_do_everything_at_once_get_one_outcome_for_each_ticket(running, seed: int) -> None:
    """Four threads with requests of their own, an engine with too few pages, aborts at random moments."""
    per_thread = 25

    def work(rig, name: str, failures: SimpleQueue[BaseException], counts: Counter[str]) -> None:
        chance = random.Random(f"{seed}{name}")
        told: SimpleQueue[object] = SimpleQueue()
        thread = rig.thread

        def outcome_of(ticket: int) -> object:
            # One at a time: a second outcome of an earlier ticket would come here, and differ.
            outcome = told.get(timeout=WAIT_S)
            assert outcome.ticket == ticket
            return outcome

        try:
            for number in range(per_thread):
                tokens = [chance.randrange(3) for _ in range(chance.randrange(1, 40))]
                request = rig.request(f"{name}{number}", tokens)
                ticket = thread.submit(request, on_done=told.put)
                if chance.random() < 0.2:
                    thread.abort(request.request_id)
                outcome = outcome_of(ticket)
                counts[type(outcome).__name__] += 1
                if isinstance(outcome, Failed):
                    continue
                ready = outcome.ready
                room = 0
                while room < 24:
                    step = chance.randrange(1, 7)
                    if thread.grow_many([ready], step):
                        counts["short"] += 1
                        outcome = outcome_of(thread.retract(ready, range(room + 1), on_done=told.put))
                        assert isinstance(outcome, Retracted)
                        outcome = outcome_of(thread.resume(outcome.retracted, on_done=told.put))
                        assert isinstance(outcome, Restored)
                        ready, room = outcome.ready, 0
                        break
                    room += step
                if chance.random() < 0.3:
                    assert thread.abort(request.request_id)
                else:
                    outcome = outcome_of(thread.finish(ready, range(room), on_done=told.put))
                    assert isinstance(outcome, Finished)
            assert told.empty()
        except BaseException as error:
            failures.put(error)

    with running(device_pages=40, host_pages=200, growth_reserve_pages=1) as rig:
        failures: SimpleQueue[BaseException] = SimpleQueue()
        counts: Counter[str] = Counter()
        workers = [
            threading.Thread(target=work, args=(rig, name, failures, counts), name=f"worker {name}") for name in "abcd"
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if not failures.empty():
            raise failures.get()
        rig.assert_nothing_held()
        assert counts["Restored"] > per_thread
        assert counts["Failed"] > 0
        assert rig.thread.poll() == []
        assert rig.thread.call(audited) is None


async def audited(engine: object) -> None:
    core_of(engine).check()  # type: ignore[attr-defined]  # Every page is recounted.


def test_a_synchronous_loop_drives_256_requests_at_once(running) -> None:
    """Continuous batching as a plain loop has it: take what is READY, step all, give back what has ended."""
    in_flight, steps = 256, 12
    with running(device_pages=256 * 9, host_pages=64, prefill_pages=256 * 6) as rig:
        for number in range(in_flight):
            rig.thread.submit(rig.request(f"r{number}", range(number, number + 20)))
        batch, waiting = {}, in_flight
        while len(batch) < in_flight:
            for outcome in rig.thread.poll(WAIT_S):
                assert isinstance(outcome, Restored)
                batch[outcome.request_id] = outcome.ready
        for _ in range(steps):
            assert rig.thread.poll() == []
            assert rig.thread.grow_many(batch.values()) == []
        assert rig.tables_of_core() == {name: ready.pages.tolist() for name, ready in batch.items()}
        pages = [page for ready in batch.values() for page in ready.pages.tolist()]
        assert len(pages) - len(set(pages)) <= in_flight * 5, "only full pages of prompts are shared"
        for ready in batch.values():
            rig.thread.finish(ready, range(steps))
        while waiting:
            waiting -= len(rig.thread.poll(WAIT_S))
        rig.assert_nothing_held()
