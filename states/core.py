"""The core: the whole decider of one decode worker. Events in, commands out; no I/O, no clock, no randomness.

The same events in the same order give the same commands, states, plans, locks and allocations, always. That is what
replay, simulation, property tests and rank agreement hold on to.
"""

from __future__ import annotations

import traceback
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from transitions import MachineError

from tidekv.states import events, steps
from tidekv.states.audit import audit_core
from tidekv.states.backups import Backups
from tidekv.states.core_state import CoreState
from tidekv.states.errors import BrokenInvariant, IllegalEvent
from tidekv.states.events import Event
from tidekv.states.loads import Loads
from tidekv.states.lookahead import Lookahead
from tidekv.states.queue import Queue
from tidekv.states.request import Load, Request, State
from tidekv.states.request_tails import Tails
from tidekv.states.restore import Restore
from tidekv.states.rooms import Rooms
from tidekv.states.serving import Serving
from tidekv.states.shared_transfers import SharedTransfers
from tidekv.states.statistics import count_core
from tidekv.states.storage_use import StorageUse
from tidekv.states.table import MOVES_ON, TRANSITIONS, build_machine
from tidekv.states.tail_moves import TailBackups
from tidekv.states.write_back import WriteBack

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidekv.states.commands import Command
    from tidekv.states.settings import CoreSettings


Answer = TypeVar("Answer")

RAISES_MAX = 8
"""So many raises of one request, failing it included, are met; the next one is not ours to hide."""

OWN_QUESTIONS = (steps.PlanDue, steps.Progressed, steps.TransitionRaised)
"""What the core asks by itself, again and again: nothing is lost with one of these."""


