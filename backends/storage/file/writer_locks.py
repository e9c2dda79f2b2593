"""Locks of living writers: each process on a directory holds a file lock that the kernel drops with the process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import uuid
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

from tidekv.backends.storage.file.ownership import make_directory, open_file

_SUFFIX: Final = ".lock"
WRITER_NAME: Final = re.compile("[0-9a-f]{32}")
"""The name of a writer, which is also the name of its files."""


class WriterLock:
    """The lock of this engine. Slots reserved by a writer whose lock is free are reclaimed."""

    def __init__(self, root: Path) -> None:
        self._directory = root / "writers"
        make_directory(self._directory)
        self.name = uuid.uuid4().hex
        # The lock is taken before any process can read the name, so a living writer is never found unlocked.
        self._file = open_file(self._path(self.name), os.O_RDWR | os.O_CREAT | os.O_EXCL)
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def is_alive(self, name: str) -> bool:
        """True while the writer of that name holds its lock. A text that is no name, from a changed index, is dead."""
        return name == self.name or (_is_name(name) and is_locked(self._path(name)))

    def forget(self, name: str) -> None:
        """Remove the file of a dead writer, if the name is one: another text could be a path to a user's file."""
        if _is_name(name):
            self._path(name).unlink(missing_ok=True)

    def forget_strangers(self, known: Collection[str]) -> None:
        """Remove lock files of dead writers that are not in the index. No other process may create a lock meanwhile: a
        new file is not locked yet.
        """
        for name in self._names():
            if name not in known and not self.is_alive(name):
                self.forget(name)

    def alone(self) -> bool:
        """True if no other writer lives."""
        return not any(self.is_alive(name) for name in self._names() if name != self.name)

    def close(self) -> None:
        """Release the lock. If the disk is gone or read-only, the file stays and counts as a dead writer's."""
        with contextlib.suppress(OSError):
            self.forget(self.name)
        os.close(self._file)

    def _names(self) -> Iterator[str]:
        """Yield the names of the writers that have a file."""
        for path in self._directory.glob("*" + _SUFFIX):
            if WRITER_NAME.fullmatch(path.stem):
                yield path.stem

    def _path(self, name: str) -> Path:
        return self._directory / (name + _SUFFIX)


def _is_name(name: object) -> bool:
    return isinstance(name, str) and WRITER_NAME.fullmatch(name) is not None


def is_locked(path: Path) -> bool:
    """True if a process holds, or may hold, the lock of a file; a missing file is not locked."""
    try:
        file = open_file(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    except OSError:
        # Another user's file, a link, or a failing disk: a writer that cannot be checked counts as alive.
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(file)
    return False
