"""Wrappers of all calls to a storage engine: ownership of cancellations, and the count of calls in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from tidekv.states.errors import TidekvError

if TYPE_CHECKING:
    from tidekv.backends.storage.base import Storage
    from tidekv.engine.decode.token_record import TokenRecord
    from tidekv.states.commands import Command

T = TypeVar("T")


class CallsInFlight:
    """Calls to one attached storage that have not ended."""

    def __init__(self) -> None:
        self.count = 0
        self.is_probed = False
        """Whether a probe is in flight: a store that hangs is not probed again before that one has ended."""
        self._quiet = asyncio.Event()
        self._quiet.set()

    def begin(self, call: Awaitable[None]) -> Coroutine[object, object, None]:
        """Count a call until it ends; the caller runs the returned coroutine."""
        self.count += 1
        self._quiet.clear()
        return self._run(call)

    async def _run(self, call: Awaitable[None]) -> None:
        try:
            await call
        finally:
            self.count -= 1
            if not self.count:
                self._quiet.set()

    async def quiet(self) -> None:
        """Wait until no call is in flight."""
        await self._quiet.wait()


class StorageCalls(Protocol):
    """Runs calls to storage, and counts those under way."""

    def need_storage(self) -> Storage:
        """The storage of full pages. Raises TidekvError if there is none."""
        ...

    def use_storage(self, call: Awaitable[None], name: str) -> None:
        """Run a call; storage is not quiet before it has ended."""
        ...

    def record_put(self, op: int) -> TokenRecord:
        """The tokens behind a put whose request is gone."""
        ...

    def words_of(self, command: Command, raised: Exception) -> str:
        """The text of an outcome for an exception."""
        ...


async def own_cancels_only(call: Awaitable[T], whose: str) -> T:
    """Await a call into foreign code. A cancellation that comes from within it counts as its failure: it must not end
    the effect without an outcome.
    """
    try:
        return await call
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise TidekvError(f"{whose} cancelled itself") from error


def leading(flags: Sequence[bool]) -> int:
    """Return how many are True before the first that is not."""
    return next((at for at, flag in enumerate(flags) if not flag), len(flags))
