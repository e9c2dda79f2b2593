"""The file of a lasting host pool: pages and their records, mapped into the memory of one process at a time.

    [ first block, 4096 bytes | a slot for each page | pages, from a multiple of the file system's block on ]

The first block says what the pages are: their number and size, and the digest of everything that makes their bytes
interchangeable. Pages of anything else are never used: the file starts empty then. It is sparse: memory of tmpfs is
taken when a page is first written. A file on a disk is allocated whole.

One process has a file at a time, by a lock that the kernel drops with it.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
import time
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from tidekv.backends.host.page_records import PageRecords, slot_bytes
from tidekv.backends.storage.file.ownership import file_system_of, open_file
from tidekv.states.errors import InvalidConfig, OutOfMemory, cause_of

MAGIC: Final = b"tidekvL2"
VERSION: Final = 1
"""Increase it when the meaning of the file's bytes changes."""
BLOCK_BYTES: Final = 4096
IN_MEMORY: Final = frozenset(("tmpfs", "ramfs", "hugetlbfs"))
LOCK_WAIT_S: Final = 10.0
"""Maximum seconds that opening waits for the process that has the file: one that was killed takes a while to end."""
LOCK_POLL_S: Final = 0.05
_HEAD: Final = struct.Struct("<8sQIIQQ32sH")
_PROCESS: Final = struct.Struct("<I")
_PROCESS_AT: Final = BLOCK_BYTES - _PROCESS.size
_CHECKED_FROM: Final = 16
_WORDS_MAX: Final = _PROCESS_AT - _HEAD.size


