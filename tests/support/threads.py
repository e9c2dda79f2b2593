"""Threads of this process: those that were not there before."""

from __future__ import annotations

import re
import threading
from collections import Counter

from tidekv.engine.poller import PollerThread

NUMBER_IN_POOL = re.compile(r"_\d+$")


def thread_names() -> Counter[str]:
    """Return the names of all live threads, with how often each occurs."""
    return Counter(thread.name for thread in threading.enumerate())


def threads_left(before: Counter[str]) -> list[str]:
    """Return the names of live threads beyond those of `before`, but for the growth of a pool.

    An executor starts its next thread, of a bounded number, when a job finds all others busy: chance decides when. A
    second pool of the same name has the same names again, and is reported. The loop's own pool may be new.
    """
    pools = {NUMBER_IN_POOL.sub("", name) for name in before} | {"asyncio"}
    more = thread_names() - before
    grown = {name for name in more if name not in before and more[name] == 1 and NUMBER_IN_POOL.sub("", name) in pools}
    return sorted(name for name in more.elements() if name not in grown)


def started() -> PollerThread:
    """Return a poller whose thread runs."""
    poller = PollerThread()
    poller.start()
    return poller
