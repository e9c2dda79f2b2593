"""Bounded waits: a test fails by an assertion when what it waits for never happens."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

LIMIT_S = 120.0
"""Seconds that a wait in a test may take: far longer than it needs on a busy machine. A test that is not marked slow
ends before that, by its own limit (`tests/support/limits.py`).
"""
LEASE_S = 120.0
"""Lease of prefill workers of tests that are not about leases; the shorter one of both ends counts."""
PATIENT = {"prefetch": "wait_complete", "query_deadline_s": 60.0, "peer_silence_s": 30.0, "peer_lease_s": LEASE_S}
"""Options of an engine whose requests wait for storage on a busy machine, too, for tests that are not about deadlines.

With any other policy a request waits for the answer of storage only as long as recent answers took, 50 ms at most.
"""
PATIENT_GROUP: dict[str, Any] = {"silence_s": 30.0, "vote_timeout_s": 60.0, "hold_s": 60.0, "form_timeout_s": LIMIT_S}
"""Limits of a `RankGroup` whose ranks share a busy machine."""

PATIENT_STORE: dict[str, Any] = {"hold_s": LIMIT_S}
"""Settings of a prefill worker's storage on a busy machine, which would not store a prompt after a second."""


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


@asynccontextmanager
async def together(*parts: AbstractAsyncContextManager[object]) -> AsyncIterator[None]:
    """Enter all contexts at once and leave them at once, within a limit: ranks wait for each other at both ends."""
    stacks = [AsyncExitStack() for _ in parts]
    async with asyncio.timeout(LIMIT_S):
        try:
            await asyncio.gather(*(stack.enter_async_context(part) for stack, part in zip(stacks, parts, strict=True)))
            yield
        finally:
            await asyncio.gather(*(stack.aclose() for stack in stacks))


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until the condition is true, for what has no wake-up, such as a count."""
    async with expected("a condition"):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


async def pass_s(seconds: float) -> None:
    """Let a fault last for a while."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.Event().wait()
