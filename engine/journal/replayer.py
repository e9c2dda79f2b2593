"""Replayer: steps a fresh core through a journal, repeats the raises of its rules, and compares every digest."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tidekv.engine.journal.digest import COVERED_TURNS, StepDigest, final_state
from tidekv.engine.journal.format import (
    ArrivalRecord,
    EndLine,
    ErrorRecord,
    EventRecord,
    FinishRecord,
    FlushRecord,
    FoundRecord,
    HintRecord,
    OfferRecord,
    RaiseRecord,
    RetractRecord,
    RunLine,
    ShareRecord,
    StallRecord,
    TurnLine,
    code_checksum,
)
from tidekv.engine.journal.raises import RaiseInjector, raise_record
from tidekv.engine.journal.reader import JournalReader
from tidekv.states.commands import Command
from tidekv.states.core import Core
from tidekv.states.errors import IllegalEvent, JournalDamaged, ReplayDiverged
from tidekv.states.events import Event, RequestArrived
from tidekv.states.records.request import Request
from tidekv.states.records.stages import State

if TYPE_CHECKING:
    from tidekv.engine.watching import Watcher

OTHER_CODE = "the code of the core is not the code that wrote the journal"


class Step(msgspec.Struct, frozen=True):
    """One replayed event."""

    seq: int
    event: Event
    commands: list[Command]
    moves: list[tuple[str, State]]
    """Requests that changed state, in order, with their new state."""
    error: str
    """The class of the error that the step raised; "" for none."""
    raises: Sequence[RaiseRecord] = ()
    """Rules that raised within the step and were handled by the core."""


class Replayed(msgspec.Struct, frozen=True):
    """The result of a replay that did not diverge."""

    events: int
    """Number of replayed events."""
    complete: bool
    """The replay reached the end record, and the final index, pools and counters are those of the run."""
    torn: JournalDamaged | None
    """Place at which the tail of the journal is missing; None if the replay was stopped or is complete."""
    raises: int = 0
    """Rules that raised, in the run and again in the replay."""


class Replayer:
    """Replays one journal.

        replayer = Replayer("run.journal")
        replayer.run()                  # or: for step in replayer.steps(): … replayer.core …

    `core` is the core after the last step, for reading only. One Replayer replays once.
    """

    def __init__(self, path: str | Path, *, force: bool = False, compare: bool = True, run: str = "") -> None:
        """Raises JournalRefused for a file that is no journal of this version, JournalDamaged for a broken header.

        `force` accepts journals of other event types. Without `compare` no digest is compared. In a log of the
        application, `run` begins the name of the run; by default it is the newest.
        """
        self._reader = JournalReader(path, force=force, run=run)
        self._compare = compare
        self.core = Core(self.header.core)
        self._digest = StepDigest(self.core)
        self._injector = RaiseInjector(self.core, key_bytes=self.header.key_bytes)
        self.core.state.raise_watchers.append(self._note_raise)
        self._raised: list[RaiseRecord] = []
        self._arrived: dict[str, bytes] = {}
        self._turns = self._events = self._raises = 0
        self._complete = False
        self._damage: JournalDamaged | None = None
        self.stalls: list[StallRecord] = []
        """Stalls of the event loop so far. Those of a turn are known when its first step is."""

    @property
    def header(self) -> RunLine:
        """The journal's first line."""
        return self._reader.header

    @property
    def place(self) -> tuple[str, int]:
        """File and line of the last step."""
        return self._reader.place

    @property
    def events(self) -> int:
        """Number of events replayed so far."""
        return self._events

    @property
    def torn(self) -> JournalDamaged | None:
        """Place at which the tail of the journal is missing, once `steps` has reached it, or that of the damage within
        `up_to_damage`.
        """
        return self._damage or self._reader.torn

    @contextmanager
    def up_to_damage(self) -> Iterator[None]:
        """Run the block, and end it at the first damaged line as at a missing tail: `torn` is set."""
        try:
            yield
        except JournalDamaged as damaged:
            self._damage = damaged

    @property
    def is_damaged(self) -> bool:
        """Whether a line was changed or lost, which a run that was killed does not explain."""
        return self._damage is not None

    @property
    def replayed(self) -> Replayed:
        """The result so far."""
        return Replayed(self._events, self._complete, self.torn, self._raises)

    def run(self, *observers: Watcher, until: int | None = None) -> Replayed:
        """Replay to the end, or up to and including event `until`; `observers` receive every step.

        Raises ReplayDiverged at the first event with other effects than in the run, and JournalDamaged at the first
        line that was changed.
        """
        for step in self.steps(until=until):
            for observer in observers:
                observer.stepped(step.event, step.commands, step.error)
        return self.replayed

    def steps(self, *, until: int | None = None) -> Iterator[Step]:
        """As `run`, but yield each step. The state after a turn is compared when the next step is requested."""
        if until is not None and until < 0:
            return
        for line in self._reader.lines():
            if isinstance(line, EndLine):
                self._check_end(line)
                continue
            if line.turn != self._turns:
                raise self._damaged(f"turn {self._turns} is missing: turn {line.turn} is in its place")
            if len(line.checks) != (len(line.took) if line.digest else 0):
                raise self._damaged(f"turn {line.turn} has {len(line.took)} events and {len(line.checks)} checks")
            self.stalls += line.stalls
            for step in self._turn(line):
                yield step
                if until is not None and step.seq >= until:
                    return

    def _turn(self, line: TurnLine) -> Iterator[Step]:
        raises: dict[int, list[RaiseRecord]] = defaultdict(list)
        for raised in line.raises:
            raises[raised.at].append(raised)
        errors = {error.at: error for error in line.errors}
        is_covered = not line.turn % COVERED_TURNS
        for at, took in enumerate(line.took):
            is_covered = is_covered or at in raises or at in errors
            check = line.checks[at] if is_covered and line.digest else None
            yield self._step(line, self.event_of(took), check, raises.get(at, ()), errors.get(at))
        self._turns += 1
        parts = self._digest.end_turn() if is_covered else []
        if is_covered and self._compare and (parts != line.parts or f"{self._digest.value:016x}" != line.digest):
            self._diverge_in_state(line, parts)

    def _step(
        self, line: TurnLine, event: Event, check: int | None, raises: Sequence[RaiseRecord], error: ErrorRecord | None
    ) -> Step:
        seq, self._raised = self._events, []
        commands: list[Command] = []
        raised = ""
        try:
            commands = self._injector.step(event, raises)
        except IllegalEvent as illegal:
            raised = type(illegal).__name__
        except Exception as broken:
            # Any exception: if it did not end the run as well, the error differs below.
            raised = type(broken).__name__
        followed = self._digest.followed(commands)
        ours = self._digest.stepped(commands, is_covered=check is not None)
        self._events += 1
        self._raises += len(self._raised)
        if self._compare:
            theirs = {"raises": _raises_in_words(raises), "error": "" if error is None else error.error}
            found = {"raises": _raises_in_words(self._raised), "error": raised}
            differing = [name for name in theirs if theirs[name] != found[name]]
            recorded = {name: theirs[name] or "none" for name in differing}
            replayed = {name: found[name] or "none" for name in differing}
            if check is not None and ours != check:
                differing.append("effects")
                recorded["effects"] = f"digest {check:04x}" if check else "none"
                words = ", ".join(f"{name} {_in_words(what)}" for name, what in followed._asdict().items())
                replayed["effects"] = f"digest {ours:04x} of {words}" if ours else "none"
            if differing:
                self._diverge(seq, in_short(event), line, differing, recorded, replayed)
        return Step(seq, event, commands, self.core.moves, raised, raises)

    def _diverge_in_state(self, line: TurnLine, parts: list[int]) -> None:
        names = self._digest.parts
        at = next((at for at, (ours, theirs) in enumerate(zip(parts, line.parts, strict=False)) if ours != theirs), -1)
        name = names[at] if at >= 0 else "digest"
        numbers = self._digest.pools().get(name, {})
        self._diverge(
            self._events - 1,
            f"the state behind turn {line.turn}",
            line,
            [name],
            {name: f"digest {line.parts[at]:04x}" if at >= 0 else line.digest},
            {name: f"digest {parts[at]:04x} of {numbers}" if at >= 0 else f"{self._digest.value:016x}"},
        )

    def _diverge(
        self,
        seq: int,
        event: str,
        line: TurnLine | None,
        parts: Sequence[str],
        recorded: dict[str, str],
        replayed: dict[str, str],
    ) -> None:
        raise ReplayDiverged(
            seq=seq,
            event=event,
            turn=self._turns if line is None else line.turn,
            parts=tuple(parts),
            recorded=_by_name(recorded),
            replayed=_by_name(replayed),
            hint=OTHER_CODE if self.header.code != code_checksum() else "",
        )

    def event_of(self, record: EventRecord) -> Event:
        """Return the event of a record, with all its keys. Call it for every record, in order."""
        if isinstance(record, Event):
            return record
        if isinstance(record, ArrivalRecord):
            event: RequestArrived = record.event()
            self._arrived[event.request_id] = event.keys
            return event
        if isinstance(record, FoundRecord | OfferRecord | FlushRecord | HintRecord | ShareRecord):
            return record.event()
        assert isinstance(record, FinishRecord | RetractRecord)
        known = self._arrived.pop(record.request_id, b"")
        width = record.same_pages * self.header.core.key_bytes
        if len(known) < width:
            raise self._damaged(f"event {self._events} continues an arrival that is not in the journal")
        return record.event(known[:width])

    def _check_end(self, line: EndLine) -> None:
        if (line.turns, line.events) != (self._turns, self._events):
            raise self._damaged(
                f"the end record counts {line.turns} turns of {line.events} events, the journal has {self._turns} of "
                f"{self._events}"
            )
        if self._compare:
            ours = final_state(self.core)
            differing = sorted(
                name for name in ours.keys() | line.final.keys() if ours.get(name) != line.final.get(name)
            )
            if differing:
                self._diverge(
                    self._events,
                    "the end of the run",
                    None,
                    differing,
                    {name: str(line.final.get(name)) for name in differing},
                    {name: str(ours.get(name)) for name in differing},
                )
        self._complete = True

    def _note_raise(self, request: Request | None) -> None:
        assert sys.exception() is not None
        self._raised.append(raise_record(0, request))

    def _damaged(self, cause: str) -> JournalDamaged:
        path, line = self.place
        return JournalDamaged(path=path, line=line, cause=cause)


def _raises_in_words(raises: Sequence[RaiseRecord]) -> str:
    return ", ".join(f"{raised.error} in {raised.rule}" for raised in raises)


def _in_words(what: object) -> str:
    return repr(what) if not isinstance(what, list) else f"[{', '.join(map(_short, what))}]"


def _short(entry: object) -> str:
    if isinstance(entry, tuple):
        return f"({', '.join(_short(part) for part in entry)})"
    return str(getattr(entry, "value", None) or entry)


def _by_name(fields: dict[str, str]) -> str:
    return f"{{{', '.join(f'{name}: {words}' for name, words in fields.items())}}}"


def in_short(event: Event) -> str:
    """Return an event in one line, without keys and without the trace of an error."""
    fields = {
        name: value
        for name, value in msgspec.structs.asdict(event).items()
        if name not in ("keys", "detail") and not (name == "deadline_at_s" and value == float("inf"))
    }
    return f"{type(event).__name__}({', '.join(f'{name}={value!r}' for name, value in fields.items())})"
