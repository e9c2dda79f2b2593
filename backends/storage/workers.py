"""Threads for pages and checksums, each with processors of its own.

Two threads that copy pages sleep and wake all the time: for work, and for the interpreter, which they hand to one
another. A kernel that finds its few processors busy leaves a thread that wakes on the processor where it slept, so on a
small machine both ended on one of them, for whole batches, while the other was idle.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor


def worker_threads(count: int, name: str) -> ThreadPoolExecutor:
    """Return an executor of `count` threads that divide among them the processors that the caller may use."""
    return ThreadPoolExecutor(count, thread_name_prefix=name, initializer=_divider(count))


def processors_of(number: int, count: int, allowed: Sequence[int]) -> set[int]:
    """Return which of the allowed processors are for thread `number` of `count`: all, if there is not one for each."""
    return set(allowed[number::count] if len(allowed) >= count else allowed)


def _divider(count: int) -> Callable[[], None]:
    """Return what each of `count` threads calls once."""
    numbers = itertools.count()

    def divide() -> None:
        if sys.platform == "linux" and count > 1:
            thread = threading.get_native_id()
            # Speed is all that this is for: a sandbox that forbids it does no harm.
            with contextlib.suppress(OSError):
                allowed = sorted(os.sched_getaffinity(thread))
                os.sched_setaffinity(thread, processors_of(next(numbers), count, allowed))

    return divide
