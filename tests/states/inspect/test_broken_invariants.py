"""A broken invariant ends the core from wherever it is found: nothing falls back from it, mends it or counts it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from simulation.rig import Rig
from tests.support.raise_stories import arrival, finish
from tidekv.states import commands
from tidekv.states.backup.backups import Backups
from tidekv.states.errors import BrokenInvariant
from tidekv.states.loads.loads import Loads
from tidekv.states.records.stages import State
from tidekv.states.request.restore import Restore
from tidekv.states.storage.admission import StorageAdmission

EIGHT = b"abcdefgh"
Step = Callable[[Rig], object]


def answer(rig: Rig) -> Step:
    query = rig.ask_storage()
    return lambda rig: rig.answer(query, 0)


def failed_copy(rig: Rig) -> Step:
    rig.bring(State.LOCAL_RESTORE)
    rig.promised(rig.take(commands.SendPromise))
    copy = rig.take(commands.CopyPages, target="device")
    return lambda rig: rig.copied(copy, error="failed")


def waiting_put(rig: Rig) -> tuple[commands.FetchPages, commands.SendPromise]:
    """A put of request "past" waits for a fetch of "a"."""
    rig.attach_storage()
    rig.arrive("a", EIGHT)
    rig.answer(rig.take(commands.QueryStorage), 6)
    promise = rig.take(commands.SendPromise)
    fetch = rig.take(commands.FetchPages)
    rig.make_ready("past", b"xyz")
    rig.finish("past", b"xyz")
    rig.copied(rig.take(commands.CopyPages, target="host"))
    rig.take(commands.ReportFinished)
    assert rig.take_all(commands.StorePages) == []
    return fetch, promise


def end_of_the_fetch(rig: Rig) -> Step:
    fetch, _ = waiting_put(rig)
    return lambda rig: rig.fetched(fetch)


@pytest.mark.parametrize(
    ("prepare", "owner", "name"),
    [
        (arrival, Restore, "ask_storage"),
        (answer, Restore, "grant"),
        (answer, StorageAdmission, "note"),
        (answer, Restore, "fix_plan"),
        (failed_copy, Loads, "fill"),
        (finish, Backups, "_begin"),
        (end_of_the_fetch, Backups, "_store"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_it_leaves_the_step_as_it_is(
    monkeypatch: pytest.MonkeyPatch, prepare: Callable[[Rig], Step], owner: type, name: str
) -> None:
    rig = Rig(store_wait_s=1.0, prefetch_base_s=100.0)
    step = prepare(rig)
    before = rig.core.statistics().get("transitions_raised", 0)

    def broken(self: object, *arguments: object, **named: object) -> None:
        raise BrokenInvariant("the tree is upside down")

    monkeypatch.setattr(owner, name, broken)
    with pytest.raises(BrokenInvariant, match="upside down"):
        step(rig)
    # A raise that a rule recovers from is counted: this one was not recovered from.
    assert rig.core.statistics().get("transitions_raised", 0) == before


def test_any_other_raise_of_a_put_that_waited_ends_the_backup_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(store_wait_s=1.0, prefetch_base_s=100.0)
    fetch, promise = waiting_put(rig)
    original, raised = Backups._store, list[bool]()

    def put(self: Backups, *_: object) -> None:
        raised.append(True)
        raise RuntimeError("put is broken")

    with monkeypatch.context() as patch:
        patch.setattr(Backups, "_store", put)
        rig.fetched(fetch)
    assert raised and Backups._store is original
    statistics = rig.core.statistics()
    assert (statistics["transitions_raised"], statistics["backups_failed"], statistics["backups"]) == (1, 1, 0)
    assert rig.take(commands.ForgetTokens)
    # The host keeps what it has, and the fetching request gets its pages.
    rig.copied(rig.take(commands.CopyPages, target="device"))
    rig.serve(promise)
    assert rig.take(commands.ReportReady).sources["l3"] == 6
    rig.take(commands.SendReceived)
    assert rig.make_ready("again", b"xyz").sources["l1"] == 3
