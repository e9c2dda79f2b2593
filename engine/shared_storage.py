"""Storage whose pages several programs share: how it is opened, and how programs without a core call it.

The core of a decode engine decides by a circuit breaker of its own, so that its decisions replay from the journal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple, ParamSpec, TypeVar

from tidekv.backends.base import Poller
from tidekv.backends.host.pool import HostPool
from tidekv.backends.storage.base import Siblings, Storage
from tidekv.backends.storage.label import set_label
from tidekv.engine.log import EngineLog
from tidekv.engine.stored_layouts import RankLayout
from tidekv.states.errors import InvalidConfig, TidekvError
from tidekv.states.storage.circuit_breaker import CallKind, CircuitBreaker
from tidekv.transports.tasks import OwnedTasks, own_cancels_only

P = ParamSpec("P")
T = TypeVar("T")


async def open_pages(
    storage: Storage, host: HostPool, layout: RankLayout, component: str = "", *, poller: Poller, log: EngineLog
) -> None:
    """Open an engine for the full pages of a rank, or for those of a component, and label its namespace.

    `host` has the pages that calls name; the caller owns both. Raises what the engine raises. A label that cannot be
    written is logged.
    """
    registered = storage.register(host.memory, host.page, namespace=layout.namespace(component), poller=poller)
    await own_cancels_only(registered, storage.uri)
    await own_cancels_only(set_label(storage, layout.label(component), warn=log.warning), storage.uri)


def sibling_for(storage: Storage, component: str) -> Storage:
    """Return an engine at the same place for the pages of a component, not opened. Raises InvalidConfig."""
    if not isinstance(storage, Siblings):
        raise InvalidConfig(
            f"{storage.uri} cannot hold component {component!r}: it makes no engine for pages of another size; see"
            " tidekv.backends.storage.base.Siblings"
        )
    return storage.sibling()


class BreakerLimits(NamedTuple):
    """Consecutive failures that open a circuit breaker (0: never), and the minimum and maximum seconds to a probe."""

    failures_max: int = 8
    backoff_s: float = 1.0
    backoff_max_s: float = 30.0


DEFAULT_LIMITS: Final = BreakerLimits()


class StorageGuard:
    """Calls storage for a program to which a failure is a miss, and decides whether storage may be used.

    After repeated failures the circuit breaker is open until a probe succeeds. All calls on one loop.
    """

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

    async def call(
        self, kind: CallKind, what: str, function: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T | None:
        """Call storage, and note how a call of this kind ended. None: it raised, and `what` was logged with the error,
        or the breaker is open, and it was not called.
        """
        if self.is_open:
            return None
        try:
            result = await own_cancels_only(function(*args, **kwargs), "storage")
        except Exception as error:
            self._log_failure(what, error)
            self._note(kind, failed=True)
            return None
        self._note(kind, failed=False)
        return result

    def _log_failure(self, what: str, error: BaseException) -> None:
        """Log a failure. An exception that is not a TidekvError is a defect, logged with its traceback."""
        if isinstance(error, TidekvError):
            self._log.warning(what, cause=str(error))
        else:
            self._log.error(what, exc_info=error)

    async def close(self) -> None:
        """Stop probing."""
        self._closing = True
        await self._tasks.close()

    def _note(self, kind: CallKind, *, failed: bool) -> None:
        was_open, limits = self._breaker.is_open, DEFAULT_LIMITS
        self._breaker.note(
            kind,
            failed=failed,
            failures_max=limits.failures_max,
            backoff_s=limits.backoff_s,
            backoff_max_s=limits.backoff_max_s,
        )
        if self._breaker.is_open and not was_open:
            self._log.warning("storage is not used until a probe succeeds")
            if not self._closing:
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
            self._breaker.probed(failed=failed, backoff_max_s=DEFAULT_LIMITS.backoff_max_s)
