"""Turns the steps of one core into journal lines. No thread, no clock of its own, no policy: whoever calls it writes.

Three parts: `note` belongs to the thread that steps the core and takes what may change after the step; `encode` is most
of the work (digests of page keys, JSON); lines add the checksums. The last two may run elsewhere and later.
Lines of steps are sealed as they come from the encoder; the few others are rendered by structlog.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import structlog

from tidekv.engine.journal.final import final_state
from tidekv.engine.journal.lines import JOURNAL_VERSION, seal, seal_steps
from tidekv.engine.journal.pages import DIGEST_BYTES, PageDigests
from tidekv.engine.journal.schema import code_checksum, package_versions, schema_checksum
from tidekv.states.events import NO_DEADLINE, FinishRequested, RequestArrived, RetractRequested
from tidekv.states.inspect.step_record import StepNotes, StepRecorder, encode_pages

if TYPE_CHECKING:
    from tidekv.states.core import Core

STEPS_PER_LINE_MAX = 512
ARRIVED_MIN = 256
"""Keys of so many requests are kept before those that are over are looked for."""


class EncodedSteps(NamedTuple):
    """Steps on their way to a line."""

    steps: int
    """How many."""
    json: bytes
    """A list of them."""
    keys_bytes: int
    """Bytes of page keys that they had."""


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
        breathe: Callable[[], None] | None = None,
    ) -> None:
        """`breathe` is called now and then while long prompts are hashed, to leave the interpreter to others."""
        self.run = secrets.token_hex(8)
        self._core = core
        self.step_recorder = StepRecorder(core)
        self.note = self.step_recorder.note
        """Takes the step that the core has just made; see StepRecorder.note."""
        self.events = 0
        """Events that are in the lines so far."""
        self._crc = 0
        self._digests = None if with_tokens else PageDigests(core.settings.key_bytes, breathe)
        self._arrived: dict[str, tuple[bytes, bytes]] = {}
        """By request: the keys that have arrived, and their digests, or no bytes where these were not kept."""
        self._arrived_max = ARRIVED_MIN
        self._encode = msgspec.json.Encoder(enc_hook=encode_pages).encode
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

    # --- One thread at a time, in the order of the steps ---

    def encode(self, noted: Sequence[StepNotes], *, pages_max: int = sys.maxsize) -> EncodedSteps:
        """Steps as they will be written, up to the first that would need more than `pages_max` pages to be hashed, all
        in all. Each of them once: what was encoded has digests in place of its keys.
        """
        left, count, keys_bytes = pages_max, len(noted), 0
        for at, step in enumerate(noted):
            if type(step.took) in WITH_KEYS:
                had_bytes = len(step.took.keys)  # type: ignore[attr-defined]  # All kinds of that set have them.
                hashed = self._hide_tokens(step, left)
                if hashed is None:
                    count, noted = at, noted[:at]
                    break
                left -= hashed
                keys_bytes += had_bytes
        return EncodedSteps(count, self._encode_whole(noted), keys_bytes)

    # --- One thread at a time, in the order of the lines ---

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

    def steps_pieces(self, encoded: EncodedSteps) -> list[bytes]:
        """One line of steps, in pieces: to put them together would copy them."""
        self.events += encoded.steps
        pieces, self._crc = seal_steps(encoded.json, self._crc)
        return pieces

    def steps_line(self, encoded: EncodedSteps) -> bytes:
        """One line of steps."""
        return b"".join(self.steps_pieces(encoded))

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

    def _encode_whole(self, value: object) -> bytes:
        try:
            return self._encode(value)
        except UnicodeEncodeError:
            # Half a character, as names of files in the words of an error may hold it: JSON has no word for that.
            return self._encode(_with_whole_characters(msgspec.to_builtins(value, enc_hook=encode_pages)))

    def _hide_tokens(self, step: StepNotes, pages_max: int) -> int | None:
        """Put digests in place of the keys; returns how many pages were hashed, None where that would be too many."""
        event = step.took
        if type(event) is RequestArrived:
            found = self._digests_of(event.keys, b"", pages_max)
            if found is None:
                return None
            written, hashed = found
            if len(self._arrived) > self._arrived_max:
                self._forget_the_dead()
            self._arrived[event.request_id] = (event.keys, written)
            deadline_at_s = NO_DEADLINE if event.deadline_at_s == NO_DEADLINE else event.deadline_at_s
            step.took = msgspec.structs.replace(event, keys=written, deadline_at_s=deadline_at_s)
            return hashed
        assert type(event) is FinishRequested or type(event) is RetractRequested
        # What was finished begins with what has arrived, whose pages are known and not written again.
        keys, known = self._arrived.get(event.request_id, NOT_ARRIVED)
        if not event.keys.startswith(keys):
            keys, known = NOT_ARRIVED
        found = self._digests_of(event.keys, known, pages_max)
        if found is None:
            return None
        written, hashed = found
        self._arrived.pop(event.request_id, None)
        key_bytes = self._core.settings.key_bytes
        step.same_pages = len(keys) // key_bytes
        left_out = step.same_pages * (key_bytes if self._digests is None else DIGEST_BYTES)
        step.took = msgspec.structs.replace(event, keys=written[left_out:])
        return hashed

    def _digests_of(self, keys: bytes, known: bytes, pages_max: int) -> tuple[bytes, int] | None:
        """What is written of keys, and how many pages were hashed for it; None where those would be too many."""
        digests = self._digests
        if digests is None:
            return keys, 0
        before = digests.hashed
        written = digests.of(keys, known, pages_max=pages_max)
        return None if written is None else (written, digests.hashed - before)

    def _forget_the_dead(self) -> None:
        """Drop the keys of requests that failed or were aborted. If an event of one is still to come, it is written
        with all its keys.
        """
        requests = self._core.state.requests
        for name in [name for name in self._arrived if name not in requests]:
            del self._arrived[name]
        self._arrived_max = ARRIVED_MIN + 2 * len(self._arrived)


NOT_ARRIVED = (b"", b"")
WITH_KEYS = frozenset((RequestArrived, FinishRequested, RetractRequested))


def _with_whole_characters(value: object) -> object:
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_with_whole_characters(name): _with_whole_characters(field) for name, field in value.items()}
    if isinstance(value, list | tuple):
        return [_with_whole_characters(entry) for entry in value]
    return value
