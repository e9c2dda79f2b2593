"""Options of the `file:` engine: defaults and allowed values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tidekv.backends.storage.options import Choice, Number, Size, UriOption, read_options

OPTIONS: Final[Mapping[str, UriOption]] = {
    "capacity": Size(),
    "segment": Size(minimum_bytes=1 << 16),
    "chunk": Size(minimum_bytes=1 << 12),
    "low_water": Number(0.1, 1.0),
    "io": Choice("threads", "nixl"),
    "queue": Choice("aio", "uring"),
    "inline": Size(minimum_bytes=0),
    "threads": Number(1, 64),
    "busy_timeout_s": Number(0.0, 60.0),
}


@dataclass(frozen=True, slots=True)
class FileOptions:
    """Settings of one directory.

    `capacity`: maximum bytes of all segment files, of every namespace. `segment`: approximate bytes of one file; larger
    if there would be too many files. `chunk`: approximate bytes of one transfer. `low_water`: share of the pages that
    stays when room is made. `io`: how pages move. `queue`: the queue that NIXL uses. `threads`: workers for pages and
    their checksums (with io=nixl, for checksums only). `inline`: maximum bytes that one call reads on the event loop
    itself, if the kernel has them in memory; 0 disables that. `busy_timeout_s`: seconds to wait for another process
    that has the index locked.
    """

    root: Path
    capacity: int = 10 * 1000**3
    segment: int = 256 << 20
    chunk: int = 8 << 20
    low_water: float = 0.95
    io: str = "threads"
    queue: str = "aio"
    threads: int = 2
    inline: int = 128 << 10
    busy_timeout_s: float = 2.0


def read_file_options(root: Path, given: Mapping[str, object]) -> FileOptions:
    """Check options; InvalidConfig names the wrong one, and what is allowed."""
    values = read_options("the file: engine", given, OPTIONS)
    return FileOptions(root=root, **values)  # type: ignore[arg-type]  # Each option has checked the type of its value.
