"""Steps that are written at once are what an encoder makes of the same steps, byte by byte, or are left to it."""

from __future__ import annotations

import gc
import weakref
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidekv import Replayer
from tidekv.engine.journal import Journal, Recorder, native
from tidekv.engine.journal.schema import event_types, field_types
from tidekv.engine.simulation.faults import FAULTS
from tidekv.engine.simulation.simulate import draw_settings, with_components
from tidekv.engine.simulation.world import World
from tidekv.states import events
from tidekv.states.commands import Command, TellFinished
from tidekv.states.core import Core
from tidekv.states.policy import StoragePolicy
from tidekv.states.request import State
from tidekv.states.settings import CoreSettings
from tidekv.states.witness import BOOKS_EVERY, COMMANDS, Noted

SETTINGS = CoreSettings(page_size=2, key_bytes=2, device_pages=16)
NUMBERS = st.one_of(st.integers(-300, 300), st.integers(-(2**70), 2**70), st.sampled_from([2**63, 2**63 - 1, -(2**63)]))
SECONDS = st.one_of(
    st.integers(0, 10**15).map(lambda nanoseconds: nanoseconds / 1e9),
    st.integers(10**15, 10**18).map(lambda nanoseconds: nanoseconds / 1e9),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([0.0, -0.0, 1e-4, 1e6, 999_999.999999999, float("inf")]),
)
WORDS = st.one_of(st.text('aé"\\/\x7f\x00\x1f\n☃\U0001f600\udce9', max_size=6), st.text(max_size=20), st.just("r0"))
PAGES = st.lists(st.integers(0, 2**31 - 1), max_size=90).map(lambda pages: array("i", pages))
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "int": NUMBERS,
    "float": SECONDS,
    "str": WORDS,
    "TierName": st.sampled_from(["device", "host"]),
    "bool": st.booleans(),
    "PageIds": PAGES,
    "dict[str, int]": st.dictionaries(WORDS, NUMBERS, max_size=3),
    "tuple[str, ...]": st.lists(WORDS, max_size=3).map(tuple),
    "tuple[int, ...]": st.lists(NUMBERS, max_size=3).map(tuple),
    "StoragePolicy": st.builds(StoragePolicy),
}


def anything(kind: type) -> st.SearchStrategy[Any]:
    """An instance with values of the types that its fields have, or now and then with their defaults."""
    defaults = dict(zip(kind.__struct_fields__[::-1], kind.__struct_defaults__[::-1], strict=False))  # type: ignore[attr-defined]
    fields: dict[str, st.SearchStrategy[Any]] = {}
    for name, words in field_types(kind).items():
        values = VALUES.get(words)
        if name == "keys":
            values = st.lists(st.sampled_from([b"aa", b"bb", b"cc"]), max_size=9).map(b"".join)
        elif name == "request_id":
            values = st.sampled_from(["r0", "r1", 'r"2'])
        if name in defaults:
            default = st.just(defaults[name])
            fields[name] = default if values is None else st.one_of(default, values)
        elif values is not None:
            fields[name] = values
        else:
            fields[name] = st.just(())
    return st.fixed_dictionaries(fields).map(lambda values: kind(**values))


EVENTS = st.one_of([anything(kind) for kind in event_types()])
GIVEN = st.lists(st.one_of([anything(kind) for kind in COMMANDS]), max_size=3)
MOVES = st.lists(st.tuples(WORDS, st.sampled_from(list(State))), max_size=3)


class Pair:
    """Two recorders of one core: one keeps steps and encodes them, the other writes them at once."""

    def __init__(self, core: Core, *, with_tokens: bool = False) -> None:
        self._keeper, other = Recorder(core, with_tokens=with_tokens), Recorder(core, with_tokens=with_tokens)
        self._noted: list[Noted] = []
        self.left: list[tuple[events.Event, list[Command], str, Exception | None]] = []
        self.calls: list[str] = []
        writer = other.writer(
            begun=lambda: self.calls.append("begun"),
            full=lambda: self.calls.append("full"),
            left=lambda *step: self.left.append(step),
        )
        assert writer is not None
        self.writer = writer

    def step(self, event: events.Event, given: list[Command], error: str = "") -> None:
        self._noted.append(self._keeper.note(event, given, error))
        self.writer.stepped(event, given, error)

    def compare(self) -> None:
        """Forget the steps so far, once they were found to be the same."""
        taken = self.writer.take()
        assert taken is not None
        kept = self._keeper.encode(self._noted)
        assert taken[0] == kept.json
        assert taken[1] == len(self._noted)
        self._noted.clear()


@pytest.fixture(autouse=True)
def at_once(step_writer: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "compiled", step_writer)


