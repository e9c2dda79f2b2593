"""Every kind of event, with any values: it is in the journal as it was, and a replay takes it again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tidekv import Replayer
from tidekv.engine.journal import Recorder
from tidekv.engine.journal.format import TurnLine, event_types, field_types, write_lines
from tidekv.engine.journal.reader import JournalReader
from tidekv.states import events
from tidekv.states.core import Core
from tidekv.states.errors import IllegalEvent
from tidekv.states.events import FinishRequested, RequestArrived, RetractRequested
from tidekv.states.settings import CoreSettings
from tidekv.states.storage_policy import StoragePolicy

SETTINGS = CoreSettings(page_size=2, key_bytes=2, device_pages=16, host_pages=8)
HERE = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
NUMBERS = st.one_of(st.integers(-3, 9), st.integers(-(2**63), 2**63 - 1))
WORDS = st.one_of(st.text('aé"\\/\x7f\x00\x1f\n☃\U0001f600\udce9', max_size=6), st.just("r0"))
PAGES = st.lists(st.sampled_from([b"aa", b"bb", b"cc"]), max_size=9).map(b"".join)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "int": NUMBERS,
    "int | None": st.one_of(st.none(), NUMBERS),
    "float | None": st.none() | st.floats(0, 1e9),
    "str | None": st.none() | WORDS,
    "float": st.one_of(st.floats(0, 1e9), st.floats(allow_nan=False, allow_infinity=False)),
    "str": WORDS,
    "bool": st.booleans(),
    "bytes": PAGES,
    "tuple[int, ...]": st.lists(st.integers(-1, 16), max_size=4).map(tuple),
    # By component, whose names are the embedder's own and not those of a client.
    "dict[str, tuple[int, ...]]": st.dictionaries(
        st.sampled_from(["window", "state"]), st.lists(st.integers(-1, 16), max_size=4).map(tuple), max_size=2
    ),
    "tuple[int, int, int, int]": st.tuples(NUMBERS, NUMBERS, NUMBERS, NUMBERS),
    "tuple[str, ...]": st.lists(WORDS, max_size=3).map(tuple),
    "StoragePolicy": st.builds(StoragePolicy),
    "tuple[FoundRun, ...]": st.lists(
        st.builds(
            events.FoundRun, st.integers(-1, 9), PAGES, st.lists(st.integers(-1, 9), max_size=3).map(tuple), WORDS
        ),
        max_size=3,
    ).map(tuple),
    "tuple[FoundComponent, ...]": st.lists(
        st.builds(events.FoundComponent, WORDS, st.integers(-1, 9), st.integers(-1, 9)), max_size=2
    ).map(tuple),
    "tuple[ComponentLeft, ...]": st.lists(
        st.builds(events.ComponentLeft, WORDS, st.integers(0, 9), st.lists(st.integers(0, 9), max_size=3).map(tuple)),
        max_size=2,
    ).map(tuple),
    "tuple[StoredComponent, ...]": st.lists(
        st.builds(events.StoredComponent, WORDS, st.lists(st.tuples(NUMBERS, NUMBERS), max_size=3).map(tuple)),
        max_size=2,
    ).map(tuple),
}


def anything(kind: type) -> st.SearchStrategy[Any]:
    """An event with any values of its fields' types, or now and then with their defaults."""
    defaults = {
        field.name: field.default for field in msgspec.structs.fields(kind) if field.default is not msgspec.NODEFAULT
    }
    fields: dict[str, st.SearchStrategy[Any]] = {}
    for name, words in field_types(kind).items():
        values = st.sampled_from(["r0", "r1", 'r"2']) if name == "request_id" else VALUES[words]
        fields[name] = st.one_of(st.just(defaults[name]), values) if name in defaults else values
    return st.fixed_dictionaries(fields).map(lambda values: kind(**values))


Named = RequestArrived | events.PagesOffered | events.HintReceived | events.ShareRequested
WithKeys = FinishRequested | RetractRequested | Named
EVENTS = st.one_of([anything(kind) for kind in event_types()])


def as_written(event: events.Event) -> list[object]:
    """An event's fields as a journal can hold them, without those that it may have digests of, and without what ranks
    compare.
    """
    digests = ("keys", "rest", "namespace", "content", "runs")
    fields = {name: getattr(event, name) for name in event.__struct_fields__ if name not in digests}
    return [type(event).__name__, repr(fields).encode(errors="replace").decode()]


