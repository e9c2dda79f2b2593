"""The witness: what it writes of a step tells any two steps apart that did something else."""

from __future__ import annotations

import zlib

import msgspec
import pytest

from tidekv.engine.simulation.rig import Rig
from tidekv.states import commands, events
from tidekv.states.components.specs import Component
from tidekv.states.inspect.step_record import (
    BOOK_NUMBERS,
    BOOKS_EVERY,
    COMMANDS,
    COMPONENT_NUMBERS,
    NOTHING,
    StepNotes,
    StepRecorder,
    StepResult,
    encode_pages,
    short_fields,
)
from tidekv.states.types import page_ids

ENCODE = msgspec.json.Encoder(enc_hook=encode_pages).encode

EIGHT = b"abcdefgh"


class Seen:
    """A rig with a witness, which answers for each step."""

    def __init__(self, **settings: int) -> None:
        self.rig = Rig(**settings)
        self.step_recorder = StepRecorder(self.rig.core)
        self.noted: list[StepNotes] = []
        step = self.rig.core.step

        def stepped(event: events.Event) -> list[commands.Command]:
            given = step(event)
            self.noted.append(self.step_recorder.note(event, given))
            return given

        self.rig.core.step = stepped  # type: ignore[method-assign]  # What it watches.

    @property
    def answers(self) -> list[StepResult]:
        return [noted.gave for noted in self.noted]

    def books(self) -> dict[str, int]:
        """The books of now, as the next step at which they are written has them."""
        self.step_recorder.events += -self.step_recorder.events % BOOKS_EVERY
        noted = self.step_recorder.note(events.ClockAdvanced(at_s=0.0), [])
        return dict(zip(BOOK_NUMBERS, noted.gave.books, strict=True))

    def short(self, at: int) -> dict[str, list[list[object]]]:
        """An answer as it is written."""
        return dict(zip(StepResult.__struct_fields__, msgspec.json.decode(ENCODE(self.answers[at])), strict=True))


def test_moves_commands_and_books_are_written_in_short() -> None:
    seen = Seen(device_pages=10)
    seen.rig.arrive("a", EIGHT)
    promise = seen.rig.take(commands.SendPromise)
    arrived = seen.short(0)
    assert arrived["moves"] == [["a", "PREALLOC"], ["a", "MATCH"], ["a", "TRANSFER"]]
    (short,) = arrived["commands"]
    assert short == ["SendPromise", "a", promise.generation, 0, 8, 0, zlib.crc32(promise.pages), False, None]
    books = seen.books()
    assert (books["device_free"], books["device_owned"], books["device_cached"]) == (2, 8, 0)
    seen.rig.promised(promise)
    # Nothing that matters happened: nothing is written.
    assert seen.answers[-1] is NOTHING
    seen.rig.aux(promise)
    seen.rig.chunk(promise)
    (received, ready) = seen.short(-1)["commands"]
    assert (received[0], ready[0]) == ("SendReceived", "ReportReady")
    pages = zlib.crc32(seen.rig.take(commands.ReportReady).pages)
    assert ready[3:] == [pages, {"l1": 0, "l2": 0, "l3": 0, "transfer": 8}, zlib.crc32(b""), None, []]
    assert seen.books()["device_cached"] == 8


def test_what_is_evicted_is_written_with_its_tier() -> None:
    seen = Seen(device_pages=8)
    seen.rig.make_cached("past", EIGHT)
    before = len(seen.answers)
    seen.rig.flush("l1", "l2")
    assert [(tier, pages) for tier, pages, _ in seen.answers[before].evicted] == [("device", 8), ("host", 8)]


def test_an_error_and_a_different_order_of_free_pages_are_seen() -> None:
    seen = Seen()
    noted = seen.step_recorder.note(events.ClockAdvanced(at_s=0.0), [], "IllegalEvent")
    assert noted.gave.error == "IllegalEvent"
    account = seen.rig.core.state.device
    taken = account.take(2)
    account.give_back(taken[::-1])
    assert seen.books()["device_next"] == taken[1]
    assert seen.step_recorder.note(events.ClockAdvanced(at_s=0.0), []).gave == NOTHING


def test_the_books_are_written_at_one_step_of_some() -> None:
    seen = Seen()
    noted = [seen.step_recorder.note(events.ClockAdvanced(at_s=0.0), []) for _ in range(3 * BOOKS_EVERY)]
    assert [note.seq for note in noted if note.gave.books] == [0, BOOKS_EVERY, 2 * BOOKS_EVERY]
    assert all(note.gave is NOTHING for note in noted if not note.gave.books)


def test_steps_are_numbered_and_say_where_their_request_is() -> None:
    seen = Seen()
    seen.rig.arrive("a", EIGHT)
    seen.rig.wait_until(1.0)
    seen.rig.abort("a")
    assert [step.seq for step in seen.noted] == [0, 1]
    assert [step.state and step.state.value for step in seen.noted] == ["TRANSFER", None]


def test_every_command_is_written_with_all_its_fields_but_free_text() -> None:
    for kind in COMMANDS:
        plain, pages = short_fields(kind)
        assert set(plain) | set(pages) | {"detail", "fallbacks"} >= set(kind.__struct_fields__), kind
        assert all(name.endswith(("pages", "reserve", "positions")) for name in pages), kind
    step_recorder = Seen().step_recorder
    failed = commands.ReportFailed(request_id="a", cause="because", detail="Traceback, line 7")
    dropped = commands.ReportDropped(request_id="b")
    fallback = commands.Fallback("Restore.commit", "cache", "line 8")
    finished = commands.ReportFinished(request_id="c", inserted=2, fallbacks=(fallback,))
    given: list[commands.Command] = [dropped, failed, finished]
    answer = step_recorder.note(events.ClockAdvanced(at_s=0.0), given).gave
    short = msgspec.json.decode(ENCODE(answer))[StepResult.__struct_fields__.index("commands")]
    assert short == [["ReportDropped", "b"], ["ReportFailed", "a", "because", ""], ["ReportFinished", "c", 2, []]]
    assert given == [dropped, failed, finished]


def test_only_pages_have_a_short_form() -> None:
    assert ENCODE(page_ids((3, 1))) == b"%d" % zlib.crc32(page_ids((3, 1)))
    with pytest.raises(TypeError, match="object"):
        ENCODE(object())


def test_the_books_of_components_stand_behind_the_others() -> None:
    components = (
        Component(name="window", kind="window", window_tokens=2, device_pages=9),
        Component(name="state", kind="state", device_pages=4, host_pages=3),
    )
    seen = Seen(components=components)  # type: ignore[arg-type]  # Not a number.
    seen.rig.arrive("a", EIGHT)
    books = seen.answers[0].books[len(BOOK_NUMBERS) :]
    width = len(COMPONENT_NUMBERS)
    parts = [dict(zip(COMPONENT_NUMBERS, books[at : at + width], strict=True)) for at in range(0, len(books), width)]
    assert [(part["free"], part["owned"], part["receipts"]) for part in parts] == [
        (6, 3, 1),
        (0, 0, 1),
        (3, 1, 1),
        (3, 0, 1),
    ]
    assert (parts[1]["next"], parts[3]["next"]) == (-1, 0)
