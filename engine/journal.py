"""The journal: one structured line a drain of the inbox, with every event that the core took.

The first line is a header. Pages are written as keyed digests of their tokens unless tokens are asked for; a key is
made for each run, so that nobody can find out by guessing which prompts were served. Writing never blocks the loop: a
thread writes, behind a bounded queue; lines that find the queue full are dropped, and a `gap` line says so.
"""

from __future__ import annotations

import hashlib
import io
import queue
import secrets
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
import structlog

from tidekv.states.errors import InvalidConfig
from tidekv.states.events import Event, FinishRequested, RequestArrived, RetractRequested

JOURNAL_VERSION = 1
QUEUE_LINES_MAX = 65536
PAGE_DIGEST_BYTES = 8
_KEYED = (RequestArrived, FinishRequested, RetractRequested)


class Journal:
    """Writes the journal of one run to a file."""

    def __init__(self, path: str, *, header: Mapping[str, object], key_bytes: int, with_tokens: bool) -> None:
        self.lines_dropped = 0
        self._key_bytes = key_bytes
        self._with_tokens = with_tokens
        self._key = secrets.token_bytes(16)
        self._lines: queue.Queue[bytes | None] = queue.Queue(QUEUE_LINES_MAX)
        try:
            self._file = Path(path).open("ab", buffering=io.DEFAULT_BUFFER_SIZE)  # noqa: SIM115 - closed by close().
        except OSError as error:
            raise InvalidConfig(f"journal {path!r} cannot be written: {error}") from error
        self._failure: OSError | None = None
        self._encoder = msgspec.json.Encoder()
        self._log = structlog.wrap_logger(
            self,
            processors=[self._render],
            wrapper_class=structlog.make_filtering_bound_logger(0),
        )
        self._thread = threading.Thread(target=self._write_lines, name="tidekv-journal", daemon=True)
        self._thread.start()
        self._log.info(
            "run",
            version=JOURNAL_VERSION,
            page_keys="tokens" if with_tokens else "digests",
            started_unix_s=time.time(),
            **header,
        )

    def write(self, events: list[Event], first_seq: int) -> None:
        """Take the events of one drain; see `EventLog`."""
        self._log.info("drain", seq=first_seq, events=[self._plain(event) for event in events])

    def info(self, line: bytes) -> None:
        """Structlog hands over a rendered line here."""
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self.lines_dropped += 1

    def close(self) -> None:
        """Write what is queued and the end record, and close the file."""
        self._log.info("end", lines_dropped=self.lines_dropped)
        self._lines.put(None)
        self._thread.join()
        if self._failure is not None:
            structlog.get_logger("tidekv.journal").warning("the journal is incomplete", cause=str(self._failure))

    def _render(self, logger: object, method: str, line: Mapping[str, object]) -> bytes:
        return self._encoder.encode(line) + b"\n"

    def _plain(self, event: Event) -> Event | dict[str, object]:
        if not isinstance(event, _KEYED):
            return event
        fields: dict[str, object] = msgspec.to_builtins(event, builtin_types=(bytes,))
        fields["keys"] = event.keys.hex() if self._with_tokens else self._digests(event.keys)
        return fields

    def _digests(self, keys: bytes) -> str:
        """A digest a page, each over its tokens alone: the index asks pages for equality and nothing else."""
        width = self._key_bytes
        return "".join(
            hashlib.blake2b(keys[at : at + width], digest_size=PAGE_DIGEST_BYTES, key=self._key).hexdigest()
            for at in range(0, len(keys), width)
        )

    def _write_lines(self) -> None:
        dropped_before = 0
        with self._file:
            while (line := self._lines.get()) is not None:
                try:
                    if self.lines_dropped > dropped_before:
                        gap = {"event": "gap", "lines": self.lines_dropped - dropped_before}
                        dropped_before += self.lines_dropped - dropped_before
                        self._file.write(self._encoder.encode(gap) + b"\n")
                    self._file.write(line)
                    if self._lines.empty():
                        self._file.flush()
                except OSError as error:
                    # A full disk ends the journal, never the service.
                    self._failure = error
                    self.lines_dropped += 1
