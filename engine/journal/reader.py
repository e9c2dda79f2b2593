"""Reader of a journal: yields its lines, file by file, and checks their chain of checksums.

Raises JournalRefused for a file that is no journal of this version, and JournalDamaged for a line that was changed,
lost or moved. A run that was killed has no end record and may end in half a line: that is reported as `torn`, and every
line before it is valid.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import msgspec

from tidekv.engine.journal.format import (
    JOURNAL_VERSION,
    AnyLine,
    EndLine,
    GapLine,
    RunLine,
    SegmentLine,
    TurnLine,
    encode_line,
    schema_checksum,
    unseal,
)
from tidekv.engine.journal.log_lines import JournalLog, canonical, is_log
from tidekv.engine.journal.segments import segment_numbers, segment_path
from tidekv.states.errors import JournalDamaged, JournalRefused, cause_of

_DECODER = msgspec.json.Decoder(AnyLine)
NOT_AS_WRITTEN = (
    "this is not the line that was written here: it was changed, one before it is missing, or two changed places"
)
RUN_BEGINS = b'{"event":"run"'
SEGMENT_BEGINS = b'{"event":"segment"'


class _Start(msgspec.Struct):
    """Fields of the first line in all versions."""

    event: str = ""
    version: int = 0
    schema: str = ""


class JournalReader:
    """The lines of one journal, from its first file on."""

    def __init__(self, path: str | Path, *, force: bool = False, run: str = "") -> None:
        """Read the header. Raises JournalRefused, JournalDamaged. `force` tries a journal of other event types.

        A log of the application with a journal's records is read as well; `run` chooses one of several in it.
        """
        self.path = Path(path)
        self.torn: JournalDamaged | None = None
        """For a journal without an end record, set at its end: the cause and the line."""
        self.place = (str(self.path), 1)
        """File and number of the last line read."""
        self._force = force
        self._sum = 0
        self._log: JournalLog | None = None
        self._run = run
        self.header = self._read_header()

    def _read_header(self) -> RunLine:
        try:
            if self.path.is_dir():
                raise JournalRefused(f"{str(self.path)!r} is a directory: name one of the journals in it")
            with self.path.open("rb") as file:
                line = file.readline()
        except FileNotFoundError:
            later = segment_numbers(self.path)
            if later:
                raise JournalRefused(
                    f"journal {str(self.path)!r} begins at segment {later[0]}: earlier ones were deleted, and a replay "
                    "needs the run from its start"
                ) from None
            raise JournalRefused(f"there is no journal {str(self.path)!r}") from None
        except OSError as error:
            raise JournalRefused(f"journal {str(self.path)!r} cannot be read: {cause_of(error)}") from error
        if not line:
            raise JournalRefused(f"{str(self.path)!r} is empty: no run was ever written to it")
        if not line.startswith((RUN_BEGINS, SEGMENT_BEGINS)) and is_log(self.path):
            self._log = JournalLog(self.path, run=self._run)
            path, number, line = next(self._log_lines())
            self.place = (path, number)
            line += b"\n"
        unsealed = unseal(line.removesuffix(b"\n"), 0)
        body = line if unsealed is None else unsealed[0]
        start = _start_of(body)
        # Earlier versions had another checksum, or none; a header of this version with a wrong checksum was changed.
        has_checksum = b'"sum":"' in line
        is_another = start.version != JOURNAL_VERSION if unsealed is not None or not has_checksum else False
        if start.event == "run" and is_another:
            raise JournalRefused(
                f"journal {str(self.path)!r} has version {start.version}, this tidekv reads version "
                f"{JOURNAL_VERSION}: use the tidekv that wrote it"
            )
        if line.startswith(SEGMENT_BEGINS):
            raise JournalRefused(
                f"{str(self.path)!r} is a later segment of a journal: name its first file, without the number"
            )
        if unsealed is None:
            if line.startswith(RUN_BEGINS) or has_checksum:
                cause = "the header was changed" if line.endswith(b"\n") else "the header is cut off"
                raise self._damaged(1, cause)
            raise JournalRefused(f"{str(self.path)!r} is no tidekv journal: its first line is not a run record")
        if start.event != "run":
            raise self._damaged(1, "the header is missing")
        if start.schema != schema_checksum() and not self._force:
            raise JournalRefused(
                f"journal {str(self.path)!r} was written with other event types (schema {start.schema}, ours is "
                f"{schema_checksum()}): use the tidekv that wrote it, or --force"
            )
        header = self._decode(body, 1)
        assert isinstance(header, RunLine)
        return header

    def lines(self) -> Iterator[TurnLine | EndLine]:
        """Yield all lines after the header, in order; stop at the end record, or set `torn` and stop.

        Raises JournalDamaged at the first line that is not what was written there.
        """
        self._sum = 0
        if self._log is not None:
            yield from self._lines_of_log()
            return
        number = 0
        while True:
            path = segment_path(self.path, number)
            ended = yield from self._lines_of(path, number)
            number += 1
            if ended or self.torn is not None:
                return
            if not segment_path(self.path, number).exists():
                later = [found for found in segment_numbers(self.path) if found > number]
                path_text, line = self.place
                if later:
                    raise JournalDamaged(
                        path=path_text, line=line + 1, cause=f"the file of segment {number} is missing"
                    )
                self.torn = self._without_end()
                return

    def _lines_of_log(self) -> Iterator[TurnLine | EndLine]:
        for path, number, raw in self._log_lines():
            self.place = (path, number)
            line = self._checked(raw, number)
            if isinstance(line, GapLine):
                raise self._gap(line, number)
            if isinstance(line, TurnLine | EndLine):
                yield line
            if isinstance(line, EndLine):
                return
        self.torn = self._without_end()

    def _log_lines(self) -> Iterator[tuple[str, int, bytes]]:
        assert self._log is not None
        for path, number, raw in self._log.lines():
            try:
                yield path, number, canonical(raw, _DECODER.decode, encode_line)
            except msgspec.DecodeError:
                yield path, number, raw

    def _without_end(self) -> JournalDamaged:
        path, line = self.place
        cause = "the end record is missing: the run was killed, or the tail was lost"
        return JournalDamaged(path=path, line=line + 1, cause=cause)

    def _gap(self, line: GapLine, at: int) -> JournalDamaged:
        return self._damaged(at, f"{line.events} events were never written: the disk was too slow")

    def _lines_of(self, path: Path, number: int) -> Generator[TurnLine | EndLine, None, bool]:
        ended = False
        with path.open("rb") as file:
            for at, raw in enumerate(file, start=1):
                self.place = (str(path), at)
                if ended:
                    raise self._damaged(at, "something follows the end record")
                if not raw.endswith(b"\n"):
                    self.torn = self._damaged(at, "the last line is cut off: the run was killed, or the tail was lost")
                    return ended
                line = self._checked(raw[:-1], at)
                if isinstance(line, RunLine | SegmentLine):
                    self._check_start(line, at, number)
                elif isinstance(line, GapLine):
                    raise self._gap(line, at)
                else:
                    ended = isinstance(line, EndLine)
                    yield line
        return ended

    def _check_start(self, line: RunLine | SegmentLine, at: int, number: int) -> None:
        expected = RunLine if number == 0 else SegmentLine
        if at != 1 or not isinstance(line, expected) or line.run != self.header.run:
            raise self._damaged(at, "a header stands where none was written")

    def _checked(self, line: bytes, at: int) -> AnyLine:
        unsealed = unseal(line, self._sum)
        if unsealed is None:
            raise self._damaged(at, NOT_AS_WRITTEN)
        body, self._sum = unsealed
        return self._decode(body, at)

    def _decode(self, body: bytes, at: int) -> AnyLine:
        try:
            line: AnyLine = _DECODER.decode(body)
            return line
        except msgspec.DecodeError as error:
            # The checksum is right, so another version of tidekv wrote this line.
            raise JournalRefused(f"{self.place[0]}:{at} cannot be read by this tidekv: {error}") from error

    def _damaged(self, at: int, cause: str) -> JournalDamaged:
        return JournalDamaged(path=self.place[0], line=at, cause=cause)


def _start_of(body: bytes) -> _Start:
    try:
        return msgspec.json.decode(body, type=_Start)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _Start()
