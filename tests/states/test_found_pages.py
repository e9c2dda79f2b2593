"""Host pages of an earlier process join the tree: each behind the page before it, and each page once."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulation.rig import Rig
from tidekv.states import events
from tidekv.states.core import Core
from tidekv.states.errors import IllegalEvent
from tidekv.states.events import FoundRun
from tidekv.states.settings import CoreSettings

SETTINGS = CoreSettings(page_size=2, key_bytes=2, device_pages=16, host_pages=8)


def core_with(*runs: FoundRun, lends: bool = False) -> Core:
    core = Core(msgspec.structs.replace(SETTINGS, lends_device=lends))
    assert core.step(events.HostPagesFound(at_s=0.0, runs=runs)) == []
    core.check()
    return core


@pytest.mark.parametrize("lends", [False, True])
def test_runs_are_found_below_the_pages_before_them(lends: bool) -> None:
    core = core_with(
        FoundRun(-1, b"aabb", (3, 1)),
        FoundRun(1, b"cc", (5,)),
        FoundRun(1, b"ddee", (0, 7)),
        FoundRun(-1, b"aa", (2,), "other"),
        lends=lends,
    )
    index = core.state.index
    assert index.probe_prefix("", b"aabbcc") == (0, 3)
    assert index.probe_prefix("", b"aabbddee") == (0, 4)
    assert index.probe_prefix("other", b"aabb") == (0, 1)
    assert sorted(core.state.host.free_pages) == [4, 6] and core.state.counters["l2_pages_found"] == 6


def test_of_two_pages_for_one_place_the_older_one_is_kept_and_runs_go_on_behind_either() -> None:
    core = core_with(FoundRun(-1, b"aabb", (0, 1)), FoundRun(-1, b"aacc", (2, 3)), FoundRun(3, b"dd", (4,)))
    assert core.state.index.probe_prefix("", b"aabb") == (0, 2)
    assert core.state.index.probe_prefix("", b"aaccdd") == (0, 3)
    assert 2 in core.state.host.free_pages


def test_a_run_behind_no_run_is_given_back() -> None:
    core = core_with(FoundRun(5, b"aa", (0,)))
    assert core.state.host.free == 8 and not list(core.state.index.nodes())


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (FoundRun(-1, b"aab", (0, 1)), "one key for each page"),
        (FoundRun(-1, b"", ()), "one key for each page"),
        (FoundRun(-1, b"aa", (8,)), "not pages of a pool of 8"),
        (FoundRun(-1, b"aa", (-1,)), "not pages of a pool of 8"),
        (FoundRun(-1, b"aabb", (1, 1)), "named twice"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(run: FoundRun, words: str) -> None:
    core = Core(SETTINGS)
    with pytest.raises(IllegalEvent, match=words):
        core.step(events.HostPagesFound(at_s=0.0, runs=(FoundRun(-1, b"zz", (7,)), run)))
    assert core.state.host.free == 8
    core.check()
    core_with(FoundRun(-1, b"aa", (0,)))
    with pytest.raises(IllegalEvent, match="not free"):
        taken = core_with(FoundRun(-1, b"aa", (0,)))
        taken.step(events.HostPagesFound(at_s=0.0, runs=(FoundRun(-1, b"bb", (0,)),)))


@given(data=st.data())
def test_any_tree_is_found_as_it_was(data: st.DataObject) -> None:
    prompts = data.draw(st.lists(st.text("abc", min_size=1, max_size=4), max_size=6))
    pages: dict[str, int] = {}
    runs = []
    for prompt in prompts:
        for end in range(1, len(prompt) + 1):
            if prompt[:end] not in pages and len(pages) < 8:
                pages[prompt[:end]] = len(pages)
                runs.append(
                    FoundRun(pages.get(prompt[: end - 1], -1), prompt[end - 1].encode() * 2, (pages[prompt[:end]],))
                )
    core = core_with(*runs)
    assert core.state.host.cached == len(pages)
    for prompt in prompts:
        known = max(end for end in range(len(prompt) + 1) if all(prompt[:at] in pages for at in range(1, end + 1)))
        assert core.state.index.probe_prefix("", b"".join(key.encode() * 2 for key in prompt)) == (0, known)


def test_found_pages_are_restored_and_evicted_as_others_are() -> None:
    rig = Rig()
    pages = tuple(range(rig.settings.host_pages))
    keys = b"".join(bytes([97 + page]) * rig.settings.key_bytes for page in pages)
    rig.step(events.HostPagesFound, runs=(FoundRun(-1, keys, pages),))
    rig.core.state.make_host_room(2)
    assert rig.core.state.host.free == 2
    rig.core.check()
