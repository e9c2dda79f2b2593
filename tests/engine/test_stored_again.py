"""Storage beside a decode engine: what it has lost is stored again, what it has is not, and a flush empties it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tidekv.backends.storage import open_storage
from tidekv.states.types import PageIds

PROMPT = list(range(100, 121))  # Five pages of four tokens and one token.

# The pair of conftest.py, which test modules cannot import.
Pair = Any


async def turn(pair: Pair, name: str, tokens: Sequence[int]) -> int:
    """Serve a request to its end; return the tokens that came from storage."""
    ready = await pair.restore(name, tokens)
    await pair.finish(ready, tokens, [1])
    await pair.engine.wait_settled()
    return int(ready.sources["l3"])


class Counting:
    """A storage with the keys of its pages, whose puts can be held up."""

    def __init__(self) -> None:
        self.engine = open_storage("memory:")
        self.uri = self.engine.uri
        self.keys_stored: list[bytes] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.waits = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    async def put_from(self, keys: Sequence[bytes], pages: PageIds, *, timeout_s: float) -> list[bool]:
        self.waits.set()
        await self.gate.wait()
        self.keys_stored += keys
        return await self.engine.put_from(keys, pages, timeout_s=timeout_s)


async def test_a_head_that_storage_has_lost_is_stored_again_with_the_next_suffix(make_pair) -> None:
    storage = Counting()
    async with make_pair(storage=storage) as pair:
        await turn(pair, "a", PROMPT)
        head = storage.keys_stored[:2]
        assert await storage.delete(head) == [True, True]
        longer = [*PROMPT[:20], *range(500, 509)]
        await turn(pair, "b", longer)
        assert await storage.exists(head, timeout_s=5) == [True, True]
        assert pair.core()["pages_stored_again"] == 2
        await pair.engine.flush()
        assert await turn(pair, "c", longer) == 28
        await pair.assert_nothing_held()


async def test_pages_that_storage_has_are_put_once_however_often_they_are_used(make_pair) -> None:
    storage = Counting()
    async with make_pair(storage=storage, host_pages=12, device_pages=12) as pair:
        for round_ in range(4):
            for number in range(4):
                await turn(pair, f"{number} of {round_}", [number] * 20 + [1])
        assert len(storage.keys_stored) == len(set(storage.keys_stored)) == 4 * 5
        assert pair.core()["pages_stored"] == 4 * 5
        await pair.assert_nothing_held()


async def test_pages_that_another_worker_has_stored_are_not_put(make_pair, tmp_path: Path) -> None:
    uri = f"file:{tmp_path}/store?capacity=4MiB&segment=1MiB"
    async with (
        make_pair(storage=open_storage(uri)) as pair,
        pair.another_decode(storage=open_storage(uri), prefetch_threshold_tokens=1000) as other,
    ):
        await turn(pair, "a", PROMPT)
        await turn(other, "b", PROMPT)
        assert other.engine.statistics()["storage"]["puts"] == 0
        assert other.engine.statistics()["storage"]["pages"] == 5


async def test_after_a_flush_of_storage_the_pages_above_it_are_stored_again(make_pair) -> None:
    async with make_pair(storage=open_storage("memory:")) as pair:
        await turn(pair, "a", PROMPT)
        assert await pair.engine.flush(("l3",)) == {"dropped": {"l3": 5}, "spared": {"l3": 0}}
        await turn(pair, "b", PROMPT)
        assert pair.engine.statistics()["storage"]["pages"] == 5
        await pair.engine.flush(("l1", "l2"))
        assert await turn(pair, "c", PROMPT) == 20


async def test_a_flush_of_storage_waits_for_a_put_under_way_and_removes_what_it_stored(make_pair) -> None:
    storage = Counting()
    async with make_pair(storage=storage) as pair:
        storage.gate.clear()
        ready = await pair.restore("a", PROMPT)
        await pair.finish(ready, PROMPT, [1])
        await storage.waits.wait()
        flush = asyncio.create_task(pair.engine.flush(("l3",)))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not flush.done()
        storage.gate.set()
        assert await flush == {"dropped": {"l3": 5}, "spared": {"l3": 0}}
        assert storage.statistics().pages == 0


async def test_a_flush_of_storage_spares_and_counts_a_put_that_does_not_end(make_pair) -> None:
    storage = Counting()
    async with make_pair(storage=storage) as pair:
        storage.gate.clear()
        ready = await pair.restore("a", PROMPT)
        await pair.finish(ready, PROMPT, [1])
        await storage.waits.wait()
        assert await pair.engine.flush(("l3",), timeout_s=0.2) == {"dropped": {"l3": 0}, "spared": {"l3": 5}}
        storage.gate.set()
        await pair.engine.wait_settled()


@pytest.mark.parametrize("uri", ["memory:", "file:{}/store?capacity=4MiB&segment=1MiB"])
async def test_flushes_of_storage_at_once_all_end(make_pair, tmp_path: Path, uri: str) -> None:
    async with make_pair(storage=open_storage(uri.format(tmp_path))) as pair:
        for _ in range(4):
            answers = await asyncio.gather(*(pair.engine.flush(("l3",)) for _ in range(4)))
            assert [answer["spared"]["l3"] for answer in answers] == [0] * 4
        await turn(pair, "a", PROMPT)
        assert pair.engine.statistics()["storage"]["pages"] == 5
