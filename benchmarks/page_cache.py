"""Control of the kernel's page cache: makes a read of storage one of the disk, and verifies that it was.

Linux only. The pages left in memory are counted before a read, and the bytes that came from the disk are read from the
process's own counter after it, so that a file system that keeps files in memory is detected.
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
    """Reads of disk and of memory cannot be distinguished in this folder; the text is the reason."""


class Cached:
    """The files of a folder that is no longer written, as cached by the kernel."""

    def __init__(self, folder: Path, pattern: str) -> None:
        """Write the files to disk, so that they can be dropped. Raises NoDisk if their state cannot be determined."""
        if sys.platform != "linux":
            raise NoDisk("only on Linux can the cached part of a file be determined")
        self._files = [path for path in folder.rglob(pattern) if path.stat().st_size]
        if not self._files:
            raise NoDisk(f"there is no {pattern} below {folder}")
        for path in self._files:
            with path.open("rb") as file:
                os.fsync(file.fileno())

    def drop(self) -> None:
        """Drop all of them from the page cache. Raises NoDisk if some stay."""
        for _ in range(ATTEMPTS_MAX):
            for path in self._files:
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            left = self.resident_bytes()
            if not left:
                return
        raise NoDisk(f"the kernel keeps {left} bytes of {self._files[0].parent} in memory after POSIX_FADV_DONTNEED")

    def resident_bytes(self) -> int:
        """Return the number of their bytes that are in memory."""
        return sum(map(_resident_bytes, self._files))


def disk_bytes() -> int:
    """Return the bytes that were read from disks for this process so far."""
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
