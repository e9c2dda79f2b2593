"""The watch for pages that storage has evicted: what it looks up, and what it says that storage lacks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from tidekv.engine.decode import stored_sweep
from tidekv.engine.decode.stored_sweep import StoredPagesSweep

PAGES = [bytes([number]) * 8 for number in range(10)]


class Watcher:
    """A watcher of ten published pages."""

    def __init__(self) -> None:
        self.lacking: list[bytes] = []

    def look(self, take: Callable[[Any], None]) -> None:
        def part(first: int, count: int) -> tuple[list[bytes], bool]:
            return PAGES[first : first + count], first + count < len(PAGES)

        # As the sending thread does it.
        asyncio.get_running_loop().run_in_executor(None, take, SimpleNamespace(digests_in_storage=part))

    def storage_lacks(self, digests: Sequence[bytes]) -> None:
        self.lacking += digests


class Storage:
    """A storage that has lost some pages."""

    uri = "memory:"

    def __init__(self, *lost: int) -> None:
        self.lost = {PAGES[number] for number in lost}
        self.evictions = 0
        self.asked: list[bytes] = []

    def statistics(self) -> Any:
        return SimpleNamespace(evictions=self.evictions)

    async def exists(self, digests: Sequence[bytes], *, timeout_s: float) -> list[bool]:
        self.asked += digests
        return [digest not in self.lost for digest in digests]


def sweep_of(storage: Storage | None, watcher: Watcher, monkeypatch: Any) -> StoredPagesSweep:
    monkeypatch.setattr(stored_sweep, "PART_PAGES", 4)
    monkeypatch.setattr(stored_sweep, "PERIOD_S", 60.0)  # The limit of a look, too.
    in_use: Any = storage, watcher
    return StoredPagesSweep(lambda: in_use[0], lambda: in_use[1])


async def test_evicted_pages_are_found_part_by_part_and_once_for_each_eviction(monkeypatch: Any) -> None:
    storage, watcher = Storage(1, 9), Watcher()
    sweep = sweep_of(storage, watcher, monkeypatch)
    await sweep.look()
    assert not storage.asked, "nothing was evicted"
    storage.evictions = 2
    for parts in (4, 8, 10):
        await sweep.look()
        assert len(storage.asked) == parts
    assert watcher.lacking == [PAGES[1], PAGES[9]]
    await sweep.look()
    assert len(storage.asked) == 10, "nothing was evicted since"
    storage.evictions = 3
    await sweep.look()
    assert len(storage.asked) == 14


async def test_without_storage_nothing_is_looked_up(monkeypatch: Any) -> None:
    watcher = Watcher()
    await sweep_of(None, watcher, monkeypatch).look()
    assert not watcher.lacking


async def test_what_another_storage_lacks_is_not_said_of_the_present_one(monkeypatch: Any) -> None:
    storage, watcher = Storage(0), Watcher()
    storage.evictions = 1
    others = iter([storage])
    monkeypatch.setattr(stored_sweep, "PERIOD_S", 60.0)
    sweep: Any = StoredPagesSweep(lambda: next(others, None), lambda: watcher)  # type: ignore[arg-type,return-value]
    await sweep.look()
    assert storage.asked == PAGES
    assert not watcher.lacking
