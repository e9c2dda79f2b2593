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

Facts come in as events. A row says which event is legal where, which action runs (`before`), and where it leads
(`dest`; None stays). An event without a row is an `IllegalEvent`: nothing happens but the report. Rows of one event and
source are tried in order; the first whose guard (`only_if`) holds is taken. Fallible work is done in `before`, so that
a raise leaves the request in the state that it was in.

Guards and actions are called with the request and the event. An action is a method of the object that does the work
(`Restore`, `Serving`, `Rooms`), or one of `Actions` if it spans several; `build_machine` binds it to the object of its
core. Guards are functions of the request.

The plan is fixed once, at the end of MATCH, by `plan`: what is on the host is copied, what storage has is fetched and
then copied, and the rest is promised away to prefill: "do not send the first n tokens". After that the request moves
on by `Progressed` only, which asks what it still waits for:

- a load in stage FETCHING is waited for in PREFETCH, one in COPYING (or still to be extended) in LOCAL_RESTORE, one
  that a room fills in TRANSFER, as are the spans of its own room and the aux record with the first token;
- a load that the room of another request fills is waited for like one of its own room (see
  `tidekv.states.loads.shared_transfers`);
- a load that fails is no event of the request: its pages are asked of prefill by *extend*, a new span of a sharer's
  room, and the request keeps waiting. This is why no tier can fail a request.

Fallbacks go along rows, too. The first raise of a step leaves the request on less, and the step runs once more; the
request fails only if the same step (one event in one state) raises again:

    state                            first raise                               second            third
    PREALLOC                         no storage; the grant is given back       FAILED
    MATCH, PREFETCH, LOCAL_RESTORE   the plan is cut to L1 + L2                L1 + transfer     FAILED
    TRANSFER                         the landing is repeated; a commit keeps   FAILED
                                     the pages, and enters nothing in the tree
    READY                            growth gets no pages; a finish keeps the  FAILED
                                     pages in the tree, without a backup

What was given up is told to the caller (`ReportReady.fallbacks`).
A room that is lost (`PrefillLost`: prefill refused it, failed, or is out of reach) sends the request back to the queue,
in a new generation, with the next prefill of its list, until every one was tried as often as the settings say. After
the last of them, a caller that can compute the rest itself is asked to, on what the device has: that is waited for in
TRANSFER, too. Pages that are lost to another writer send a request back as well (`PagesLost`). A request that goes back
holds nothing.

Three internal events are fired at a request whenever something happened that may move it on, in this order, if the
table has a row for them in its state: `StorageDue`, `PlanDue`, `Progressed`. Guards keep them from doing work twice.

READY ends the restore. Finishing, retracting or aborting a READY request leads to no other state: it gives everything
back and is forgotten. Outcomes that come for a request that is gone never reach this table: the core settles their
pages and counts them.

States are compared in this module, in `request`, `machine` and `guards_and_actions`, and nowhere else in `states/`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from transitions import Machine

from tidekv.states import events
from tidekv.states.events import Event
from tidekv.states.handover.rooms import Rooms
from tidekv.states.request import guards_and_actions as guards
from tidekv.states.request.guards_and_actions import Actions
from tidekv.states.request.machine import ShortMachine
from tidekv.states.request.ready import Serving
from tidekv.states.request.request import State
from tidekv.states.request.restore import Restore

if TYPE_CHECKING:
    from tidekv.states.request.request import Request

# Called with the request and the event; a method is bound to the object of its core first.
Action: TypeAlias = Callable[..., None]
Guard: TypeAlias = Callable[..., bool]

PREALLOC, MATCH, PREFETCH, LOCAL_RESTORE, TRANSFER, READY, FAILED = State
WITH_ROOM = (PREFETCH, LOCAL_RESTORE, TRANSFER)
RESTORING = (MATCH, *WITH_ROOM)
LIVE = (PREALLOC, *RESTORING)


@dataclass(frozen=True, slots=True)
class Row:
    """One rule: on `event`, in a state of `source`, if `only_if`: run `before`, then be in `dest` (None: stay)."""

    event: type[Event]
    source: tuple[State, ...]
    dest: State | None
    before: Action | None = None
    only_if: Guard | None = None


