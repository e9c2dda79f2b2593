"""A write in parts, over a NIXL by script: every request is released once, after its end, and none is posted late."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.scripted_requests import Script
from tidekv.states.errors import TransferFailed
from tidekv.states.types import Segment, page_ids
from tidekv.transports.base import Ended, StreamTurn
from tidekv.transports.nixl.agent import NixlRequest
from tidekv.transports.nixl.plan import Numbering, Part, WritePlan, paired_pages
from tidekv.transports.nixl.writes import REQUESTS_IN_FLIGHT_MAX, Lane, PartedWrite

PAGE_BYTES = 64


@dataclass
class ScriptedNixl:
    """Requests numbered as their parts, and what was done with them."""

    scripts: list[Script]
    calls: list[tuple[str, int]] = field(default_factory=list)
    asked: dict[int, int] = field(default_factory=dict)
    in_flight_max: int = 0
    is_closed: bool = False

    def write_request(self, ours: int, theirs: int, part: Part) -> NixlRequest:
        number = int(part.ours[0])
        assert (ours, theirs) == (7, 8)
        if not self.scripts[number].is_made:
            self.calls.append(("refuse", number))
            raise TransferFailed(f"part {number} cannot be made")
        self.calls.append(("make", number))
        return NixlRequest(self, number)  # type: ignore[arg-type]  # Stands in for an agent.

    def post(self, number: int) -> bool:
        self.calls.append(("post", number))
        return self._answer(number)

    def check(self, number: int) -> bool:
        return self._answer(number)

    def release(self, number: int) -> None:
        self.calls.append(("release", number))
        if self.scripts[number].release_fails:
            raise TransferFailed(f"part {number} cannot be released")

    def numbers(self, call: str) -> list[int]:
        return [number for name, number in self.calls if name == call]

    def _answer(self, number: int) -> bool:
        script = self.scripts[number]
        asked = self.asked[number] = self.asked.get(number, -1) + 1
        in_flight = [each for each, times in self.asked.items() if times < self.scripts[each].checks]
        self.in_flight_max = max(self.in_flight_max, len(in_flight))
        if asked < script.checks:
            return False
        if script.fails:
            raise TransferFailed(f"part {number} failed")
        return True


def parted(nixl: ScriptedNixl) -> tuple[Lane, PartedWrite]:
    """A write of one page a part."""
    count = len(nixl.scripts)
    segment = Segment(address=4096, piece_bytes=PAGE_BYTES, stride_bytes=PAGE_BYTES, page_count=count)
    numbering = Numbering((segment,), our_page_count=count, their_page_count=count)
    pages = paired_pages(page_ids(range(count)), page_ids(range(count)), numbering=numbering, peer="peer")
    plan = WritePlan(numbering, *pages, part_bytes=PAGE_BYTES, part_descriptors=1)
    lane = Lane(nixl, our_list=7, their_list=8)  # type: ignore[arg-type]  # As above.
    write = PartedWrite(plan, object())  # type: ignore[arg-type]  # No test waits for it: only its identity counts.
    lane.enter(write)
    return lane, write


SCRIPTS = st.builds(
    Script,
    checks=st.integers(0, 6),
    is_made=st.sampled_from([True] * 9 + [False]),
    fails=st.sampled_from([False] * 9 + [True]),
    release_fails=st.sampled_from([False] * 19 + [True]),
)


@given(scripts=st.lists(SCRIPTS, min_size=1, max_size=12), stopped_after=st.none() | st.integers(0, 12))
def test_whatever_happens_each_request_is_released_once_and_nothing_is_posted_after_the_stop(
    scripts: list[Script], stopped_after: int | None
) -> None:
    nixl = ScriptedNixl(scripts)
    lane, write = parted(nixl)
    ended: Ended = []
    posted_at_stop: list[int] | None = None
    turns = 0
    while not ended:
        if turns == stopped_after:
            lane.stop(write)
            posted_at_stop = nixl.numbers("post")
        assert turns < 200, "a write does not come to its end"
        lane.advance(ended.extend)
        turns += 1
    assert lane.advance(ended.extend) is StreamTurn.EMPTY
    ((future, error),) = ended
    assert future is write.future
    made, posted, released = (nixl.numbers(call) for call in ("make", "post", "release"))
    assert sorted(released) == made == list(range(len(made)))
    assert posted == made[: len(posted)]
    assert nixl.in_flight_max <= REQUESTS_IN_FLIGHT_MAX
    if posted_at_stop is not None:
        assert posted == posted_at_stop
    assert write.bytes_done == PAGE_BYTES * sum(not scripts[number].fails for number in posted)
    went_wrong = [number for number in posted if scripts[number].fails]
    went_wrong += [number for number in released if scripts[number].release_fails]
    assert (error is not None) == bool(went_wrong or nixl.numbers("refuse"))
    if error is None and posted_at_stop is None:
        assert posted == list(range(len(scripts)))
        assert turns >= len(scripts)


def test_none_is_made_before_the_first_turn_and_each_other_right_after_the_post_before_it() -> None:
    nixl = ScriptedNixl([Script(), Script()])
    lane, write = parted(nixl)
    ended: Ended = []
    assert nixl.calls == []
    assert lane.advance(ended.extend) is StreamTurn.MOVED
    assert nixl.calls == [("make", 0), ("post", 0), ("release", 0), ("make", 1)]
    assert ended == []
    assert lane.advance(ended.extend) is StreamTurn.EMPTY
    assert ended == [(write.future, None)]


def test_a_write_stopped_before_its_first_turn_makes_no_request() -> None:
    nixl = ScriptedNixl([Script(), Script()])
    lane, write = parted(nixl)
    ended: Ended = []
    lane.stop(write)
    assert lane.advance(ended.extend) is StreamTurn.EMPTY
    assert ended == [(write.future, None)]
    assert nixl.calls == []
    assert write.bytes_done == 0


@pytest.mark.parametrize("checks", [0, 9])
def test_of_several_errors_the_first_is_told_when_nothing_is_in_flight_any_more(checks: int) -> None:
    nixl = ScriptedNixl([Script(checks=checks, fails=True), Script(checks=3, fails=True)])
    lane, _ = parted(nixl)
    # What failed while it was posted keeps the next one from being made.
    first, made = (0, [0]) if checks == 0 else (1, [0, 1])
    ended: Ended = []
    while not ended:
        lane.advance(ended.extend)
    assert str(ended[0][1]) == f"part {first} failed"
    assert sorted(nixl.numbers("release")) == made
    assert lane.advance(ended.extend) is StreamTurn.EMPTY
