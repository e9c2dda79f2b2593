"""Files of lasting host pools on this machine: which of them a process has, and those that none has."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

from tidekv.backends.host.pool_file import IN_MEMORY, MAGIC, is_held, read_first_block, start_of
from tidekv.backends.storage.file.ownership import open_file
from tidekv.engine.doctor.finding import Finding, in_bytes
from tidekv.states.errors import InvalidConfig, cause_of

FILES_MAX: Final = 10_000
"""Maximum files that are looked at in one file system."""


class FoundPool(NamedTuple):
    """One pool of this user."""

    path: Path
    bytes_held: int
    words: str
    """The model that its pages are of."""
    process: int
    """The process that opened it last; 0: unknown."""
    is_held: bool
    """Whether a process has it now."""

    def __str__(self) -> str:
        holder = f"process {self.process}" if self.is_held else "no process"
        return f"{self.path} ({in_bytes(self.bytes_held)}, {self.words}): {holder}"


def host_pools(root: Path = Path("/")) -> Finding:
    """Look for pools in memory (tmpfs, hugetlbfs), which take it whether or not a worker runs."""
    found = [pool for place in _places(root) for pool in _pools_in(place)]
    left = [pool for pool in found if not pool.is_held]
    if left:
        advice = "Start the worker that has the path, or free the memory: tidekv doctor --free-pool PATH"
        return Finding("host pools", "warn", "; ".join(map(str, left)), advice)
    return Finding("host pools", "ok", "; ".join(map(str, found)) or "no lasting ones in memory")


def free_pool(path: Path) -> Finding:
    """Remove the file of a pool that no process has. Raises InvalidConfig for any other file."""
    try:
        file = open_file(path, os.O_RDWR)
    except OSError as error:
        raise InvalidConfig(f"--free-pool: {path} cannot be opened: {cause_of(error)}") from error
    try:
        if not start_of(file).startswith(MAGIC):
            raise InvalidConfig(f"--free-pool: {path} is not a host pool")
        pool = _describe(path, file)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidConfig(f"--free-pool: process {pool.process} has {path}: stop it first") from None
        # Under the lock: a worker that waits for it makes a new file.
        path.unlink()
        return Finding("host pools", "ok", f"freed {path}: {in_bytes(pool.bytes_held)}, {pool.words}")
    finally:
        os.close(file)


def _places(root: Path) -> list[Path]:
    """Return the mount points of file systems in memory, and /dev/shm."""
    places = {root / "dev/shm": None}
    try:
        lines = (root / "proc/self/mounts").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, place, kind, *_ = line.split(" ")
        if kind in IN_MEMORY:
            places[root / place.replace("\\040", " ").lstrip("/")] = None
    return [place for place in places if place.is_dir()]


def _pools_in(place: Path) -> Iterator[FoundPool]:
    device = place.stat().st_dev
    for path in islice(_files_below(place, device), FILES_MAX):
        try:
            found = path.lstat()
            if found.st_uid != os.geteuid() or found.st_dev != device or found.st_size < len(MAGIC):
                continue
            file = open_file(path, os.O_RDONLY)
        except OSError:
            continue  # Removed meanwhile, a pipe, or not readable: no pool that a worker here could have.
        try:
            if start_of(file).startswith(MAGIC):
                yield _describe(path, file)
        except OSError:
            continue
        finally:
            os.close(file)


def _files_below(place: Path, device: int) -> Iterator[Path]:
    for folder, folders, names in os.walk(place):
        # Other file systems are places of their own.
        folders[:] = [name for name in folders if _device_of(Path(folder, name)) == device]
        yield from (Path(folder, name) for name in names)


def _device_of(folder: Path) -> int:
    try:
        return folder.lstat().st_dev
    except OSError:
        return -1


def _describe(path: Path, file: int) -> FoundPool:
    block = read_first_block(start_of(file))
    words, process = ("not finished", 0) if block is None else (block.words, block.process)
    return FoundPool(path, os.fstat(file).st_blocks * 512, words, process, is_held(file))
