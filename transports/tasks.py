"""Background tasks with one owner, which reports their failures and waits for their end.

For objects with `start` and `close` instead of a block: a `TaskGroup` belongs to the task that entered it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from contextvars import Context
from typing import Any, TypeVar

from tidekv.states.errors import TidekvError
from tidekv.transports.log import engine_log, own_context

LOG = engine_log("tidekv.transports")

T = TypeVar("T")


class OwnedTasks:
    """Tasks that live no longer than their owner.

    An exception that leaves a task is a bug of ours: it is logged at once, by the loop's exception handler if the
    application has set one, and `close` raises the first one.
    """

    def __init__(self, label: str, *, instance: str = "") -> None:
        """`instance` is the name in records of these tasks, by default that of the context of `spawn`."""
        self._label = label
        self._instance = instance
        self._tasks: set[asyncio.Task[Any]] = set()  # Results of every kind; only the caller of `spawn` uses them.
        self._failure: BaseException | None = None
        self._closing = False

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(
        self, work: Coroutine[object, object, T], *, name: str, context: Context | None = None
    ) -> asyncio.Task[T]:
        """Run `work` in a task of this owner, by default in a context without variables of the caller, which the task
        may outlive. Raises RuntimeError after `close`.
        """
        if self._closing:
            work.close()
            raise RuntimeError(f"{self._label} is closing and starts no {name}")
        task = asyncio.get_running_loop().create_task(
            work, name=f"{self._label}: {name}", context=own_context(self._instance) if context is None else context
        )
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def close(self) -> None:
        """Cancel the running tasks, wait for all of them, and raise the first failure."""
        self._closing = True
        # `close` may be called by one of the tasks, which must neither cancel nor await itself.
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()
        while rest := [task for task in self._tasks if task is not current]:
            await asyncio.wait(rest)
            # The callbacks that remove ended tasks from the set run in the next loop iteration.
            await asyncio.sleep(0)
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _ended(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        self._failure = self._failure or error
        what = f"a task of {self._label} failed"
        if task.get_loop().get_exception_handler() is None:
            # Not the loop's default handler: it logs past the application's structlog.
            LOG.error(what, exc_info=error)
        else:
            task.get_loop().call_exception_handler({"message": what, "exception": error, "task": task})


async def own_cancels_only(call: Awaitable[T], whose: str) -> T:
    """Await a call into foreign code. Raises TidekvError if it cancels itself: only a cancellation of the awaiting task
    may end an effect without an outcome.
    """
    try:
        return await call
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise TidekvError(f"{whose} cancelled itself") from error
