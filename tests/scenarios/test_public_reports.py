"""Recent reports of other systems, replayed on a running pair; tests/scenarios/INCIDENTS.md lists them all."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.inside import core_of, runtime_of
from tests.support.waits import LIMIT_S
from tidekv import RequestFailed, open_storage
from tidekv.backends.keys.chain import pack_tokens, page_digests
from tidekv.engine.kv_events.content import KVContent
from tidekv.engine.kv_events.messages import BlockRemoved, KVEvent, hash_of
from tidekv.engine.kv_events.watcher import KVEventWatcher
from tidekv.states.types import PageIds

PROMPT = list(range(100, 121))  # Five pages of four tokens and one token.
OTHER = list(range(500, 521))

# The pair of conftest.py, which test modules cannot import.
Pair = Any


async def serve(pair: Pair, name: str, tokens: Sequence[int]) -> dict[str, int]:
    """Serve a request to its end, every byte verified; return its tokens by source."""
    ready = await pair.restore(name, tokens)
    await pair.finish(ready, tokens, [1])
    await pair.engine.wait_settled()
    return dict(ready.sources)


class ScriptedStorage:
    """Storage in memory: `on_put` and `on_get` run before its own calls."""

    def __init__(self) -> None:
        self._inner = open_storage("memory:?capacity=64MiB")
        self.on_put: Any = None
        self.on_get: Any = None
        self.asked: list[bytes] = []
        """The first key of each look-up."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def exists(self, keys: Sequence[bytes], *, timeout_s: float) -> list[bool]:
        self.asked.append(keys[0])
        return await self._inner.exists(keys, timeout_s=timeout_s)

    async def put_from(self, keys: Sequence[bytes], pages: PageIds, *, timeout_s: float) -> list[bool]:
        if self.on_put is not None:
            await self.on_put(pages)
        return await self._inner.put_from(keys, pages, timeout_s=timeout_s)

    async def get_into(self, keys: Sequence[bytes], pages: PageIds, *, timeout_s: float) -> list[bool]:
        flags = await self._inner.get_into(keys, pages, timeout_s=timeout_s)
        return flags if self.on_get is None else list(await self.on_get(pages, flags))


RAISED = [ValueError("a malformed answer"), TimeoutError(), MemoryError(), asyncio.CancelledError("by the client")]


@pytest.mark.parametrize("raised", RAISED, ids=lambda raised: type(raised).__name__)
async def test_a_put_that_raises_anything_gives_its_host_pages_back_and_ends_no_later_put(
    make_pair, raised: BaseException
) -> None:
    """SGLang #38428: one exception of a storage client ended the thread of backups, and no host page came back."""
    storage = ScriptedStorage()

    async def fail(pages: PageIds) -> None:
        raise raised

    async with make_pair(storage=storage, host_pages=16, breaker_backoff_s=0.01, breaker_backoff_max_s=0.02) as pair:
        storage.on_put = fail
        for number in range(12):
            # Five pages each: more than host memory has, so what failed has to make room.
            await serve(pair, f"r{number}", [1000 * number + at for at in range(21)])
        assert pair.core()["pages_stored"] == 0
        storage.on_put = None
        async with asyncio.timeout(LIMIT_S):
            number = 100
            while not pair.core()["pages_stored"]:
                await serve(pair, f"r{number}", [1000 * number + at for at in range(21)])
                number += 1
        await pair.assert_nothing_held()


@pytest.mark.parametrize("end", ["raises", "says that it read nothing", "says that it read one page"])
async def test_what_a_failed_read_has_left_in_host_memory_is_hit_by_no_later_request(make_pair, end: str) -> None:
    """Dynamo #15079: a transfer that had failed counted as loaded, and a request was served with another one's KV."""
    storage = ScriptedStorage()
    async with make_pair(storage=storage) as pair:
        await serve(pair, "a", PROMPT)
        await pair.engine.flush()

        async def scribble(pages: PageIds, flags: list[bool]) -> list[bool]:
            pair.host.read_pages(pages[1:])  # They exist: the read has come so far.
            pair.host.write_pages(pages[1:], pair.host.read_pages(pages[1:]) + 1)
            if end == "raises":
                raise OSError("the device is gone")
            return [end.endswith("one page"), *[False] * (len(flags) - 1)]

        storage.on_get = scribble
        sources = await serve(pair, "b", PROMPT)
        assert sources["l3"] == (4 if end.endswith("one page") else 0)
        storage.on_get = None
        # From the device, then from the host: `serve` verifies each byte.
        assert (await serve(pair, "c", PROMPT))["l1"] == 20
        await pair.engine.flush(("l1",))
        assert (await serve(pair, "d", PROMPT))["l2"] == 20
        await pair.assert_nothing_held()


async def test_a_request_that_is_put_off_again_and_again_counts_once(make_pair) -> None:
    """vLLM #48860: each time a waiting request was looked at, its look-up was counted once more in the hit rate."""
    storage = ScriptedStorage()
    async with make_pair(
        storage=storage, device_pages=12, growth_reserve_pages=0, metrics_listen="127.0.0.1:0"
    ) as pair:
        await serve(pair, "warm", PROMPT)
        await pair.engine.flush()
        storage.asked.clear()
        holder = await pair.restore("holder", OTHER * 2)  # Eleven of the twelve pages.
        waiting = asyncio.create_task(pair.restore("waiting", PROMPT))
        for number in range(20):
            # What comes and goes gives the queue a reason to look at it again.
            passing = asyncio.create_task(pair.restore(f"passing{number}", [number] * 3))
            for _ in range(5):
                await asyncio.sleep(0)
            await pair.engine.abort(f"passing{number}")
            with suppress(RequestFailed):
                await passing
        assert not waiting.done()
        await pair.finish(holder, OTHER * 2, [1])
        ready = await waiting
        assert ready.sources == {"l1": 0, "l2": 0, "l3": 20, "transfer": 1}
        assert len(storage.asked) == len(set(storage.asked)), "each prompt was looked up once"
        await pair.finish(ready, PROMPT, [1])
        fold = runtime_of(pair.engine)._fold
        assert fold.tokens["l3"] == 20
        await pair.assert_nothing_held()


async def test_a_flush_of_one_tier_is_published_as_that_tiers_and_at_once(make_pair) -> None:
    """vLLM #57296, aibrix #2287: a reset of device memory alone was published as if no tier had anything any more, and
    an idle engine published it with its next request.
    """
    async with make_pair(storage=ScriptedStorage()) as pair:
        published: list[KVEvent] = []
        outlet = SimpleNamespace(has_room=True, publish=lambda make, whole: published.extend(make()))
        core = core_of(pair.engine)
        content = KVContent(page_size=4, key_bytes=core.settings.key_bytes)
        runtime_of(pair.engine).driver.watch(KVEventWatcher(core, outlet, content))
        await serve(pair, "a", PROMPT)
        pages = sorted(hash_of(digest) for digest in page_digests(pack_tokens(PROMPT), 4))
        assert len(pages) == 5
        # Host memory last: with it the index forgets the pages, and with them what storage has of them.
        for tier, medium in (("l1", "GPU"), ("l3", "STORAGE"), ("l2", "CPU")):
            published.clear()
            await pair.engine.flush((tier,))
            (removed,) = published
            assert isinstance(removed, BlockRemoved)
            assert (sorted(removed.block_hashes), removed.medium) == (pages, medium)