@HERE
@given(taken=st.lists(EVENTS, max_size=12), with_tokens=st.booleans())
def test_events_of_any_values_are_read_as_they_were_written(
    tmp_path: Path, taken: list[events.Event], with_tokens: bool
) -> None:
    recorder = Recorder(Core(SETTINGS), with_tokens=with_tokens)
    lines = [recorder.run_line()]
    for event in taken:
        recorder.stepped(event, [])
    turn = recorder.end_turn()
    if turn is not None:
        lines.append(recorder.render(turn))
    write_lines(tmp_path / "j", lines)
    replayer, reader = Replayer(tmp_path / "j"), JournalReader(tmp_path / "j")
    read = [replayer.event_of(record) for line in reader.lines() if isinstance(line, TurnLine) for record in line.took]
    assert [as_written(event) for event in read] == [as_written(event).copy() for event in map(_whole, taken)]
    for before, after in zip(taken, read, strict=True):
        if isinstance(before, events.HostPagesFound):
            assert isinstance(after, events.HostPagesFound)
            assert [(run.after, run.pages) for run in after.runs] == [(run.after, run.pages) for run in before.runs]
            for was, now in zip(before.runs, after.runs, strict=True):
                assert now == _whole_run(was) if with_tokens else len(now.keys) == 4 * len(was.keys)
                assert with_tokens or len(now.namespace) in (0, 16)
        if isinstance(before, WithKeys):
            assert isinstance(after, WithKeys)
            assert len(after.keys) == len(before.keys) * (1 if with_tokens else 4)
            assert not with_tokens or after.keys == before.keys
        if isinstance(before, Named):
            assert isinstance(after, Named)
            assert after.namespace == _whole(before).namespace if with_tokens else len(after.namespace) in (0, 16)  # type: ignore[union-attr]


def _whole_run(run: events.FoundRun) -> events.FoundRun:
    """The run with a question mark for each lone surrogate of its namespace."""
    return msgspec.structs.replace(run, namespace=run.namespace.encode(errors="replace").decode())


def _whole(event: events.Event) -> events.Event:
    """The event with a question mark for each lone surrogate."""

    def whole(value: Any) -> Any:
        if isinstance(value, str):
            return value.encode(errors="replace").decode()
        if isinstance(value, events.ComponentLeft):
            return events.ComponentLeft(whole(value.component), value.first, value.pages)
        if isinstance(value, events.StoredComponent):
            return events.StoredComponent(whole(value.component), value.ranges)
        if isinstance(value, events.FoundComponent):
            return events.FoundComponent(whole(value.component), value.beside, value.page)
        if isinstance(value, events.FoundRun):
            return _whole_run(value)
        return tuple(map(whole, value)) if isinstance(value, tuple) else value

    return type(event)(**{name: whole(getattr(event, name)) for name in event.__struct_fields__})


@HERE
@given(taken=st.lists(EVENTS, max_size=25), size=st.integers(1, 5), lends=st.booleans())
def test_a_core_that_takes_any_events_is_replayed(
    tmp_path: Path, taken: list[events.Event], size: int, *, lends: bool
) -> None:
    core = Core(msgspec.structs.replace(SETTINGS, lends_device=lends))
    recorder = Recorder(core)
    lines = [recorder.run_line()]
    for number, event in enumerate(map(_whole, taken), start=1):
        error = ""
        try:
            given_commands = core.step(event)
        except Exception as raised:
            error = type(raised).__name__
            recorder.stepped(event, [], error)
        else:
            recorder.stepped(event, given_commands)
        if number % size == 0 and (turn := recorder.end_turn()) is not None:
            lines.append(recorder.render(turn))
        if error not in ("", IllegalEvent.__name__):
            break  # The core broke.
    if (turn := recorder.end_turn()) is not None:
        lines.append(recorder.render(turn))
    write_lines(tmp_path / "j", [*lines, recorder.end_line()])
    replayed = Replayer(tmp_path / "j").run()
    assert (replayed.complete, replayed.events) == (True, recorder.events)


def test_every_kind_of_event_has_values() -> None:
    assert len(event_types()) == 34
    with pytest.raises(KeyError):
        anything(type("Unknown", (events.Event,), {"__annotations__": {"what": "object"}}))
