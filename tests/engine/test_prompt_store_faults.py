"""Faults while prefill writes its prompts through: each is counted, and no page of a request waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from typing import Any

import msgspec
import pytest

from tests.support.inside import copy_on_streams_only, runtime_of, store_of
from tests.support.waits import LIMIT_S
from tidekv import HostPool, InvalidConfig, KVLayout, StorageFailed, TidekvError
from tidekv.backends.keys import page_keys
from tidekv.backends.storage.base import StorageStatistics
from tidekv.engine.prefill.prefill_peer import PromptStoreSettings

PROMPT = list(range(100, 122))  # Five pages of four tokens and a tail of two.
LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", page_size=4)

EMPTY = StorageStatistics("gated:", 0, 0, 1 << 20, 0, 0, 0, 0, 0, 0)


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

    def statistics(self) -> StorageStatistics:
        return EMPTY

    async def close(self) -> None: ...


async def serve_one(pair: Any, number: int = 0) -> None:
    ready = await pair.restore(f"r{number}", [*PROMPT[:-1], number])
    await pair.engine.finish(ready)
    await pair.engine.flush()


async def all_pages_back(pair: Any, host_pages: int = 256) -> None:
    """Prefill has every page again, and every host page of the store is free."""
    async with asyncio.timeout(LIMIT_S), pair.prefill.freed:
        await pair.prefill.freed.wait_for(lambda: pair.prefill.pages_free == 256)
    await pair.peer.wait_stored()
    assert pair.peer.statistics()["store_host_free"] == host_pages


@pytest.mark.parametrize("name", ["batch_pages", "rooms_max", "hold_s", "put_timeout_s", "close_wait_s"])
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_a_bound_that_bounds_nothing_is_named(name: str, value: float) -> None:
    with pytest.raises(InvalidConfig, match=rf"{name} must be a (whole )?number"):
        PromptStoreSettings(**{name: value})  # type: ignore[arg-type]  # NaN is no int, and is refused all the same.


class HeldCopies:
    """Lets the copies of a prefill peer to host memory begin, and holds them until `may_end` is set."""

    def __init__(self, pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        copier = runtime_of(store_of(pair.peer)).copier
        assert copier is not None
        self._to_host = copier.to_host
        self.begun, self.may_end = asyncio.Event(), asyncio.Event()
        self.ended = 0
        monkeypatch.setattr(copier, "to_host", lambda *pages: asyncio.ensure_future(self._copy(*pages)))

    async def _copy(self, *pages: Any) -> None:
        self.begun.set()
        await self.may_end.wait()
        await self._to_host(*pages)
        self.ended += 1


async def test_prompts_over_the_bound_are_declined_and_served_all_the_same(
    make_pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make_pair(prefill_storage=Gated(), prefill_store=PromptStoreSettings(rooms_max=1)) as pair:
        copies = HeldCopies(pair, monkeypatch)
        for number in range(3):
            await serve_one(pair, number)
        assert pair.peer.statistics()["store_rooms_declined"] == 2
        assert pair.peer.statistics()["store_rooms"] == 1
        copies.may_end.set()
        await all_pages_back(pair)
        assert pair.peer.statistics()["store_pages_written"] == 5


@pytest.mark.parametrize(("host_pages", "declined"), [(2, 5), (8, 0)])
async def test_storage_that_does_not_answer_holds_a_prompt_for_a_while_only(
    make_pair, host_pages: int, declined: int
) -> None:
    """Pages for which host memory has no room wait for storage; the others are in host memory at once."""
    storage = Gated()
    storage.answers.clear()
    settings = PromptStoreSettings(hold_s=0.02, close_wait_s=0.02)
    host = HostPool.allocate(LAYOUT, host_pages)
    async with make_pair(prefill_storage=storage, prefill_store=settings, prefill_host=host) as pair:
        await serve_one(pair)
        async with asyncio.timeout(LIMIT_S), pair.prefill.freed:
            await pair.prefill.freed.wait_for(lambda: pair.prefill.pages_free == 256)
        statistics = pair.peer.statistics()
        assert (statistics["store_pages_declined"], statistics["store_pages_written"]) == (declined, 0)
        storage.answers.set()


async def test_a_copy_that_fails_costs_its_prompt_a_place_in_storage_and_nothing_else(
    make_pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make_pair(prefill_storage=Gated()) as pair:
        copier = runtime_of(store_of(pair.peer)).copier
        assert copier is not None
        to_host = copier.to_host

        def fails(*pages: object) -> asyncio.Future[None]:
            failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            failed.set_exception(OSError("a device event is in error"))
            return failed

        monkeypatch.setattr(copier, "to_host", fails)
        await serve_one(pair)
        await all_pages_back(pair)
        assert pair.peer.statistics()["store_pages_declined"] == 5
        monkeypatch.setattr(copier, "to_host", to_host)
        await serve_one(pair)
        await all_pages_back(pair)
        assert pair.peer.statistics()["store_pages_written"] == 5


async def test_a_put_that_stores_a_part_is_counted_by_pages(make_pair) -> None:
    async with make_pair(prefill_storage=Gated(stores=2)) as pair:
        await serve_one(pair)
        await all_pages_back(pair)
        assert pair.peer.statistics()["store_pages_written"] == 2


async def test_pages_that_pass_through_host_memory_and_do_not_get_to_storage_are_lost(make_pair) -> None:
    storage = Gated(stores=0)
    async with make_pair(prefill_storage=storage, prefill_host=HostPool.allocate(LAYOUT, 2)) as pair:
        await serve_one(pair)
        await all_pages_back(pair, host_pages=2)
        statistics = pair.peer.statistics()
        assert (statistics["store_pages_written"], statistics["store_pages_lost"]) == (0, 5)


async def test_a_bug_of_an_engine_is_logged_with_its_traceback_and_fails_nobody(
    make_pair, caplog: pytest.LogCaptureFixture
) -> None:
    async with make_pair(prefill_storage=Gated(raises=ZeroDivisionError("of the engine"))) as pair:
        with caplog.at_level(logging.ERROR, logger="tidekv.engine"):
            await serve_one(pair)
            await all_pages_back(pair)
        assert pair.peer.statistics()["store_pages_written"] == 0
        assert any("ZeroDivisionError" in record.getMessage() for record in caplog.records)


async def test_host_pages_stay_taken_while_a_copy_writes_to_them_though_the_peer_closes(
    make_pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    copying, may_end = threading.Event(), threading.Event()
    ended: list[bool] = []
    host = HostPool.allocate(LAYOUT, 8)
    settings = PromptStoreSettings(close_wait_s=0.01)
    async with make_pair(prefill_storage=Gated(), prefill_host=host, prefill_store=settings) as pair:
        copy_on_streams_only(store_of(pair.peer))
        copier = runtime_of(store_of(pair.peer)).copier
        assert copier is not None
        to_host = copier._mover.to_host

        def hold(*pages: Any) -> None:
            copying.set()
            may_end.wait(LIMIT_S)
            to_host(*pages)
            ended.append(pair.prefill.pages_free == 256)

        monkeypatch.setattr(copier._mover, "to_host", hold)
        await serve_one(pair)
        await asyncio.to_thread(copying.wait, LIMIT_S)
        assert pair.peer.statistics()["store_host_free"] == 3
        asyncio.get_running_loop().call_later(0.1, may_end.set)
    # Closing cut the prompt, and waited for the copy that nothing can stop before it gave the pages back.
    assert ended == [False]
    assert pair.peer.statistics()["store_rooms"] == 0
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


async def test_storage_that_hangs_is_left_behind_and_the_peer_closes(make_pair) -> None:
    never = asyncio.Event()
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(StorageFailed, match="to gated: did not end: closing gated: did not end in time"):
            settings = PromptStoreSettings(close_wait_s=0.01)
            async with make_pair(prefill_storage=Hanging(never), prefill_store=settings) as pair:
                await serve_one(pair)
    never.set()


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
