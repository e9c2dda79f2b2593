"""A prefill worker leaves storage that fails alone, and comes back to it by a probe."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.waits import until
from tidekv import open_storage
from tidekv.engine.prefill.prefill_config import PromptStoreSettings
from tidekv.states.errors import InvalidConfig, StorageFailed


class Failing:
    """A memory engine that fails while `broken` is set, and counts its calls."""

    def __init__(self) -> None:
        self._storage = open_storage("memory:?capacity=1MiB")
        self.broken = True
        self.asked = 0
        self.probes = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._storage, name)

    async def exists(self, keys: list[bytes], *, timeout_s: float) -> list[bool]:
        self.asked += 1
        if self.broken:
            raise StorageFailed("it is gone")
        return await self._storage.exists(keys, timeout_s=timeout_s)

    async def touch(self, keys: list[bytes], *, timeout_s: float) -> list[bool]:
        return await self.exists(keys, timeout_s=timeout_s)

    async def probe(self) -> None:
        self.probes += 1
        if self.broken and self.probes >= 2:
            self.broken = False
            return
        if self.broken:
            raise StorageFailed("it is gone still")


async def test_prompts_are_not_stored_until_a_probe_succeeds(make_pair) -> None:
    storage = Failing()
    settings = PromptStoreSettings(breaker_failures=2, breaker_backoff_s=0.005, breaker_backoff_max_s=0.02)
    async with make_pair(prefill_storage=storage, prefill_store=settings) as pair:

        async def serve(name: str, token: int) -> None:
            tokens = [token] * 12
            await pair.finish(await pair.restore(name, tokens), tokens, [1])
            await pair.peer.wait_stored()

        await serve("a", 1)
        await serve("b", 2)
        statistics = pair.peer.statistics()
        assert statistics["store_breaker_opened"] == 1
        if statistics["store_breaker_open"]:
            asked = storage.asked
            await serve("c", 3)
            assert pair.peer.statistics().get("store_rooms_skipped", 0) == 1 or storage.asked > asked
        await until(lambda: not pair.peer.statistics()["store_breaker_open"])
        assert storage.probes == 2
        await serve("d", 4)
        assert pair.peer.statistics()["store_pages_written"] >= 3


async def test_a_worker_that_ends_does_not_wait_for_a_probe(make_pair) -> None:
    settings = PromptStoreSettings(breaker_failures=1, breaker_backoff_s=3600.0)
    async with make_pair(prefill_storage=Failing(), prefill_store=settings) as pair:
        await pair.finish(await pair.restore("a", [1] * 12), [1] * 12, [1])
        await pair.peer.wait_stored()
        assert pair.peer.statistics()["store_breaker_open"] == 1
        await pair.finish(await pair.restore("b", [2] * 12), [2] * 12, [1])
        assert pair.peer.statistics()["store_rooms_skipped"] == 1


@pytest.mark.parametrize("field", ["breaker_failures", "breaker_backoff_s", "breaker_backoff_max_s"])
def test_a_wrong_breaker_is_refused(field: str) -> None:
    with pytest.raises(InvalidConfig, match=field):
        PromptStoreSettings(**{field: -1})


class Cancelling:
    """A memory engine whose next calls by these names cancel themselves, as a client with timeouts of its own may."""

    def __init__(self) -> None:
        self._storage = open_storage("memory:?capacity=1MiB")
        self.cancels: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._storage, name)
        if self.cancels.get(name, 0) <= 0:
            return call

        async def cancelled(*_: object, **__: object) -> None:
            self.cancels[name] -= 1
            raise asyncio.CancelledError("by the client")

        return cancelled


async def test_calls_that_storage_cancels_have_failed_and_a_probe_that_it_cancels_is_not_the_last(make_pair) -> None:
    """SGLang #38428: one exception that nothing expected ended backups for the life of the process."""
    storage = Cancelling()
    settings = PromptStoreSettings(breaker_failures=2, breaker_backoff_s=0.005, breaker_backoff_max_s=0.02)
    async with make_pair(prefill_storage=storage, prefill_store=settings) as pair:

        async def serve(number: int) -> None:
            tokens = [number] * 12
            await pair.finish(await pair.restore(f"r{number}", tokens), tokens, [1])
            await pair.peer.wait_stored()

        storage.cancels = {"put_from": 1}
        await serve(0)
        storage.cancels = {"touch": 2, "probe": 1}
        await serve(1)
        statistics = pair.peer.statistics()
        assert (statistics["store_breaker_opened"], statistics["store_pages_written"]) == (1, 0)
        await until(lambda: not pair.peer.statistics()["store_breaker_open"])
        assert not storage.cancels["probe"]
        storage.cancels = {}
        await serve(9)
        assert pair.peer.statistics()["store_pages_written"] == 3
