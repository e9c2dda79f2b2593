"""An engine on a thread of its own, driven by plain loops: one outcome for every ticket, every byte verified."""

from __future__ import annotations

import selectors
import threading
from functools import partial
from types import SimpleNamespace

import pytest

from tests.support.waits import LIMIT_S
from tidekv import (
    CapacityError,
    EngineClosed,
    EngineThread,
    Failed,
    Finished,
    InvalidRequest,
    Offered,
    OfferedPages,
    OutOfPages,
    RequestFailed,
    Restored,
    RestoredInto,
    Retracted,
)
from tidekv.engine.thread.engine_thread import Outcome

WAIT_S = LIMIT_S


def is_readable(thread: EngineThread) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(thread, selectors.EVENT_READ)
        return bool(selector.select(0))


def test_a_request_is_restored_grown_and_finished_without_an_event_loop(running) -> None:
    with running() as rig:
        ready = rig.restore("r1")
        assert ready.sources == {"l1": 0, "l2": 0, "l3": 0, "transfer": 22}
        assert rig.thread.grow(ready, 2) == []
        (page,) = rig.thread.grow(ready)
        assert ready.pages[-1] == page
        assert rig.tables_of_core() == {"r1": ready.pages.tolist()}
        ticket = rig.thread.finish(ready, [ready.first_token, 8, 9])
        assert rig.outcome() == Finished(ticket, "r1", 1)  # The prompt is in the cache since READY.
        again = rig.restore("r2")
        assert again.sources["l1"] == 20
        rig.thread.finish(again)
        assert isinstance(rig.outcome(), Finished)
        rig.assert_nothing_held()


def test_a_thread_changes_requests_and_flushes_a_namespace(running) -> None:
    with running() as rig:
        ready = rig.restore("r1")
        assert not rig.thread.change_request("r1", priority=1)
        rig.thread.finish(ready)
        assert isinstance(rig.outcome(), Finished)
        assert rig.thread.flush(namespace="other")["dropped"] == {"l1": 0, "l2": 0}
        assert rig.thread.flush(namespace="")["dropped"]["l1"] > 0
        rig.assert_nothing_held()


def test_the_eventfd_is_readable_exactly_while_there_is_something_to_take(running) -> None:
    with running() as rig, selectors.DefaultSelector() as selector:
        selector.register(rig.thread, selectors.EVENT_READ)
        assert not is_readable(rig.thread)
        assert rig.thread.poll() == []
        rig.thread.submit(rig.request("r1"))
        assert selector.select(WAIT_S)
        assert is_readable(rig.thread)
        (outcome,) = rig.thread.poll()
        assert isinstance(outcome, Restored)
        assert not is_readable(rig.thread)
        rig.thread.finish(outcome.ready)
        assert selector.select(WAIT_S)
        assert isinstance(rig.outcome(), Finished)
        assert not is_readable(rig.thread)


def test_on_done_is_called_on_the_engines_thread_and_may_go_on_from_there(running) -> None:
    told: list[tuple[object, str]] = []
    over = threading.Event()

    with running() as rig:

        def on_finished(outcome: object) -> None:
            told.append((outcome, threading.current_thread().name))
            over.set()
            raise ValueError("a callback's own mistake")

        def on_restored(outcome: object) -> None:
            told.append((outcome, threading.current_thread().name))
            assert isinstance(outcome, Restored)
            # Thirty pages are more than the reserve: this calls the engine, and already runs on its thread.
            assert len(rig.thread.grow(outcome.ready, 120)) == 30
            with pytest.raises(InvalidRequest, match="made on it"):
                rig.thread.flush()
            with pytest.raises(InvalidRequest, match="own thread"):
                rig.thread.close()
            rig.thread.finish(outcome.ready, on_done=on_finished)

        rig.thread.submit(rig.request("r1"), on_done=on_restored)
        assert over.wait(WAIT_S)
        assert [type(outcome) for outcome, _ in told] == [Restored, Finished]
        assert {name for _, name in told} == {"tidekv-engine"}
        assert rig.thread.poll() == []
        rig.assert_nothing_held()
        assert rig.thread.statistics()["thread"] == {"tickets": 0, "outcomes_waiting": 0, "callbacks_raised": 1}


