"""Attaching and detaching storage under load: no request fails, nothing leaks, and a failed attach is undone."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support.inside import calls_of, core_of, runtime_of
from tests.support.threads import thread_names, threads_left
from tidekv import InvalidConfig, InvalidRequest, Replayer, open_storage
from tidekv.backends.storage.file.directory import Directory
from tidekv.backends.storage.file.engine import FileStorage
from tidekv.states.errors import StorageFailed, TidekvError

PROMPT = list(range(100, 122))  # Five pages of four tokens and a tail of two.


@pytest.mark.slow
async def test_a_hundred_swaps_under_traffic_fail_nobody_and_leak_nothing(make_pair, tmp_path: Path) -> None:
    """Detached, another kind, the same directory again: all while conversations run through a small device."""
    journal = tmp_path / "journal"
    done, turned = asyncio.Event(), asyncio.Event()
    turns = from_storage = 0
    async with make_pair(device_pages=32, host_pages=48, journal_path=str(journal)) as pair:

        async def converse(number: int) -> None:
            nonlocal turns, from_storage
            turn = 0
            while not done.is_set():
                tokens = [number] * 7 + [turn % 20] * 5
                for _ in range(4):
                    ready = await pair.restore(f"c{number}t{turn}", tokens)
                    from_storage += ready.sources["l3"]
                    output = [number, turn % 50, ready.first_token % 97]
                    await pair.finish(ready, tokens, output)
                    tokens = [*tokens, *output, turn % 50]
                    turn += 1
                    turns += 1
                    turned.set()

        async def swap() -> None:
            for number in range(100):
                before = turns
                match number % 4:
                    case 0 | 2:
                        await pair.engine.attach_storage(f"file:{tmp_path}/pages?io=threads&capacity=4MiB")
                    case 1:
                        await pair.engine.attach_storage("memory:?capacity=64KiB")
                    case 3:
                        await pair.engine.detach_storage()
                # Traffic between any two swaps, by the storage that there is: device and host forget what they have.
                await pair.engine.flush()
                while turns < before + 10:
                    turned.clear()
                    await turned.wait()
            done.set()

        # The first request opens the connection to prefill; the tasks of that connection stay.
        await pair.finish(await pair.restore("first", PROMPT), PROMPT, [1])
        await pair.engine.wait_settled()
        tasks = len(asyncio.all_tasks())
        async with asyncio.TaskGroup() as group:
            threads, files = thread_names(), len(os.listdir("/proc/self/fd"))
            group.create_task(swap())
            for number in range(4):
                group.create_task(converse(number))
        assert turns >= 1000
        assert from_storage > 0
        assert pair.engine.statistics()["storage"] is None
        assert threads_left(threads) == []
        assert len(os.listdir("/proc/self/fd")) <= files
        await pair.engine.wait_settled()
        assert len(asyncio.all_tasks()) <= tasks
        assert not pair.core()["transitions_raised"]
        assert pair.engine.statistics()["effects_raised"] == 0
        await pair.assert_nothing_held()
    assert Replayer(next(journal.iterdir()) if journal.is_dir() else journal).run().events > 1000


class Broken:
    """Storage that cannot be opened, or not yet."""

    uri = "broken:"

    def __init__(self, opening: asyncio.Future[None]) -> None:
        self.opening = opening
        self.closed = 0

    async def register(self, *_: object, **__: object) -> None:
        await self.opening

    async def close(self) -> None:
        self.closed += 1


async def test_an_attach_that_fails_leaves_the_old_storage_in_use(make_pair) -> None:
    async with make_pair(storage=open_storage("memory:?capacity=1MiB")) as pair:
        ready = await pair.restore("r1", PROMPT)
        await pair.finish(ready, PROMPT, [1])
        await pair.engine.wait_settled()
        await pair.engine.flush()
        opening: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        opening.set_exception(StorageFailed("no such place"))
        broken = Broken(opening)
        with pytest.raises(StorageFailed, match="no such place"):
            await pair.engine.attach_storage(broken)
        assert broken.closed == 1
        with pytest.raises(StorageFailed, match="/dev/null/x"):
            await pair.engine.attach_storage("file:/dev/null/x?io=threads")
        with pytest.raises(InvalidRequest, match="attached already"):
            await pair.engine.attach_storage(runtime_of(pair.engine).storage)
        again = await pair.restore("r2", PROMPT)
        assert again.sources["l3"] == 20
        await pair.finish(again, PROMPT, [1])
        await pair.assert_nothing_held()


class HalfOpen:
    """A file engine that is open when opening it goes wrong after all."""

    def __init__(self, uri: str) -> None:
        self._storage = open_storage(uri)

    def __getattr__(self, name: str) -> object:
        return getattr(self._storage, name)

    async def register(self, *arguments: object, **named: object) -> None:
        await self._storage.register(*arguments, **named)
        raise StorageFailed("the last step failed")


@pytest.mark.parametrize("times", [20, pytest.param(100, marks=pytest.mark.slow)])
async def test_attaching_that_fails_half_way_many_times_under_traffic_is_undone(
    make_pair, tmp_path: Path, times: int
) -> None:
    journal = tmp_path / "journal"
    done = asyncio.Event()
    async with make_pair(
        device_pages=32, host_pages=48, storage=open_storage("memory:?capacity=1MiB"), journal_path=str(journal)
    ) as pair:
        from_storage = 0

        async def converse(number: int) -> None:
            nonlocal from_storage
            turn = 0
            while not done.is_set():
                tokens = [number] * 7 + [turn % 5] * 8
                ready = await pair.restore(f"c{number}t{turn}", tokens)
                from_storage += ready.sources["l3"]
                await pair.finish(ready, tokens, [1])
                await pair.engine.flush()
                turn += 1

        async def fail_to_attach() -> None:
            with pytest.raises(StorageFailed, match="the last step failed"):
                await pair.engine.attach_storage(HalfOpen(f"file:{tmp_path}/pages?io=threads&capacity=4MiB"))

        old = runtime_of(pair.engine).storage
        # The first request and the first attach leave a connection and the loop's own threads behind.
        await pair.finish(await pair.restore("first", PROMPT), PROMPT, [1])
        for _ in range(3):
            await fail_to_attach()
        await pair.engine.wait_settled()
        threads, files, tasks = thread_names(), len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())
        async with asyncio.TaskGroup() as group:
            for number in range(3):
                group.create_task(converse(number))
            for _ in range(times):
                await fail_to_attach()
                assert runtime_of(pair.engine).storage is old
            done.set()
        assert from_storage > 0
        assert threads_left(threads) == []
        assert len(os.listdir("/proc/self/fd")) <= files
        await pair.assert_nothing_held()
        assert len(asyncio.all_tasks()) <= tasks
        assert pair.engine.statistics()["effects_raised"] == 0
    assert Replayer(next(journal.iterdir()) if journal.is_dir() else journal).run().complete


async def test_a_cancelled_attach_leaves_the_old_storage_in_use(make_pair) -> None:
    async with make_pair(storage=open_storage("memory:?capacity=1MiB")) as pair:
        broken = Broken(asyncio.get_running_loop().create_future())
        attaching = asyncio.create_task(pair.engine.attach_storage(broken))
        await asyncio.sleep(0)
        attaching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await attaching
        assert broken.closed == 1
        # And while the calls of the old one are waited for.
        storage = runtime_of(pair.engine).storage
        release = asyncio.Event()
        put = storage.put_from

        async def slow_put(*arguments: object, **named: object) -> list[bool]:
            await release.wait()
            return await put(*arguments, **named)

        storage.put_from = slow_put
        ready = await pair.restore("r1", PROMPT)
        await pair.finish(ready, PROMPT, [1])
        await calls_of(pair.engine).wait_until(lambda: runtime_of(pair.engine).executor.storage_calls == 1)
        new = open_storage("memory:?capacity=1MiB")
        attaching = asyncio.create_task(pair.engine.attach_storage(new))
        await calls_of(pair.engine).wait_until(lambda: not core_of(pair.engine).state.storage_available)
        attaching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await attaching
        assert core_of(pair.engine).state.storage_available
        release.set()
        await pair.engine.wait_settled()
        await pair.engine.flush()
        again = await pair.restore("r2", PROMPT)
        assert again.sources["l3"] == 20
        await pair.finish(again, PROMPT, [1])
        await pair.assert_nothing_held()


async def test_attaching_to_an_engine_without_storage_that_fails_leaves_none(make_pair) -> None:
    async with make_pair() as pair:
        opening: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        opening.set_exception(StorageFailed("no such place"))
        with pytest.raises(StorageFailed):
            await pair.engine.attach_storage(Broken(opening))
        assert pair.engine.statistics()["storage"] is None
        ready = await pair.restore("r1", PROMPT)
        await pair.finish(ready, PROMPT, [1])
        await pair.assert_nothing_held()
    async with make_pair(host_pages=0) as pair:
        with pytest.raises(InvalidConfig, match="host pool"):
            await pair.engine.attach_storage("memory:")


async def test_another_store_gets_what_the_first_one_has_already(make_pair, tmp_path: Path) -> None:
    first, second = (f"file:{tmp_path}/{name}?io=threads&capacity=4MiB" for name in ("first", "second"))
    async with make_pair(storage=open_storage(first)) as pair:
        ready = await pair.restore("r1", PROMPT)
        await pair.finish(ready, PROMPT, [1])
        await pair.engine.wait_settled()
        await pair.engine.attach_storage(second)
        dialog = [*PROMPT, 1, 2, 3, 4]
        ready = await pair.restore("r2", dialog)
        await pair.finish(ready, dialog, [5])
        await pair.engine.wait_settled()
        await pair.engine.flush()
        again = await pair.restore("r3", dialog)
        # Were the first five pages taken for stored, the sixth alone would be there, which no prefix reaches.
        assert again.sources["l3"] == 24
        await pair.finish(again, dialog, [5])
        await pair.assert_nothing_held()


class Hung:
    """A store with calls (gets, puts, opening or closing) that wait for a release."""

    def __init__(self, uri: str, *hangs: str) -> None:
        self._storage = open_storage(uri)
        self._hangs = hangs
        self.release = asyncio.Event()
        self.entered = asyncio.Event()

    def __getattr__(self, name: str) -> object:
        found = getattr(self._storage, name)
        if name not in self._hangs:
            return found

        async def hang(*arguments: object, **named: object) -> object:
            # A put has reached the store, and its answer hangs; anything else hangs on its way there.
            answer = await found(*arguments, **named) if name == "put_from" else None
            self.entered.set()
            while not self.release.is_set():
                try:
                    await self.release.wait()
                except asyncio.CancelledError:
                    # As a call that cannot be cancelled: it settles when the store answers.
                    continue
            return answer if name == "put_from" else await found(*arguments, **named)

        return hang

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        # However the test ends: an engine that is closed waits for what cannot be cancelled.
        self.release.set()


async def test_a_store_that_hangs_is_replaced_and_its_calls_keep_their_pages_until_they_end(make_pair) -> None:
    hung = Hung("memory:?capacity=1MiB", "put_from", "close")
    async with make_pair(storage=hung, close_deadline_s=30.0) as pair:
        with hung:
            ready = await pair.restore("r1", PROMPT)
            await pair.finish(ready, PROMPT, [1])
            await hung.entered.wait()
            # Enough for the new one to open on a busy machine; the old one takes all of it.
            await pair.engine.attach_storage("memory:?capacity=1MiB", timeout_s=1.0)
            assert pair.engine.statistics()["storage"]["uri"].startswith("memory:")
            assert core_of(pair.engine).operations_in_flight == 1
            (retired,) = runtime_of(pair.engine).storage_in_use.retired
            # Read by way of another storage, unless its protocol is not recognized through `__getattr__` since 3.12.
            assert hung in (retired, getattr(retired, "storage", None))
            # The new one is used, and has what is put from now on.
            other = [token + 500 for token in PROMPT]
            await pair.finish(await pair.restore("r2", other), other, [1])
            await calls_of(pair.engine).wait_until(lambda: pair.engine.statistics()["storage"]["puts"] == 5)
            hung.release.set()
            await pair.engine.wait_settled()
            # What the old one has stored is not taken for stored in the new one.
            await pair.finish(await pair.restore("r3", PROMPT), PROMPT, [1])
            await pair.engine.wait_settled()
            assert pair.engine.statistics()["storage"]["pages"] == 10
            await pair.engine.flush()
            again = await pair.restore("r4", other)
            assert again.sources["l3"] == 20
            await pair.finish(again, other, [1])
            assert runtime_of(pair.engine).storage_in_use.retired == []
            await pair.assert_nothing_held()


async def test_a_store_that_hangs_is_detached(make_pair) -> None:
    hung = Hung("memory:?capacity=1MiB", "put_from", "close")
    async with make_pair(storage=hung) as pair:
        with hung:
            await pair.finish(await pair.restore("r1", PROMPT), PROMPT, [1])
            await hung.entered.wait()
            await pair.engine.detach_storage(timeout_s=0.05)
            assert pair.engine.statistics()["storage"] is None
            await pair.finish(await pair.restore("r2", PROMPT), PROMPT, [1])
            hung.release.set()
            await pair.engine.wait_settled()
            await pair.assert_nothing_held()


async def test_a_store_that_does_not_open_in_time_leaves_the_old_one_in_use(make_pair) -> None:
    hung = Hung("memory:?capacity=1MiB", "register")
    async with make_pair(storage=open_storage("memory:?capacity=1MiB")) as pair:
        with hung:
            old = runtime_of(pair.engine).storage
            with pytest.raises(StorageFailed, match="not open in time"):
                await pair.engine.attach_storage(hung, timeout_s=0.05)
            assert runtime_of(pair.engine).storage is old
            ready = await pair.restore("r1", PROMPT)
            await pair.finish(ready, PROMPT, [1])
            await pair.engine.wait_settled()
            assert pair.engine.statistics()["storage"]["puts"] == 5
            hung.release.set()
            await pair.assert_nothing_held()


async def test_an_engine_ends_while_a_file_storage_that_it_gave_up_still_closes(
    make_pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opens, both = threading.Event(), threading.Event()
    open_directory, close_directory, close = Directory.__init__, Directory.close, FileStorage.close
    closes = 0

    def slow_open(directory: Directory, *arguments: Any, **names: Any) -> None:
        opens.wait()
        open_directory(directory, *arguments, **names)

    def slow_close(directory: Directory) -> None:
        both.wait()
        close_directory(directory)

    async def counted(storage: FileStorage) -> None:
        nonlocal closes
        closes += 1
        if closes == 2:
            both.set()
        await close(storage)

    monkeypatch.setattr(Directory, "__init__", slow_open)
    monkeypatch.setattr(Directory, "close", slow_close)
    monkeypatch.setattr(FileStorage, "close", counted)
    async with make_pair() as pair:
        with pytest.raises(StorageFailed, match="not open in time"):
            await pair.engine.attach_storage(f"file:{tmp_path / 'kv'}?capacity=4MiB", timeout_s=0.05)
        opens.set()
    assert closes == 2, "by what gave it up, and by the engine's end"


async def test_a_second_exchange_waits_for_the_first_one_until_its_deadline(make_pair) -> None:
    hung = Hung("memory:?capacity=1MiB", "register")
    async with make_pair() as pair:
        with hung:
            first = asyncio.create_task(pair.engine.attach_storage(hung, timeout_s=600.0))
            await hung.entered.wait()
            with pytest.raises(StorageFailed, match="try again later"):
                await pair.engine.attach_storage("memory:", timeout_s=0.05)
            hung.release.set()
            await first
            assert runtime_of(pair.engine).storage is hung


async def test_a_store_that_hangs_while_it_is_cleared_ends_the_call_at_its_deadline(make_pair) -> None:
    hung = Hung("memory:?capacity=1MiB", "clear")
    async with make_pair(storage=hung) as pair:
        with hung:
            await pair.finish(await pair.restore("r1", PROMPT), PROMPT, [1])
            await pair.engine.wait_settled()
            with pytest.raises(StorageFailed, match="not cleared in time"):
                await pair.engine.flush(("l3",), timeout_s=0.05)
            hung.release.set()
            with pytest.raises(InvalidRequest, match="timeout_s"):
                await pair.engine.detach_storage(timeout_s=float("nan"))


async def test_a_probe_that_hangs_fails_at_its_deadline_and_is_not_repeated_before_it_has_ended(make_pair) -> None:
    hung = Hung("memory:?capacity=1MiB", "exists", "probe")
    limits = {"query_deadline_s": 0.05, "store_timeout_s": 0.05, "breaker_failures": 1, "breaker_backoff_s": 0.01}
    async with make_pair(storage=hung, breaker_backoff_max_s=0.02, **limits) as pair:
        with hung:
            await pair.finish(await pair.restore("r1", PROMPT), PROMPT, [1])
            async with asyncio.timeout(60):
                await calls_of(pair.engine).wait_until(lambda: pair.core().get("l3_probes_failed", 0) >= 3)
            # The query and one probe.
            assert runtime_of(pair.engine).executor.storage_calls == 2
            hung.release.set()
            await calls_of(pair.engine).wait_until(lambda: pair.core().get("l3_breaker_closed", 0) == 1)
            await pair.engine.wait_settled()
            await pair.assert_nothing_held()


class Cancelling:
    """A memory engine with one call that cancels itself, as a client with timeouts of its own may."""

    def __init__(self, name: str) -> None:
        self._storage = open_storage("memory:?capacity=64KiB")
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name != self._name:
            return getattr(self._storage, name)

        async def cancelled(*_: object, **__: object) -> None:
            raise asyncio.CancelledError("by the client")

        return cancelled


@pytest.mark.parametrize("call", ["register", "clear"])
async def test_a_call_that_storage_cancels_is_an_error_and_no_cancellation_of_its_caller(make_pair, call: str) -> None:
    async with make_pair() as pair:
        with pytest.raises(TidekvError, match="cancelled itself"):
            await pair.engine.attach_storage(Cancelling(call))
            await pair.engine.flush(("l3",))
        ready = await pair.restore("r", PROMPT)
        await pair.finish(ready, PROMPT, [1])
