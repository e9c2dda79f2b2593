"""Background tasks with one owner, who hears of their failures and waits for their end.

For objects whose life is `start` and `close` rather than a block: a `TaskGroup` belongs to the task that entered it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class OwnedTasks:
    """Tasks that live no longer than their owner.

    An exception that leaves a task is a bug of ours: the loop's exception handler hears of it at once, and `close`
    raises the first one.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._tasks: set[asyncio.Task[Any]] = set()  # Results of every kind; only whoever spawned looks at them.
        self._failure: BaseException | None = None
        self._closing = False

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[object, object, T], *, name: str) -> asyncio.Task[T]:
        """Run `work` in a task of this owner."""
        if self._closing:
            work.close()
            raise RuntimeError(f"{self._label} is closing and starts no {name}")
        task = asyncio.get_running_loop().create_task(work, name=f"{self._label}: {name}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def close(self) -> None:
        """Cancel what still runs, wait for all of it, and raise the first failure there was."""
        self._closing = True
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()
        while rest := [task for task in self._tasks if task is not current]:
            await asyncio.wait(rest)
            # The callbacks that take ended tasks out of the set run on the loop's next turn.
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
    """Wait for `work` to its end, whatever happens to the caller; a cancellation is raised only then.

    For writes that nothing can stop: whoever gives up on one must still not touch its pages before it has ended.
    """
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        # The outcome is looked at, so that a failure of the write is not reported as never retrieved.
        if not work.cancelled():
            work.exception()
        raise cancelled
    return work.result()
