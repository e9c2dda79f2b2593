"""Writes that share a lane, over a NIXL by script: each page goes once, and each write gets its own outcome."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.scripted_requests import Script
from tidekv.states.errors import TransferFailed
from tidekv.states.types import Segment, page_ids
from tidekv.transports.base import Ended, StreamTurn
from tidekv.transports.nixl.agent import NixlRequest, PeerDisconnected
from tidekv.transports.nixl.plan import JOINT_SHARE, Numbering, Part, WritePlan, paired_pages
from tidekv.transports.nixl.writes import REQUESTS_IN_FLIGHT_MAX, Lane, PartedWrite

PAGE_BYTES = 64
POOL_PAGES = 64
PART_PAGES = 4
JOINT_PAGES = PART_PAGES // JOINT_SHARE


@dataclass
class ScriptedNixl:
    """Requests in the order in which they are made, by the scripts in turn; and what was done with each."""

    scripts: list[Script]
    pages: list[list[tuple[int, int]]] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    in_flight: set[int] = field(default_factory=set)
    released: list[int] = field(default_factory=list)
    is_closed: bool = False
    on_post: list[int] = field(default_factory=list)

    def script(self, number: int) -> Script:
        return self.scripts[number % len(self.scripts)]

    def write_request(self, ours: int, theirs: int, part: Part) -> NixlRequest:
        assert (ours, theirs) == (7, 8)
        assert part.size_bytes == PAGE_BYTES * len(part.ours) == PAGE_BYTES * len(part.theirs)
        number = len(self.pages)
        self.pages.append(list(zip(part.ours.tolist(), part.theirs.tolist(), strict=True)))
        self.asked.append(0)
        if not self.script(number).is_made:
            raise TransferFailed(f"request {number} cannot be made")
        return NixlRequest(self, number)  # type: ignore[arg-type]  # Stands in for an agent.

    def post(self, number: int) -> bool:
        self.on_post.append(number)
        self.in_flight.add(number)
        assert len(self.in_flight) <= REQUESTS_IN_FLIGHT_MAX
        return self._answer(number)

    def check(self, number: int) -> bool:
        self.asked[number] += 1
        return self._answer(number)

    def release(self, number: int) -> None:
        assert number not in self.in_flight
        self.released.append(number)
        if self.script(number).release_fails:
            raise TransferFailed(f"request {number} cannot be released")

    def _answer(self, number: int) -> bool:
        script = self.script(number)
        if self.asked[number] < script.checks:
            return False
        self.in_flight.remove(number)
        if script.fails:
            raise PeerDisconnected(f"request {number} failed")
        return True

    def outcome(self, number: int) -> tuple[bool, bool]:
        """Whether its bytes are in place, and whether it is a failure."""
        script = self.script(number)
        done = script.is_made and not script.fails
        return done, not done or script.release_fails


@dataclass
class Flight:
    """A write as its caller has it; its end is reported once."""

    lane: Lane
    write: PartedWrite
    pages: list[tuple[int, int]]
    enters_at: int
    stops_at: int
    is_entered: bool = False
    is_over: bool = False
    error: Exception | None = None

    def enter(self) -> None:
        """As the loop does, some time between the turns or within one."""
        if not self.is_entered:
            self.is_entered = True
            self.lane.enter(self.write)

    def is_unresolved(self) -> bool:
        """True if it has ended, as far as NIXL goes, and its caller has not been notified."""
        return self.is_entered and not self.is_over and not (self.write._left or self.write.parts_in_flight)


def flights(
    nixl: ScriptedNixl,
    lots: list[tuple[list[tuple[int, int]], int, int]],
    *,
    part_pages: int = PART_PAGES,
    part_descriptors: int = 1000,
) -> list[Flight]:
    """Writes of one lane, of so many pages each."""
    segment = Segment(address=4096, piece_bytes=PAGE_BYTES, stride_bytes=PAGE_BYTES, page_count=POOL_PAGES)
    numbering = Numbering((segment,), our_page_count=POOL_PAGES, their_page_count=POOL_PAGES)
    lane = Lane(nixl, our_list=7, their_list=8)  # type: ignore[arg-type]  # As above.
    made = []
    for pages, enters_at, stops_at in lots:
        columns = (page_ids(column) for column in zip(*pages, strict=True))
        pairs = paired_pages(*columns, numbering=numbering, peer="peer")
        plan = WritePlan(numbering, *pairs, part_bytes=part_pages * PAGE_BYTES, part_descriptors=part_descriptors)
        write = PartedWrite(plan, object())  # type: ignore[arg-type]  # No test waits for it: only its identity counts.
        made.append(Flight(lane, write, sorted(pages), enters_at, stops_at))
    return made


def drive(nixl: ScriptedNixl, all_flights: list[Flight]) -> None:
    """Turns as the poller gives them, with writes that come between two of them and within one."""
    lane = all_flights[0].lane
    by_future = {id(flight.write.future): flight for flight in all_flights}

    def resolve(ended: Ended) -> None:
        assert ended, "the loop is woken for nothing"
        for future, error in ended:
            flight = by_future[id(future)]
            assert not flight.is_over, "a future is resolved twice"
            assert flight.is_entered
            flight.is_over, flight.error = True, error

    def post(number: int, original: Callable[[int], bool] = nixl.post) -> bool:
        assert not any(flight.is_unresolved() for flight in all_flights if number not in taking(flight)), (
            "a request is posted while the ended futures of others are not resolved"
        )
        assert all(flight.write.is_live for flight in all_flights if number in taking(flight))
        # The loop goes on while this blocks.
        for late in all_flights[::2]:
            if late.enters_at == turn + 1:
                late.enter()
            if late.is_entered and late.stops_at == turn + 1:
                lane.stop(late.write)
        return original(number)

    def taking(flight: Flight) -> list[int]:
        return [number for number, pages in enumerate(nixl.pages) if set(flight.pages) & set(pages)]

    nixl.post = post  # type: ignore[method-assign]  # Looks on.
    for turn in range(500):
        for flight in all_flights:
            if flight.enters_at == turn:
                flight.enter()
            if flight.stops_at == turn:
                flight.enter()
                lane.stop(flight.write)
        before = len(nixl.on_post)
        state = lane.advance(resolve)
        assert len(nixl.on_post) <= before + 1, "one turn posts twice, and keeps the others waiting"
        assert state is not StreamTurn.WAITING or len(nixl.on_post) == before
        assert (state is StreamTurn.EMPTY) <= all(flight.is_over for flight in all_flights if flight.is_entered)
        if state is StreamTurn.EMPTY and all(flight.is_over for flight in all_flights):
            assert not (lane._waiting or lane._made or lane._in_flight or lane._ended)
            return
    raise AssertionError("writes do not come to their end")


SCRIPTS = st.builds(
    Script,
    checks=st.sampled_from([0, 0, 0, 1, 5]),
    is_made=st.sampled_from([True] * 9 + [False]),
    fails=st.sampled_from([False] * 9 + [True]),
    release_fails=st.sampled_from([False] * 19 + [True]),
)
SOUND = st.builds(Script, checks=st.sampled_from([0, 0, 0, 1, 5]))
COUNTS = st.lists(
    st.tuples(st.integers(1, 11), st.integers(0, 4), st.none() | st.integers(0, 8)), min_size=1, max_size=9
)


def lots_of(
    counts: list[tuple[int, int, int | None]], targets: list[int]
) -> list[tuple[list[tuple[int, int]], int, int]]:
    """So many pages each, no target named by two; sources may be."""
    lots, at = [], 0
    for count, enters_at, stops_at in counts:
        some = targets[at : at + count]
        at += count
        if some:
            pages = [((page * 7 + 3) % POOL_PAGES, page) for page in some]
            lots.append((pages, enters_at, -1 if stops_at is None else enters_at + stops_at))
    return lots


@given(
    counts=COUNTS,
    targets=st.permutations(range(POOL_PAGES)),
    scripts=st.lists(SCRIPTS, min_size=1, max_size=6) | st.lists(SOUND, min_size=1, max_size=3),
)
def test_each_write_has_what_the_requests_with_its_pages_came_to(
    counts: list[tuple[int, int, int | None]], targets: list[int], scripts: list[Script]
) -> None:
    nixl = ScriptedNixl(scripts)
    all_flights = flights(nixl, lots_of(counts, targets))
    drive(nixl, all_flights)
    made = [number for number in range(len(nixl.pages)) if nixl.script(number).is_made]
    # What is made and not posted was made for a write that was stopped before its turn.
    unposted = set(made) - set(nixl.on_post)
    assert nixl.on_post == sorted(set(nixl.on_post))
    assert sorted(nixl.released) == made
    assert not nixl.in_flight
    for number in unposted:
        nixl.pages[number] = []
    posted = [pair for pages in nixl.pages for pair in pages]
    assert len(posted) == len(set(posted)), "a page is posted twice"
    for pages in nixl.pages:
        owners = [flight for flight in all_flights if set(flight.pages) & set(pages)]
        assert len(pages) <= (PART_PAGES if len(owners) == 1 else JOINT_PAGES)
    for flight in all_flights:
        own = set(flight.pages)
        numbers = [number for number, pages in enumerate(nixl.pages) if own & set(pages)]
        went = [pair for number in numbers for pair in nixl.pages[number] if pair in own]
        # A plain write of the same pages goes in the order of its own list, from the beginning.
        assert went == flight.pages[: len(went)]
        in_place = [nixl.outcome(number)[0] for number in numbers]
        failed = [nixl.outcome(number)[1] for number in numbers]
        assert flight.write.bytes_done == PAGE_BYTES * sum(
            len(own & set(nixl.pages[number])) for number, done in zip(numbers, in_place, strict=True) if done
        )
        if not any(nixl.script(number).release_fails for number in unposted):
            assert (flight.error is not None) == any(failed)
        if not any(failed) and flight.stops_at < 0:
            assert went == flight.pages
    errors = [flight.error for flight in all_flights if flight.error is not None]
    assert len({id(error) for error in errors}) == len(errors), "two writes share one error"


def singles(count: int) -> list[tuple[list[tuple[int, int]], int, int]]:
    return [([(page, page)], 0, -1) for page in range(count)]


def test_what_waits_together_is_joined_up_to_its_bound_and_in_order() -> None:
    nixl = ScriptedNixl([Script()])
    drive(nixl, flights(nixl, singles(5)))
    assert nixl.pages == [[(0, 0), (1, 1)], [(2, 2), (3, 3)], [(4, 4)]]


@pytest.mark.parametrize(("gap", "requests"), [(1, 2), (2, 4)])
def test_of_scattered_pages_fewer_are_joined_than_of_neighbours(gap: int, requests: int) -> None:
    nixl = ScriptedNixl([Script()])
    pairs = [[(gap * page, gap * page), (gap * page + gap, gap * page + gap)] for page in range(0, 8, 2)]
    drive(nixl, flights(nixl, [(pages, 0, -1) for pages in pairs], part_pages=16, part_descriptors=4))
    assert len(nixl.pages) == requests
    assert [pair for pages in nixl.pages for pair in pages] == [pair for pages in pairs for pair in pages]


def test_a_small_write_passes_between_the_parts_of_a_large_one() -> None:
    nixl = ScriptedNixl([Script()])
    large = [(page, page) for page in range(12)]
    drive(nixl, flights(nixl, [(large, 0, -1), ([(40, 40)], 0, -1)]))
    assert nixl.pages == [large[:4], [(40, 40)], large[4:8], large[8:]]


def test_a_joint_failure_is_told_to_each_with_an_error_of_its_own_and_to_no_other() -> None:
    nixl = ScriptedNixl([Script(fails=True), Script()])
    three = flights(nixl, singles(3))
    drive(nixl, three)
    first, second, third = (flight.error for flight in three)
    assert isinstance(first, PeerDisconnected)
    assert isinstance(second, PeerDisconnected)
    assert first is not second
    assert str(first) == str(second) == "request 0 failed"
    assert third is None
    assert [flight.write.bytes_done for flight in three] == [0, 0, PAGE_BYTES]


@pytest.mark.parametrize("stopped", [0, 1, 2])
def test_a_stopped_write_is_left_out_and_keeps_nobody_waiting(stopped: int) -> None:
    nixl = ScriptedNixl([Script()])
    three = flights(nixl, singles(3))
    three[stopped].stops_at = 0
    drive(nixl, three)
    rest = [(page, page) for page in range(3) if page != stopped]
    assert [nixl.pages[number] for number in nixl.on_post] == [rest]
    assert [flight.write.bytes_done for flight in three] == [PAGE_BYTES * (page != stopped) for page in range(3)]


def test_a_stopped_write_ends_though_what_it_would_have_to_wait_for_hangs() -> None:
    nixl = ScriptedNixl([Script(checks=10**9)])
    hanging = flights(nixl, [([(page, page) for page in range(4 * at, 4 * at + 4)], 0, -1) for at in range(4)])
    lane = hanging[0].lane
    late = flights(nixl, [([(50, 50)], 0, -1)])[0].write
    ended: Ended = []
    for flight in hanging:
        flight.enter()
    lane.enter(late)
    states = [lane.advance(ended.extend) for _ in range(6)]
    assert states == [StreamTurn.MOVED] * REQUESTS_IN_FLIGHT_MAX + [StreamTurn.WAITING] * 2
    assert len(nixl.in_flight) == REQUESTS_IN_FLIGHT_MAX
    lane.stop(late)
    assert lane.advance(ended.extend) is StreamTurn.MOVED
    assert ended == [(late.future, None)]
