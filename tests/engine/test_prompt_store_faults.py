"""Faults while prefill writes its prompts through: each is counted, and no page of a request waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

import msgspec
import pytest

from tests.support.waits import LIMIT_S
from tidekv import HostPool, InvalidConfig, KVLayout, StorageFailed, TidekvError
from tidekv.backends.keys import page_keys
from tidekv.engine.prefill import prompt_store
from tidekv.engine.prefill.prefill_peer import PromptStoreSettings

PROMPT = list(range(100, 122))  # Five pages of four tokens and a tail of two.
LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", page_size=4)


class Gated:
    """An engine with calls that wait for gates, or raise what a test sets."""

    uri = "gated:"

    def __init__(self, *, raises: Exception | None = None, stores: int = 99) -> None:
        self.answers, self.puts = asyncio.Event(), asyncio.Event()
        self.answers.set()
        self.puts.set()
        self.raises = raises
        self.stores = stores

    async def register(self, *_: object, **__: object) -> None: ...

    async def exists(self, keys: list[bytes], *, timeout_s: float) -> list[bool]:
        await self.answers.wait()
        return [False] * len(keys)

    async def put_from(self, keys: list[bytes], pages: object, *, timeout_s: float) -> list[bool]:
        await self.puts.wait()
        if self.raises is not None:
            raise self.raises
        return [at < self.stores for at in range(len(keys))]

    async def close(self) -> None: ...


async def serve_one(pair: Any, number: int = 0) -> None:
    ready = await pair.restore(f"r{number}", [*PROMPT[:-1], number])
    await pair.engine.finish(ready)
    await pair.engine.flush()


async def all_pages_back(pair: Any) -> None:
    """Prefill has every page again, and every host page of the store is free."""
    async with asyncio.timeout(LIMIT_S), pair.prefill.freed:
        await pair.prefill.freed.wait_for(lambda: pair.prefill.pages_free == 256)
    await pair.peer.wait_stored()
    assert pair.peer.statistics()["store_bounce_free"] == 256


@pytest.mark.parametrize("name", ["batch_pages", "rooms_max", "hold_s", "put_timeout_s", "close_wait_s"])
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_a_bound_that_bounds_nothing_is_named(name: str, value: float) -> None:
    with pytest.raises(InvalidConfig, match=rf"{name} must be a (whole )?number"):
        PromptStoreSettings(**{name: value})  # type: ignore[arg-type]  # NaN is no int, and is refused all the same.


async def test_prompts_over_the_bound_are_declined_and_served_all_the_same(make_pair) -> None:
    storage = Gated()
    storage.answers.clear()
    settings = PromptStoreSettings(rooms_max=1, hold_s=60.0)
    async with make_pair(prefill_storage=storage, prefill_store=settings) as pair:
        for number in range(3):
            await serve_one(pair, number)
        assert pair.peer.statistics()["store_rooms_declined"] == 2
        assert pair.peer.statistics()["store_rooms"] == 1
        storage.answers.set()
        await all_pages_back(pair)
        assert pair.peer.statistics()["store_pages_written"] == 5


async def test_storage_that_does_not_answer_holds_a_prompt_for_a_while_only(make_pair) -> None:
    storage = Gated()
    storage.answers.clear()
    settings = PromptStoreSettings(hold_s=0.02, close_wait_s=0.02)
    async with make_pair(prefill_storage=storage, prefill_store=settings) as pair:
        await serve_one(pair)
        await all_pages_back(pair)
        statistics = pair.peer.statistics()
        assert (statistics["store_pages_late"], statistics.get("store_pages_written", 0)) == (5, 0)
        storage.answers.set()


async def test_a_copy_that_fails_costs_its_prompt_a_place_in_storage_and_nothing_else(
    make_pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make_pair(prefill_storage=Gated()) as pair:
        copier = pair.peer._store._full.copier
        to_host = copier.to_host

        def fails(*pages: object) -> asyncio.Future[None]:
            failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            failed.set_exception(OSError("a device event is in error"))
            return failed

        monkeypatch.setattr(copier, "to_host", fails)
        await serve_one(pair)
        await all_pages_back(pair)
        assert pair.peer.statistics()["store_pages_failed"] == 5
        monkeypatch.setattr(copier, "to_host", to_host)
        await serve_one(pair)
        await all_pages_back(pair)
        assert pair.peer.statistics()["store_pages_written"] == 5


async def test_a_put_that_stores_a_part_is_counted_by_pages(make_pair) -> None:
    async with make_pair(prefill_storage=Gated(stores=2)) as pair:
        await serve_one(pair)
        await all_pages_back(pair)
        statistics = pair.peer.statistics()
        assert (statistics["store_pages_written"], statistics["store_pages_failed"]) == (2, 3)


async def test_a_bug_of_an_engine_is_logged_with_its_traceback_and_fails_nobody(
    make_pair, caplog: pytest.LogCaptureFixture
) -> None:
    async with make_pair(prefill_storage=Gated(raises=ZeroDivisionError("of the engine"))) as pair:
        with caplog.at_level(logging.ERROR, logger="tidekv.engine"):
            await serve_one(pair)
            await all_pages_back(pair)
        assert pair.peer.statistics()["store_pages_failed"] == 5
        (record,) = [record for record in caplog.records if "writing a prompt through" in record.message]
        assert "ZeroDivisionError" in record.getMessage()


async def test_host_pages_stay_taken_while_a_copy_writes_to_them_though_the_peer_closes(
    make_pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    copying, may_end = asyncio.Event(), asyncio.Event()
    free_then: list[int] = []
    settings = PromptStoreSettings(close_wait_s=0.01)
    async with make_pair(
        prefill_storage=Gated(), prefill_host=HostPool.allocate(LAYOUT, 8), prefill_store=settings
    ) as pair:
        store = pair.peer._store
        to_host = store._full.copier.to_host

        def hold(*pages: object) -> asyncio.Future[None]:
            async def copy_later() -> None:
                copying.set()
                await may_end.wait()
                free_then.append(store._full.bounce.free)
                await to_host(*pages)

            return asyncio.ensure_future(copy_later())

        monkeypatch.setattr(store._full.copier, "to_host", hold)
        await serve_one(pair)
        await copying.wait()
        asyncio.get_running_loop().call_later(0.1, may_end.set)
    # Closing cut the prompt, and waited for the copy that nothing can stop.
    assert free_then == [3]
    assert pair.peer.statistics()["store_bounce_free"] == 8
    assert pair.peer.statistics()["store_closed_early"] == 1


async def test_a_prompt_that_extends_a_stored_one_hashes_only_its_new_pages(
    make_pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[int] = []
    page_digests = page_keys.page_digests

    def counted(*arguments: Any, **options: Any) -> list[bytes]:
        digests = page_digests(*arguments, **options)
        hashed.append(len(digests))
        return digests

    monkeypatch.setattr(page_keys, "page_digests", counted)
    async with make_pair(prefill_storage=Gated()) as pair:
        for number, tokens in enumerate((PROMPT, [*PROMPT, *range(200, 212)])):
            ready = await pair.restore(f"r{number}", tokens)
            await pair.engine.finish(ready)
            await pair.engine.flush()
            await all_pages_back(pair)
        assert pair.peer.statistics()["store_pages_written"] == 5 + 8
    assert hashed == [5, 3]


class Hanging(Gated):
    """An engine with puts that ignore cancellation and a close that waits, both until `never` is set."""

    def __init__(self, never: asyncio.Event) -> None:
        super().__init__()
        self._never = never

    async def put_from(self, keys: list[bytes], pages: object, *, timeout_s: float) -> list[bool]:
        while not self._never.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await self._never.wait()
        return [True] * len(keys)

    async def close(self) -> None:
        await self._never.wait()


async def test_storage_that_hangs_is_left_behind_and_the_peer_closes(
    make_pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(prompt_store, "CLOSE_S", 0.05)
    never = asyncio.Event()
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(StorageFailed, match="storage of gated: did not end within"):
            settings = PromptStoreSettings(close_wait_s=0.01)
            async with make_pair(prefill_storage=Hanging(never), prefill_store=settings) as pair:
                await serve_one(pair)
    assert "puts that were cancelled of gated: did not end" in caplog.text
    never.set()
    await pair.peer._store._tasks.close()


async def test_a_room_whose_program_ignores_its_cancellation_does_not_keep_the_peer_from_closing(make_pair) -> None:
    serving, never = asyncio.Event(), asyncio.Event()

    async def ignore(_: object) -> None:
        serving.set()
        while not never.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await never.wait()

    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(TidekvError, match="on_room ignores its cancellation"):
            async with make_pair() as pair:
                pair.peer._on_room = ignore
                pair.peer.config = msgspec.structs.replace(pair.peer.config, close_deadline_s=0.05)
                restoring = asyncio.ensure_future(pair.restore("r1", PROMPT))
                await serving.wait()
                await pair.engine.abort("r1")
                await asyncio.gather(restoring, return_exceptions=True)
    never.set()
    await pair.peer._tasks.close()
