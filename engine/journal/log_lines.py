"""The journal in the log of the application: writing its lines as records, and finding them between others.

A record of the journal is `{"event": "journal", "journal_run": …, "journal_line": …, "journal": {the line}, …}`, with
whatever the processors of the application add. Each line keeps its checksum, so one that was lost or changed on the way
is found as in a file. Lines are counted, so the order of files, and of records within them, does not matter.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import structlog

from tidekv.engine.log import engine_log
from tidekv.states.errors import InvalidConfig, JournalRefused, cause_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

LOG = engine_log("tidekv.journal")
MARK: Final = b'"journal_run"'
"""What each record has in any JSON."""


class LogLines:
    """Writer of lines to the application's structlog, in place of `SegmentFiles`. Used on the journal's thread only."""

    number = 0

    def __init__(self, run: str, run_line: bytes) -> None:
        """Raises InvalidConfig if the application has not configured structlog, or takes no records at level info."""
        if not structlog.is_configured() or not LOG.takes("info"):
            raise InvalidConfig(
                "engine.journal.log writes to the application's structlog: call structlog.configure with a JSON "
                "renderer before the engine starts, and let the logger tidekv.journal take level INFO"
            )
        self._run = run
        self._lines = 0
        self.write([run_line])

    def write(self, pieces: Sequence[bytes]) -> None:
        """Log sealed lines. Raises what the application's processors raise."""
        for piece in pieces:
            line = msgspec.json.decode(piece)
            LOG.info("journal", journal_run=self._run, journal_line=self._lines, journal=line)
            self._lines += 1

    def begin_next(self) -> None:
        """Never called: rotation is the application's, so the journal is written without segments."""

    def close(self) -> None:
        """Nothing to close: the output is the application's."""


class Found(NamedTuple):
    """A line of a journal in a log: where it stands, and the record's bytes."""

    at: int
    path: str
    number: int
    offset: int
    size: int


class _Record(msgspec.Struct):
    journal_run: str
    journal_line: int
    journal: msgspec.Raw


_DECODER = msgspec.json.Decoder(_Record)


class JournalLog:
    """The lines of one run in a log, of which only the places are in memory."""

    def __init__(self, path: Path, *, run: str = "") -> None:
        """Search the log and its rotated files, `NAME.*`. `run` begins the name of a run; without it the newest is
        read. Raises JournalRefused if the log has no such run.
        """
        runs: dict[str, dict[int, Found]] = {}
        for file in rotated(path):
            for found, name in _records_of(file):
                runs.setdefault(name, {})[found.at] = found
        self.runs = list(runs)
        """Names of all runs, the oldest first."""
        chosen = [name for name in runs if name.startswith(run)]
        if not chosen:
            there = ", ".join(runs) or "none"
            raise JournalRefused(f"{str(path)!r} has no journal of a run {run!r}: it has {there}")
        self._lines = [found for _, found in sorted(runs[chosen[-1]].items())]

    def lines(self) -> Iterator[tuple[str, int, bytes]]:
        """Yield the sealed lines in order, each with the file and the number of the line that it stands in."""
        for found in self._lines:
            with Path(found.path).open("rb") as file:
                file.seek(found.offset)
                record = _DECODER.decode(file.read(found.size))
            yield found.path, found.number, bytes(record.journal)


def is_log(path: Path) -> bool:
    """Whether a file, or one that it was rotated to, has records of a journal."""
    return any(True for file in rotated(path) for _ in _records_of(file))


def rotated(path: Path) -> Iterable[Path]:
    """Return a log's files, the newest last: by time of change, since names of rotated files go up or down."""
    files = [path, *path.parent.glob(f"{path.name}.*")]
    return sorted((file for file in files if file.is_file()), key=lambda file: file.stat().st_mtime_ns)


def _records_of(path: Path) -> Iterator[tuple[Found, str]]:
    offset = 0
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                if MARK in raw and (begin := raw.find(b"{")) >= 0:
                    # What stands in front of the object, as time and level of a handler, is left out.
                    body = raw[begin : raw.rfind(b"}") + 1]
                    try:
                        record = _DECODER.decode(body)
                    except msgspec.DecodeError:
                        record = None  # Cut off, or another record with this word: a missing line is found by its sum.
                    if record is not None:
                        found = Found(record.journal_line, str(path), number, offset + begin, len(body))
                        yield found, record.journal_run
                offset += len(raw)
    except OSError as error:
        raise JournalRefused(f"{str(path)!r} cannot be read: {cause_of(error)}") from error


def canonical(line: bytes, decode: Any, encode: Any) -> bytes:  # Any: a decoder's and an encoder's functions.
    """Return the bytes of a line as the journal encodes it: a renderer may order fields and write numbers otherwise."""
    fields: dict[str, Any] = msgspec.json.decode(line)
    checksum = fields.pop("sum", "")
    body: bytes = encode(decode(msgspec.json.encode(fields)))
    return b'%b,"sum":"%b"}' % (body[:-1], str(checksum).encode())