TRANSITIONS = (
    # The way through.
    Row(events.StorageDue, (PREALLOC,), None, before=Restore.ask_storage, only_if=guards.has_not_asked),
    Row(events.StorageAnswered, (PREALLOC, MATCH), None, before=Restore.note_answer),
    Row(events.Granted, (PREALLOC,), MATCH),
    Row(events.PlanDue, (MATCH,), None, before=Restore.fix_plan, only_if=guards.can_plan),
    Row(events.Progressed, (MATCH,), PREFETCH, only_if=guards.waits_for_storage),
    Row(events.Progressed, (MATCH,), LOCAL_RESTORE, only_if=guards.waits_for_copies),
    Row(events.Progressed, (MATCH,), TRANSFER, only_if=guards.is_planned),
    Row(events.Progressed, (PREFETCH,), LOCAL_RESTORE, only_if=guards.needs_no_storage),
    Row(events.Progressed, (LOCAL_RESTORE,), TRANSFER, only_if=guards.needs_no_local_tier),
    Row(events.Progressed, (TRANSFER,), READY, before=Restore.commit, only_if=guards.has_everything),
    # The hand-over, which runs beside the local restore.
    Row(events.PromiseSent, WITH_ROOM, None, before=Rooms.note_writer),
    Row(events.ChunkLanded, WITH_ROOM, None, before=Actions.land_chunk),
    Row(events.AuxLanded, WITH_ROOM, None, before=Actions.land_aux),
    # Fallback: the same request on fewer tiers, or in a new generation.
    Row(
        events.TransitionRaised,
        (PREALLOC,),
        None,
        before=Restore.give_grant_back,
        only_if=guards.is_first_raise,
    ),
    Row(
        events.TransitionRaised,
        (MATCH, PREFETCH, LOCAL_RESTORE),
        None,
        before=Restore.fall_back,
        only_if=guards.has_tiers_left,
    ),
    Row(events.TransitionRaised, (TRANSFER,), None, before=Restore.repeat, only_if=guards.is_first_raise),
    Row(events.TransitionRaised, (READY,), None, before=Serving.repeat, only_if=guards.is_first_raise),
    Row(events.PagesLost, RESTORING, PREALLOC, before=Actions.start_over),
    Row(
        events.PrefillLost,
        WITH_ROOM,
        PREALLOC,
        before=Actions.try_next_prefill,
        only_if=Actions.has_another_prefill,
    ),
    Row(events.PrefillLost, WITH_ROOM, PREALLOC, before=Actions.ask_caller, only_if=guards.can_recompute),
    Row(events.Recomputed, (TRANSFER,), FAILED, before=Actions.fail_by_recompute, only_if=guards.has_failed),
    Row(events.Recomputed, (TRANSFER,), None, before=Restore.note_recomputed),
    # The ends.
    Row(events.TransitionRaised, (*LIVE, READY), FAILED, before=Actions.fail_by_raise),
    Row(events.PrefillLost, WITH_ROOM, FAILED, before=Actions.fail_by_prefill),
    Row(events.DeadlinePassed, LIVE, FAILED, before=Actions.fail_by_deadline),
    Row(events.AbortRequested, LIVE, FAILED, before=Actions.fail_by_abort),
    # After the restore.
    Row(events.DeadlinePassed, (READY,), None),
    Row(events.GrowthTaken, (READY,), None, before=Serving.grow),
    Row(events.FinishRequested, (READY,), None, before=Serving.finish),
    Row(events.RetractRequested, (READY,), None, before=Serving.retract),
    Row(events.AbortRequested, (READY,), None, before=Serving.drop),
)


def build_machine(rules: Iterable[object], machine_class: type[Machine] = ShortMachine) -> Machine:
    """The one machine that all requests of a core share; `rules` are the objects whose methods the rows name.

    Models are not registered with it: a request is triggered directly, `machine.events["Granted"].trigger(request,
    request, event)`. Any machine class of the library can be built from the table; they differ in cost only.
    """
    owners = {type(rule).__name__: rule for rule in rules}

    def bound(function: Callable[..., Any] | None) -> list[Callable[..., Any]]:  # Any: a guard's answer, or nothing.
        if function is None:
            return []
        owner, _, name = function.__qualname__.rpartition(".")
        return [_method(owners[owner], name) if owner else function]

    return machine_class(
        model=None,
        states=State,
        initial=PREALLOC,
        transitions=[
            {
                "trigger": row.event.__name__,
                "source": list(row.source),
                "dest": row.dest,
                "before": bound(row.before),
                "conditions": bound(row.only_if),
            }
            for row in TRANSITIONS
        ],
        auto_transitions=False,
        queued=False,
    )


def _method(owner: object, name: str) -> Callable[[Request, Event], Any]:  # Any: a guard's answer, or nothing.
    """A method of a rule object, looked up when it is called: a test may have replaced it since."""
    return lambda request, event: getattr(owner, name)(request, event)


_SOURCES: dict[type[Event], tuple[State, ...]] = {}
for _row in TRANSITIONS:
    _SOURCES[_row.event] = tuple(dict.fromkeys((*_SOURCES.get(_row.event, ()), *_row.source)))


def takes(request: Request, kind: type[Event]) -> bool:
    """Whether the table has a row for events of this kind in the request's state."""
    # In a tuple: it finds a member of an enum without hashing it.
    return request.state in _SOURCES[kind]


PROGRESS_GUARDS: dict[State, tuple[Guard, ...]] = {
    state: tuple(
        row.only_if for row in TRANSITIONS if row.event is events.Progressed and state in row.source and row.only_if
    )
    for state in State
}
"""What must hold for a request in this state to move on."""


# --- The diagram ---

GROUPS = {
    "LIVE": ("any state before READY", LIVE),
    "RESTORING": ("any state from MATCH to TRANSFER", RESTORING),
    "WITH_ROOM": ("PREFETCH, LOCAL_RESTORE or TRANSFER", WITH_ROOM),
}
"""Sets of states that rows share, the largest first: the diagram has one arrow for all states of a set."""


def diagram() -> str:
    """The machine as a Mermaid state diagram, drawn from the table."""
    arrows: dict[tuple[str, str], dict[str, None]] = {}
    for row in TRANSITIONS:
        if row.dest is not None:
            label = row.event.__name__ if row.only_if is None else f"{row.event.__name__} [{row.only_if.__name__}]"
            for source in _grouped(row.source):
                arrows.setdefault((source, row.dest.value), {})[label.replace("_", " ")] = None
    lines = ["stateDiagram-v2"]
    # No composite states: Mermaid draws no arrow between inner states of different ones.
    lines += [f'    state "{words}" as {name}' for name, (words, _) in GROUPS.items()]
    lines.append("    [*] --> PREALLOC : RequestArrived")
    lines += [f"    {source} --> {dest} : {', '.join(labels)}" for (source, dest), labels in arrows.items()]
    return "\n".join([*lines, "    READY --> [*]", "    FAILED --> [*]", ""])


def _grouped(states: tuple[State, ...]) -> list[str]:
    """Names of the largest group that these states hold, and of the states beside it."""
    for name, (_, group) in GROUPS.items():
        if set(group) <= set(states):
            return [name, *(state.value for state in states if state not in group)]
    return [state.value for state in states]


if __name__ == "__main__":
    print(diagram(), end="")
