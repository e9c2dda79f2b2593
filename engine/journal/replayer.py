"""Steps a fresh core through a journal and compares every answer with the recorded one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from tidekv.engine.journal.final import final_state
from tidekv.engine.journal.lines import EndLine, RunLine, StepRecord
from tidekv.engine.journal.reader import JournalReader
from tidekv.engine.journal.schema import code_checksum
from tidekv.states.commands import Command
from tidekv.states.core import Core
from tidekv.states.errors import IllegalEvent, JournalDamaged, ReplayDiverged
from tidekv.states.events import Event, FinishRequested, RequestArrived, RetractRequested
from tidekv.states.inspect.step_record import BOOKS_EVERY, StepRecorder, StepResult, encode_pages
from tidekv.states.request.request import State

OTHER_CODE = "the code of the core is not that which wrote the journal"
BOOKS_ALONE = (
    f"only the books differ, which one event of {BOOKS_EVERY} has: it may be an earlier one since the last such"
)


class Step(msgspec.Struct, frozen=True):
    """One event that the core has just taken again."""

    seq: int
    event: Event
    commands: list[Command]
    moves: list[tuple[str, State]]
    """Requests that changed state, in order, with the state that they came to."""
    error: str
    """The class of the error that the step raised; "" for none."""


class Replayed(msgspec.Struct, frozen=True):
    """What a replay found: everything identical, as far as the journal goes."""

    events: int
    """Events that were taken again."""
    complete: bool
    """The journal was followed to its end record, and the final index, pools and counters are those of the run."""
    torn: JournalDamaged | None
    """Where and how the tail of the journal is missing; None where the replay was stopped, or is complete."""


class Replayer:
    """Replays one journal.

        replayer = Replayer("run.journal")
        replayer.run()                  # or: for step in replayer.steps(): … replayer.core …

    `core` is the core as it is after the last step that was made: read it freely. One Replayer replays once.
    """

    def __init__(self, path: str | Path, *, force: bool = False, compare: bool = True) -> None:
        """Raises JournalRefused for what is no journal of this version, JournalDamaged for a broken header.

        `force` reads journals of other event types as well as can be. Without `compare` answers are not compared: the
        core of today decides, whatever the journal says.
        """
        self._reader = JournalReader(path, force=force)
        self._compare = compare
        self.core = Core(self.header.core)
        self._step_recorder = StepRecorder(self.core)
        self._encode = msgspec.json.Encoder(enc_hook=encode_pages).encode
        self._arrived: dict[str, bytes] = {}
        self._events = 0
        self._complete = False

    @property
    def header(self) -> RunLine:
        """The journal's first line."""
        return self._reader.header

    @property
    def place(self) -> tuple[str, int]:
        """File and line of the step that was made last."""
        return self._reader.place

    @property
    def events(self) -> int:
        """Events that were taken again so far."""
        return self._events

    @property
    def torn(self) -> JournalDamaged | None:
        """Where and how the tail of the journal is missing, once `steps` has come there."""
        return self._reader.torn

    def run(self, *, until: int | None = None) -> Replayed:
        """Replay to the end, or up to and with event `until`.

        Raises ReplayDiverged at the first event that the core answers in another way, JournalDamaged at the first line
        that is not what was written.
        """
        for _ in self.steps(until=until):
            pass
        return Replayed(self._events, self._complete, self.torn)

    def steps(self, *, until: int | None = None) -> Iterator[Step]:
        """The same, event by event."""
        if until is not None and until < 0:
            return
        for line in self._reader.lines():
            if isinstance(line, EndLine):
                self._check_end(line)
                continue
            for record in line.steps:
                yield self._step(record)
                if until is not None and record.seq >= until:
                    return

    def _step(self, record: StepRecord) -> Step:
        if record.seq != self._events:
            raise self._damaged(f"event {self._events} is missing: event {record.seq} stands in its place")
        event = self.event_of(record)
        error = ""
        commands: list[Command] = []
        try:
            commands = self.core.step(event)
        except IllegalEvent as illegal:
            error = type(illegal).__name__
        except Exception as broken:
            # Whatever it is, it ended the run as well, or else the answers differ.
            error = type(broken).__name__
        answer = self._encode(self._step_recorder.note(event, commands, error).gave)
        self._events += 1
        if self._compare and answer != bytes(record.gave):
            recorded, replayed = _by_name(bytes(record.gave)), _by_name(answer)
            raise ReplayDiverged(
                seq=record.seq,
                event=in_short(event),
                recorded=_in_words(recorded),
                replayed=_in_words(replayed),
                hint=self._hint(only_books={**recorded, "books": ""} == {**replayed, "books": ""}),
            )
        return Step(record.seq, event, commands, self.core.moves, error)

    def event_of(self, record: StepRecord) -> Event:
        """The event of a record, with all its keys. Call it for every record, in order."""
        event = record.took
        if isinstance(event, RequestArrived):
            self._arrived[event.request_id] = event.keys
        elif isinstance(event, FinishRequested | RetractRequested):
            known = self._arrived.pop(event.request_id, b"")
            width = self.header.core.key_bytes
            if len(known) < record.same_pages * width:
                raise self._damaged(f"event {record.seq} goes on from an arrival that is not in the journal")
            return msgspec.structs.replace(event, keys=known[: record.same_pages * width] + event.keys)
        return event

    def _check_end(self, line: EndLine) -> None:
        if line.events != self._events:
            raise self._damaged(f"the end record counts {line.events} events, the journal has {self._events}")
        if self._compare:
            ours = final_state(self.core)
            differing = sorted(
                name for name in ours.keys() | line.final.keys() if ours.get(name) != line.final.get(name)
            )
            if differing:
                raise ReplayDiverged(
                    seq=self._events,
                    event="the end of the run",
                    recorded=", ".join(f"{name} {line.final.get(name)}" for name in differing),
                    replayed=", ".join(f"{name} {ours.get(name)}" for name in differing),
                    hint=self._hint(),
                )
        self._complete = True

    def _hint(self, *, only_books: bool = False) -> str:
        hints = [BOOKS_ALONE] if only_books else []
        if self.header.code != code_checksum():
            hints.append(OTHER_CODE)
        return "; ".join(hints)

    def _damaged(self, cause: str) -> JournalDamaged:
        path, line = self.place
        return JournalDamaged(path=path, line=line, cause=cause)


def _by_name(answer: bytes) -> dict[str, str]:
    """The fields of an encoded answer, but those that are empty."""
    fields = msgspec.json.decode(answer, type=list[msgspec.Raw])
    words = [bytes(field).decode() for field in fields]
    return {
        name: word for name, word in zip(StepResult.__struct_fields__, words, strict=False) if word not in ("[]", '""')
    }


def _in_words(fields: dict[str, str]) -> str:
    return f"{{{', '.join(f'{name}: {word}' for name, word in fields.items())}}}"


def in_short(event: Event) -> str:
    """An event in one line, without keys and without the trace of an error."""
    fields = {
        name: value
        for name, value in msgspec.structs.asdict(event).items()
        if name not in ("keys", "detail") and not (name == "deadline_at_s" and value == float("inf"))
    }
    return f"{type(event).__name__}({', '.join(f'{name}={value!r}' for name, value in fields.items())})"
