"""Files of a run's storage (L3), and damage to them."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

FILES: Final = "storage"
"""Folder of a file storage, within the folder of the run."""
DAMAGE_STRIDE: Final = 100_000
"""Bytes of a store from one damaged place to the next."""


def damage(store: Path, *, pattern: str = "*/*.seg", stride: int = DAMAGE_STRIDE) -> int:
    """Overwrite bytes every `stride` bytes of a file store's pages, and return in how many places."""
    places = 0
    for path in store.glob(pattern):
        with path.open("r+b") as segment:
            at = 0
            with suppress(OSError):  # From there on, nothing was ever written: the file is sparse.
                while True:
                    at = os.lseek(segment.fileno(), at, os.SEEK_DATA)
                    os.pwrite(segment.fileno(), b"damaged!", at)
                    at, places = at + stride, places + 1
    return places