def test_what_is_wrong_with_a_call_is_raised_in_it_and_changes_nothing(running) -> None:
    with running() as rig:
        with pytest.raises(InvalidRequest, match="token"):
            rig.thread.submit(rig.request("bad", [2**40]))
        ready = rig.restore("r1")
        with pytest.raises(InvalidRequest, match="live already"):
            rig.thread.submit(rig.request("r1"))
        with pytest.raises(InvalidRequest, match="grow before writing"):
            rig.thread.finish(ready, list(range(50)))
        with pytest.raises(InvalidRequest, match="tokens must be a whole number, 0 or more, not -1"):
            rig.thread.grow(ready, -1)
        rig.thread.finish(ready)
        for call in (rig.thread.grow, rig.thread.finish, rig.thread.retract):
            with pytest.raises(InvalidRequest, match="not yours"):
                call(ready)
        assert isinstance(rig.outcome(), Finished)
        too_long = rig.thread.submit(rig.request("long", list(range(4 * 64 + 1))))
        outcome = rig.outcome()
        assert isinstance(outcome, Failed)
        assert (outcome.ticket, type(outcome.error)) == (too_long, InvalidRequest)
        assert rig.restore("long")


def test_a_full_queue_is_an_outcome(running) -> None:
    with running(answers=False, queue_max=2, device_pages=8) as rig:
        for number in range(6):
            rig.thread.submit(rig.request(f"r{number}"))
        failed: list[Failed] = []
        while len(failed) < 3:
            failed += [outcome for outcome in rig.thread.poll(WAIT_S) if isinstance(outcome, Failed)]
        assert {type(outcome.error) for outcome in failed} == {CapacityError}


def test_growth_without_pages_is_refused_and_retract_makes_room_for_others(running) -> None:
    with running(device_pages=20) as rig:
        first, second = rig.restore("r1"), rig.restore("r2", list(range(500, 522)))
        assert rig.thread.grow_many([first, second], 8) == []
        before = second.length
        with pytest.raises(OutOfPages):
            rig.thread.grow(second, 100)
        assert second.length == before
        while not (short := rig.thread.grow_many([first], 4)):
            pass
        assert short == [first]
        tables = rig.tables_of_core()
        assert tables == {"r1": first.pages.tolist(), "r2": second.pages.tolist()}
        assert not set(tables["r1"]) & set(tables["r2"])
        rig.thread.retract(second, [1, 2])
        outcome = rig.outcome()
        assert isinstance(outcome, Retracted)
        assert outcome.retracted.held_tokens == 20
        assert len(rig.thread.grow(first, 8)) == 2
        rig.thread.finish(first)
        assert isinstance(rig.outcome(), Finished)
        rig.thread.resume(outcome.retracted)
        resumed = rig.outcome()
        assert isinstance(resumed, Restored)
        assert resumed.ready.sources["transfer"] <= 4
        rig.thread.retract(resumed.ready)
        held = rig.outcome()
        assert isinstance(held, Retracted)
        rig.thread.drop(held.retracted)
        rig.assert_nothing_held()


def test_an_abort_ends_what_waits_what_was_not_taken_and_what_is_ready(running) -> None:
    with running() as rig:
        ready = rig.restore("r1")
        assert rig.thread.abort("r1")
        assert not rig.thread.abort("r1")
        with pytest.raises(InvalidRequest):
            rig.thread.grow(ready)
        # It is READY, but not yet polled: no poll after the abort may hand out its pages.
        rig.thread.submit(rig.request("r2"))
        with selectors.DefaultSelector() as selector:
            selector.register(rig.thread, selectors.EVENT_READ)
            assert selector.select(WAIT_S)
        assert rig.thread.abort("r2")
        outcome = rig.outcome()
        assert isinstance(outcome, Failed)
        assert isinstance(outcome.error, RequestFailed)
        assert outcome.error.cause == "aborted"
        assert not rig.thread.abort("nobody")
        rig.assert_nothing_held()
    with running(answers=False) as rig:
        rig.thread.submit(rig.request("r1"))
        assert rig.thread.abort("r1")
        outcome = rig.outcome()
        assert isinstance(outcome, Failed)
        assert isinstance(outcome.error, RequestFailed)
        assert outcome.error.cause == "aborted"


@pytest.mark.parametrize("answers", [True, False])
def test_close_ends_what_is_in_flight_and_every_ticket_gets_its_outcome(running, answers: bool) -> None:
    with running(answers=answers) as rig:
        tickets = [rig.thread.submit(rig.request(f"r{number}", range(number, number + 9))) for number in range(8)]
        left = rig.thread.close()
        if not answers:
            assert left == [f"r{number}" for number in range(8)]
        outcomes = rig.thread.poll()
        assert sorted(outcome.ticket for outcome in outcomes) == tickets
        assert all(isinstance(outcome, Failed) for outcome in outcomes)
        for call in rig.calls():
            with pytest.raises(EngineClosed):
                call()
        assert rig.thread.close() == []


