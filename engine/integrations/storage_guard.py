"""Storage that fails again and again is left alone, until a probe finds it well."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from tidekv.backends.storage.base import Storage
from tidekv.states.breaker import Breaker
from tidekv.states.errors import TidekvError
from tidekv.transports.tasks import OwnedTasks

FAILURES_MAX: Final = 8
BACKOFF_S: Final = 1.0
BACKOFF_MAX_S: Final = 30.0


class StorageGuard:
    """Hears how uses of some storage engines end, and says whether to use them. All on one loop."""

    def __init__(self, storages: Sequence[Storage], log: logging.Logger) -> None:
        """The engines are the caller's; those that are added later count, too."""
        self._storages = storages
        self._log = log
        self._breaker = Breaker()
        self._tasks = OwnedTasks("storage guard")
        self._closing = False

    @property
    def is_open(self) -> bool:
        """Whether storage is to be left alone."""
        return self._breaker.is_open

    def succeeded(self) -> None:
        """A use has ended well."""
        self._note(failed=False)

    def failed(self, what: str, error: BaseException) -> None:
        """A use has failed. Logged: with its traceback where it is no failure of storage but a bug."""
        if isinstance(error, TidekvError):
            self._log.warning("%s: %s", what, error)
        else:
            self._log.error("%s", what, exc_info=error)
        self._note(failed=True)

    async def close(self) -> None:
        """Probe no more."""
        self._closing = True
        await self._tasks.close()

    def _note(self, *, failed: bool) -> None:
        was_open = self._breaker.is_open
        self._breaker.note(failed=failed, failures_max=FAILURES_MAX, backoff_s=BACKOFF_S)
        if self._breaker.is_open and not was_open and not self._closing:
            self._log.warning("storage is left alone until a probe succeeds")
            self._tasks.spawn(self._probe(), name="probe")

    async def _probe(self) -> None:
        while self._breaker.is_open:
            await asyncio.sleep(self._breaker.backoff_s)
            failed = False
            try:
                for storage in self._storages:
                    await storage.probe()
            except TidekvError as error:
                failed = True
                self._log.warning("storage still fails: %s", error)
            self._breaker.probed(failed=failed, backoff_max_s=BACKOFF_MAX_S)
