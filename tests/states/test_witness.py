"""The witness: what it writes of a step tells any two steps apart that did something else."""

from __future__ import annotations

import zlib

from tidekv.engine.simulation.rig import Rig
from tidekv.states import commands, events
from tidekv.states.witness import COMMANDS, NOTHING, POOL_NUMBERS, Answer, Witness, short_fields

EIGHT = b"abcdefgh"


class Seen:
    """A rig with a witness, which answers for each step."""

    def __init__(self, **settings: int) -> None:
        self.rig = Rig(**settings)
        self.witness = Witness(self.rig.core)
        self.answers: list[Answer] = []
        step = self.rig.core.step

        def stepped(event: events.Event) -> list[commands.Command]:
            given = step(event)
            self.answers.append(self.witness.answer(self.witness.note(event, given)))
            return given

        self.rig.core.step = stepped  # type: ignore[method-assign]  # What it watches.

    def pools(self) -> dict[str, int]:
        return dict(
            zip(POOL_NUMBERS, next(answer.pools for answer in reversed(self.answers) if answer.pools), strict=True)
        )


def test_moves_commands_and_books_are_written_in_short() -> None:
    seen = Seen(device_pages=10)
    seen.rig.arrive("a", EIGHT)
    promise = seen.rig.take(commands.SendPromise)
    (arrived,) = seen.answers
    assert list(arrived.moves) == [("a", "PREALLOC"), ("a", "MATCH"), ("a", "TRANSFER")]
    (short,) = arrived.commands
    assert short[0] == "SendPromise"
    assert short[-2:] == (8, zlib.crc32(promise.pages))
    pools = seen.pools()
    assert (pools["device_free"], pools["device_owned"], pools["device_cached"]) == (2, 8, 0)
    seen.rig.promised(promise)
    # Nothing that matters happened: nothing is written.
    assert seen.answers[-1] is NOTHING
    seen.rig.aux(promise)
    seen.rig.chunk(promise)
    (received, ready) = seen.answers[-1].commands
    assert (received[0], ready[0]) == ("SendReceived", "TellReady")
    assert ready[-4:] == (8, zlib.crc32(seen.rig.take(commands.TellReady).pages), 0, zlib.crc32(b""))
    assert seen.pools()["device_cached"] == 8


def test_what_is_evicted_is_written_with_its_tier() -> None:
    seen = Seen(device_pages=8)
    seen.rig.make_cached("past", EIGHT)
    before = len(seen.answers)
    seen.rig.flush("l1", "l2")
    assert [(tier, pages) for tier, pages, _ in seen.answers[before].evicted] == [("device", 8), ("host", 8)]


def test_an_error_and_a_different_order_of_free_pages_are_seen() -> None:
    seen = Seen()
    noted = seen.witness.note(events.ClockAdvanced(at_s=0.0), [], "IllegalEvent")
    assert seen.witness.answer(noted).error == "IllegalEvent"
    digest = seen.witness.digest
    account = seen.rig.core.books.device
    taken = account.take(2)
    account.give_back(taken[::-1])
    seen.witness.answer(seen.witness.note(events.ClockAdvanced(at_s=0.0), []))
    assert seen.witness.digest != digest


def test_every_command_has_a_short_form_with_all_its_fields_but_free_text() -> None:
    for kind in COMMANDS:
        plain, pages = short_fields(kind)
        assert set(plain) | set(pages) | {"detail"} >= set(kind.__struct_fields__), kind
        assert all(name.endswith(("pages", "reserve")) for name in pages), kind
