"""The parts of an engine and of a storage that tests of faults look at: the one place that knows where they are."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidekv import DecodeEngine, PrefillPeer, Room
    from tidekv.backends.storage.file.engine import FileStorage
    from tidekv.backends.storage.file.file_store import FileStore
    from tidekv.engine.decode.driver import Driver
    from tidekv.engine.decode.pending_calls import PendingCalls
    from tidekv.engine.decode.rank_driver import RankDriver
    from tidekv.engine.decode.runtime import Runtime
    from tidekv.engine.decode.values import ReadyRequest
    from tidekv.states.commands import Command
    from tidekv.states.core import Core


def runtime_of(engine: DecodeEngine) -> Runtime:
    """What an engine starts and closes: transport, tiers, driver, journal."""
    return engine._runtime


def store_of(peer: PrefillPeer) -> DecodeEngine:
    """The engine by which a prefill peer writes its prompts through to storage."""
    store = peer._store
    assert store is not None
    return store._engine


def core_of(engine: DecodeEngine) -> Core:
    """The core that decides for an engine."""
    return engine._runtime.core


def calls_of(engine: DecodeEngine) -> PendingCalls:
    """The calls of an engine's users that wait for an outcome."""
    return engine._runtime.calls


def driver_of(engine: DecodeEngine) -> Driver | RankDriver:
    """What an engine posts its events to, and what tells the time."""
    return engine._driver


def assert_no_call_waits(engine: DecodeEngine) -> None:
    """No finish, retract, abort or settling of an engine waits for an outcome, and no request has tokens left."""
    calls = calls_of(engine)
    assert not calls._ends and not calls._tokens_left and not calls._flushes


def replace_report(
    engine: DecodeEngine, kind: type[Command], report: Callable[[Any], None]
) -> Callable[..., None]:  # Any: a command of that kind.
    """Have `report` called with each command of a kind that goes to an engine's users; return what was."""
    tellers = calls_of(engine)._tellers
    before, tellers[kind] = tellers[kind], report
    return before


def copy_on_streams_only(engine: DecodeEngine) -> None:
    """Copy the smallest prompt as large ones are copied: in the background, layer by layer."""
    copier = runtime_of(engine).copier
    assert copier is not None
    copier._small_pages_max = 0


def reserve_of(ready: ReadyRequest) -> list[int]:
    """The device pages that a request grows into without a grant."""
    return list(ready._reserve)


def serve_rooms(peer: PrefillPeer, on_room: Callable[[Room], Awaitable[None]] | None) -> None:
    """Replace the function that serves the rooms of a prefill peer."""
    peer._on_room = on_room


def file_store_of(storage: FileStorage) -> FileStore:
    """The directory that an opened storage uses now."""
    store = storage._file_store
    assert store is not None
    return store
