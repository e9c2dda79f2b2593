"""The tick of the newest change of a directory's index, in a file of eight bytes: a glance tells whether to ask SQLite.

Asking the index itself takes a thread; the event loop reads this file without ever waiting. It only says that
something may have changed. A change writes its tick before it is committed, so where the change can be seen the tick
can; one that fails after that costs questions, and no more.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

from tidekv.backends.storage.segments import FILE_MODE, NO_WAIT

TICK_FILE: Final = "tick"
_TICK_BYTES: Final = 8


class ChangeTick:
    """The file, open. `write` belongs to whoever holds the index's write lock."""

    def __init__(self, root: Path) -> None:
        self._file = os.open(root / TICK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)

    def write(self, seq: int) -> None:
        """Say that a change of this tick is about to be committed.

        If that cannot be said, others learn of the change later: that makes no change fail which the index can take.
        """
        with contextlib.suppress(OSError):
            os.pwrite(self._file, seq.to_bytes(_TICK_BYTES, "little"), 0)

    def is_at(self, seq: int) -> bool:
        """True if nothing was changed since that tick. False also where it cannot be told without waiting."""
        if not NO_WAIT:
            return False
        found = bytearray(_TICK_BYTES)
        try:
            os.preadv(self._file, [found], 0, NO_WAIT)
        except OSError:
            return False
        return int.from_bytes(found, "little") == seq

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)
