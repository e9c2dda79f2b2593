"""Whose an outcome is: operations that ended, and deadlines that have come, go to the rule of their owner.

An operation ends once. Its owner is looked up and forgotten by its number, so that an outcome that is told twice, or
comes when nobody knows its operation any more, is counted and changes nothing.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from tidekv.states import events, steps
from tidekv.states.load import LateFetch, LateRecompute, Load, Stage
from tidekv.states.lookahead import AheadRun
from tidekv.states.request import Request, State
from tidekv.states.request_tails import RequestTails
from tidekv.states.storage_use import StorageUse
from tidekv.states.tail_moves import TailBackup
from tidekv.states.tail_puts import TailPut
from tidekv.states.tail_storage import TailFetch, TailStage

if TYPE_CHECKING:
    from tidekv.states.backups import Backup
    from tidekv.states.core import Core
    from tidekv.states.tail_puts import TailPuts

Outcome: TypeAlias = (
    events.StorageAnswered
    | events.PagesFetched
    | events.CopyEnded
    | events.PagesStored
    | events.StorageProbed
    | events.Recomputed
    | events.CommandRaised
)
OUTCOMES: tuple[type[events.Event], ...] = Outcome.__args__
OF_STORAGE = (events.StorageAnswered, events.PagesFetched, events.PagesStored)


def operation_ended(core: Core, event: Outcome) -> None:
    """An operation has had its outcome."""
    state = core.state
    owner = state.operations.pop(event.op, None)
    if owner is None:
        state.count("outcomes_late")
        return
    error = (event.detail or "raised") if isinstance(event, events.CommandRaised) else event.error
    if isinstance(event, OF_STORAGE) and not isinstance(owner, LateFetch):
        core.run_guarded(partial(state.storage.note, failed=bool(error)))
    if isinstance(owner, Request):
        _request_ended(core, owner, event, error)
    elif isinstance(owner, Load):
        _load_ended(core, owner, event, error)
    elif isinstance(owner, AheadRun):
        good = event.good if isinstance(event, events.PagesFetched) else 0
        core.run_guarded(partial(core.lookahead.landed, owner, good), partial(core.lookahead.abandon, owner.request))
    elif isinstance(owner, LateFetch):
        core.run_guarded(partial(state.storage.late_fetch_ended, owner))
        state.pages_freed = True
    elif isinstance(owner, LateRecompute):
        core.run_guarded(partial(state.device.give_back, owner.device_pages))
        if owner.tails is not None and core.tails is not None:
            core.run_guarded(partial(core.tails.give_up, owner.tails))
        state.pages_freed = True
    elif isinstance(owner, RequestTails):
        assert core.tails is not None
        core.run_guarded(partial(core.tails.copied, owner, error), partial(core.tails.give_up, owner))
    elif isinstance(owner, TailFetch):
        _tail_fetch_ended(core, owner, event, error)
    elif isinstance(owner, TailBackup):
        assert core.tail_backups is not None
        core.run_guarded(partial(core.tail_backups.ended, owner, error), partial(core.tail_backups.give_up, owner))
        core.tail_backups.puts.begin(owner.node, (owner.component,))
    elif isinstance(owner, TailPut):
        assert core.tail_backups is not None
        stored = event.stored if isinstance(event, events.PagesStored) else 0
        core.run_guarded(
            partial(core.tail_backups.puts.ended, owner, stored), partial(core.tail_backups.puts.give_up, owner)
        )
    elif isinstance(owner, StorageUse):
        core.run_guarded(partial(owner.probed, error))
    else:
        _backup_ended(core, owner, event, error)


def _request_ended(core: Core, request: Request, event: Outcome, error: str) -> None:
    if event.op == request.recompute_op:
        core.fire(request, events.Recomputed(at_s=event.at_s, op=event.op, error=error))
        return
    found, tails = (event.found, event.tails) if isinstance(event, events.StorageAnswered) else (0, ())
    core.fire(request, events.StorageAnswered(at_s=event.at_s, op=event.op, found=found, error=error, tails=tails))


def _load_ended(core: Core, load: Load, event: Outcome, error: str) -> None:
    recover = partial(core.loads.outcome_raised, load)
    if load.stage is Stage.FETCHING:
        good = event.good if isinstance(event, events.PagesFetched) else 0
        core.run_guarded(partial(core.loads.fetched, load, good), recover)
    else:
        core.run_guarded(partial(core.loads.copied, load, error), recover)


def _tail_fetch_ended(core: Core, fetch: TailFetch, event: Outcome, error: str) -> None:
    assert core.tails is not None
    storage = core.tails.storage
    if fetch.stage is TailStage.FETCHING:
        good = event.good if isinstance(event, events.PagesFetched) else 0
        core.run_guarded(partial(storage.fetched, fetch, good), partial(storage.failed, fetch))
    else:
        core.run_guarded(partial(storage.copied, fetch))
        core.run_guarded(partial(core.tails.copied, fetch.tails, error), partial(core.tails.give_up, fetch.tails))


def _backup_ended(core: Core, backup: Backup, event: Outcome, error: str) -> None:
    recover = partial(core.backups.abandon, backup)
    if backup.storing:
        stored = event.stored if isinstance(event, events.PagesStored) else 0
        core.run_guarded(partial(core.backups.stored, backup, stored), recover)
    else:
        core.run_guarded(partial(core.backups.copied, backup, error), recover)


def time_passed(core: Core, event: events.ClockAdvanced) -> None:
    """Whatever was due by now is late."""
    state = core.state
    while (due := state.pop_due()) is not None:
        owner, op = due
        if isinstance(owner, Request):
            _request_is_late(core, owner, op, event.at_s)
        elif isinstance(owner, Load):
            _load_is_late(core, owner)
        elif isinstance(owner, AheadRun):
            core.run_guarded(partial(state.storage.note, failed=True))
            core.run_guarded(partial(core.lookahead.is_late, owner))
        elif isinstance(owner, StorageUse):
            core.run_guarded(owner.probe)
        elif isinstance(owner, RequestTails):
            assert core.tails is not None
            core.run_guarded(partial(core.tails.is_late, owner))
        elif isinstance(owner, TailFetch):
            _tail_fetch_is_late(core, owner)
        elif isinstance(owner, TailBackup):
            assert core.tail_backups is not None
            core.run_guarded(core.tail_backups.is_late)
        elif isinstance(owner, TailPut):
            assert core.tail_backups is not None
            _tail_put_is_late(core, core.tail_backups.puts, owner)
        else:
            assert not isinstance(owner, LateFetch | LateRecompute), "what is late already has no deadline any more"
            core.run_guarded(partial(core.backups.is_late, owner))
        core.settle()


def _request_is_late(core: Core, request: Request, op: int, at_s: float) -> None:
    if op:
        core.state.count("l3_queries_late")
        core.run_guarded(partial(core.state.storage.note, failed=True))
        del core.state.operations[op]
        core.fire(request, events.StorageAnswered(at_s=at_s, op=op, found=0))
    elif request.state is not State.READY:
        core.fire(request, steps.DeadlinePassed(at_s=at_s))


def _load_is_late(core: Core, load: Load) -> None:
    if load.stage is Stage.FETCHING:
        core.run_guarded(partial(core.state.storage.note, failed=True))
        core.state.storage.note_pace(begun_at_s=load.begun_at_s, pages=load.queued_pages)
        core.loads.fetch_is_late(load)
    elif load.stage is Stage.FILLING:
        core.run_guarded(partial(core.shared_transfers.is_late, load))
    else:
        assert load.stage is Stage.COPYING, "a load that waits for no operation of its own has no deadline"
        core.run_guarded(partial(core.loads.copy_is_late, load))


def _tail_fetch_is_late(core: Core, fetch: TailFetch) -> None:
    assert core.tails is not None
    if fetch.stage is TailStage.FETCHING:
        core.run_guarded(partial(core.state.storage.note, failed=True))
        core.tails.storage.is_late(fetch)
    else:
        core.run_guarded(partial(core.tails.is_late, fetch.tails))


def _tail_put_is_late(core: Core, puts: TailPuts, put: TailPut) -> None:
    if put in puts.waiting:
        core.run_guarded(partial(puts.put_now, put), partial(puts.give_up, put))
    else:
        core.run_guarded(partial(puts.is_late, put))
