"""The folder of a run's storage (L3), which can be damaged, hang and be full."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final  # The methods of an engine.

from benchmarks.servers.file_storage import damage
from benchmarks.servers.model_server import FREEZE_S
from benchmarks.sglang_pair.names import HANG, HANG_POLL_S
from tidekv.backends.storage.uri import BUILT_IN
from tidekv.states.errors import InvalidConfig

PAUSED: Final = "paused"
"""Scheme of `open_paused`."""
ACTIONS: Final = ("hang", "fill")
TMPFS_MB: Final = 512
FILLER: Final = "filler"
DAMAGED_EVERY: Final = 16_384
"""Bytes; a page of the model has twice as many."""
WAITING: Final = ("exists", "touch", "get_into", "put_from")


@dataclass
class StorageFolder:
    """A folder. It is a file system of its own after `mount`, which `unmount` undoes."""

    path: Path
    is_mounted: bool = False

    @property
    def marker(self) -> Path:
        """While it exists, storage does not answer."""
        return self.path.with_name("hang")

    def mount(self) -> None:
        """Give the folder a size. Raises InvalidConfig where that is not allowed."""
        self.path.mkdir(parents=True, exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={TMPFS_MB}m,mode=0700", "tmpfs", str(self.path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise InvalidConfig(f"fill needs the right to mount a tmpfs: {done.stderr.strip()}")
        self.is_mounted = True

    def unmount(self) -> None:
        """Undo `mount`. The content is lost."""
        if self.is_mounted:
            subprocess.run(["umount", "--lazy", str(self.path)], check=True)
            self.is_mounted = False

    async def act(self, action: str) -> None:
        """hang: do not answer for FREEZE_S seconds. fill: have no room from now on; only after `mount`."""
        if action == "hang":
            self.marker.touch()
            await asyncio.sleep(FREEZE_S)
            self.marker.unlink()
            return
        assert self.is_mounted, "a folder that is not mounted has no size"
        await asyncio.to_thread(self._fill)

    def damage(self) -> int:
        """Overwrite bytes of each page, of tidekv's files or of SGLang's, and return in how many places."""
        return sum(damage(self.path, pattern=pattern, stride=DAMAGED_EVERY) for pattern in ("**/*.seg", "**/*.bin"))

    def _fill(self) -> None:
        block = bytes(1 << 20)
        with (self.path / FILLER).open("wb") as filler:
            try:
                while True:
                    filler.write(block)
                    filler.flush()
            except OSError:
                return  # There is no room left.


class _Paused:
    """An engine whose calls wait while the marker exists."""

    def __init__(self, engine: Any, marker: Path) -> None:
        self._engine = engine
        self._marker = marker

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._engine, name)
        return self._waiting(method) if name in WAITING else method

    def _waiting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        async def wait_and_call(*args: Any, **kwargs: Any) -> Any:
            while self._marker.exists():  # noqa: ASYNC110  # Another process makes and removes it.
                await asyncio.sleep(HANG_POLL_S)
            return await method(*args, **kwargs)

        return wait_and_call


def open_paused(*, authority: str, path: str, options: Mapping[str, object]) -> Any:
    """Make a `file:` engine that hangs on request, as a storage engine of tidekv."""
    return _Paused(BUILT_IN["file"](authority=authority, path=path, options=options), Path(os.environ[HANG]))
