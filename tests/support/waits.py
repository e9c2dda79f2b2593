"""Bounded waits: a test fails by an assertion when what it waits for never happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

LIMIT_S = 60.0
"""Seconds that a wait in a test may take: far longer than it needs on a busy machine."""


@asynccontextmanager
async def expected(what: str, *, limit_s: float = LIMIT_S) -> AsyncIterator[None]:
    """Fail with an AssertionError that names `what` if the body takes longer than `limit_s`."""
    try:
        async with asyncio.timeout(limit_s) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise AssertionError(f"{what} did not happen within {limit_s:g} s") from None
