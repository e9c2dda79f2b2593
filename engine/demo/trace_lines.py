"""Lines of a recording, plain or gzip, with errors that name file and line.

Memory is bounded by the maximum length of a line, also for a small gzip file that unpacks to a huge one.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final, TypeVar, cast

import msgspec

from tidekv.states.errors import InvalidRequest

GZIP_MAGIC: Final = b"\x1f\x8b"
LINE_BYTES_MAX: Final = 1 << 28

Record = TypeVar("Record")


def trace_error(path: Path, line: int, what: str) -> InvalidRequest:
    """Return the error for one line of a recording; line 0 stands for the whole file."""
    return InvalidRequest(f"trace {path}, line {line}: {what}" if line else f"trace {path}: {what}")


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield each line that is not blank with its number, from 1. The file is open until the iterator ends or is closed.

    Raises InvalidRequest if the file cannot be opened, read or unpacked, or if a line exceeds LINE_BYTES_MAX.
    """
    number = 0
    try:
        with _opened(path) as file:
            while line := file.readline(LINE_BYTES_MAX + 1):
                number += 1
                if len(line) > LINE_BYTES_MAX:
                    raise trace_error(path, number, f"the line is longer than {LINE_BYTES_MAX} bytes")
                if not line.isspace():
                    yield number, line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise trace_error(path, number + 1, f"the gzip stream is damaged or cut off ({error})") from error
    except OSError as error:
        raise trace_error(path, number and number + 1, f"cannot be read ({error.strerror or error})") from error


def decode_line(decoder: msgspec.json.Decoder[Record], line: bytes, *, path: Path, number: int, wanted: str) -> Record:
    """Decode one line. Raises InvalidRequest, which names the wrong or missing field and the expected format."""
    try:
        return decoder.decode(line)
    except msgspec.ValidationError as error:
        raise trace_error(path, number, f"{error}; expected {wanted}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise trace_error(path, number, f"not valid JSON ({error}); expected {wanted}") from error


def _opened(path: Path) -> BinaryIO:
    """Open a recording, and unpack it if its first bytes are those of gzip, regardless of its name."""
    with path.open("rb") as file:
        packed = file.read(len(GZIP_MAGIC)) == GZIP_MAGIC
    return cast(BinaryIO, gzip.open(path, "rb")) if packed else path.open("rb")
