"""A cache tier never fails a request: whatever storage or copies do, the missing pages come by extend."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tests.support.inside import runtime_of
from tests.support.waits import PATIENT
from tidekv import RequestFailed, open_storage
from tidekv.backends.storage.base import Storage
from tidekv.states.errors import CopyFailed, StorageFailed
from tidekv.states.types import PageIds

PROMPT = list(range(100, 142))  # Ten pages of four tokens and a tail of two.
# Faults that end by a deadline of the engine. No other request here may depend on one.
WITHOUT_END = ("query never", "fetch late")
BRIEF = {"prefetch": "timeout", "query_deadline_s": 0.05, "prefetch_base_s": 0.05}


class FaultyStorage:
    """A storage engine with one fault that a test sets."""

    def __init__(self, inner: Storage) -> None:
        self._inner = inner
        self.fault = ""
        self.calls = 0
        self.held = asyncio.Event()

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    async def exists(self, keys: Sequence[bytes], *, timeout_s: float) -> list[bool]:
        if self.fault == "query error":
            raise StorageFailed("the index is gone")
        if self.fault == "query bug":
            raise ZeroDivisionError("a bug of the engine")
        if self.fault == "query never":
            await self.held.wait()
        return await self._inner.exists(keys, timeout_s=timeout_s)

    async def get_into(self, keys: Sequence[bytes], pages: PageIds, *, timeout_s: float) -> list[bool]:
        self.calls += 1
        call = self.calls
        if self.fault == "fetch error":
            raise StorageFailed("the disk is gone")
        if self.fault == "fetch bug":
            raise ZeroDivisionError("a bug of the engine")
        if self.fault == "fetch late":
            await self.held.wait()
        flags = await self._inner.get_into(keys, pages, timeout_s=timeout_s)
        if self.fault == "nothing there":
            return [False] * len(flags)
        if self.fault == "hole" and call == 2:
            return [True, False, *flags[2:]]
        return flags


async def in_storage_only(pair, storage: FaultyStorage) -> None:
    ready = await pair.restore("warm", PROMPT)
    await pair.finish(ready, PROMPT, [1])
    await pair.engine.wait_settled()
    await pair.engine.flush()


@pytest.mark.parametrize(
    ("fault", "from_storage"),
    [
        ("", 40),
        ("query error", 0),
        ("query bug", 0),
        ("query never", 0),
        ("fetch error", 0),
        ("fetch bug", 0),
        ("fetch late", 0),
        ("nothing there", 0),
        ("hole", 28),
    ],
)
async def test_storage_faults_are_made_good_by_prefill(make_pair, fault: str, from_storage: int) -> None:
    storage = FaultyStorage(open_storage("memory:?capacity=64MiB"))
    waits = BRIEF if fault in WITHOUT_END else PATIENT
    async with make_pair(storage=storage, fetch_run_pages=4, close_deadline_s=5.0, **waits) as pair:
        await in_storage_only(pair, storage)
        storage.fault = fault
        ready = await pair.restore("r1", PROMPT)
        assert ready.sources == {"l1": 0, "l2": 0, "l3": from_storage, "transfer": 42 - from_storage}
        storage.held.set()
        await pair.finish(ready, PROMPT, [1])
        await pair.assert_nothing_held()


async def test_a_failed_copy_to_the_device_is_made_good_by_prefill(make_pair, monkeypatch) -> None:
    async with make_pair() as pair:
        ready = await pair.restore("warm", PROMPT)
        await pair.finish(ready, PROMPT, [1])
        await pair.engine.wait_settled()
        await pair.engine.flush(("l1",))
        copier = runtime_of(pair.engine).copier

        def fail(host_pages: object, device_pages: object) -> asyncio.Future[None]:
            copied: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            copied.set_exception(CopyFailed("the copy engine is gone"))
            return copied

        monkeypatch.setattr(copier, "to_device", fail)
        ready = await pair.restore("r1", PROMPT)
        assert ready.sources == {"l1": 0, "l2": 0, "l3": 0, "transfer": 42}
        assert pair.core()["copies_failed"] == 1
        await pair.finish(ready, PROMPT, [1])
        await pair.assert_nothing_held()


async def test_a_command_that_cannot_be_started_is_made_good_by_prefill(make_pair, monkeypatch) -> None:
    async with make_pair() as pair:
        ready = await pair.restore("warm", PROMPT)
        await pair.finish(ready, PROMPT, [1])
        await pair.engine.wait_settled()
        await pair.engine.flush(("l1",))

        def refuse(host_pages: object, device_pages: object) -> asyncio.Future[None]:
            raise RuntimeError("no thread can be started")

        monkeypatch.setattr(runtime_of(pair.engine).copier, "to_device", refuse)
        ready = await pair.restore("r1", PROMPT)
        assert ready.sources["transfer"] == 42
        await pair.finish(ready, PROMPT, [1])
        await pair.assert_nothing_held()


async def test_a_prefill_that_is_not_there_fails_the_request_with_its_address(make_pair) -> None:
    async with make_pair() as pair:
        from tidekv import DecodeRequest

        with pytest.raises(RequestFailed, match="nobody") as failed:
            await pair.engine.restore(DecodeRequest(request_id="r1", tokens=PROMPT, prefill="nobody", send_prompt=True))
        assert failed.value.cause == "connection refused"
        await pair.assert_nothing_held()


async def test_the_next_prefill_of_the_list_is_tried_with_the_tokens(make_pair) -> None:
    async with make_pair() as pair:
        from tidekv import DecodeRequest

        # A router would bring the tokens to the first one only: the second gets them with its promise.
        ready = await pair.engine.restore(
            DecodeRequest(request_id="r1", tokens=PROMPT, prefill=["nobody", "prefill"], send_prompt=False)
        )
        assert pair.wrong_pages(ready, PROMPT) == []
        assert pair.core()["prefill_retries"] == 1
        await pair.finish(ready, PROMPT, [1])
        await pair.assert_nothing_held()


async def test_a_deadline_ends_the_wait_with_its_state(make_pair) -> None:
    async with make_pair() as pair:
        held = asyncio.Event()

        async def hold(*_: object) -> None:
            await held.wait()

        pair.network.before_write = hold
        with pytest.raises(RequestFailed, match="deadline") as failed:
            await pair.engine.restore(pair.request("r1", PROMPT, deadline_s=0.05))
        assert "TRANSFER" in failed.value.detail
        # The writer has not confirmed: its pages wait in quarantine, without an owner.
        assert pair.core()["device_draining"] == 11
        held.set()
        await pair.assert_nothing_held()
