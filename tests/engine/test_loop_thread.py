"""The loop thread ends within its deadline, whatever hangs on it."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor

import pytest

from tidekv import KVLayout
from tidekv.engine.integrations.sglang import storage_thread
from tidekv.engine.integrations.sglang.storage_thread import StorageThread
from tidekv.engine.thread import loop_thread
from tidekv.engine.thread.loop_thread import LoopThread
from tidekv.states.errors import EngineClosed, TidekvError


def test_a_last_step_that_hangs_is_left_behind_with_the_thread_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    thread = LoopThread("tidekv-test")

    async def hang() -> None:
        await asyncio.Event().wait()

    with monkeypatch.context() as patched:
        patched.setattr(loop_thread, "CLOSE_S", 0.05)
        with pytest.raises(TidekvError, match=r"tidekv-test: closing did not end within 0.05 s"):
            thread.close(hang())
    thread._thread.join(60.0)
    assert not thread._thread.is_alive()
    with pytest.raises(EngineClosed):
        thread.post(print)


class Hanging:
    """Storage with reads that never end."""

    uri = "hanging:"

    def __init__(self, reading: threading.Event) -> None:
        self._reading = reading

    async def register(self, *_: object, **__: object) -> None: ...

    async def get_into(self, *_: object, **__: object) -> list[bool]:
        self._reading.set()
        await asyncio.Event().wait()
        return []

    async def close(self) -> None: ...


def test_a_read_that_hangs_ends_with_the_storage_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    reading = threading.Event()
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32", page_size=4)
    storage = StorageThread(Hanging(reading), layout=layout, model="m")  # type: ignore[arg-type]  # As far as is needed.
    with ThreadPoolExecutor(1) as threads:
        read = threads.submit(storage.get, [bytes(32)], lambda *_: None)
        assert reading.wait(60.0)
        with monkeypatch.context() as patched:
            patched.setattr(storage_thread, "CLOSE_S", 0.05)
            storage.close()
        with pytest.raises(CancelledError):
            read.result(60.0)