def test_close_with_drain_waits_for_whoever_gives_back(running) -> None:
    finished = []

    with running() as rig:

        def on_restored(outcome: object) -> None:
            assert isinstance(outcome, Restored)
            rig.thread.finish(outcome.ready, on_done=finished.append)

        for number in range(8):
            rig.thread.submit(rig.request(f"r{number}", range(number, number + 9)), on_done=on_restored)
        assert rig.thread.close(drain=True) == []
        assert [type(outcome) for outcome in finished] == [Finished] * 8


def test_a_drain_that_is_refused_changes_nothing(running) -> None:
    with running() as rig:
        told: list[object] = []

        def on_done(_: Outcome) -> None:
            try:
                rig.thread.drain(0)
            except InvalidRequest as error:
                told.append(error)

        rig.thread.submit(rig.request("r1"), on_done=on_done)
        rig.thread.wait_settled()
        rig.restore("r2")
        assert len(told) == 1
        with pytest.raises(InvalidRequest, match="timeout_s"):
            rig.thread.drain(-1)
        rig.restore("r3")


def test_a_call_of_a_plain_method_has_its_result_and_its_error(running) -> None:
    with running() as rig:
        ready = rig.restore("r1")
        assert rig.thread.call(lambda engine: engine.probe_prefix(list(range(100, 122))))["l1"] == 20
        pages = rig.thread.call(lambda engine: engine.grow(ready, 3))
        assert list(ready.pages[len(ready.pages) - len(pages) :]) == pages
        with pytest.raises(InvalidRequest):
            rig.thread.call(lambda engine: engine.grow(ready, -1))


def test_a_loop_of_one_thread_drains_itself(running) -> None:
    with running() as rig:
        ready = rig.restore("r1")
        assert rig.thread.drain(0).live == ["r1"]
        with pytest.raises(EngineClosed, match="drains"):
            rig.thread.submit(rig.request("r2"))
        assert rig.thread.close(drain=True, timeout_s=0.01) == ["r1"]
        with pytest.raises(EngineClosed):
            rig.thread.finish(ready)


def test_pages_are_lent_and_offered_without_an_event_loop(running) -> None:
    with running(device="lent") as rig:
        pages = [9, 3, 4, 11, 40, 5]
        ticket = rig.thread.restore_into(rig.request("r1"), pages)
        outcome = rig.outcome()
        assert isinstance(outcome, RestoredInto)
        assert (outcome.ticket, outcome.request_id, outcome.restored.restored_tokens) == (ticket, "r1", 22)
        ticket = rig.thread.offer(range(100, 122), pages)
        assert rig.outcome() == Offered(ticket, OfferedPages(written=5, present=0, declined=0))
        with pytest.raises(InvalidRequest, match="page 64 is not in the device pool"):
            rig.thread.restore_into(rig.request("r2"), [*pages[:5], 64])
        # The id is free again, and so are the pages.
        rig.thread.restore_into(rig.request("r1"), pages, 9)
        again = rig.outcome()
        assert isinstance(again, RestoredInto)
        assert again.restored.sources == {"l1": 8, "l2": 12, "l3": 0, "transfer": 2}
        rig.thread.submit(rig.request("r3"))
        refused = rig.outcome()
        assert isinstance(refused, Failed) and "config.device" in str(refused.error)
        rig.assert_nothing_held()


def test_orders_of_many_callers_at_once_wake_the_loop_once(running, monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as rig:
        orders, wakes, taken = rig.thread._loop, list[object](), list[int]()
        loop, has_begun, may_end = orders._loop, threading.Event(), threading.Event()

        def wake(*given: object, **named: object) -> None:
            wakes.append(given)
            loop.call_soon_threadsafe(*given, **named)

        def hold() -> None:
            has_begun.set()
            may_end.wait(WAIT_S)

        orders.post(hold)
        assert has_begun.wait(WAIT_S)
        monkeypatch.setattr(orders, "_loop", SimpleNamespace(call_soon_threadsafe=wake))
        callers = [threading.Thread(target=orders.post, args=(partial(taken.append, number),)) for number in range(64)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(WAIT_S)
        monkeypatch.undo()
        may_end.set()
        assert len(wakes) == 1
        rig.thread.statistics()
        assert sorted(taken) == list(range(64))
