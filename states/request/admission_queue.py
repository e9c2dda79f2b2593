"""The queue of requests that wait for device pages: priorities with ageing, bounded head-of-line blocking.

Requests of the same priority are in order of arrival. Smaller requests may pass one that does not fit `passes_max`
times; after that, all requests behind it wait until it fits. A request that is over the quota of its prefill only
blocks the requests of that prefill: these keep their order, so that it cannot starve, and all others pass it freely.
"""

from __future__ import annotations

import heapq
from bisect import insort
from itertools import islice
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tidekv.states.records.request import Request
    from tidekv.states.settings import CoreSettings

Lane: TypeAlias = "tuple[int, str]"
"""Priority and prefill of requests that are in order of arrival among themselves."""


class Queue:
    """The requests in PREALLOC."""

    def __init__(self, settings: CoreSettings) -> None:
        self._settings = settings
        self._lanes: dict[Lane, list[Request]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Request]:
        for lane in self._lanes.values():
            yield from lane

    def add(self, request: Request) -> None:
        """Add a request, in order of arrival: one that returns to the queue gets its former place."""
        lane = self._lanes.setdefault((request.priority, request.prefill), [])
        insort(lane, request, key=lambda waiting: waiting.arrival)
        self._count += 1

    def remove(self, request: Request) -> None:
        """Remove a request that was admitted or has ended."""
        lane = self._lanes[request.priority, request.prefill]
        lane.remove(request)
        self._count -= 1
        if not lane:
            del self._lanes[request.priority, request.prefill]

    def move(self, request: Request, priority: int) -> None:
        """Give a request that waits another priority; its place among those is that of its arrival."""
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

    def waits_for_quota(self, prefill: str) -> bool:
        """Whether the quota of this prefill holds back its waiting requests."""
        return any(lane[0].admission.over_quota for (_, name), lane in self._lanes.items() if name == prefill)

    def candidates(self, now_s: float) -> Iterator[Request]:
        """Yield the requests to try, in order; none behind one that was passed too often. The caller stops before it
        changes the queue.

        A request whose prefill was late is left out until its pause is over. After a request that is over its quota
        (`Request.over_quota`, once the caller has tried it) no other of its prefill follows. At most
        `admission_scan_max` requests are tried that are not.
        """
        if len(self._lanes) == 1:
            # Usual with one prefill: the order is that of arrival and needs no ranks.
            (requests,) = self._lanes.values()
            waiting = (request for request in requests if request.admission.retry_at_s <= now_s)
            for request in islice(waiting, self._settings.admission_scan_max):
                yield request
                if request.admission.over_quota or request.admission.passed >= self._settings.passes_max:
                    return
            return
        # Merge the lanes by rank. Within a lane the first waiting request has the highest rank, since it is oldest.
        heads = [self._head(lane, 0, now_s) for lane in self._lanes]
        heapq.heapify(heads)
        blocked: set[str] = set()
        tried = 0
        while heads and tried < self._settings.admission_scan_max:
            _, _, lane, at = heads[0]
            request = self._lanes[lane][at]
            if lane[1] in blocked:
                heapq.heappop(heads)
                continue
            if request.admission.retry_at_s <= now_s:
                yield request
                if request.admission.over_quota:
                    blocked.add(lane[1])
                    continue
                tried += 1
                if request.admission.passed >= self._settings.passes_max:
                    return
            if at + 1 < len(self._lanes[lane]):
                heapq.heapreplace(heads, self._head(lane, at + 1, now_s))
            else:
                heapq.heappop(heads)

    def _head(self, lane: Lane, at: int, now_s: float) -> tuple[float, int, Lane, int]:
        """Return the rank of a lane's request number `at`, lowest first, and its place."""
        request = self._lanes[lane][at]
        waited = (now_s - request.arrived_at_s) / self._settings.ageing_s
        return -(request.priority + waited), request.arrival, lane, at
