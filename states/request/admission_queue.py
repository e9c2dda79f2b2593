"""The queue of requests that wait for device pages: priorities with ageing, bounded head-of-line blocking.

- *Order.* A request ranks by the time of its arrival, less `ageing_s` for each step of its priority. The order does not
  change while requests wait. A request that waits for the answer of storage is in no order yet.
- *Blocking.* Smaller requests may pass one that does not fit `passes_max` times; after that, all requests behind it
  wait until it fits. A request over the quota of its prefill blocks the requests of that prefill only, so that it does
  not starve; all others pass it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heappop, heappush
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tidekv.states.records.request import Request
    from tidekv.states.settings import CoreSettings


class Rank(NamedTuple):
    """Place of a request in the order of all; the lowest is tried first."""

    due_s: float
    arrival: int
    """Unique, so that what follows is never compared."""
    request: Request


class Queue:
    """The requests in PREALLOC."""

    def __init__(self, settings: CoreSettings) -> None:
        self._settings = settings
        self._entered: dict[Request, None] = {}
        """Requests that are not tried yet."""
        self._lines: dict[str, list[Rank]] = {}
        """The waiting requests by prefill, in order."""
        self._firsts: list[Rank] = []
        """The first request of each line, in order."""
        self._count = 0

    def __len__(self) -> int:
        return len(self._entered) + self._count

    def __iter__(self) -> Iterator[Request]:
        yield from self._entered
        for line in self._lines.values():
            yield from (rank.request for rank in line)

    def enter(self, request: Request) -> None:
        """Add a request that is not tried before it is lined up."""
        self._entered[request] = None

    def line_up(self, request: Request) -> None:
        """Let a request that has entered be tried. Does nothing if it has been lined up."""
        if request in self._entered:
            self.add(request)
            del self._entered[request]

    def add(self, request: Request) -> None:
        """Line up a request, in order of arrival: one that returns to the queue gets its former place."""
        rank, line = self._rank(request), self._lines.setdefault(request.prefill, [])
        if not line or rank < line[0]:
            self._replace_first(line, rank)
        insort(line, rank)
        self._count += 1

    def remove(self, request: Request) -> None:
        """Remove a request that was admitted or has ended."""
        if request in self._entered:
            del self._entered[request]
            return
        prefill = request.prefill
        line = self._lines[prefill]
        at = bisect_left(line, self._rank(request))
        assert line[at].request is request, "a request in the queue changes its rank by `move` only"
        if not at:
            self._replace_first(line, line[1] if len(line) > 1 else None)
        del line[at]
        self._count -= 1
        if not line:
            del self._lines[prefill]

    def move(self, request: Request, priority: int) -> None:
        """Give a request that waits another priority; its place among those is that of its arrival."""
        if request in self._entered:
            request.change_priority(priority)
            return
        before = request.priority
        self.remove(request)
        try:
            request.change_priority(priority)
            self.add(request)
        except BaseException:
            # An exception leaves it where it was, so that the row can be repeated.
            request.change_priority(before)
            self.add(request)
            raise

    def is_held_by_quota(self, request: Request) -> bool:
        """Whether the quota of its prefill holds back a waiting request, or the first one before it."""
        line = self._lines.get(request.prefill)
        return request.admission.over_quota or (line is not None and line[0].request.admission.over_quota)

    def candidates(self, now_s: float) -> Iterator[Request]:
        """Yield the requests to try, in order; none behind one that was passed too often. The caller stops before it
        changes the queue.

        A request whose prefill was late is left out until its pause is over. After a request that is over its quota
        (`Request.over_quota`, once the caller has tried it) no other of its prefill follows. At most
        `admission_scan_max` requests are tried that are not.
        """
        begun: list[tuple[Rank, Iterator[Rank]]] = []
        """The next request of each begun line, and those behind it. Lines behind are not looked at."""
        firsts, tries, passes_max = self._firsts, self._settings.admission_scan_max, self._settings.passes_max
        lines = 0
        while tries:
            if lines < len(firsts) and (not begun or firsts[lines] < begun[0][0]):
                behind = iter(self._lines[firsts[lines].request.prefill])
                rank = next(behind)
                lines += 1
            elif begun:
                rank, behind = heappop(begun)
            else:
                return
            admission = rank.request.admission
            if admission.retry_at_s <= now_s:
                yield rank.request
                if admission.over_quota:
                    continue
                if admission.passed >= passes_max:
                    return
                tries -= 1
            if (following := next(behind, None)) is not None:
                heappush(begun, (following, behind))

    def _replace_first(self, line: list[Rank], first: Rank | None) -> None:
        """Note that another request, or none, becomes the first of a line."""
        if line:
            del self._firsts[bisect_left(self._firsts, line[0])]
        if first is not None:
            insort(self._firsts, first)

    def _rank(self, request: Request) -> Rank:
        return Rank(request.arrived_at_s - request.priority * self._settings.ageing_s, request.arrival, request)
