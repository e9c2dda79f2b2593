"""The core, stepped by hand: reserves that a request can use, and the bound on running requests."""

from __future__ import annotations

import pytest

from simulation.rig import Rig
from tidekv.states import commands, events


def ready(rig: Rig, request_id: str, tokens: bytes, **fields: object) -> commands.ReportReady:
    rig.arrive(request_id, tokens, **fields)
    rig.serve(rig.take(commands.SendPromise))
    return rig.take(commands.ReportReady)


@pytest.mark.parametrize(("prompt_pages", "reserve"), [(8, 0), (7, 1), (6, 2), (5, 2)])
def test_a_prompt_that_leaves_the_pool_no_room_for_growth_is_served_without_reserve(
    prompt_pages: int, reserve: int
) -> None:
    rig = Rig(device_pages=8, growth_reserve_pages=2)
    assert len(ready(rig, "r", bytes(range(prompt_pages))).reserve) == reserve


@pytest.mark.parametrize(
    ("tokens_max", "reserve"), [(0, 2), (3, 0), (4, 0), (5, 1), (8, 1), (9, 2), (1000, 2)], ids=str
)
def test_no_page_is_held_beyond_the_tokens_that_a_request_announces(tokens_max: int, reserve: int) -> None:
    rig = Rig(device_pages=12, growth_reserve_pages=2, page_size=4, key_bytes=4)
    assert len(ready(rig, "r", b"abc", tokens_max=tokens_max).reserve) == reserve


def test_the_reserve_is_refilled_up_to_the_tokens_that_were_announced_and_wishes_beyond_are_served() -> None:
    rig = Rig(device_pages=12, growth_reserve_pages=2)
    assert len(ready(rig, "r", b"abc", tokens_max=6).reserve) == 2
    given = []
    for wanted in (0, 0, 0, 1, 2):
        rig.step(events.GrowthTaken, request_id="r", page_count=0 if wanted else 1, wanted=wanted)
        given.append(len(rig.take(commands.GiveReserve).pages))
    assert given == [1, 0, 0, 1, 2]


def test_no_more_requests_run_than_may_and_the_next_one_begins_with_the_end_of_one() -> None:
    rig = Rig(device_pages=40, running_max=2)
    for number in range(4):
        rig.arrive(f"r{number}", bytes([number]) * 2)
    first, second = rig.take_all(commands.SendPromise)
    rig.serve(first)
    assert rig.take_all(commands.SendPromise) == [], "a READY request runs until it is given back"
    assert rig.core.statistics()["requests_running"] == 2
    rig.finish("r0", bytes([0]) * 2)
    third = rig.take(commands.SendPromise)
    assert third.request_id == "r2"
    rig.abort(second.request_id)
    assert rig.take(commands.SendPromise).request_id == "r3"
    # Each request that was first in the queue and had to wait is counted once.
    assert rig.core.statistics()["running_waits"] == 2


def test_a_waiting_request_can_end_and_a_retracted_one_waits_as_others_do() -> None:
    rig = Rig(device_pages=40, host_pages=40, running_max=1)
    ready(rig, "r0", b"ab")
    rig.arrive("r1", b"cd")
    rig.abort("r1")
    rig.arrive("r2", b"ef")
    rig.step(events.RetractRequested, request_id="r0", keys=b"ab", tokens=2)
    assert rig.take(commands.SendPromise).request_id == "r2"
    rig.arrive("r0", b"abx")
    assert rig.take_all(commands.SendPromise) == []
