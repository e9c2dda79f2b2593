"""What a request of the full KV costs by the source of its pages: events, commands, and calls of functions of the core.

Counts do not depend on the machine: a rule that is asked once more for each request shows here and in no measurement.
"""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType
from typing import Any

import pytest

from simulation.rig import Rig
from tidekv.states import commands
from tidekv.states.events import Event

PROMPT = bytes(range(64))
MOST = {"transfer": (5, 4, 545), "l1": (4, 3, 430), "l2": (5, 4, 585), "l3": (7, 6, 745)}
"""By source, the most events, commands and calls. Those of calls leave room for a method more here and there."""


@pytest.mark.parametrize("source", list(MOST))
def test_a_request_takes_no_more_events_commands_and_calls_than_it_did(source: str) -> None:
    rig = Rig(page_size=4, key_bytes=4, device_pages=64, host_pages=64)
    rig.attach_storage()
    if source != "transfer":
        restore(rig, "past", found=0)
        rig.finish("past", PROMPT + b"x")
        rig.settle()
        rig.flush(*{"l1": (), "l2": ("l1",), "l3": ("l1", "l2")}[source])
    counts, step, check = Counter[str](), rig.core.step, rig.core.check

    def counted(event: Event) -> list[commands.Command]:
        given = step(event)
        counts.update(events=1, commands=len(given))
        return given

    def called(frame: FrameType, what: str, value: Any) -> None:  # Any: as the interpreter calls it.
        counts["calls"] += what == "call" and "states" in frame.f_code.co_filename.split("/")

    rig.core.step, rig.core.check = counted, lambda: None  # type: ignore[method-assign]
    sys.setprofile(called)
    try:
        restore(rig, "a", found=16 if source == "l3" else 0)
    finally:
        sys.setprofile(None)
        rig.core.step, rig.core.check = step, check  # type: ignore[method-assign]
    assert rig.request("a").sources.pages.get(source, 0) == (0 if source == "transfer" else 16)
    assert all(counts[name] <= most for name, most in zip(("events", "commands", "calls"), MOST[source], strict=True))


def restore(rig: Rig, request_id: str, *, found: int) -> None:
    """Make a prompt of sixteen pages and a token READY. Storage has the first `found` pages."""
    rig.arrive(request_id, PROMPT + b"x")
    for query in rig.take_all(commands.QueryStorage):
        rig.answer(query, found)
    for fetch in rig.take_all(commands.FetchPages):
        rig.fetched(fetch)
    for copy in rig.take_all(commands.CopyPages, target="device"):
        rig.copied(copy)
    rig.serve(rig.take(commands.SendPromise))
    rig.take(commands.ReportReady)
