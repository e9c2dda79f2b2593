"""Makes a short journal of one that ends in an error of the core, or that replays differently.

Where a step raises, requests and then single events are left out for as long as the same class of error is still
raised. What is left out shifts the numbers of operations, so outcomes are told by what their operation was for. Where
the core answers differently, there is no other core to compare with: the journal is cut behind the first difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec

from tidekv.engine.journal.left_components import Left, LeftComponents
from tidekv.engine.journal.lines import RunLine, StepRecord, StepsLine, seal
from tidekv.engine.journal.reader import JournalReader
from tidekv.engine.journal.recorder import STEPS_PER_LINE_MAX, Recorder
from tidekv.engine.journal.replayer import Replayer
from tidekv.states.backup.backups import Backup
from tidekv.states.commands import Operation
from tidekv.states.components.request_components import ComponentCopy
from tidekv.states.components.storage import ComponentRead, StoredComponentCopy
from tidekv.states.core import Core
from tidekv.states.errors import IllegalEvent, InvalidRequest, ReplayDiverged
from tidekv.states.events import Event
from tidekv.states.loads.loads import LoadCopy, LoadFetch
from tidekv.states.request.restore import Recomputation
from tidekv.states.storage.admission import StorageQuery

RUNS_MAX = 2000
"""So many shortened runs are tried at most."""

Purpose: TypeAlias = "tuple[str, tuple[str, ...], int]"
"""What an operation is for: its command, its requests, and which of such it is."""


class Shrunk(msgspec.Struct, frozen=True):
    """What became of a journal."""

    events_before: int
    events_after: int
    what: str
    """What the short journal still shows."""


def shrink(path: str | Path, out: str | Path) -> Shrunk:
    """Write a short journal to `out`. Raises InvalidRequest where the journal replays without error or difference."""
    replayer = Replayer(path)
    taken: list[Event] = []
    purposes, component_pages = _Purposes(), LeftComponents()
    left: dict[int, tuple[Left, ...]] = {}
    try:
        for step in replayer.steps():
            taken.append(step.event)
            left[id(step.event)] = component_pages.places(step.event)
            if step.error not in ("", IllegalEvent.__name__):
                break
            purposes.note(step.commands, replayer.core)
            component_pages.note(step.commands)
        else:
            raise InvalidRequest(f"journal {str(path)!r} has no error and no difference to shrink to")
    except ReplayDiverged as diverged:
        _cut(path, out, diverged.seq)
        return Shrunk(_count(path), diverged.seq + 1, f"the core answers event {diverged.seq} differently")
    shortened = _Reduction(replayer.header, purposes.of_op, left, step.error).reduce(taken)
    _write(out, replayer.header, shortened)
    return Shrunk(len(taken), len(shortened), f"the last event raises {step.error}")


class _Purposes:
    """Tells operations by what they are for, in any run of the same requests."""

    def __init__(self) -> None:
        self.of_op: dict[int, Purpose] = {}
        self.ops: dict[Purpose, int] = {}
        self._seen: Counter[tuple[str, tuple[str, ...]]] = Counter()

    def note(self, given: Iterable[object], core: Core) -> None:
        """Note the operations that a step has begun."""
        for command in given:
            if isinstance(command, Operation):
                kind = (type(command).__name__, _requests_of(core.state.operations.get(command.op)))
                purpose = (*kind, self._seen[kind])
                self._seen[kind] += 1
                self.of_op[command.op] = purpose
                self.ops[purpose] = command.op


def _requests_of(operation: object) -> tuple[str, ...]:
    if isinstance(operation, LoadFetch | LoadCopy):
        return tuple(request.request_id for request in operation.load.sharers)
    if isinstance(operation, Backup):
        return (operation.request_id,)
    request = None
    if isinstance(operation, ComponentRead | StoredComponentCopy):
        request = operation.fetch.component_pages.request
    elif isinstance(operation, ComponentCopy):
        request = operation.component_pages.request
    elif isinstance(operation, StorageQuery | Recomputation):
        request = operation.request
    return () if request is None else (request.request_id,)


class _Reduction:
    """Leaves out what is not needed for the error."""

    def __init__(
        self, header: RunLine, purposes: dict[int, Purpose], left: dict[int, tuple[Left, ...]], error: str
    ) -> None:
        """`left`: what each event leaves of components, by the id of the event."""
        self._header = header
        self._purposes = purposes
        self._left = left
        self._error = error
        self._runs = 0

    def reduce(self, events: Sequence[Event]) -> list[Event]:
        """A short list of events, the last of which raises the error."""
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
        return kept if run is None else run[1]

    def _without(self, events: list[Event], is_gone: Callable[[Event], bool]) -> list[Event]:
        fewer = [event for event in events if not is_gone(event)]
        if len(fewer) == len(events):
            return events
        run = self._run(fewer)
        return events if run is None else run[0]

    def _requests(self, events: list[Event]) -> list[str]:
        return list(dict.fromkeys(name for event in events for name in sorted(self._named(event))))

    def _named(self, event: Event) -> set[str]:
        """The requests that an event is for, alone or together."""
        op = getattr(event, "op", None)
        if op is not None:
            return set(self._purposes[op][1]) if op in self._purposes else set()
        name = getattr(event, "request_id", None)
        return set() if name is None else {name}

    def _run(self, events: list[Event]) -> tuple[list[Event], list[Event]] | None:
        """The events that mattered to a core, where the last of them raised the error: as they were, and with the
        numbers that operations have in that run. What the core does not know or refuses does not matter.
        """
        if self._runs >= RUNS_MAX:
            return None
        self._runs += 1
        core = Core(self._header.core)
        purposes, component_pages = _Purposes(), LeftComponents()
        mattered: list[Event] = []
        taken: list[Event] = []
        for original in events:
            event = original
            op = getattr(event, "op", None)
            if op is not None:
                known = purposes.ops.get(self._purposes.get(op, ("", (), 0)))
                if known is None:
                    continue
                event = msgspec.structs.replace(event, op=known)
            event = component_pages.leave(event, self._left[id(original)])
            error = ""
            try:
                given = core.step(event)
                purposes.note(given, core)
                component_pages.note(given)
            except IllegalEvent:
                continue
            except Exception as raised:
                error = type(raised).__name__
            mattered.append(original)
            taken.append(event)
            if error:
                return (mattered, taken) if error == self._error else None
        return None


def _write(out: str | Path, header: RunLine, events: list[Event]) -> None:
    """Run the events once more, and record it. The keys are what they were in the journal."""
    core = Core(header.core)
    recorder = Recorder(core, with_tokens=True, config=header.config, layout=header.layout, instance=header.instance)
    lines = [recorder.run_line()]
    for event in events:
        try:
            noted = recorder.note(event, core.step(event))
        except Exception as error:
            noted = recorder.note(event, [], type(error).__name__)
        lines.append(recorder.steps_line(recorder.encode([noted])))
    Path(out).write_bytes(b"".join([*lines, recorder.end_line()]))


def _cut(path: str | Path, out: str | Path, last_seq: int) -> None:
    """Copy the journal up to and with an event. It has no end record then, as if the run had been killed."""
    encode = msgspec.json.Encoder().encode
    reader = JournalReader(path)
    line, crc = seal(encode(reader.header), 0)
    written = [line]
    records: list[StepRecord] = []
    for read in reader.lines():
        if isinstance(read, StepsLine):
            records += [record for record in read.steps if record.seq <= last_seq]
        if records and records[-1].seq == last_seq:
            break
    for at in range(0, len(records), STEPS_PER_LINE_MAX):
        line, crc = seal(encode(StepsLine(steps=records[at : at + STEPS_PER_LINE_MAX])), crc)
        written.append(line)
    Path(out).write_bytes(b"".join(written))


def _count(path: str | Path) -> int:
    return sum(len(line.steps) for line in JournalReader(path).lines() if isinstance(line, StepsLine))
