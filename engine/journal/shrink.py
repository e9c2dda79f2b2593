"""Shrinking of a journal that ends in an error of the core, or that diverges in a replay.

If a step ends in an error, requests and then single events are left out for as long as the same class of error still
ends the run. That shifts the numbers of operations, so outcomes are matched by what their operation was for. Raises of
the run are repeated if their place is still reached. A journal that diverges is cut after the first difference, since
there is no other core to compare with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec

from tidekv.engine.journal.format import EndLine, RaiseRecord, RunLine, TurnLine, encode_line, write_lines
from tidekv.engine.journal.raises import RaiseInjector
from tidekv.engine.journal.reader import JournalReader
from tidekv.engine.journal.recorder import Recorder, RunInfo
from tidekv.engine.journal.replayer import Replayer
from tidekv.states.backup.backups import Backup
from tidekv.states.commands import Command, OperationCommand, ReportReady
from tidekv.states.component_specs import ComponentTable
from tidekv.states.components.look_ahead import ComponentAheadRead
from tidekv.states.components.request_components import ComponentCopy
from tidekv.states.components.storage import ComponentRead
from tidekv.states.core import Core
from tidekv.states.errors import IllegalEvent, InvalidRequest, ReplayDiverged
from tidekv.states.events import ComponentLeft, Event, FinishRequested, RetractRequested
from tidekv.states.loads.loads import LoadCopy, LoadFetch
from tidekv.states.request.restore import Recomputation
from tidekv.states.storage.admission import StorageQuery

RUNS_MAX = 2000
"""Maximum number of shortened runs to try."""

Purpose: TypeAlias = "tuple[str, tuple[str, ...], int]"
"""Purpose of an operation: its command, its requests, and its number among equal ones."""


Place: TypeAlias = "tuple[bool, int]"
"""Whether a page is one of the request's own, and which of those; else the position of a shared one."""
Left: TypeAlias = "tuple[str, int, tuple[Place, ...]]"
"""Component, first position, and the pages."""


class Shrunk(msgspec.Struct, frozen=True):
    """Result of shrinking a journal."""

    events_before: int
    events_after: int
    what: str
    """Description of the error or difference in the short journal."""


def shrink(path: str | Path, out: str | Path) -> Shrunk:
    """Write a short journal to `out`. Raises InvalidRequest if the journal replays without error and difference."""
    replayer = Replayer(path)
    taken: list[Event] = []
    purposes, component_pages = _Purposes(), LeftComponents()
    facts: dict[int, _Facts] = {}
    try:
        for step in replayer.steps():
            taken.append(step.event)
            facts[id(step.event)] = _Facts(component_pages.places(step.event), step.raises)
            if step.error not in ("", IllegalEvent.__name__):
                break
            purposes.note(step.commands, replayer.core)
            component_pages.note(step.commands)
        else:
            raise InvalidRequest(f"journal {str(path)!r} has no error and no difference to shrink to")
    except ReplayDiverged as diverged:
        before, after = _cut(path, out, diverged.turn)
        return Shrunk(before, after, f"the replay diverges at event {diverged.seq}, in {', '.join(diverged.parts)}")
    shortened = _Reduction(replayer.header, purposes.of_op, facts, step.error).reduce(taken)
    _write(out, replayer.header, shortened)
    return Shrunk(len(taken), len(shortened), f"the last event raises {step.error}")


class _Facts(NamedTuple):
    """Facts about an event that are not in its fields."""

    left: tuple[Left, ...]
    """Component pages that it leaves."""
    raises: Sequence[RaiseRecord]


Taken: TypeAlias = "tuple[Event, Sequence[RaiseRecord]]"
"""An event of a shortened run, with the raises of rules within its step."""


class _Purposes:
    """Identifies operations by their purpose, in any run of the same requests."""

    def __init__(self) -> None:
        self.of_op: dict[int, Purpose] = {}
        self.ops: dict[Purpose, int] = {}
        self._seen: Counter[tuple[str, tuple[str, ...]]] = Counter()

    def note(self, given: Iterable[object], core: Core) -> None:
        """Record the operations that a step has begun."""
        for command in given:
            if isinstance(command, OperationCommand):
                kind = (type(command).__name__, _requests_of(core.state.operations.get(command.op)))
                purpose = (*kind, self._seen[kind])
                self._seen[kind] += 1
                self.of_op[command.op] = purpose
                self.ops[purpose] = command.op


def _requests_of(operation: object) -> tuple[str, ...]:
    if isinstance(operation, LoadFetch | LoadCopy):
        return tuple(request.request_id for request in operation.load.waiters)
    if isinstance(operation, Backup):
        return (operation.request_id,)
    request = None
    if isinstance(operation, ComponentRead | ComponentCopy):
        request = operation.component_pages.request
    elif isinstance(operation, ComponentAheadRead | StorageQuery | Recomputation):
        request = operation.request
    return () if request is None else (request.request_id,)


