"""What requests leave of components, by example: what is kept, backed up, held until they resume, and given back."""

from __future__ import annotations

from functools import partial

import pytest

from tests.support import component_stories
from tests.support.component_stories import PROMPT, device_pages, finish, left_by, state, window
from tidekv.states import commands, events
from tidekv.states.errors import BrokenInvariant

rig_with = partial(component_stories.rig_with, storage=False)


def test_component_pages_go_to_the_host_completely_or_not_at_all() -> None:
    rig = rig_with(window(3, host=2), state(host=1))
    ready = rig.make_ready("a", PROMPT)
    finish(rig, ready, PROMPT)
    rig.copied(rig.take(commands.CopyPages, target="host"))
    copy = rig.take(commands.CopyPages, of_components=True)
    assert (copy.component, copy.source, copy.target) == ("state", "device", "host")
    rig.wait_until(rig.now_s + 40.0)
    rig.copied(copy, error="bus error")
    counts = rig.core.statistics()
    assert (counts["backups_failed"], counts["backups_late"], counts["state_host_free"]) == (1, 1, 1)
    rig.settle()
    rig.expect_nothing_held()


def test_incomplete_component_pages_are_not_backed_up() -> None:
    rig = rig_with(window(3))
    ready = rig.make_ready("a", PROMPT)
    assert ready.component_pages is not None
    finish(
        rig,
        ready,
        PROMPT,
        component_pages=(events.ComponentLeft("window", 6, tuple(ready.component_pages[0].pages[1:])),),
    )
    rig.copied(rig.take(commands.CopyPages, target="host"))
    assert not rig.take_all(commands.CopyPages, of_components=True)


def test_what_is_left_beyond_what_is_kept_is_given_back() -> None:
    rig = rig_with(window(3), state(), keep_output=False)
    ready = rig.make_ready("a", PROMPT[:4])
    assert ready.component_pages is not None
    left = (
        events.ComponentLeft(
            "window",
            2,
            (
                *ready.component_pages[0].pages[1:],
                *set(ready.component_pages[0].own) - set(ready.component_pages[0].pages),
            ),
        ),
        events.ComponentLeft("state", 4, tuple(ready.component_pages[1].own)),
    )
    rig.step(events.GrowthTaken, request_id="a", page_count=0, wanted=1)
    rig.step(events.GrowthTaken, request_id="a", page_count=1)
    rig.step(events.FinishRequested, request_id="a", keys=PROMPT[:5], tokens=5, component_pages=left)
    assert device_pages(rig, "window")["cached"] == 2 and device_pages(rig, "state")["free"] == 8
    rig.settle()
    rig.expect_nothing_held()


def test_component_pages_far_beyond_the_kept_full_pages_are_given_back() -> None:
    rig = rig_with(state(), keep_output=False)
    ready = rig.make_ready("a", PROMPT[:4])
    assert ready.component_pages is not None
    rig.step(events.GrowthTaken, request_id="a", page_count=0, wanted=2)
    rig.step(events.GrowthTaken, request_id="a", page_count=2)
    left = (events.ComponentLeft("state", 5, tuple(ready.component_pages[0].own)),)
    rig.step(events.FinishRequested, request_id="a", keys=PROMPT[:6], tokens=6, component_pages=left)
    assert device_pages(rig, "state")["free"] == 8
    rig.settle()
    rig.expect_nothing_held()


def test_leaving_a_page_that_is_not_ones_own_is_a_bug() -> None:
    rig = rig_with(window(3))
    ready = rig.make_ready("a", PROMPT)
    with pytest.raises(BrokenInvariant, match="which it does not have"):
        finish(rig, ready, PROMPT, component_pages=(events.ComponentLeft("window", 7, (15,)),))


def test_requests_that_are_not_to_be_cached_leave_no_component_pages() -> None:
    rig = rig_with()
    ready = rig.make_ready("a", PROMPT, cache=False)
    finish(rig, ready, PROMPT)
    assert device_pages(rig, "window")["free"] == 16
    rig.settle()
    rig.expect_nothing_held()


def test_what_a_retracted_request_left_of_components_is_held_until_it_resumes() -> None:
    rig = rig_with(state(host=1))
    ready = rig.make_ready("a", PROMPT)
    left = left_by(ready, len(PROMPT))
    rig.step(events.RetractRequested, request_id="a", keys=PROMPT, tokens=len(PROMPT), component_pages=left)
    rig.copied(rig.take(commands.CopyPages, target="host"))
    rig.take(commands.ReportRetracted)
    rig.copied(rig.take(commands.CopyPages, of_components=True))
    rig.take_all(commands.ForgetTokens)
    # Another one would like to have the only record of the host, and does not get it.
    other = rig.make_ready("b", b"zyxw")
    finish(rig, other, b"zyxw")
    rig.copied(rig.take(commands.CopyPages, target="host"))
    assert not rig.take_all(commands.CopyPages, of_components=True)
    rig.flush("l1")
    rig.arrive("a", PROMPT)
    assert rig.take(commands.SendPromise).promised_tokens == 8
    rig.abort("a")
    rig.settle()
    rig.expect_nothing_held()
