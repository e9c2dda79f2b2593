"""Counters behind an engine's statistics."""

from __future__ import annotations

from collections import Counter

from tidekv.backends.storage.base import StorageStatistics


class StorageCounters:
    """Counters of one engine. Written on the event loop, except `evictions`, which one thread of the engine counts."""

    def __init__(self) -> None:
        self.hits = 0
        self.puts = 0
        self.evictions = 0
        self.read_bytes = 0
        self.written_bytes = 0
        self.misses: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()

    def got(self, causes: list[str], page_bytes: int) -> list[bool]:
        """Count the outcome of reads: one cause for each page, empty for a hit."""
        found = causes.count("")
        self.hits += found
        self.read_bytes += found * page_bytes
        if found < len(causes):
            self.misses.update(filter(None, causes))
        return [not cause for cause in causes]

    def put(self, causes: list[str], page_bytes: int) -> list[bool]:
        """Count the outcome of writes: one cause for each page, empty for a stored one."""
        stored = causes.count("")
        self.puts += stored
        self.written_bytes += stored * page_bytes
        if stored < len(causes):
            self.failures.update(filter(None, causes))
        return [not cause for cause in causes]

    def statistics(
        self, *, uri: str, pages: int, used_bytes: int, capacity_bytes: int, calls_in_flight: int
    ) -> StorageStatistics:
        """Return the counters together with what the engine holds."""
        return StorageStatistics(
            uri=uri,
            pages=pages,
            used_bytes=used_bytes,
            capacity_bytes=capacity_bytes,
            hits=self.hits,
            puts=self.puts,
            evictions=self.evictions,
            read_bytes=self.read_bytes,
            written_bytes=self.written_bytes,
            calls_in_flight=calls_in_flight,
            misses=dict(self.misses),
            failures=dict(self.failures),
        )
