"""The profile of a request counts what its thread does, by part, and draws it."""

from __future__ import annotations

from xml.etree import ElementTree

import uvloop

from benchmarks.engine import TIERS, Load
from benchmarks.request_profile import Profile, draw, measure

CALLS, JOURNAL_CALLS = 1_990, 65
"""The most calls that a request of `benchmarks/engine.py` makes on the loop, and those of its journal. A run differs
from the next one by half a percent: threads end copies and writes at other turns.
"""


def inner(number: int) -> int:
    return number + 1


def outer() -> int:
    return inner(1) + inner(2)


def test_calls_and_instructions_belong_to_the_function_on_its_stack() -> None:
    profile = Profile()
    with profile:
        outer()
    calls, instructions = profile.by_function()
    names = {place.rpartition(":")[2]: number for place, number in calls.items()}
    assert (names["outer"], names["inner"]) == (1, 2)
    assert instructions.total() == profile.root.total > 0


def test_every_part_of_a_request_is_counted_and_drawn() -> None:
    profile = uvloop.run(measure(Load(256, 16, 64, TIERS), 3, journal=True))
    calls, instructions = profile.by_part()
    assert instructions.total() == profile.root.total
    for part in ("journal", "state machine", "arrival", "match", "plan", "promise", "loads", "READY", "finish"):
        assert calls[part] > 0, part
    picture = ElementTree.fromstring(draw(profile, 3, "256 tokens"))
    assert any("Restore.fix_plan" in (title.text or "") for title in picture.iter("{http://www.w3.org/2000/svg}title"))


def test_a_request_makes_no_more_calls_on_the_loop_than_it_did() -> None:
    in_flight = 12
    calls, _ = uvloop.run(measure(Load(4096, 64, 512, TIERS), in_flight, journal=True)).by_part()
    del calls["rig"]
    assert calls.total() <= CALLS * in_flight, calls
    assert calls["journal"] <= JOURNAL_CALLS * in_flight, calls
