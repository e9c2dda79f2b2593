"""Turns the steps of one core into journal lines. No thread, no clock of its own, no policy: whoever calls it writes.

Two halves: `note` belongs to the thread that steps the core and takes what may change after the step; `lines` may run
elsewhere and later, and does the costly rest (digests of page keys, JSON, checksums).
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
import structlog

from tidekv.engine.journal.final import final_state
from tidekv.engine.journal.lines import JOURNAL_VERSION, StepWritten, seal
from tidekv.engine.journal.pages import DIGEST_BYTES, PageDigests
from tidekv.engine.journal.schema import code_checksum, event_types, package_versions, schema_checksum
from tidekv.states.events import (
    NO_DEADLINE,
    AbortRequested,
    Event,
    FinishRequested,
    RequestArrived,
    RetractRequested,
)
from tidekv.states.request import State
from tidekv.states.witness import NOTHING, Noted, Witness

if TYPE_CHECKING:
    from tidekv.states.core import Core

STEPS_PER_LINE_MAX = 128


class Recorder:
    """Records one core from its first step on."""

    def __init__(
        self,
        core: Core,
        *,
        with_tokens: bool = False,
        config: Mapping[str, object] | None = None,
        layout: Mapping[str, object] | None = None,
        instance: str = "",
        started_unix_s: float = 0.0,
    ) -> None:
        self.run = secrets.token_hex(8)
        self._core = core
        self._witness = Witness(core)
        self.note = self._witness.note
        """Takes the step that the core has just made; see Witness.note."""
        self.events = 0
        """Events that are in the lines so far."""
        self._crc = 0
        self._digests = None if with_tokens else PageDigests(core.settings.key_bytes)
        self._arrived: dict[str, tuple[bytes, bytes]] = {}
        self._digest = 0
        self._states: dict[str, str] = {}
        self._encode = msgspec.json.Encoder().encode
        self._line = b""
        # structlog renders and chains each line; where lines go is the caller's business.
        self._log = structlog.wrap_logger(
            self, processors=[self._render], wrapper_class=structlog.make_filtering_bound_logger(0)
        ).bind()
        settings = core.settings
        if not with_tokens:
            settings = msgspec.structs.replace(settings, key_bytes=DIGEST_BYTES)
        self._header: dict[str, object] = {
            "version": JOURNAL_VERSION,
            "run": self.run,
            "schema": schema_checksum(),
            "code": code_checksum(),
            "packages": package_versions(),
            "page_keys": "tokens" if with_tokens else "digests",
            "core": settings,
            "config": dict(config or {}),
            "layout": dict(layout or {}),
            "instance": instance,
            "started_unix_s": started_unix_s,
        }

    # --- Anywhere, one thread at a time, in order ---

    def run_line(self) -> bytes:
        """The first line."""
        return self._say("run", **self._header)

    def segment_line(self, number: int) -> bytes:
        """The first line of a further file."""
        return self._say(
            "segment",
            version=JOURNAL_VERSION,
            run=self.run,
            number=number,
            first_seq=self.events,
            previous_crc=f"{self._crc:08x}",
        )

    def steps_line(self, noted: Sequence[Noted]) -> bytes:
        """One line of steps: at most STEPS_PER_LINE_MAX."""
        first_seq = self.events
        self.events += len(noted)
        # Each is encoded at once: what lives for a line only would still be looked at by every garbage collection.
        encode, record = self._encode, self._record
        steps = b",".join([encode(record(seq, step)) for seq, step in enumerate(noted, first_seq)])
        return self._say("steps", steps=msgspec.Raw(b"[%b]" % steps))

    def gap_line(self, events: int) -> bytes:
        """Say that steps are missing here."""
        self.events += events
        return self._say("gap", events=events)

    def end_line(self) -> bytes:
        """The last line. The core is not stepped any more."""
        return self._say("end", events=self.events, final=final_state(self._core))

    def info(self, line: bytes) -> None:
        """Structlog hands over a rendered line here."""
        self._line = line

    def _say(self, kind: str, **fields: object) -> bytes:
        self._log.info(kind, **fields)
        return self._line

    def _render(self, logger: object, method: str, fields: Mapping[str, object]) -> bytes:
        body = self._encode({"event": fields["event"], **fields})
        line, self._crc = seal(body, self._crc)
        return line

    def _record(self, seq: int, noted: Noted) -> StepWritten:
        event, given, moves, _, books, error = noted
        states = self._states
        if not (given or moves or books or error):
            # Most events are of this kind; all of them are of a request.
            return StepWritten(seq, event, NOTHING, None, states.get(event.request_id, ""))  # type: ignore[attr-defined]
        before = self._digest
        answer = self._witness.answer(noted)
        digest = self._digest = self._witness.digest
        kind = type(event)
        same_pages, state = 0, ""
        if kind in _WITH_KEYS:
            event, same_pages = self._without_tokens(event)
        for request_id, moved_to in moves:
            if moved_to is _FAILED:
                del states[request_id]
                self._arrived.pop(request_id, None)
            else:
                states[request_id] = moved_to._value_
        if kind in _OF_REQUESTS:
            request_id = event.request_id  # type: ignore[attr-defined]  # All kinds of that set have one.
            if kind in _LAST and not moves and not error:
                states.pop(request_id, None)
            else:
                state = states.get(request_id, "")
        return StepWritten(seq, event, answer, None if digest == before else digest, state, same_pages)

    def _without_tokens(self, event: Event) -> tuple[Event, int]:
        assert isinstance(event, RequestArrived | FinishRequested | RetractRequested)
        if isinstance(event, RequestArrived):
            written = event.keys if self._digests is None else self._digests.of(event.keys)
            self._arrived[event.request_id] = (event.keys, written)
            deadline_at_s = NO_DEADLINE if event.deadline_at_s == NO_DEADLINE else event.deadline_at_s
            return msgspec.structs.replace(event, keys=written, deadline_at_s=deadline_at_s), 0
        # What was finished begins with what has arrived, whose pages are known and not written again.
        keys, known = self._arrived.pop(event.request_id, (b"", b""))
        if not event.keys.startswith(keys):
            keys = known = b""
        written = event.keys if self._digests is None else self._digests.of(event.keys, known)
        same_pages = len(keys) // self._core.settings.key_bytes
        return msgspec.structs.replace(event, keys=written[len(known) :]), same_pages


_OF_REQUESTS = frozenset(kind for kind in event_types() if "request_id" in kind.__struct_fields__)
# Reading a member off its class is a slow property in Python 3.11.
_FAILED = State.FAILED
# What ends a READY request; before that, an abort shows as a move.
_LAST = frozenset((FinishRequested, RetractRequested, AbortRequested))
_WITH_KEYS = frozenset((RequestArrived, FinishRequested, RetractRequested))
