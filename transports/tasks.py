"""Background tasks with one owner, which reports their failures and waits for their end.

For objects with `start` and `close` instead of a block: a `TaskGroup` belongs to the task that entered it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class OwnedTasks:
    """Tasks that live no longer than their owner.

    An exception that leaves a task is a bug of ours: the loop's exception handler is called at once, and `close` raises
    the first one.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._tasks: set[asyncio.Task[Any]] = set()  # Results of every kind; only the caller of `spawn` uses them.
        self._failure: BaseException | None = None
        self._closing = False

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[object, object, T], *, name: str) -> asyncio.Task[T]:
        """Run `work` in a task of this owner. Raises RuntimeError after `close`."""
        if self._closing:
            work.close()
            raise RuntimeError(f"{self._label} is closing and starts no {name}")
        task = asyncio.get_running_loop().create_task(work, name=f"{self._label}: {name}")
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
        task.get_loop().call_exception_handler(
            {"message": f"a task of {self._label} failed", "exception": error, "task": task}
        )


async def settle(work: asyncio.Future[int]) -> int:
    """Wait for `work` to end even if the caller is cancelled; the cancellation is raised afterwards.

    For writes that cannot be stopped: their pages must not be reused before they have ended.
    """
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        # Retrieved, so that asyncio does not report a failure of the write as never retrieved.
        if not work.cancelled():
            work.exception()
        raise cancelled
    return work.result()
