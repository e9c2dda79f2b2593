"""Circuit breaker for storage engines: after repeated failures they are not used until a probe succeeds."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from tidekv.backends.storage.base import Storage
from tidekv.states.errors import TidekvError
from tidekv.states.storage.circuit_breaker import CircuitBreaker
from tidekv.transports.log import EngineLog
from tidekv.transports.tasks import OwnedTasks, own_cancels_only

FAILURES_MAX: Final = 8
BACKOFF_S: Final = 1.0
BACKOFF_MAX_S: Final = 30.0


class StorageGuard:
    """Receives the results of storage calls and decides whether storage may be used. All calls on one loop."""

    def __init__(self, storages: Sequence[Storage], log: EngineLog) -> None:
        """The caller owns the engines; the sequence is read at each probe, so engines added later are probed too."""
        self._storages = storages
        self._log = log
        self._breaker = CircuitBreaker()
        self._tasks = OwnedTasks("storage guard")
        self._closing = False

    @property
    def is_open(self) -> bool:
        """Whether the breaker is open: storage must not be used."""
        return self._breaker.is_open

    def succeeded(self) -> None:
        """Record a successful call."""
        self._note(failed=False)

    def failed(self, what: str, error: BaseException) -> None:
        """Record and log a failed call. An exception that is not a TidekvError is a defect, logged with traceback."""
        self._log_failure(what, error)
        self._note(failed=True)

    async def close(self) -> None:
        """Stop probing."""
        self._closing = True
        await self._tasks.close()

    def _log_failure(self, what: str, error: BaseException) -> None:
        if isinstance(error, TidekvError):
            self._log.warning(what, cause=str(error))
        else:
            self._log.error(what, exc_info=error)

    def _note(self, *, failed: bool) -> None:
        was_open = self._breaker.is_open
        self._breaker.note(failed=failed, failures_max=FAILURES_MAX, backoff_s=BACKOFF_S, backoff_max_s=BACKOFF_MAX_S)
        if self._breaker.is_open and not was_open and not self._closing:
            self._log.warning("storage is not used until a probe succeeds")
            self._tasks.spawn(self._probe(), name="probe")

    async def _probe(self) -> None:
        while self._breaker.is_open:
            await asyncio.sleep(self._breaker.backoff_s)
            failed = False
            try:
                for storage in self._storages:
                    await own_cancels_only(storage.probe(), "storage")
            except Exception as error:
                # Of every kind: without another probe, storage would never be used again.
                failed = True
                self._log_failure("storage still fails", error)
            self._breaker.probed(failed=failed, backoff_max_s=BACKOFF_MAX_S)
