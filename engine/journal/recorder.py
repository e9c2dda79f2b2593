"""Recorder: makes journal lines of the steps of one core. It has no thread and no clock, and writes nothing.

`stepped` takes each step and rolls the digest, `end_turn` returns the turn. `render` makes its line: page keys become
digests, and msgspec encodes the line. The writer seals lines with their checksums.
"""

from __future__ import annotations

import secrets
import sys
import traceback
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import msgspec

from tidekv.engine.journal.digest import COVERED_TURNS, StepDigest, final_state
from tidekv.engine.journal.format import (
    JOURNAL_VERSION,
    ArrivalRecord,
    EndLine,
    ErrorRecord,
    FinishRecord,
    FlushRecord,
    FoundRecord,
    GapLine,
    HintRecord,
    OfferRecord,
    RetractRecord,
    RunLine,
    SegmentLine,
    ShareRecord,
    StallRecord,
    TurnLine,
    code_checksum,
    encode_line,
    package_versions,
    schema_checksum,
)
from tidekv.engine.journal.pages import DIGEST_BYTES, PageDigests
from tidekv.engine.journal.raises import raise_record
from tidekv.states.errors import IllegalEvent
from tidekv.states.events import (
    Event,
    FinishRequested,
    FlushRequested,
    FoundRun,
    HintReceived,
    HostPagesFound,
    PagesOffered,
    RequestArrived,
    RetractRequested,
    ShareRequested,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tidekv.engine.journal.format import EventRecord, RaiseRecord
    from tidekv.states.commands import Command
    from tidekv.states.core import Core
    from tidekv.states.records.request import Request

ARRIVED_MIN = 256
"""Number of requests with kept keys that starts a search for requests that ended."""
NOT_ARRIVED = (b"", b"")
STALLS_MAX = 64
"""Maximum stalls kept for the next turn."""


class RecordedTurn(NamedTuple):
    """One turn of the loop, before it is encoded."""

    line: TurnLine
    """Its events still have their page keys."""
    keyed: list[int]
    """Which of the events have page keys, or a namespace."""

    def keys_bytes(self) -> list[int]:
        """Bytes of the page keys of each of these, before the turn is rendered."""
        # A flush has a namespace only.
        return [len(getattr(self.line.took[at], "keys", b"")) for at in self.keyed]


class Stepped(Protocol):
    """Callback for the steps of a core."""

    def __call__(self, event: Event, given: Sequence[Command], error: str = "") -> None: ...


class RunInfo(NamedTuple):
    """What the first line of a journal says about the engine and its start."""

    config: Mapping[str, object] = {}
    layout: Mapping[str, object] = {}
    instance: str = ""
    started_unix_s: float = 0.0
    started_at_s: float = 0.0
    """In seconds of the core's clock."""


UNNAMED_RUN = RunInfo()


class Recorder:
    """Records one core from its first step on."""

    def __init__(
        self,
        core: Core,
        *,
        with_tokens: bool = False,
        info: RunInfo = UNNAMED_RUN,
        breathe: Callable[[], None] | None = None,
    ) -> None:
        """`breathe` is called now and then while long prompts are hashed, to leave the interpreter to other threads."""
        self.run = secrets.token_hex(8)
        self.turns = self.events = 0
        """Number of turns ended and of events taken."""
        self._core = core
        self._digest = StepDigest(core)
        self._is_covered = True
        """Whether the digests cover what follows in this turn, see `COVERED_TURNS`."""
        self._took: list[EventRecord] = []
        self._checks: list[int] = []
        self._raises: list[RaiseRecord] = []
        self._errors: list[ErrorRecord] = []
        self._keyed: list[int] = []
        self._stalls: list[StallRecord] = []
        core.state.raise_watchers.append(self._note_raise)
        self._digests = None if with_tokens else PageDigests(core.settings.key_bytes, breathe)
        self._arrived: dict[str, tuple[bytes, bytes]] = {}
        """By request: the keys that arrived, and the keys written."""
        self._arrived_max = ARRIVED_MIN
        settings = core.settings
        if not with_tokens:
            settings = msgspec.structs.replace(settings, key_bytes=DIGEST_BYTES)
        self._header = RunLine(
            version=JOURNAL_VERSION,
            run=self.run,
            schema=schema_checksum(),
            code=code_checksum(),
            packages=package_versions(),
            page_keys="tokens" if with_tokens else "digests",
            key_bytes=core.settings.key_bytes,
            core=settings,
            config=dict(info.config),
            layout=dict(info.layout),
            instance=info.instance,
            started_unix_s=info.started_unix_s,
            started_at_s=info.started_at_s,
        )

    # --- On the thread of the core ---

    def stepped(self, event: Event, given: Sequence[Command], error: str = "") -> None:
        """Add the core's last step. With `error`, its exception is being handled."""
        self._took.append(event)
        if error:
            self._is_covered = True
        self._checks.append(self._digest.stepped(given, is_covered=self._is_covered))
        if type(event) in WITH_KEYS:
            self._keyed.append(len(self._took) - 1)
        if error:
            self._note_error(error)

    def note_stall(self, at_s: float, seconds: float, where: str) -> None:
        """Add a stall of the event loop that ended at `at_s` to the next turn."""
        self._stalls.append(StallRecord(at_s, round(seconds, 6), where))
        # Without requests no turn follows; only the newest matter to the next one.
        del self._stalls[:-STALLS_MAX]

    def end_turn(self) -> RecordedTurn | None:
        """End the turn; None if the core took no event in it."""
        took = self._took
        if not took:
            return None
        is_covered = self._is_covered
        line = TurnLine(
            turn=self.turns,
            at_s=self._core.state.now_s,
            took=took,
            checks=self._checks if is_covered else [],
            parts=self._digest.end_turn() if is_covered else [],
            digest=f"{self._digest.value:016x}" if is_covered else "",
            raises=self._raises,
            errors=self._errors,
            stalls=self._stalls,
        )
        turn = RecordedTurn(line, self._keyed)
        self.turns += 1
        self._is_covered = not self.turns % COVERED_TURNS
        self.events += len(took)
        # The turn owns the lists: it may be rendered much later.
        self._took, self._checks, self._keyed, self._raises, self._errors, self._stalls = [], [], [], [], [], []
        return turn

    def _note_raise(self, request: Request | None) -> None:
        self._raises.append(raise_record(len(self._took), request))
        self._is_covered = True

    def _note_error(self, name: str) -> None:
        error = sys.exception()
        # A refused event has changed nothing; its traceback is not needed.
        has_trace = error is not None and not isinstance(error, IllegalEvent)
        trace = "".join(traceback.format_exception(error)) if has_trace else ""
        self._errors.append(ErrorRecord(len(self._took) - 1, name, "" if error is None else str(error), trace))

    # --- One thread at a time, in the order of the turns ---

    def render(self, turn: RecordedTurn) -> bytes:
        """Return the line of a turn, without its checksum."""
        took = turn.line.took
        for at in turn.keyed:
            event = took[at]
            assert isinstance(event, Event), "a turn is rendered once"
            took[at] = WITH_KEYS[type(event)](self, event)
        return encode_line(turn.line)

    # --- Other lines ---

    def run_line(self) -> bytes:
        """Return the first line, without its checksum."""
        return encode_line(self._header)

    def segment_line(self, number: int, *, first_event: int, previous: int) -> bytes:
        """Return the first line of a further file, without its checksum."""
        return encode_line(
            SegmentLine(
                version=JOURNAL_VERSION,
                run=self.run,
                number=number,
                first_event=first_event,
                previous_sum=f"{previous:08x}",
            )
        )

    def gap_line(self, turns: int, events: int) -> bytes:
        """Return a line for missing turns, without its checksum."""
        return encode_line(GapLine(turns=turns, events=events))

    def end_line(self) -> bytes:
        """Return the last line, without its checksum. The core must not be stepped afterwards."""
        return encode_line(EndLine(turns=self.turns, events=self.events, final=final_state(self._core)))

    # --- Page keys ---

    def _arrival(self, event: RequestArrived) -> ArrivalRecord:
        keys = event.keys
        written = keys if self._digests is None else self._digests.of(keys)
        rest = event.rest if self._digests is None else self._digests.of_rest(event.rest)
        if len(self._arrived) > self._arrived_max:
            self._forget_ended()
        self._arrived[event.request_id] = (keys, written)
        return ArrivalRecord.of(event, written, rest, self._namespace(event.namespace))

    def _finish(self, event: FinishRequested) -> FinishRecord:
        return FinishRecord(event.at_s, event.request_id, *self._left(event))

    def _retract(self, event: RetractRequested) -> RetractRecord:
        return RetractRecord(event.at_s, event.request_id, *self._left(event))

    def _offer(self, event: PagesOffered) -> OfferRecord:
        written = event.keys if self._digests is None else self._digests.of(event.keys)
        namespace = self._namespace(event.namespace)
        return OfferRecord(
            event.at_s, event.offer, written, event.pages, namespace, event.offered_components, event.hold_s
        )

    def _flush(self, event: FlushRequested) -> FlushRecord:
        namespace = event.namespace if event.namespace is None else self._namespace(event.namespace)
        return FlushRecord(event.at_s, event.call, event.tiers, namespace)

    def _hint(self, event: HintReceived) -> HintRecord:
        written = event.keys if self._digests is None else self._digests.of(event.keys)
        fields = {**msgspec.structs.asdict(event), "keys": written, "namespace": self._namespace(event.namespace)}
        return HintRecord(**fields)

    def _share(self, event: ShareRequested) -> ShareRecord:
        written = event.keys if self._digests is None else self._digests.of(event.keys)
        fields = {**msgspec.structs.asdict(event), "keys": written, "namespace": self._namespace(event.namespace)}
        return ShareRecord(**fields)

    def _found(self, event: HostPagesFound) -> FoundRecord:
        def written(run: FoundRun) -> FoundRun:
            keys = run.keys if self._digests is None else self._digests.of(run.keys)
            return msgspec.structs.replace(run, keys=keys, namespace=self._namespace(run.namespace))

        return FoundRecord(event.at_s, tuple(map(written, event.runs)), event.component_pages)

    def _namespace(self, namespace: str) -> str:
        return namespace if self._digests is None else self._digests.of_namespace(namespace)

    def _left(self, event: FinishRequested | RetractRequested) -> tuple[bytes, int, Any, int]:
        """Return the record of a finished request: further keys, tokens, component pages, keys left out."""
        keys, known = self._arrived.pop(event.request_id, NOT_ARRIVED)
        if not event.keys.startswith(keys):
            keys, known = NOT_ARRIVED
        written = event.keys if self._digests is None else self._digests.of(event.keys, known)
        same_pages = len(keys) // self._core.settings.key_bytes
        return written[len(known) :], event.tokens, event.component_pages, same_pages

    def _forget_ended(self) -> None:
        """Drop the keys of requests that failed. A later event of one is written with all its keys."""
        requests = self._core.state.requests
        for name in [name for name in self._arrived if name not in requests]:
            del self._arrived[name]
        self._arrived_max = ARRIVED_MIN + 2 * len(self._arrived)


Keyed: TypeAlias = (
    "FoundRecord | ArrivalRecord | FinishRecord | RetractRecord | OfferRecord | FlushRecord | HintRecord | ShareRecord"
)
WITH_KEYS: dict[type[Event], Callable[[Recorder, Any], Keyed]] = {
    HostPagesFound: Recorder._found,
    RequestArrived: Recorder._arrival,
    FinishRequested: Recorder._finish,
    RetractRequested: Recorder._retract,
    PagesOffered: Recorder._offer,
    FlushRequested: Recorder._flush,
    HintReceived: Recorder._hint,
    ShareRequested: Recorder._share,
}
