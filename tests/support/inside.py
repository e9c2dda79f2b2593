"""The parts of an engine and of a storage that tests of faults look at: the one place that knows where they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidekv import DecodeEngine
    from tidekv.backends.storage.file.engine import FileStorage
    from tidekv.backends.storage.file.file_store import FileStore
    from tidekv.engine.decode.driver import Driver
    from tidekv.engine.decode.pending_calls import PendingCalls
    from tidekv.engine.decode.rank_driver import RankDriver
    from tidekv.engine.decode.runtime import Runtime
    from tidekv.states.core import Core


def runtime_of(engine: DecodeEngine) -> Runtime:
    """What an engine starts and closes: transport, tiers, driver, journal."""
    return engine._runtime


def core_of(engine: DecodeEngine) -> Core:
    """The core that decides for an engine."""
    return engine._runtime.core


def calls_of(engine: DecodeEngine) -> PendingCalls:
    """The calls of an engine's users that wait for an outcome."""
    return engine._runtime.calls


def driver_of(engine: DecodeEngine) -> Driver | RankDriver:
    """What an engine posts its events to, and what tells the time."""
    return engine._driver


def file_store_of(storage: FileStorage) -> FileStore:
    """The directory that an opened storage uses now."""
    store = storage._file_store
    assert store is not None
    return store
