"""A thread for a worker's computation, so that its event loop is not blocked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self, TypeVar

import torch

from tidekv.transports.blocking import settled

T = TypeVar("T")


class ComputeThread:
    """Runs calls one after the other on a thread of its own, with one torch thread. A context manager."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(
            1, thread_name_prefix=f"tidekv-{name}", initializer=torch.set_num_threads, initargs=(1,)
        )

    async def run(self, call: Callable[[], T]) -> T:
        """Run a call and return its result, or raise its error.

        A cancelled caller waits for the end of the call first, because the call may still be writing to pages.
        """
        return await settled(asyncio.wrap_future(self._pool.submit(call)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the running call, and drop the queued ones."""
        self._pool.shutdown(cancel_futures=True)
