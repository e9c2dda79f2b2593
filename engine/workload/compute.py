"""One thread for a worker's computing, so that its event loop stays free."""

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
    """Runs calls one after the other in a thread of its own, with one torch thread. A context manager."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(
            1, thread_name_prefix=f"tidekv-{name}", initializer=torch.set_num_threads, initargs=(1,)
        )

    async def run(self, call: Callable[[], T]) -> T:
        """Run a call and return its result, or raise its error.

        A cancelled caller waits for the call's end first: it may still be writing to pages.
        """
        return await settled(asyncio.wrap_future(self._pool.submit(call)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the call that runs, drop those that wait."""
        self._pool.shutdown(cancel_futures=True)
