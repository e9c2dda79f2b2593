"""The request machine: every rule about the state of a request is in this file.

Theory of operation
===================

A request enters in PREALLOC and leaves the restore in READY or in FAILED. The state says where the request *waits*;
what runs meanwhile is more: the transfer runs from the end of MATCH on, beside PREFETCH and LOCAL_RESTORE, so that
the time to ready is the longest of the three and not their sum.

    state          waits for                     owns
    PREALLOC       device pages                  a place in the queue; a question to storage may be under way
    MATCH          the answer of storage         pages for [matched, page_count), a lock on the L1 path, a pin on the
                                                 L2 path, a share in every load that the path runs through
    PREFETCH       a fetch from storage          the lock on [0, promised), shares in loads, own pages
                                                 [promised, page_count), an open room
    LOCAL_RESTORE  a copy from host to device    the same
    TRANSFER       prefill                       the same
    READY          the caller                    the lock, own pages (those not in the tree), a reserve to grow by
    FAILED         nothing                       nothing; pages that prefill may still write to are in the quarantine

Facts come in as events. A row says which event is legal where, what it does (`before`), and where it leads (`dest`;
None stays). An event without a row is an `IllegalEvent`: nothing happens but the report. Rows of one event and source
are tried in order, the first whose `only_if` holds is taken. Fallible work is done in `before`, so that a raise
leaves the request in the state that it was in.

The plan is fixed once, at the end of MATCH, by `plan`: what is on the host is copied, what storage has is fetched and
then copied, and the rest is promised away to prefill: "do not send the first n tokens". After that the request moves
on by `Progressed` alone, which asks what it still waits for:

- a load in stage FETCHING is waited for in PREFETCH, one in COPYING (or still to be extended) in LOCAL_RESTORE, one
  that a room fills in TRANSFER, as are the spans of its own room and the aux record with the first token;
- a load that the room of another request fills is waited for like one of its own room (see
  `tidekv.states.shared_transfers`);
- a load that fails is no event of the request: its pages are asked of prefill by *extend*, a new span of a sharer's
  room, and the request waits on. This is why no tier can fail a request.

Fallbacks go along rows, too. A raise in MATCH, PREFETCH or LOCAL_RESTORE cuts the plan to L1 + L2 the first time, to
L1 + transfer the second time, and fails the request the third time; in PREALLOC and TRANSFER there is nothing to cut.
A room that is lost (refused, failed, writer out of reach) sends the request back to the queue, in a new generation,
with the next prefill of its list, until every one was tried as often as the settings say. After the last of them, a
caller that can compute the rest itself is asked to, on what the device has: that is waited for in TRANSFER, too. Pages
that are lost to somebody else's writer send a request back as well. Who goes back holds nothing.

READY ends the restore. Finishing, retracting or aborting a READY request leads to no other state: it gives everything
back and is forgotten. Outcomes that come for a request that is gone never reach this table: the core settles their
pages and counts them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from transitions import Machine

from tidekv.states import events, steps
from tidekv.states import rules as do
from tidekv.states.events import Event
from tidekv.states.machine import ShortMachine
from tidekv.states.request import State

if TYPE_CHECKING:
    from tidekv.states.core import Core
    from tidekv.states.request import Request

    Rule: TypeAlias = Callable[[Core, Request, Event], None]
    Guard: TypeAlias = Callable[[Core, Request, Event], bool]

PREALLOC, MATCH, PREFETCH, LOCAL_RESTORE, TRANSFER, READY, FAILED = State
WITH_ROOM = (PREFETCH, LOCAL_RESTORE, TRANSFER)
RESTORING = (MATCH, *WITH_ROOM)
LIVE = (PREALLOC, *RESTORING)


@dataclass(frozen=True, slots=True)
class Row:
    """One rule: on `event`, in a state of `source`, if `only_if`: do `before`, then be in `dest` (None: stay)."""

    event: type[Event]
    source: tuple[State, ...]
    dest: State | None
    before: Rule | None = None
    only_if: Guard | None = None


TRANSITIONS = (
    # The way through.
    Row(events.StorageAnswered, (PREALLOC, MATCH), None, before=do.note_answer),
    Row(steps.Granted, (PREALLOC,), MATCH),
    Row(steps.PlanDue, (MATCH,), None, before=do.plan),
    Row(steps.Progressed, (MATCH,), PREFETCH, only_if=do.waits_for_storage),
    Row(steps.Progressed, (MATCH,), LOCAL_RESTORE, only_if=do.waits_for_copies),
    Row(steps.Progressed, (MATCH,), TRANSFER, only_if=do.is_planned),
    Row(steps.Progressed, (PREFETCH,), LOCAL_RESTORE, only_if=do.needs_no_storage),
    Row(steps.Progressed, (LOCAL_RESTORE,), TRANSFER, only_if=do.needs_no_local_tier),
    Row(steps.Progressed, (TRANSFER,), READY, before=do.commit, only_if=do.has_everything),
    # The hand-over, which runs beside the local restore.
    Row(events.PromiseSent, WITH_ROOM, None, before=do.note_writer),
    Row(events.ChunkLanded, WITH_ROOM, None, before=do.land_chunk),
    Row(events.AuxLanded, WITH_ROOM, None, before=do.land_aux),
    # Fallback: the same request on fewer tiers, or in a new generation.
    Row(steps.TransitionRaised, (MATCH, PREFETCH, LOCAL_RESTORE), None, before=do.fall_back, only_if=do.can_fall_back),
    Row(steps.PagesLost, RESTORING, PREALLOC, before=do.start_over),
    Row(events.RoomRefused, WITH_ROOM, PREALLOC, before=do.try_next_prefill, only_if=do.has_another_prefill),
    Row(events.RoomFailed, WITH_ROOM, PREALLOC, before=do.try_next_prefill, only_if=do.has_another_prefill),
    Row(events.WriterLost, WITH_ROOM, PREALLOC, before=do.try_next_prefill, only_if=do.has_another_prefill),
    Row(events.RoomRefused, WITH_ROOM, PREALLOC, before=do.ask_caller, only_if=do.can_recompute),
    Row(events.RoomFailed, WITH_ROOM, PREALLOC, before=do.ask_caller, only_if=do.can_recompute),
    Row(events.WriterLost, WITH_ROOM, PREALLOC, before=do.ask_caller, only_if=do.can_recompute),
    Row(events.Recomputed, (TRANSFER,), FAILED, before=do.fail_by_recompute, only_if=do.has_failed),
    Row(events.Recomputed, (TRANSFER,), None, before=do.note_recomputed),
    # The ends.
    Row(steps.TransitionRaised, (*LIVE, READY), FAILED, before=do.fail_by_raise),
    Row(events.RoomRefused, WITH_ROOM, FAILED, before=do.fail_by_prefill),
    Row(events.RoomFailed, WITH_ROOM, FAILED, before=do.fail_by_prefill),
    Row(events.WriterLost, WITH_ROOM, FAILED, before=do.fail_by_prefill),
    Row(steps.DeadlinePassed, LIVE, FAILED, before=do.fail_by_deadline),
    Row(events.AbortRequested, LIVE, FAILED, before=do.fail_by_abort),
    # After the restore.
    Row(events.GrowthTaken, (READY,), None, before=do.grow),
    Row(events.FinishRequested, (READY,), None, before=do.finish),
    Row(events.RetractRequested, (READY,), None, before=do.retract),
    Row(events.AbortRequested, (READY,), None, before=do.drop),
)


def build_machine(kind: type[Machine] = ShortMachine) -> Machine:
    """The one machine that all requests share. Models are not registered with it: a request is triggered directly,
    `machine.events["Granted"].trigger(request, core, request, event)`.

    Any kind of machine of the library's can be built of the table; they differ in what a trigger costs.
    """
    return kind(
        model=None,
        states=State,
        initial=PREALLOC,
        transitions=[
            {
                "trigger": row.event.__name__,
                "source": list(row.source),
                "dest": row.dest,
                "before": [row.before] if row.before else [],
                "conditions": [row.only_if] if row.only_if else [],
            }
            for row in TRANSITIONS
        ],
        auto_transitions=False,
        queued=False,
    )


MOVES_ON = tuple(dict.fromkeys(state for row in TRANSITIONS if row.event is steps.Progressed for state in row.source))
"""The states in which a request may move on by itself. (A tuple: it finds a member without hashing it.)"""


PROGRESS_GUARDS: dict[State, tuple[Guard, ...]] = {
    state: tuple(
        row.only_if for row in TRANSITIONS if row.event is steps.Progressed and state in row.source and row.only_if
    )
    for state in State
}
"""What must hold for a request in this state to move on."""


def diagram() -> str:
    """The machine as a Mermaid state diagram, drawn from the table."""
    arrows: dict[tuple[State, State], dict[str, None]] = {}
    for row in TRANSITIONS:
        if row.dest is None:
            continue
        label = row.event.__name__ if row.only_if is None else f"{row.event.__name__} [{row.only_if.__name__}]"
        for source in row.source:
            arrows.setdefault((source, row.dest), {})[label] = None
    lines = ["stateDiagram-v2", "    [*] --> PREALLOC : RequestArrived"]
    lines += [
        f"    {source.value} --> {dest.value} : {', '.join(labels).replace('_', ' ')}"
        for (source, dest), labels in arrows.items()
    ]
    return "\n".join([*lines, "    READY --> [*]", "    FAILED --> [*]", ""])


if __name__ == "__main__":
    print(diagram(), end="")
