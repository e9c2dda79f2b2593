"""What every call to a storage engine goes through: whose cancellation it is, and how many calls are in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Sequence
from typing import TypeVar

from tidekv.states.errors import TidekvError

T = TypeVar("T")


class CallsInFlight:
    """Calls to one attached storage that have not ended."""

    def __init__(self) -> None:
        self.count = 0
        self._quiet = asyncio.Event()
        self._quiet.set()

    def begin(self, call: Awaitable[None]) -> Coroutine[object, object, None]:
        """Count a call from now on until it ends; the caller runs what this returns."""
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


async def own_cancels_only(call: Awaitable[T], whose: str) -> T:
    """Await a call into code that is not ours. A cancellation that comes from within it, and was not meant for us, is
    its failure: it must not end the effect without an outcome.
    """
    try:
        return await call
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise TidekvError(f"{whose} cancelled itself") from error


def leading(flags: Sequence[bool]) -> int:
    """How many are True before the first that is not."""
    return next((at for at, flag in enumerate(flags) if not flag), len(flags))
