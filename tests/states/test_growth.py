"""The cost of a request does not grow with what is in flight or waits: counts of instructions, without a clock."""

from __future__ import annotations

from typing import TypeVar

import pytest

from tests.support.instructions import instructions_of
from tidekv.states import events
from tidekv.states.commands import Command
from tidekv.states.core import Core
from tidekv.states.settings import CoreSettings

Wanted = TypeVar("Wanted", bound=Command)
PAGES = 8


class Worker:
    """A core with the default policies, which is not audited; a prompt has PAGES pages, four of which all share."""

    def __init__(self, **settings: int) -> None:
        self.core = Core(
            CoreSettings(page_size=16, key_bytes=4, **{"device_pages": 200_000, "host_pages": 0, **settings})
        )
        self.step(events.StorageChanged, available=False)
        self.serial = 0

    def step(self, kind: type[events.Event], **fields: object) -> list[Command]:
        return self.core.step(kind(at_s=1.0, **fields))

    def arrive(self, **fields: object) -> list[Command]:
        self.serial += 1
        prompt = b"".join(
            page.to_bytes(4, "big") for page in (0, 1, 2, 3, *range(self.serial * PAGES, self.serial * PAGES + 4))
        )
        known = {"prefills": ("prefill",), "request_id": str(self.serial), "keys": prompt, "prompt_tokens": 16 * PAGES}
        return self.step(events.RequestArrived, serial=self.serial, generation=0, **{**known, **fields})

    def serve(self, number: int, *, writer: str = "writer") -> None:
        """Prefill sends all pages of a request."""
        name = {"request_id": str(number), "generation": 0}
        room = self.core.rooms.live(str(number), 0)
        assert room is not None
        self.step(events.PromiseSent, writer=writer, ranks=1, **name)
        first, count = room.spans[0].first, room.spans[0].count
        self.step(events.ChunkLanded, rank=0, span=0, first=first, count=count, last=True, **name)
        self.step(events.AuxLanded, rank=0, **name)

    def finish(self, number: int) -> None:
        request = self.core.request(str(number))
        assert request is not None and request.is_ready
        self.step(events.FinishRequested, request_id=str(number), keys=request.keys, tokens=16 * PAGES)

    def one_request(self) -> None:
        """A request, from its arrival to its end."""
        self.arrive()
        number = self.serial
        self.serve(number)
        self.finish(number)


@pytest.mark.parametrize("state", ["transfer", "ready"])
def test_a_request_costs_the_same_whatever_is_in_flight(state: str) -> None:
    def cost_at(count: int) -> int:
        worker = Worker()
        worker.one_request()
        for _ in range(count):
            worker.arrive()
            if state == "ready":
                worker.serve(worker.serial)
        return instructions_of(worker.one_request)

    assert cost_at(1024) <= 1.02 * cost_at(16)


def test_an_abort_of_a_waiting_request_costs_the_same_whatever_waits() -> None:
    def cost_at(count: int) -> int:
        worker = Worker(device_pages=PAGES)
        for _ in range(count + 1):
            worker.arrive(priority=-worker.serial)
        return instructions_of(lambda: worker.step(events.AbortRequested, request_id=str(count), cause="aborted"))

    assert cost_at(1024) <= 1.02 * cost_at(32)