class PoolShape(NamedTuple):
    """The sizes of a pool and its file."""

    page_count: int
    page_bytes: int
    slot_bytes: int

    def __str__(self) -> str:
        return f"{self.page_count} pages of {self.page_bytes} bytes"

    def pages_at(self, block_bytes: int) -> int:
        """Return where the pages begin in a file system of such blocks."""
        return -(-(BLOCK_BYTES + self.page_count * self.slot_bytes) // block_bytes) * block_bytes

    def total_bytes(self, block_bytes: int) -> int:
        """Return the size of the file."""
        end = self.pages_at(block_bytes) + self.page_count * self.page_bytes
        return -(-end // block_bytes) * block_bytes


class FirstBlock(NamedTuple):
    """What the first block says."""

    shape: PoolShape
    identity: bytes
    words: str
    """The model and the place of the rank, for people."""
    process: int
    """The process that opened the file last."""


def read_first_block(block: bytes) -> FirstBlock | None:
    """Return what a first block says; None if it is damaged, unfinished, or of another version."""
    magic, check, version, pages, page_bytes, slot, identity, word_bytes = _HEAD.unpack_from(block)
    if magic != MAGIC or check != _check(block) or version != VERSION:
        return None
    words = block[_HEAD.size : _HEAD.size + word_bytes].decode(errors="replace")
    (process,) = _PROCESS.unpack_from(block, _PROCESS_AT)
    return FirstBlock(PoolShape(pages, page_bytes, slot), identity, words, process)


def is_pool(block: bytes) -> bool:
    """Whether a file that begins with these bytes is a pool, or one whose creation was cut off."""
    written = block[:BLOCK_BYTES].rstrip(b"\0")
    return written.startswith(MAGIC) or MAGIC.startswith(written)


def _check(block: bytes) -> int:
    return xxhash.xxh3_64_intdigest(block[_CHECKED_FROM:_PROCESS_AT])


class PoolFile:
    """An open file of a pool, locked for this process. `pages` is uint8 [pages, page_bytes], shared with the file."""

    def __init__(self, path: Path, file: int, shape: PoolShape, prepared: Prepared) -> None:
        self.path = path
        self._file = file
        self._shape = shape
        self._emptied = prepared.emptied
        block_bytes = _block_bytes(file)
        self._map = mmap.mmap(file, shape.total_bytes(block_bytes))
        whole: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self._block = whole[:BLOCK_BYTES]
        slots = whole[BLOCK_BYTES : BLOCK_BYTES + shape.page_count * shape.slot_bytes]
        self.records = PageRecords(slots.reshape(shape.page_count, shape.slot_bytes), is_empty=prepared.is_new)
        at = shape.pages_at(block_bytes)
        self.pages = whole[at : at + shape.page_count * shape.page_bytes].reshape(shape.page_count, shape.page_bytes)
        if not self._block[: len(MAGIC)].any():
            # Before anything else is written: a file that begins with other bytes is not touched.
            self._block[: len(MAGIC)] = np.frombuffer(MAGIC, np.uint8)
        self._block[_PROCESS_AT:] = np.frombuffer(_PROCESS.pack(os.getpid()), np.uint8)

    @classmethod
    def open(cls, path: Path, *, page_count: int, page_bytes: int, key_bytes_max: int) -> PoolFile:
        """Open or create the file of a pool, and lock it. The directory must exist.

        Raises InvalidConfig if another process has it for LOCK_WAIT_S, if it cannot be opened, is not a pool, or is
        another user's; OutOfMemory if its file system has not enough room.
        """
        shape = PoolShape(page_count, page_bytes, slot_bytes(key_bytes_max))
        file = _open_locked(path)
        try:
            return cls(path, file, shape, _prepare(file, path, shape))
        except OSError as error:
            os.close(file)
            raise InvalidConfig(f"host pool {path} cannot be used: {cause_of(error)}") from error
        except BaseException:
            os.close(file)
            raise

    def begin(self, identity: bytes, words: str) -> str:
        """Say whose pages these are, by a digest of 32 bytes and in words. Clears the records of any others.

        Returns why what was in the file is not used; nothing if it is, or if there was nothing. Call it before the
        records are read.
        """
        block = self._block.tobytes()
        found = read_first_block(block)
        if found is not None and found.identity == identity and found.shape == self._shape:
            return ""
        emptied = self._emptied
        if found is not None and not emptied:
            emptied = f"it has pages of {found.words}"
        # In this order: a process that ends in between leaves a file that starts empty.
        self._block[len(MAGIC) : _CHECKED_FROM] = 0
        self.records.clear_all()
        text = words.encode(errors="replace")[:_WORDS_MAX]
        new = bytearray(block[:_PROCESS_AT].ljust(BLOCK_BYTES, b"\0"))
        _HEAD.pack_into(new, 0, MAGIC, 0, VERSION, *self._shape, identity, len(text))
        new[_HEAD.size : _PROCESS_AT] = text.ljust(_WORDS_MAX, b"\0")
        self._block[_CHECKED_FROM:_PROCESS_AT] = np.frombuffer(new, np.uint8)[_CHECKED_FROM:_PROCESS_AT]
        check = _check(bytes(new)).to_bytes(_CHECKED_FROM - len(MAGIC), "little")
        self._block[len(MAGIC) : _CHECKED_FROM] = np.frombuffer(check, np.uint8)
        return emptied

    def close(self) -> None:
        """Release the file for other processes. Nothing may use the pages or records any more."""
        # The mapping has a descriptor of its own, and lives as long as the arrays do.
        fcntl.flock(self._file, fcntl.LOCK_UN)
        os.close(self._file)


def is_held(file: int) -> bool:
    """Whether a process has the pool of an open file."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(file, fcntl.LOCK_UN)
    return False


def _open_locked(path: Path) -> int:
    """Open or create a file and lock it. Raises InvalidConfig."""
    ends_at_s = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            file = open_file(path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise InvalidConfig(f"host pool {path} cannot be opened: {cause_of(error)}") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.stat().st_ino == os.fstat(file).st_ino:
                return file
            # Removed between the open and the lock: a file without a name, which no other process finds.
        except FileNotFoundError:
            pass
        except BlockingIOError:
            if time.monotonic() > ends_at_s:
                found = read_first_block(start_of(file))
                os.close(file)
                by = f" (process {found.process})" if found is not None else ""
                raise InvalidConfig(
                    f"host pool {path} is in use by another process{by}: stop it, or give this worker a path of its own"
                ) from None
        os.close(file)
        time.sleep(LOCK_POLL_S)


class Prepared(NamedTuple):
    """What was in a file before it got its size."""

    is_new: bool
    """It has nothing now."""
    emptied: str
    """Why what was in it is not used; empty if it is, or if there was nothing."""


def _prepare(file: int, path: Path, shape: PoolShape) -> Prepared:
    """Give the file its size, and remove what it has if that is another pool's."""
    is_new, emptied = True, ""
    if os.fstat(file).st_size:
        block = start_of(file)
        if not is_pool(block):
            raise InvalidConfig(f"host pool {path} is a file, but not a pool of tidekv: name another path")
        found = read_first_block(block)
        if found is None:
            # A file whose creation was cut off has lost nothing.
            begun = block[len(MAGIC) : _PROCESS_AT].strip(b"\0")
            emptied = "its first block is damaged, or of another version" if begun else ""
        elif found.shape != shape:
            emptied = f"it has {found.shape}, not {shape}"
        is_new = found is None or found.shape != shape
        if is_new:
            os.ftruncate(file, 0)
    total = shape.total_bytes(_block_bytes(file))
    _check_room(file, path, total)
    os.ftruncate(file, total)
    if file_system_of(os.fstat(file).st_dev) not in IN_MEMORY:
        # A disk that is full later would end the process at its next write to a page.
        _allocate(file, path, total)
    return Prepared(is_new, emptied)


def _allocate(file: int, path: Path, total: int) -> None:
    try:
        os.posix_fallocate(file, 0, total)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise OutOfMemory(f"host pool {path} needs {total} bytes; its disk has not enough room") from error
        # File systems that cannot allocate ahead.


def _check_room(file: int, path: Path, total: int) -> None:
    there, found = os.fstatvfs(file), os.fstat(file)
    free, has = there.f_bavail * there.f_frsize, found.st_blocks * 512
    # Some file systems report no size: then there is nothing to compare with.
    if there.f_blocks and total - has > free:
        raise OutOfMemory(
            f"host pool {path} needs {total} bytes; its file system has {free + has} for it"
            " (Docker's /dev/shm has 64 MiB: --shm-size)"
        )


def _block_bytes(file: int) -> int:
    """Return the bytes of a block: those of a huge page on hugetlbfs."""
    return max(BLOCK_BYTES, os.fstatvfs(file).f_bsize)


def start_of(file: int) -> bytes:
    """Return the first block of an open file, filled up by zeros."""
    return os.pread(file, BLOCK_BYTES, 0).ljust(BLOCK_BYTES, b"\0")
