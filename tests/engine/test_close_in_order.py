"""Closing the parts of an engine in order: errors are returned, what is no Exception is raised, and no part is lost."""

from __future__ import annotations

import asyncio

import pytest

from tidekv.engine.decode.runtime import close_in_order
from tidekv.states.errors import TidekvError


class Interrupt(BaseException):
    """Like KeyboardInterrupt, but asyncio leaves it in its task."""


class Part:
    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.closed = False

    async def close(self) -> None:
        self.closed = True
        if self.error is not None:
            raise self.error


async def test_errors_of_closing_are_returned_and_the_other_parts_closed() -> None:
    error = ValueError("no")
    parts = [Part(), Part(error), Part(asyncio.CancelledError()), Part()]
    failures = await close_in_order([*parts, None], part_s=30.0, late_s=30.0)
    assert failures[0] is error and isinstance(failures[1], TidekvError) and len(failures) == 2
    assert "cancelled itself" in str(failures[1])
    assert all(part.closed for part in parts)


async def test_what_is_no_exception_is_raised_at_close() -> None:
    """It is not for the caller of `close` to be told in a list: the process is asked to end."""
    with pytest.raises(Interrupt):
        await close_in_order([Part(), Part(Interrupt()), Part()], part_s=30.0, late_s=30.0)
    task = asyncio.create_task(Part(Interrupt()).close())
    with pytest.raises(Interrupt):
        await close_in_order([task], part_s=30.0, late_s=30.0)
