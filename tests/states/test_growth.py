"""The cost of a request does not grow with what is in flight or waits: counts of instructions, without a clock."""

from __future__ import annotations

import gc
from typing import TypeVar

import pytest

from tests.support.instructions import calls_of, instructions_of
from tidekv.states import commands, events
from tidekv.states.commands import Command
from tidekv.states.core import Core
from tidekv.states.settings import CoreSettings

Wanted = TypeVar("Wanted", bound=Command)
PAGES = 8
CALLS = 700
"""Calls of functions that a core makes for one request without host memory and storage."""


class Worker:
    """A core with the default policies, which is not audited; a prompt has PAGES pages, four of which all share."""

    def __init__(self, **settings: int) -> None:
        self.core = Core(
            CoreSettings(page_size=16, key_bytes=4, **{"device_pages": 200_000, "host_pages": 0, **settings})
        )
        self.step(events.StorageChanged, available=False)
        self.request_number = 0

    def step(self, kind: type[events.Event], **fields: object) -> list[Command]:
        return self.core.step(kind(at_s=1.0, **fields))

    def arrive(self, **fields: object) -> list[Command]:
        self.request_number += 1
        prompt = b"".join(
            page.to_bytes(4, "big")
            for page in (0, 1, 2, 3, *range(self.request_number * PAGES, self.request_number * PAGES + 4))
        )
        known = {
            "prefills": ("prefill",),
            "request_id": str(self.request_number),
            "keys": prompt,
            "prompt_tokens": 16 * PAGES,
        }
        return self.step(events.RequestArrived, request_number=self.request_number, generation=0, **{**known, **fields})

    def serve(self, number: int, *, writer: str = "writer") -> None:
        """Prefill sends all pages of a request."""
        name = {"request_id": str(number), "generation": 0}
        room = self.core.rooms.live(str(number), 0)
        assert room is not None
        self.step(events.PromiseSent, writer=writer, ranks=1, **name)
        first, count = room.spans[0].first, room.spans[0].count
        self.step(events.ChunkReceived, rank=0, span=0, first=first, count=count, last=True, **name)
        self.step(events.AuxReceived, rank=0, **name)

    def finish(self, number: int) -> None:
        request = self.core.request(str(number))
        assert request is not None and request.is_ready
        self.step(events.FinishRequested, request_id=str(number), keys=request.keys, tokens=16 * PAGES)

    def one_request(self) -> None:
        """A request, from its arrival to its end."""
        self.arrive()
        number = self.request_number
        self.serve(number)
        self.finish(number)


def test_a_request_makes_no_more_calls_than_it_did() -> None:
    worker = Worker()
    worker.one_request()
    made = calls_of(worker.one_request)
    # A fall is welcome, and to be entered here.
    assert made <= CALLS, f"{made} calls of functions in the core, from its arrival to its end"


def test_a_cached_prompt_adds_few_objects_that_a_full_collection_visits() -> None:
    worker = Worker()
    worker.one_request()
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(200):
        worker.one_request()
    gc.collect()
    # A node, its pages, its keys (two objects), and its place in the order of eviction. docs/operating.md names them.
    assert len(gc.get_objects()) - before < 6 * 200


@pytest.mark.parametrize("state", ["transfer", "ready"])
def test_a_request_costs_the_same_whatever_is_in_flight(state: str) -> None:
    def cost_at(count: int) -> int:
        worker = Worker()
        worker.one_request()
        for _ in range(count):
            worker.arrive()
            if state == "ready":
                worker.serve(worker.request_number)
        return instructions_of(worker.one_request)

    assert cost_at(1024) <= 1.02 * cost_at(16)


def test_an_answer_of_storage_costs_the_same_however_many_wait_for_theirs() -> None:
    def cost_at(count: int) -> int:
        worker = Worker(host_pages=64, prefetch_threshold_tokens=16)
        worker.step(events.StorageChanged, available=True)
        queries = [each for _ in range(count) for each in worker.arrive() if isinstance(each, commands.QueryStorage)]
        assert len(queries) == len(worker.core.queue) == count

        def answer() -> None:
            (promise,) = worker.step(events.StorageAnswered, op=queries[-1].op, found=0)
            assert isinstance(promise, commands.SendPromise)

        return instructions_of(answer)

    assert cost_at(512) <= 1.02 * cost_at(2)


