"""The queue of requests that wait for device pages: priorities with ageing, bounded head-of-line blocking.

Requests of the same priority are in order of arrival. Smaller requests may pass one that does not fit `passes_max`
times; after that, all requests behind it wait until it fits.
"""

from __future__ import annotations

from bisect import insort
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tidekv.states.request.request import Request
    from tidekv.states.settings import CoreSettings


class Queue:
    """The requests in PREALLOC."""

    def __init__(self, settings: CoreSettings) -> None:
        self._settings = settings
        self._levels: dict[int, list[Request]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Request]:
        for level in self._levels.values():
            yield from level

    def add(self, request: Request) -> None:
        """Add a request, in order of arrival: one that returns to the queue gets its former place."""
        insort(self._levels.setdefault(request.priority, []), request, key=lambda waiting: waiting.arrival)
        self._count += 1

    def remove(self, request: Request) -> None:
        """Remove a request that was admitted or has ended."""
        level = self._levels[request.priority]
        level.remove(request)
        self._count -= 1
        if not level:
            del self._levels[request.priority]

    def candidates(self, now_s: float) -> list[Request]:
        """Return at most `admission_scan_max` requests to try, in order; none behind one passed too often."""
        if len(self._levels) == 1:
            # One priority: the order is that of arrival and needs no comparison of ranks.
            (level,) = self._levels.values()
            return self._until_passed(level[: self._settings.admission_scan_max])
        # Merge the levels by rank. Within a level the first waiting request has the highest rank, since it is oldest.
        heads = dict.fromkeys(self._levels, 0)
        chosen: list[Request] = []
        while heads and len(chosen) < self._settings.admission_scan_max:
            priority = max(heads, key=lambda level: self._rank(self._levels[level][heads[level]], now_s))
            request = self._levels[priority][heads[priority]]
            chosen.append(request)
            if request.passed >= self._settings.passes_max:
                break
            heads[priority] += 1
            if heads[priority] == len(self._levels[priority]):
                del heads[priority]
        return chosen

    def _until_passed(self, requests: list[Request]) -> list[Request]:
        passes_max = self._settings.passes_max
        for at, request in enumerate(requests, start=1):
            if request.passed >= passes_max:
                return requests[:at]
        return requests

    def _rank(self, request: Request, now_s: float) -> tuple[float, int]:
        waited = (now_s - request.arrived_at_s) / self._settings.ageing_s
        return (request.priority + waited, -request.arrival)
