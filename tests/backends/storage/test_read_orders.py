"""In which order threads take the pieces of a batch: by halves where it is alone, in order behind another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

from tidekv.backends.storage.file.page_io import ThreadIO
from tidekv.backends.storage.file.records import Geometry
from tidekv.backends.storage.file.segments import Run, Segments

PAGE_BYTES = 512 << 10
"""A piece."""
PAGES = 16


class Turns(Executor):
    """Threads that never run: one may look at what each was given, and take pieces for them in turns."""

    def __init__(self) -> None:
        self.given: list[tuple[Iterator[Run], Future[Any]]] = []

    def submit(self, work: Callable[..., Any], *arguments: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.given.append((arguments[1], future))
        return future

    def taken(self, first: int) -> list[int]:
        """The pieces that two threads take in turns, of the batch that starts at `given[first]`."""
        (one, _), (other, _) = self.given[first : first + 2]
        return [run.first for pair in zip(one, other, strict=True) for run in pair]

    def end(self) -> None:
        for _, future in self.given:
            future.set_result(None)
        self.given = []


async def test_a_batch_behind_another_is_read_in_order_and_one_alone_by_halves(tmp_path: Path) -> None:
    geometry = Geometry(namespace=b"n" * 32, page_bytes=PAGE_BYTES, slots=PAGES)
    turns = Turns()
    io = ThreadIO(
        Segments(tmp_path, geometry), lambda page: memoryview(b""), turns, worker_count=2, chunk_bytes=8 << 20
    )
    slots, pages, keys = list(range(PAGES)), list(range(PAGES)), [bytes(32)] * PAGES

    def begin(move: Callable[..., Any]) -> asyncio.Task[list[str]]:
        return asyncio.create_task(move(keys, slots, pages, lambda: True))

    async def ends(*calls: asyncio.Task[list[str]]) -> None:
        turns.end()
        await asyncio.gather(*calls)

    halves = [at for pair in zip(range(PAGES // 2), range(PAGES // 2, PAGES), strict=True) for at in pair]
    calls = [begin(io.fetch) for _ in range(3)]
    await asyncio.sleep(0)
    assert [turns.taken(first) for first in (0, 2, 4)] == [halves, list(range(PAGES)), list(range(PAGES))]
    await ends(*calls)
    # The others have ended: it is alone again. What is written goes to two files, regardless of other writers.
    calls = [begin(io.fetch), begin(io.store), begin(io.store)]
    await asyncio.sleep(0)
    assert [turns.taken(first) for first in (0, 2, 4)] == [halves] * 3
    await ends(*calls)