def test_an_abort_of_a_waiting_request_costs_the_same_whatever_waits() -> None:
    def cost_at(count: int) -> int:
        worker = Worker(device_pages=PAGES)
        for _ in range(count + 1):
            worker.arrive(priority=-worker.request_number)
        return instructions_of(lambda: worker.step(events.AbortRequested, request_id=str(count), cause="aborted"))

    assert cost_at(1024) <= 1.02 * cost_at(32)


@pytest.mark.parametrize("loss", ["deadline", "lost", "dead"])
def test_the_end_of_thousands_at_once_goes_on_over_several_steps(loss: str) -> None:
    worker = Worker()
    for number in range(1, 1001):
        worker.arrive(deadline_at_s=2.0)
        worker.step(events.PromiseSent, writer="writer", ranks=1, request_id=str(number), generation=0)
    core, at_s, ended = worker.core, 1.0, []
    if loss != "deadline":
        kind = events.WriterLost if loss == "lost" else events.WriterDead
        fields = {"cause": "silence"} if loss == "lost" else {}
        core.step(kind(at_s=at_s, writer="writer", **fields))
        ended.append(len(core.moves))
    while (due_s := core.next_deadline_s()) is not None and (loss == "deadline" or due_s < 1.5):
        at_s = due_s
        core.step(events.ClockAdvanced(at_s=at_s))
        ended.append(len(core.moves))
    assert sum(ended) == 1000
    assert max(ended) <= 64
    assert core.rooms.draining_rooms == (0 if loss == "dead" else 1000)
    core.check()


def test_lent_pages_go_back_without_a_look_at_those_that_still_have_a_writer() -> None:
    def cost_at(count: int) -> int:
        worker = Worker(lends_device=True)
        for number in range(1, count + 1):
            worker.arrive(lent_pages=tuple(range(PAGES * number, PAGES * (number + 1))), prefills=("prefill",))
            name = {"request_id": str(number), "generation": 0}
            worker.step(events.PromiseSent, writer="writer", ranks=1, **name)
            assert not any(
                isinstance(each, commands.ReportRestored)
                for each in worker.step(events.RoomFailed, cause="no", settled=False, **name)
            )

        def drain() -> None:
            (report,) = worker.step(events.RoomDrained, request_id="1", generation=0, rank=0)
            assert isinstance(report, commands.ReportRestored)

        return instructions_of(drain)

    assert cost_at(256) <= 1.02 * cost_at(4)


def test_room_for_thousands_at_once_is_granted_over_several_steps() -> None:
    worker = Worker()
    held = worker.core.state.device.take(worker.core.state.device.free)
    for _ in range(1000):
        worker.arrive()
    worker.core.state.device.give_back(held)
    granted = [worker.step(events.FlushRequested, call=1, tiers=("l1",))]
    while worker.core.queue:
        due_s = worker.core.next_deadline_s()
        assert due_s is not None and due_s < 1.5
        granted.append(worker.core.step(events.ClockAdvanced(at_s=due_s)))
    assert max(sum(isinstance(each, commands.SendPromise) for each in step) for step in granted) == 64
    worker.core.check()


@pytest.mark.parametrize("namespace", [None, ""])
def test_a_flush_of_a_large_cache_goes_on_over_several_steps(namespace: str | None) -> None:
    worker = Worker()
    for _ in range(2000):
        worker.one_request()
    index = worker.core.state.index
    cached = [index.device_evictable]
    made = worker.step(events.FlushRequested, call=1, tiers=("l1", "l2"), namespace=namespace)
    while not made:
        cached.append(index.device_evictable)
        due_s = worker.core.next_deadline_s()
        assert due_s is not None
        made = worker.core.step(events.ClockAdvanced(at_s=due_s))
    assert made == [commands.ReportFlushed(call=1, dropped={"l1": 8004, "l2": 0}, spared={"l1": 0, "l2": 0})]
    assert len(cached) == 2 and cached[1] > 3800
    worker.core.check()
