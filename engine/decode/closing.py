"""Closing parts in order, each with a bound: what hangs does not keep the others from being closed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Protocol

from tidekv.states.errors import TidekvError


class Closable(Protocol):
    """Something that can be closed."""

    def close(self) -> Coroutine[object, object, object]:
        """End it."""
        ...


def begin_close(part: Closable) -> asyncio.Task[object]:
    """Begin to close a part before its turn; `close_in_order` takes the task in its place."""
    closing: asyncio.Task[object] = asyncio.ensure_future(part.close())
    closing.set_name(f"closing {type(part).__name__}")
    return closing


async def close_in_order(
    parts: Sequence[Closable | asyncio.Task[object] | None], *, part_s: float, late_s: float
) -> list[Exception]:
    """Close these parts, None among them left out; returns what closing them raised.

    A part that takes longer than `part_s` is left behind, one that began to close before its turn after `late_s`. Both
    have `late_s` more when all others are closed.
    """
    failures: list[Exception] = []
    late: list[asyncio.Task[object]] = []
    for part in parts:
        if part is None:
            continue
        begun = isinstance(part, asyncio.Task)
        closing = part if isinstance(part, asyncio.Task) else begin_close(part)
        if not await _has_ended(closing, late_s if begun else part_s, failures):
            late.append(closing)
    for closing in late:
        # The pollers are closed by now, which ends what hung in them.
        if not await _has_ended(closing, late_s, failures):
            closing.cancel()
            failures.append(TidekvError(f"{closing.get_name()} did not end in time"))
    return failures


async def _has_ended(closing: asyncio.Task[object], timeout_s: float, failures: list[Exception]) -> bool:
    await asyncio.wait([closing], timeout=timeout_s)
    if not closing.done():
        return False
    error = TidekvError(f"{closing.get_name()} cancelled itself") if closing.cancelled() else closing.exception()
    if isinstance(error, Exception):
        failures.append(error)
    elif error is not None:
        raise error
    return True