class Core:
    """All requests, the prefix index, the accounts and the rooms of one decode worker."""

    def __init__(self, settings: CoreSettings) -> None:
        self.settings = settings
        self.state = CoreState(settings)
        self.queue = Queue(settings)
        self.storage = StorageUse(self.state)
        self.rooms = Rooms(self.state)
        self.loads = Loads(self.state, self.storage, self.rooms)
        self.shared_transfers = SharedTransfers(self.state, self.loads)
        components = self.state.components
        self.tails = None if components is None else Tails(self.state, self.storage, components)
        self.tail_backups = None if components is None else TailBackups(self.state, self.storage, components)
        self.backups = Backups(self.state, self.storage, self.tail_backups)
        self.write_back = WriteBack(self.state, self.storage, self.backups)
        self.lookahead = Lookahead(self.state, self.storage)
        self.restore = Restore(
            self.state, self.storage, self.rooms, self.loads, self.shared_transfers, self.lookahead, self.tails
        )
        self.serving = Serving(self.state, self.restore, self.backups)
        self.moves: list[tuple[str, State]] = []
        """The changes of state that the last step made, in order: request and where it is now."""
        self._arrivals = 0
        machine = build_machine()
        self._triggers: dict[type[Event], Callable[[Request, Core, Request, Event], bool]] = {
            row.event: machine.events[row.event.__name__].trigger for row in TRANSITIONS
        }
        self._takers: dict[type[Event], Callable[..., None]] = {
            events.RequestArrived: self._arrived,
            events.AbortRequested: self._to_request,
            events.GrowthTaken: self._to_request,
            events.FinishRequested: self._to_request,
            events.RetractRequested: self._to_request,
            events.RetractedDropped: self._retracted_dropped,
            events.FlushRequested: self._flush_requested,
            events.StorageChanged: self.storage.changed,
            events.PolicyChanged: self.storage.policy_changed,
            events.ClockAdvanced: self._time_passed,
            **dict.fromkeys(events.Outcome.__args__, self._operation_ended),
            events.PromiseSent: self._promise_sent,
            events.ChunkLanded: self._to_room,
            events.AuxLanded: self._to_room,
            events.RoomRefused: self._to_room,
            events.RoomFailed: self._room_failed,
            events.RoomDrained: self._room_drained,
            events.WriterLost: self._writer_lost,
            events.WriterDead: self._writer_dead,
        }

    def step(self, event: Event) -> list[Command]:
        """Take one event; return the commands that follow from it, in the order in which they are to be started.

        Raises IllegalEvent, having changed nothing, for an event of a request that the table has no row for, and
        BrokenInvariant where the accounts contradict themselves: then the core must not be used any more.
        """
        state = self.state
        self.moves = []
        state.now_s = max(state.now_s, event.at_s)
        self._takers[type(event)](event)
        self.settle()
        commands, state.out = state.out, []
        return commands

    def next_deadline_s(self) -> float | None:
        """When to send ClockAdvanced; None: nothing is waited for."""
        return self.state.next_deadline_s()

    def request(self, request_id: str) -> Request | None:
        """The live request of that name: restoring, or READY and not given back."""
        return self.state.requests.get(request_id)

    @property
    def operations_in_flight(self) -> int:
        """Operations that somebody waits for: all but the breaker's own."""
        return len(self.state.operations) - self.storage.is_open

    @property
    def is_idle(self) -> bool:
        """Nothing is in flight: no request, load, backup, operation, and nothing in the quarantine."""
        in_flight = self.state.requests or self.operations_in_flight or self.loads or self.backups
        return not (in_flight or self.rooms.draining_rooms)

    def statistics(self) -> dict[str, int]:
        """Counts of now, and counters since the start."""
        return count_core(self)

    def keys_put(self, op: int) -> tuple[str, bytes]:
        """Namespace and keys, from the first page on, of what StoreTail `op` puts, or StorePages of no request's tokens
        (serial 0): when they are started.
        """
        return self.backups.keys_put(op)

    def check(self) -> None:
        """Recount everything from scratch; BrokenInvariant says what does not add up."""
        audit_core(self)

    # --- What rules call ---

    def enqueue(self, request: Request) -> None:
        """The request waits for admission (again)."""
        self.queue.add(request)
        request.has_asked = False
        self.state.dirty[request] = None
        self.state.pages_freed = True

    def forget(self, request: Request) -> None:
        """The request is over for the core: late outcomes of it only settle pages."""
        del self.state.requests[request.request_id]
        self.state.dirty.pop(request, None)
        if request.state is State.PREALLOC:
            self.queue.remove(request)

    # --- Events ---

    def _arrived(self, event: events.RequestArrived) -> None:
        if event.request_id in self.state.requests:
            raise IllegalEvent(f"request {event.request_id!r} arrived twice; the driver must refuse the second")
        self._arrivals += 1
        request = Request(
            event,
            arrival=self._arrivals,
            page_count=self.settings.pages_of(event.prompt_tokens),
            full_pages=len(event.keys) // self.settings.key_bytes,
        )
        self.state.requests[request.request_id] = request
        self.moves.append((request.request_id, request.state))
        self.state.set_deadline(request, event.deadline_at_s)
        self.enqueue(request)

    def _to_request(self, event: events.AbortRequested) -> None:
        request = self.state.requests.get(event.request_id)
        if request is None:
            self.state.count("calls_late")
        else:
            self.fire(request, event)

    def _retracted_dropped(self, event: events.RetractedDropped) -> None:
        self.state.run_guarded(lambda: self.backups.release_retracted(event.request_id))
        self.state.pages_freed = True

    def _flush_requested(self, event: events.FlushRequested) -> None:
        self.state.run_guarded(lambda: self.serving.flush(event))

    def _operation_ended(self, event: events.Outcome) -> None:
        # Popped first: an outcome that comes twice, or after its operation was given up, changes nothing.
        operation = self.state.operations.pop(event.op, None)
        if operation is None:
            self.state.count("outcomes_late")
            return
        error = (event.detail or "raised") if isinstance(event, events.CommandRaised) else event.error
        self.state.run_guarded(partial(operation.ended, event, error), recover=operation.abandon)

    def _time_passed(self, event: events.ClockAdvanced) -> None:
        while (due := self.state.pop_due()) is not None:
            if not isinstance(due, Request):
                self.state.run_guarded(due.late)
            elif due.state is not State.READY:
                self.fire(due, steps.DeadlinePassed(at_s=event.at_s))
            # All that follows from one deadline comes before the next one.
            self.settle()

    def _promise_sent(self, event: events.PromiseSent) -> None:
        room = self.rooms.live(event.request_id, event.generation)
        if room is not None:
            self.fire(room.request, event)
        else:
            self.rooms.sent(event.request_id, event.generation, writer=event.writer, ranks=event.ranks)

    def _to_room(self, event: events.ChunkLanded | events.AuxLanded | events.RoomRefused | events.RoomFailed) -> None:
        room = self.rooms.live(event.request_id, event.generation)
        if room is None:
            self.state.count("frames_late")
            return
        self.fire(room.request, event)

    def _room_failed(self, event: events.RoomFailed) -> None:
        if event.settled:
            self.state.run_guarded(lambda: self.rooms.settle_unsent(event.request_id, event.generation))
        self._to_room(event)

    def _room_drained(self, event: events.RoomDrained) -> None:
        self.state.run_guarded(lambda: self.rooms.drained(event.request_id, event.generation, event.rank))

    def _writer_lost(self, event: events.WriterLost) -> None:
        for room in self.rooms.of_writer(event.writer):
            assert self.rooms.live(*room.key) is room, "a request that leaves its room ends no other's"
            self.fire(room.request, event)

    def _writer_dead(self, event: events.WriterDead) -> None:
        # Who is dead is out of reach: its live rooms end first, and what they leave in the quarantine is free at once.
        self._writer_lost(events.WriterLost(at_s=event.at_s, writer=event.writer, cause="its process is gone"))
        self.state.run_guarded(lambda: self.rooms.writer_dead(event.writer))

    # --- Consequences ---

    def fire(self, request: Request, event: Event) -> bool:
        """Pull a trigger of the machine. A rule that raises pulls TransitionRaised; a missing row is our bug."""
        before = request.state
        try:
            done = self._triggers[type(event)](request, self, request, event)
        except MachineError as error:
            raise IllegalEvent(
                f"{type(event).__name__} in {request.state.value} of {request!r}: no such row"
            ) from error
        except BrokenInvariant:
            raise
        except Exception:
            self._raised(request, event)
            return True
        if done:
            self.state.dirty[request] = None
            if request.state is not before:
                self.moves.append((request.request_id, request.state))
        return done

    def _raised(self, request: Request, event: Event | None) -> None:
        """A rule of this request raised just now, taking `event` (None: a question of the core's own)."""
        request.raised += 1
        self.state.count("transitions_raised")
        if request.raised > RAISES_MAX:
            raise  # Called while the exception is handled: even failing the request does not work.
        before = request.state
        self.fire(request, steps.TransitionRaised(at_s=self.state.now_s, detail=traceback.format_exc()))
        if request.state is before and isinstance(event, Event) and not isinstance(event, OWN_QUESTIONS):
            # The request goes on, with fewer tiers; what the event said must not be lost.
            self.fire(request, event)

    def settle(self) -> None:
        """Draw all consequences until there are none left."""
        state = self.state
        while True:
            if state.answers:
                request, event = state.answers.popitem()
                self.fire(request, event)
            elif state.preempted:
                request, cause = next(iter(state.preempted.items()))
                del state.preempted[request]
                self.fire(request, steps.PagesLost(at_s=state.now_s, cause=cause))
            elif state.failed_loads:
                load = next(iter(state.failed_loads))
                del state.failed_loads[load]
                self._fill(load)
            elif state.progressed_loads:
                load = next(iter(state.progressed_loads))
                del state.progressed_loads[load]
                self.state.run_guarded(partial(self.shared_transfers.take_landed, load))
            elif state.dirty:
                request = next(iter(state.dirty))
                del state.dirty[request]
                self._progress(request)
            elif self.backups.waiting and (backup := self.backups.next_waiting) is not None:
                self.backups.put_now(backup)
            elif self.tail_backups is not None and (put := self.tail_backups.puts.next_waiting) is not None:
                puts = self.tail_backups.puts
                self.state.run_guarded(partial(puts.put_now, put), partial(puts.give_up, put))
            elif state.pages_freed or state.reclaimable_loads:
                if state.reclaimable_loads or self.loads.has_settled:
                    self.state.run_guarded(self.loads.free_settled_voids)
                state.pages_freed = False
                self._admit()
            elif state.ahead_over or state.ahead_due or state.write_due:
                self._work_ahead()
            else:
                return

    def _work_ahead(self) -> None:
        """Everything else is done: bring nearer what will be needed, and save what will be evicted."""
        state = self.state
        while state.ahead_over:
            request, _ = state.ahead_over.popitem()
            self.state.run_guarded(partial(self.lookahead.drop, request))
        if state.ahead_due:
            state.ahead_due = False
            for request in self.queue.candidates(state.now_s) if state.settings.lookahead_pages_max else ():
                self.state.run_guarded(partial(self.lookahead.start, request), partial(self.lookahead.abandon, request))
        if state.write_due:
            self.state.run_guarded(self.write_back.look)

    def _fill(self, load: Load) -> None:
        """Have a sharer of a failed load extend into it. A raise is the sharer's that was to."""
        filler = self.loads.filler_of(load)
        if filler is None:
            self.state.run_guarded(lambda: self.loads.fill(load))
            return
        try:
            self.loads.fill(load)
        except BrokenInvariant:
            raise
        except Exception:
            self.state.failed_loads[load] = None
            self._raised(filler, None)

    def _progress(self, request: Request) -> None:
        if self.state.requests.get(request.request_id) is not request:
            return
        if request.state is State.PREALLOC and not request.has_asked:
            request.has_asked = True
            self._ask(request, self.restore.ask_storage)
            return
        if request.state is State.MATCH and not request.is_planned and not request.query_op:
            self.fire(request, steps.PlanDue(at_s=self.state.now_s))
        if request.state in MOVES_ON:
            event = steps.Progressed(at_s=self.state.now_s)
            while self.fire(request, event):
                if request.state not in MOVES_ON:
                    return
            if request.is_planned or request.query_op:
                # That was the last word: nothing that it waits for has come since. (A plan that raised is due again.)
                self.state.dirty.pop(request, None)
            if request.loads and self.shared_transfers.waits_for(request) is not None:
                self.state.run_guarded(partial(self.shared_transfers.watch, request))

    def _ask(self, request: Request, question: Callable[[Request], Answer]) -> Answer | None:
        """Ask `restore` about a request that waits for admission. A raise is that request's own."""
        try:
            return question(request)
        except BrokenInvariant:
            raise
        except Exception:
            self._raised(request, None)
            return None

    def _admit(self) -> None:
        """Grant pages to those that wait, in order; who does not fit lets smaller ones pass, within bounds."""
        if not self.queue:
            return
        for request in self.queue.candidates(self.state.now_s):
            granted = self._ask(request, self.restore.grant)
            if granted is None:
                return
            if granted:
                self.queue.remove(request)
                self.fire(request, steps.Granted(at_s=self.state.now_s))
                for waiting in self.queue.candidates(self.state.now_s):
                    if waiting.arrival < request.arrival and waiting.short_need:
                        waiting.passed += 1
                self.state.pages_freed = True
                return