@pytest.mark.parametrize("seed", range(8))
def test_simulated_runs_with_faults_are_written_the_same(seed: int) -> None:
    drawn = draw_settings(Random(f"settings {seed}"))
    if seed >= 5:
        drawn = with_components(drawn, seed)
    faults = tuple(name for name in FAULTS if name != "rule_raises")
    world = World(seed=seed, requests=80, faults=faults, settings=drawn)
    pair = Pair(world.core, with_tokens=seed % 2 == 1)
    step = world.core.step
    steps = 0

    def watched(event: events.Event) -> list[Command]:
        nonlocal steps
        try:
            given = step(event)
        except Exception as error:
            pair.step(event, [], type(error).__name__)
            raise
        pair.step(event, given)
        steps += 1
        if steps % 100 == 0:
            pair.compare()
        return given

    world.core.step = watched  # type: ignore[method-assign]  # What it watches.
    world.run(6)
    pair.compare()
    assert steps > 500
    assert not pair.left


@given(
    steps=st.lists(st.tuples(EVENTS, GIVEN, MOVES, st.one_of(st.just(""), WORDS)), min_size=1, max_size=20),
    with_tokens=st.booleans(),
)
def test_whatever_is_in_a_step_is_written_the_same(
    steps: list[tuple[events.Event, list[Command], list[tuple[str, State]], str]], with_tokens: bool
) -> None:
    core = Core(SETTINGS)
    pair = Pair(core, with_tokens=with_tokens)
    for event, commands, moves, error in steps:
        core.moves = moves
        pair.step(event, commands, error)
    assert not pair.left
    pair.compare()


@pytest.mark.parametrize("kind", [*event_types(), *COMMANDS])
def test_every_kind_is_written_the_same(kind: type) -> None:
    values = anything(kind)

    @settings(max_examples=25)
    @given(values)
    def one(value: Any) -> None:
        pair = Pair(Core(SETTINGS))
        is_event = isinstance(value, events.Event)
        pair.step(value if is_event else events.ClockAdvanced(at_s=1.5), [] if is_event else [value])
        assert not pair.left
        pair.compare()

    one()


@pytest.mark.parametrize("pages", [0, 1, 2, 3, 4, 5, 7, 8, 9, 63, 64, 1000, 100_001])
def test_checksums_are_those_of_zlib(pages: int) -> None:
    words = Random(pages)
    pair = Pair(Core(SETTINGS))
    for _ in range(5):
        ids = array("i", [words.randrange(-(2**31), 2**31) for _ in range(pages)])
        moved = array("h", [1, *ids.tobytes()])[1:]
        pair.step(events.ClockAdvanced(at_s=2.0), [TellFinished(request_id="r", inserted=3)])
        pair.step(events.ClockAdvanced(at_s=2.0), [_with_pages(ids), _with_pages(moved)])
    pair.compare()


def _with_pages(pages: Any) -> Command:
    (kind,) = [kind for kind in COMMANDS if kind.__name__ == "GiveReserve"]
    return kind(request_id="r", pages=pages)  # type: ignore[call-arg]  # It has these.


def test_books_come_at_the_steps_where_they_are_asked_for() -> None:
    pair = Pair(Core(SETTINGS))
    for _ in range(3 * BOOKS_EVERY):
        pair.step(events.ClockAdvanced(at_s=1.0), [])
    taken = pair.writer.take()
    assert taken is not None
    with_books = [seq for seq, _, _, (_, _, _, books, _), _ in msgspec.json.decode(taken[0]) if books]
    assert with_books == [0, BOOKS_EVERY, 2 * BOOKS_EVERY]


def test_who_made_it_is_told_of_the_first_step_and_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "STEPS_MAX", 3)
    pair = Pair(Core(SETTINGS))
    for _ in range(4):
        pair.step(events.ClockAdvanced(at_s=1.0), [])
    assert pair.calls == ["begun", "full", "full"]
    pair.compare()
    pair.step(events.ClockAdvanced(at_s=1.0), [])
    assert pair.calls == ["begun", "full", "full", "begun"]
    assert pair.writer.events == 5


def arrival(number: int, keys: bytes) -> events.RequestArrived:
    return events.RequestArrived(
        at_s=1.0, request_id=f"r{number}", serial=number, keys=keys, prompt_tokens=len(keys), cache=False
    )


def test_a_long_prompt_is_left_and_nothing_of_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "PAGES_MAX", 4)
    core = Core(SETTINGS)
    pair = Pair(core)
    long, short = arrival(1, b"aabbccddee"), arrival(2, b"aabbccdd")
    pair.writer.stepped(long, [])
    assert pair.left == [(long, [], "", None)]
    assert pair.writer.events == 0
    pair.step(short, [])
    # It is the pages that are new which count.
    pair.step(events.FinishRequested(at_s=1.0, request_id="r2", keys=b"aabbccddeeffgghh", tokens=16), [])
    pair.compare()
    assert len(pair.left) == 1


