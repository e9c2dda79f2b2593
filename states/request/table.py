"""The request machine: every rule about the state of a request.

Theory of operation
===================

A request starts in PREALLOC and ends its restore in READY or FAILED. The state names what the request *waits* for, not
everything that runs. The transfer from prefill starts at the end of MATCH and runs in parallel with PREFETCH and
LOCAL_RESTORE, so the time to ready is the longest of the three, not their sum.

    state          waits for                     owns
    PREALLOC       the answer of storage, for a  a place in the queue; a query to storage, and host pages that are
                   short time; device pages      fetched ahead, if there are any
    MATCH          its plan, made in the same    device pages for [matched, page_count), a lock on the matched device
                   step                          path (L1), a pin on the matched host path (L2), a share in every load
                                                 on that device path, the reserve
    PREFETCH       a fetch from storage          a lock on [0, promised), shares in loads, device pages for
                                                 [promised, page_count), an open room, the reserve
    LOCAL_RESTORE  a copy from host to device    the same
    TRANSFER       prefill                       the same; the operation of the caller instead of the room, if the
                                                 caller computes the rest
    READY          the caller                    a lock on the prompt's path, its pages that are not in the tree, the
                                                 reserve
    FAILED         nothing                       nothing; pages that prefill may still write to are in the quarantine

The reserve is a set of device pages held back for the tokens that the request will generate. With components, a request
from MATCH to READY owns component pages as well: `tidekv.states.components.request_components`.

Rows
----

Facts arrive as events. A row lists the states in which an event is legal, the action that runs (`before`) and the state
that follows (`dest`; None keeps the state). An event without a row is an `IllegalEvent` and changes nothing. Rows of
the same event and source are tried in order; the first whose guard (`only_if`) holds is taken. Everything that can
raise runs in `before`, so an exception leaves the request in the state that it was in.

Guards are functions of the request and the event. Actions are methods, called with the request and the event, of the
object that does the work (`Restore`, `Serving`, `Rooms`), or of `Actions` if the work spans several of them. A row
names its action as that of the `Rules` of a core, so a reader can follow it to the definition.

The restore
-----------

`Restore.fix_plan` fixes the plan once, at the end of MATCH. Pages in host memory are copied, pages in storage are
fetched and then copied, and prefill is promised that it need not send these first `promised` pages: it sends the rest.
After that only `Progressed` moves the request, depending on what is missing:

- A load in stage FETCHING keeps the request in PREFETCH. A load that is COPYING, or that has FAILED and has no request
  yet that extends into it, keeps it in LOCAL_RESTORE. TRANSFER waits for loads that are RECEIVING, for the spans of the
  request's own room, and for the aux record with the first token.
- A load that receives its pages from another request's room counts like one of the request's own room (see
  `tidekv.states.loads.shared_transfers`).
- The failure of a load is not an event of the request. A waiter of the load asks its prefill for the pages by *extend*,
  a new span of its room, and the request keeps waiting. For this reason no tier can fail a request.

Fallback
--------

After an exception a step (one event in one state) runs once more, with less. The request fails only if the same step
raises again:

    state                            first exception                           second            third
    PREALLOC                         no storage; the grant is given back       FAILED
    MATCH, PREFETCH, LOCAL_RESTORE   the plan uses L1, L2 and transfer         L1 and transfer   FAILED
    TRANSFER                         the receipt is repeated; a commit keeps   FAILED
                                     the pages, and enters none in the tree
    READY                            growth gets no pages; a finish keeps the  FAILED
                                     pages in the tree, without a backup

`ReportReady.fallbacks` reports to the caller what was given up. Other reasons lead back to the queue:

- A lost room (`PrefillLost`: prefill refused it, failed, or is unreachable) returns the request to the queue in a new
  generation, with the next prefill of its list, until each was tried `attempts_per_prefill` times. After the last
  attempt, a caller that can compute the rest of the prompt itself receives that command; TRANSFER waits for it.
- A request whose pages were lost to another writer returns to the queue as well (`PagesLost`): the sender of pages that
  it shares has left while its prefill may still write to them, and no device page is free to go on with instead.
- A caller that can compute does so at once, and prefill is not asked, if the device lacks no more than
  `recompute_threshold` tokens of the prompt. If it fails, the next generation asks prefill.

A request that returns to the queue holds nothing.

With lent pages (`tidekv.states.request.lending`) the device pages are the caller's. A request is admitted at once, owns
its lent pages instead of pages of the pool, a reserve and a path in the tree, and ends with READY. A passed deadline,
and a lost room after the last attempt, are no failures: READY then returns the pages that are in place. A request that
names no prefill ends so when its loads have ended, or plans once more if host memory had no room for all of them. The
outcome, failure included, is reported when nothing writes to the pages any more.

The core fires three internal events at a request after every change that may let it move on, in this order, if the
table has a row for them in its state: `StorageDue`, `PlanDue`, `Progressed`. Guards prevent repeated work.

The end
-------

READY ends the restore. Finishing, retracting or aborting a READY request has no next state: the request gives
everything back and is forgotten. The outcome of an operation whose request is gone never reaches this table; the core
settles its pages and counts it.

States are compared in this module, in `request`, `machine` and `guards_and_actions`, and nowhere else in `states/`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from transitions import EventData, Machine, Transition

from tidekv.states import events
from tidekv.states.events import Event
from tidekv.states.handover.rooms import Rooms
from tidekv.states.records.stages import State
from tidekv.states.request import guards_and_actions as guards
from tidekv.states.request.guards_and_actions import Actions, Receiving
from tidekv.states.request.lending import Lending
from tidekv.states.request.ready import Serving
from tidekv.states.request.restore import Restore

if TYPE_CHECKING:
    from tidekv.states.records.request import Request

# Called with the request and the event.
Action: TypeAlias = Callable[..., None]
Guard: TypeAlias = Callable[..., bool]
BoundRows: TypeAlias = "dict[type[Event], dict[str, list[tuple[Guard | None, Action | None]]]]"
"""By event and name of the state, the rows of one core in order: the guard, and what runs the action and changes the
state.
"""

PREALLOC, MATCH, PREFETCH, LOCAL_RESTORE, TRANSFER, READY, FAILED = State
WITH_ROOM = (PREFETCH, LOCAL_RESTORE, TRANSFER)
RESTORING = (MATCH, *WITH_ROOM)
LIVE = (PREALLOC, *RESTORING)


@dataclass(frozen=True, slots=True)
class Rules:
    """The objects of one core whose methods are actions."""

    restore: Restore
    lending: Lending
    rooms: Rooms
    receiving: Receiving
    serving: Serving
    actions: Actions


@dataclass(frozen=True, slots=True)
class Row:
    """One rule: on `event` in a state of `source`, if `only_if` holds, run `before` and go to `dest` (None: stay)."""

    event: type[Event]
    source: tuple[State, ...]
    dest: State | None
    before: Callable[[Rules], Action] | None = None
    """The action, of the object that does the work."""
    only_if: Guard | None = None


TRANSITIONS = (
    # The restore.
    Row(events.StorageDue, (PREALLOC,), None, before=lambda of: of.restore.ask_storage, only_if=guards.has_not_asked),
    Row(events.RequestChanged, LIVE, None, before=lambda of: of.actions.change),
    Row(events.Granted, (PREALLOC,), MATCH),
    Row(events.PlanDue, (MATCH,), None, before=lambda of: of.restore.fix_plan, only_if=guards.can_plan),
    # Most prompts have nothing in the lower tiers. A trigger tries the rows in order, and its price is that of each.
    Row(events.Progressed, (MATCH,), TRANSFER, only_if=guards.waits_for_prefill),
    Row(events.Progressed, (MATCH,), PREFETCH, only_if=guards.waits_for_storage),
    Row(events.Progressed, (MATCH,), LOCAL_RESTORE, only_if=guards.waits_for_copies),
    Row(events.Progressed, (PREFETCH,), LOCAL_RESTORE, only_if=guards.needs_no_storage),
    Row(events.Progressed, (LOCAL_RESTORE,), TRANSFER, only_if=guards.needs_no_local_tier),
    # The usual end comes first. A request that has failed to recompute never has everything.
    Row(events.Progressed, (TRANSFER,), READY, before=lambda of: of.restore.commit, only_if=guards.has_everything),
    Row(
        events.Progressed, (TRANSFER,), READY, before=lambda of: of.lending.commit, only_if=guards.has_filled_lent_pages
    ),
    Row(
        events.Progressed,
        (TRANSFER,),
        PREALLOC,
        before=lambda of: of.actions.ask_tiers_again,
        only_if=guards.has_more_in_tiers,
    ),
    Row(
        events.Progressed,
        (TRANSFER,),
        READY,
        before=lambda of: of.actions.end_without_tiers,
        only_if=guards.has_all_of_tiers,
    ),
    Row(
        events.Progressed,
        (TRANSFER,),
        PREALLOC,
        before=lambda of: of.actions.ask_prefill,
        only_if=guards.has_failed_short,
    ),
    Row(
        events.Progressed,
        (TRANSFER,),
        FAILED,
        before=lambda of: of.actions.fail_by_recompute,
        only_if=guards.has_failed_to_recompute,
    ),
    # The hand-over, which runs in parallel with the local restore.
    Row(events.PromiseSent, WITH_ROOM, None, before=lambda of: of.rooms.note_writer),
    Row(events.ChunkReceived, WITH_ROOM, None, before=lambda of: of.receiving.receive_chunk),
    Row(events.AuxReceived, WITH_ROOM, None, before=lambda of: of.receiving.receive_aux),
    # Fallback: the same request on fewer tiers, or in a new generation.
    Row(
        events.TransitionRaised,
        (PREALLOC,),
        None,
        before=lambda of: of.restore.give_grant_back,
        only_if=guards.is_first_raise,
    ),
    Row(
        events.TransitionRaised,
        (MATCH, PREFETCH, LOCAL_RESTORE),
        None,
        before=lambda of: of.restore.fall_back,
        only_if=guards.has_tiers_left,
    ),
    Row(events.TransitionRaised, (TRANSFER,), None, before=lambda of: of.restore.repeat, only_if=guards.is_first_raise),
    Row(events.TransitionRaised, (READY,), None, before=lambda of: of.serving.repeat, only_if=guards.is_first_raise),
    Row(events.PagesLost, RESTORING, PREALLOC, before=lambda of: of.actions.start_over),
    Row(
        events.PrefillLost,
        WITH_ROOM,
        PREALLOC,
        before=lambda of: of.actions.try_next_prefill,
        only_if=guards.has_another_prefill,
    ),
    Row(events.PrefillLost, WITH_ROOM, PREALLOC, before=lambda of: of.actions.ask_caller, only_if=guards.can_recompute),
    # Lent pages: what is in place so far goes back to the caller, which computes the rest.
    Row(
        events.PrefillLost,
        WITH_ROOM,
        None,
        before=lambda of: of.actions.wait_for_tiers,
        only_if=guards.is_left_to_tiers,
    ),
    Row(
        events.PrefillLost,
        WITH_ROOM,
        READY,
        before=lambda of: of.actions.end_without_prefill,
        only_if=guards.fills_lent_pages,
    ),
    Row(
        events.DeadlinePassed,
        LIVE,
        READY,
        before=lambda of: of.actions.end_at_deadline,
        only_if=guards.fills_lent_pages,
    ),
    # Failure.
    Row(events.TransitionRaised, (*LIVE, READY), FAILED, before=lambda of: of.actions.fail_by_raise),
    Row(events.PrefillLost, WITH_ROOM, FAILED, before=lambda of: of.actions.fail_by_prefill),
    Row(events.DeadlinePassed, LIVE, FAILED, before=lambda of: of.actions.fail_by_deadline),
    Row(events.AbortRequested, LIVE, FAILED, before=lambda of: of.actions.fail_by_abort),
    # After the restore. The deadline is that of the restore, so it has no effect any more,
    # and neither has another one.
    Row(events.DeadlinePassed, (READY,), None),
    Row(events.RequestChanged, (READY,), None),
    Row(events.GrowthTaken, (READY,), None, before=lambda of: of.serving.grow),
    Row(events.FinishRequested, (READY,), None, before=lambda of: of.serving.finish),
    Row(events.RetractRequested, (READY,), None, before=lambda of: of.serving.retract),
    Row(events.AbortRequested, (READY,), None, before=lambda of: of.serving.drop),
)


def build_machine(rules: Rules) -> BoundRows:
    """Build the machine that all requests of a core share; return its rows.

    Requests are not registered as models; each call passes one. The library executes the rows that change the state.
    They have no triggers, by which it would look for the row that `Core.fire` has found.
    """
    machine = Machine(model=None, states=State, initial=PREALLOC, auto_transitions=False, queued=False)
    rows: BoundRows = {}
    for row in TRANSITIONS:
        action = None if row.before is None else _bound(row.before, rules)
        for state in row.source:
            take = action
            if row.dest is not None:
                take = partial(_change_state, machine, Transition(state.name, row.dest.name, before=action))
            # By name of the state: reading a member's hash is slow in Python 3.11.
            rows.setdefault(row.event, {}).setdefault(state.name, []).append((row.only_if, take))
    return rows


def _change_state(machine: Machine, transition: Transition, request: Request, event: Event) -> None:
    """Let the library take a row."""
    transition.execute(EventData(None, None, machine, request, (request, event), {}))


def _bound(before: Callable[[Rules], Action], rules: Rules) -> Action:
    """Bind an action to the rules of a core, again for each call, so that a test can replace it in its class."""
    return lambda request, event: before(rules)(request, event)


# --- The diagram ---

GROUPS = {
    "LIVE": ("any state before READY", LIVE),
    "RESTORING": ("any state from MATCH to TRANSFER", RESTORING),
    "WITH_ROOM": ("PREFETCH, LOCAL_RESTORE or TRANSFER", WITH_ROOM),
}
"""Sets of states that rows share, largest first. The diagram draws one arrow for all states of a set."""


def diagram() -> str:
    """Return the machine as a Mermaid state diagram, drawn from the table."""
    arrows: dict[tuple[str, str], dict[str, None]] = {}
    for row in TRANSITIONS:
        if row.dest is not None:
            label = row.event.__name__ if row.only_if is None else f"{row.event.__name__} [{row.only_if.__name__}]"
            for source in _grouped(row.source):
                arrows.setdefault((source, row.dest.value), {})[label.replace("_", " ")] = None
    lines = ["stateDiagram-v2"]
    # No composite states: Mermaid cannot draw arrows between inner states of different composites.
    lines += [f'    state "{words}" as {name}' for name, (words, _) in GROUPS.items()]
    lines.append("    [*] --> PREALLOC : RequestArrived")
    lines += [f"    {source} --> {dest} : {', '.join(labels)}" for (source, dest), labels in arrows.items()]
    return "\n".join([*lines, "    READY --> [*]", "    FAILED --> [*]", ""])


def _grouped(states: tuple[State, ...]) -> list[str]:
    """Return the name of the largest group within `states`, then the names of the remaining states."""
    for name, (_, group) in GROUPS.items():
        if set(group) <= set(states):
            return [name, *(state.value for state in states if state not in group)]
    return [state.value for state in states]


if __name__ == "__main__":
    print(diagram(), end="")
