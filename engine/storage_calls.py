"""What every call to a storage engine of somebody else's goes through."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from tidekv.states.errors import TidekvError

T = TypeVar("T")


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