class LeftComponents:
    """Tracks the component pages of the READY requests of one run."""

    def __init__(self) -> None:
        self._tables: dict[str, dict[str, ComponentTable]] = {}

    def note(self, given: Iterable[Command]) -> None:
        """Record the answers of a step to callers."""
        for command in given:
            if isinstance(command, ReportReady):
                self._tables[command.request_id] = {table.component: table for table in command.component_pages or ()}

    def places(self, event: Event) -> tuple[Left, ...]:
        """Return the component pages that an event of this run leaves, only those of its request."""
        if not isinstance(event, FinishRequested | RetractRequested):
            return ()
        tables = self._tables.get(event.request_id, {})
        found = []
        for part in event.component_pages:
            table = tables.get(part.component)
            if table is not None:
                own = {page: (True, at) for at, page in enumerate(table.own)}
                places = (own.get(page, (False, position)) for position, page in enumerate(part.pages, part.first))
                found.append((part.component, part.first, tuple(places)))
        return tuple(found)

    def leave(self, event: Event, left: tuple[Left, ...]) -> Event:
        """Return an event of another run with the pages that it leaves in this one, without components with missing
        pages.
        """
        if not isinstance(event, FinishRequested | RetractRequested):
            return event
        tables = self._tables.get(event.request_id, {})
        component_pages = []
        for component, first, places in left:
            table = tables.get(component)
            pages = [] if table is None else [page for place in places if (page := _page_at(table, place)) is not None]
            if len(pages) == len(places):
                component_pages.append(ComponentLeft(component, first, tuple(pages)))
        return msgspec.structs.replace(event, component_pages=tuple(component_pages))


def _page_at(table: ComponentTable, place: Place) -> int | None:
    is_own, at = place
    pages, number = (table.own, at) if is_own else (table.pages, at - table.first)
    return pages[number] if 0 <= number < len(pages) else None


class _Reduction:
    """Removes events that are not needed for the error."""

    def __init__(self, header: RunLine, purposes: dict[int, Purpose], facts: dict[int, _Facts], error: str) -> None:
        """`facts` are by the id of the event."""
        self._header = header
        self._purposes = purposes
        self._facts = facts
        self._error = error
        self._runs = 0

    def reduce(self, events: Sequence[Event]) -> list[Taken]:
        """Return a short list of events, the last of which raises the error."""
        kept = list(events)
        size = max(1, len(self._requests(kept)) // 2)
        while size:
            names = self._requests(kept)
            for at in range(0, len(names), size):
                gone = set(names[at : at + size])
                kept = self._without(kept, lambda event, gone=gone: bool(self._named(event) & gone))  # type: ignore[misc]
            size //= 2
        size = max(1, len(kept) // 2)
        while size:
            at = len(kept) - 1 - size
            while at > -size:
                gone_events = set(map(id, kept[max(at, 0) : at + size]))
                kept = self._without(kept, lambda event, gone=gone_events: id(event) in gone)  # type: ignore[misc]
                at -= size
            size //= 2
        run = self._run(kept)
        return [(event, self._facts[id(event)].raises) for event in kept] if run is None else run[1]

    def _without(self, events: list[Event], is_gone: Callable[[Event], bool]) -> list[Event]:
        fewer = [event for event in events if not is_gone(event)]
        if len(fewer) == len(events):
            return events
        run = self._run(fewer)
        return events if run is None else run[0]

    def _requests(self, events: list[Event]) -> list[str]:
        return list(dict.fromkeys(name for event in events for name in sorted(self._named(event))))

    def _named(self, event: Event) -> set[str]:
        """Return the requests of an event."""
        op = getattr(event, "op", None)
        if op is not None:
            return set(self._purposes[op][1]) if op in self._purposes else set()
        name = getattr(event, "request_id", None)
        return set() if name is None else {name}

    def _run(self, events: list[Event]) -> tuple[list[Event], list[Taken]] | None:
        """Return the events that a core took if the last of them raised the error: the original ones, and with the
        numbers of operations of this run. Events that the core refuses or ignores are left out.
        """
        if self._runs >= RUNS_MAX:
            return None
        self._runs += 1
        core = Core(self._header.core)
        # Numbers of operations are locals of the stack, and differ in a shorter run.
        injector = RaiseInjector(core, key_bytes=self._header.key_bytes, compares_locals=False)
        purposes, component_pages = _Purposes(), LeftComponents()
        mattered: list[Event] = []
        taken: list[Taken] = []
        for original in events:
            event = original
            op = getattr(event, "op", None)
            if op is not None:
                known = purposes.ops.get(self._purposes.get(op, ("", (), 0)))
                if known is None:
                    continue
                event = msgspec.structs.replace(event, op=known)
            facts = self._facts[id(original)]
            event = component_pages.leave(event, facts.left)
            error = ""
            try:
                given = injector.step(event, facts.raises)
                purposes.note(given, core)
                component_pages.note(given)
            except IllegalEvent:
                continue
            except Exception as raised:
                error = type(raised).__name__
            mattered.append(original)
            taken.append((event, facts.raises))
            if error:
                return (mattered, taken) if error == self._error else None
        return None


def _write(out: str | Path, header: RunLine, events: Sequence[Taken]) -> None:
    """Run the events again and record each as a turn. The keys are those of the journal."""
    core = Core(header.core)
    info = RunInfo(header.config, header.layout, header.instance)
    recorder = Recorder(core, with_tokens=True, info=info)
    injector = RaiseInjector(core, key_bytes=header.key_bytes, compares_locals=False)
    lines = [recorder.run_line()]
    for event, raises in events:
        try:
            recorder.stepped(event, injector.step(event, raises))
        except Exception as error:
            recorder.stepped(event, [], type(error).__name__)
        turn = recorder.end_turn()
        assert turn is not None
        lines.append(recorder.render(turn))
    write_lines(out, [*lines, recorder.end_line()])


def _cut(path: str | Path, out: str | Path, last_turn: int) -> tuple[int, int]:
    """Copy the journal up to and including a turn; returns the number of events before and after. The copy has no end
    record, as after a killed run.
    """
    reader = JournalReader(path)
    lines = [encode_line(reader.header)]
    before = after = 0
    for read in reader.lines():
        if isinstance(read, TurnLine):
            before += len(read.took)
            if read.turn <= last_turn:
                after += len(read.took)
                lines.append(encode_line(read))
        elif isinstance(read, EndLine) and last_turn > read.turns - 1:
            lines.append(encode_line(read))
    write_lines(out, lines)
    return before, after