@pytest.mark.parametrize("width", [8, 63, 64, 128, 256, 1024])
def test_pages_are_hashed_as_python_hashes_them_however_many_there_are(width: int) -> None:
    settings = CoreSettings(page_size=2, key_bytes=width, device_pages=16)
    pair, source = Pair(Core(settings)), Random(width)
    for pages in (0, 1, 7, 8, 9, 15, 16, 17, 31, 64):
        keys = source.randbytes(pages * width)
        pair.step(arrival(pages, keys), [])
        longer = keys + source.randbytes(source.randrange(20) * width)
        pair.step(events.FinishRequested(at_s=1.0, request_id=f"r{pages}", keys=longer, tokens=2), [])
    pair.compare()


def test_keys_of_requests_that_are_gone_are_not_kept_for_ever() -> None:
    core = Core(SETTINGS)
    recorder = Recorder(core)
    writer = recorder.writer(begun=lambda: None, full=lambda: None, left=lambda *step: pytest.fail("left"))
    assert writer is not None
    for number in range(2000):
        writer.stepped(arrival(number, b"aabb"), [])
    assert len(recorder._arrived) < 600
    number, keys = 1999, b"aabb"
    assert f"r{number}" in recorder._arrived
    writer.stepped(events.FinishRequested(at_s=1.0, request_id=f"r{number}", keys=keys, tokens=4), [])
    assert f"r{number}" not in recorder._arrived


@pytest.mark.parametrize("wrong", [("event", []), (events.ClockAdvanced(at_s=1.0), [object()])])
def test_a_mistake_is_told_and_leaves_what_was_written(wrong: tuple[Any, list[Any]]) -> None:
    pair = Pair(Core(SETTINGS))
    pair.step(events.ClockAdvanced(at_s=1.0), [])
    pair.writer.stepped(*wrong)
    ((event, given, error, raised),) = pair.left
    assert (event, given, error) == (*wrong, "")
    assert raised is None or isinstance(raised, TypeError)
    pair.compare()
    with pytest.raises(TypeError, match="expected an event"):
        pair.writer.stepped(events.ClockAdvanced(at_s=1.0), ())  # type: ignore[arg-type]


def test_an_interrupt_is_no_mistake_of_the_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(Core(SETTINGS))
    encode = recorder._encode_whole

    def interrupted(value: object) -> bytes:
        if value == "é":
            raise KeyboardInterrupt
        return encode(value)

    monkeypatch.setattr(recorder, "_encode_whole", interrupted)
    writer = recorder.writer(begun=lambda: None, full=lambda: None, left=lambda *step: pytest.fail("left"))
    assert writer is not None
    with pytest.raises(KeyboardInterrupt):
        writer.stepped(events.AbortRequested(at_s=1.0, request_id="é"), [])
    writer.stepped(events.AbortRequested(at_s=1.0, request_id="e"), [])
    assert writer.take() == (
        recorder.encode([recorder.note(events.AbortRequested(at_s=1.0, request_id="e"), [])]).json,
        1,
    )


def test_a_writer_that_nobody_has_any_more_is_gone() -> None:
    core = Core(SETTINGS)
    pair = Pair(core)
    pair.step(arrival(1, b"aabb"), [])
    gone = weakref.ref(pair)
    # The core knows it as well: it tells of evictions.
    del pair, core
    gc.collect()
    assert gone() is None


def steps_of(core: Core, words: Random, count: int) -> Iterator[tuple[events.Event, list[Command]]]:
    """Requests that arrive and are aborted; some are long."""
    for number in range(count):
        keys = words.randbytes(2 * words.choice([0, 1, 3, 400]))
        for event in (arrival(number, keys), events.AbortRequested(at_s=1.0, request_id=f"r{number}")):
            yield event, core.step(event)


def test_a_journal_takes_long_prompts_aside_and_goes_on_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "PAGES_MAX", 100)
    core = Core(SETTINGS)
    journal = Journal(str(tmp_path / "j"), core)
    assert journal._writer is not None
    ways: set[Callable[..., None]] = set()
    for event, commands in steps_of(core, Random(5), 3000):
        journal.stepped(event, commands)
        ways.add(journal.stepped)
    journal.close()
    assert len(ways) == 2
    assert journal.events_dropped == 0
    replayed = Replayer(journal.path).run()
    assert (replayed.events, replayed.complete) == (6000, True)


def test_nothing_is_taken_within_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of Python within a step may pass the interpreter on to the thread that takes."""
    recorder = Recorder(Core(SETTINGS))
    encode = recorder._encode_whole
    taken: list[object] = []

    def passed_on(value: object) -> bytes:
        if value == "é":
            taken.append(writer.take())
        return encode(value)

    monkeypatch.setattr(recorder, "_encode_whole", passed_on)
    writer = recorder.writer(begun=lambda: None, full=lambda: None, left=lambda *step: pytest.fail("left"))
    assert writer is not None
    for request_id in ("e", "é"):
        writer.stepped(events.AbortRequested(at_s=1.0, request_id=request_id), [])
    assert taken == [None]
    last = writer.take()
    assert last is not None
    assert [step[1]["request_id"] for step in msgspec.json.decode(last[0])] == ["e", "é"]
