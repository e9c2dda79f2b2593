"""One TaskGroup for all effects of an engine, in a task of its own.

A TaskGroup cancels the task that entered it and wraps what leaves the block. Entered by the embedder's own task it
would wrap the embedder's exceptions; so a supervisor task enters it, and tells when an effect broke.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


class EffectGroup:
    """Runs effects until `close`. An effect that raises is a bug: `on_failure` hears of it, all others are ended."""

    def __init__(self, on_failure: Callable[[BaseException], None]) -> None:
        self._on_failure = on_failure
        self._group: asyncio.TaskGroup | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()

    async def start(self) -> None:
        """Be ready for effects when this returns."""
        ready = asyncio.Event()
        self._supervisor = asyncio.create_task(self._run(ready), name="tidekv effects")
        await ready.wait()

    def spawn(self, effect: Awaitable[None], name: str) -> None:
        """Run an effect."""

        async def run() -> None:
            try:
                await effect
            except Exception as error:
                # The group tells of it only when all others have ended, which may be never.
                self._on_failure(error)
                raise

        assert self._group is not None, "effects are spawned after start and before close"
        self._group.create_task(run(), name=f"tidekv {name}")

    async def close(self, *, timeout_s: float) -> bool:
        """Wait for the effects that run; after `timeout_s` cancel them and wait as long again. False: some go on.

        An effect that uses memory which others may write to settles before it ends, cancelled or not.
        """
        if self._supervisor is None:
            return True
        self._ended.set()
        for patience_is_over in (False, True):
            if patience_is_over:
                self._supervisor.cancel()
            await asyncio.wait([self._supervisor], timeout=timeout_s)
            if self._supervisor.done():
                return True
        return False

    async def _run(self, ready: asyncio.Event) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                ready.set()
                await self._ended.wait()
        except BaseExceptionGroup as failures:
            self._on_failure(failures.exceptions[0])
