"""Files that the kernel has in memory, or has not: what makes a read of storage one of the disk, and the proof of it.

Linux only. What was dropped is counted page by page before a read, and what the disk brought is read from the process's
own counter behind it, so that a file system that keeps files in memory is noticed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from pathlib import Path

ATTEMPTS_MAX = 5
PAGE_BYTES = mmap.PAGESIZE


class NoDisk(Exception):
    """The folder is not on a disk whose reads can be told from those of memory; the words say why."""


class Cached:
    """The files of a folder below which nothing is written any more, as the kernel has them in memory."""

    def __init__(self, folder: Path, pattern: str) -> None:
        """Write them out, so that they can be dropped. Raises NoDisk where nothing can be said of them."""
        if sys.platform != "linux":
            raise NoDisk("only Linux says what it has of a file in memory")
        self._files = [path for path in folder.rglob(pattern) if path.stat().st_size]
        if not self._files:
            raise NoDisk(f"there is no {pattern} below {folder}")
        for path in self._files:
            with path.open("rb") as file:
                os.fsync(file.fileno())

    def drop(self) -> None:
        """Have the kernel forget all of them. Raises NoDisk if it does not."""
        for _ in range(ATTEMPTS_MAX):
            for path in self._files:
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            left = self.resident_bytes()
            if not left:
                return
        raise NoDisk(f"the kernel keeps {left} bytes of {self._files[0].parent} in memory, whatever it is told")

    def resident_bytes(self) -> int:
        """How much of them is in memory."""
        return sum(map(_resident_bytes, self._files))


def disk_bytes() -> int:
    """What this process has had read from disks so far."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


def _resident_bytes(path: Path) -> int:
    size = path.stat().st_size
    found = (ctypes.c_ubyte * (-(-size // PAGE_BYTES)))()
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as mapped:
        view = ctypes.c_char.from_buffer(mapped)
        try:
            failed = ctypes.CDLL(None, use_errno=True).mincore(
                ctypes.c_void_p(ctypes.addressof(view)), ctypes.c_size_t(size), found
            )
        finally:
            del view
    if failed:
        raise NoDisk(f"mincore of {path}: {os.strerror(ctypes.get_errno())}")
    return sum(byte & 1 for byte in bytes(found)) * PAGE_BYTES
