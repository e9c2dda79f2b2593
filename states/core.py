"""The core: the whole decider of one decode worker. Events in, commands out; no I/O, no clock, no randomness.

The same events in the same order give the same commands, states, plans, locks and allocations, always. That is what
replay, simulation, property tests and rank agreement hold on to.
"""

from __future__ import annotations

import traceback
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from transitions import MachineError

from tidekv.states import events, outcomes, steps
from tidekv.states.audit import audit_core
from tidekv.states.backups import Backups
from tidekv.states.books import Books
from tidekv.states.errors import BrokenInvariant, IllegalEvent
from tidekv.states.events import Event
from tidekv.states.load import Load
from tidekv.states.loads import Loads
from tidekv.states.lookahead import Lookahead
from tidekv.states.queue import Queue
from tidekv.states.request import Request, State
from tidekv.states.request_tails import Tails
from tidekv.states.restore import Restore
from tidekv.states.rooms import Rooms
from tidekv.states.serving import Serving
from tidekv.states.shared_transfers import SharedTransfers
from tidekv.states.statistics import count_core
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
        self.books = Books(settings)
        self.queue = Queue(settings)
        self.rooms = Rooms(self.books)
        self.loads = Loads(self.books, self.rooms)
        self.shared_transfers = SharedTransfers(self.books, self.loads)
        components = self.books.components
        self.tails = None if components is None else Tails(self.books, components)
        self.tail_backups = None if components is None else TailBackups(self.books, components)
        self.backups = Backups(self.books, self.tail_backups)
        self.write_back = WriteBack(self.books, self.backups)
        self.lookahead = Lookahead(self.books)
        self.restore = Restore(self.books, self.rooms, self.loads, self.shared_transfers, self.lookahead, self.tails)
        self.serving = Serving(self.books, self.restore, self.backups)
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
            events.StorageChanged: self.books.storage.changed,
            events.PolicyChanged: self.books.storage.policy_changed,
            events.ClockAdvanced: partial(outcomes.time_passed, self),
            **dict.fromkeys(outcomes.OUTCOMES, partial(outcomes.operation_ended, self)),
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
        books = self.books
        self.moves = []
        books.now_s = max(books.now_s, event.at_s)
        self._takers[type(event)](event)
        self.settle()
        commands, books.out = books.out, []
        return commands

    def next_deadline_s(self) -> float | None:
        """When to send ClockAdvanced; None: nothing is waited for."""
        return self.books.next_deadline_s()

    def request(self, request_id: str) -> Request | None:
        """The live request of that name: restoring, or READY and not given back."""
        return self.books.requests.get(request_id)

    @property
    def operations_in_flight(self) -> int:
        """Operations that somebody waits for: all but the breaker's own."""
        return len(self.books.operations) - self.books.storage.is_open

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in flight: no request, load, backup or operation, and nothing in the quarantine.

        The circuit breaker's wait and its probe do not count: an engine with unreachable storage is idle all the same.
        Neither do retracted requests: their pages wait for `resume` or `drop`.
        """
        in_flight = self.books.requests or self.operations_in_flight or self.loads or self.backups
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
        self.books.dirty[request] = None
        self.books.pages_freed = True

    def forget(self, request: Request) -> None:
        """The request is over for the core: late outcomes of it only settle pages."""
        del self.books.requests[request.request_id]
        self.books.dirty.pop(request, None)
        if request.state is State.PREALLOC:
            self.queue.remove(request)

    # --- Events ---

    def _arrived(self, event: events.RequestArrived) -> None:
        if event.request_id in self.books.requests:
            raise IllegalEvent(f"request {event.request_id!r} arrived twice; the driver must refuse the second")
        self._arrivals += 1
        request = Request(
            event,
            arrival=self._arrivals,
            page_count=self.settings.pages_of(event.prompt_tokens),
            full_pages=len(event.keys) // self.settings.key_bytes,
        )
        self.books.requests[request.request_id] = request
        self.moves.append((request.request_id, request.state))
        self.books.remind(request, event.deadline_at_s)
        self.enqueue(request)

    def _to_request(self, event: events.AbortRequested) -> None:
        request = self.books.requests.get(event.request_id)
        if request is None:
            self.books.count("calls_late")
        else:
            self.fire(request, event)

    def _retracted_dropped(self, event: events.RetractedDropped) -> None:
        self.insist(lambda: self.backups.release_retracted(event.request_id))
        self.books.pages_freed = True

    def _flush_requested(self, event: events.FlushRequested) -> None:
        self.insist(lambda: self.serving.flush(event))

    def _promise_sent(self, event: events.PromiseSent) -> None:
        room = self.rooms.live(event.request_id, event.generation)
        if room is not None:
            self.fire(room.request, event)
        else:
            self.rooms.sent(event.request_id, event.generation, writer=event.writer, ranks=event.ranks)

    def _to_room(self, event: events.ChunkLanded | events.AuxLanded | events.RoomRefused | events.RoomFailed) -> None:
        room = self.rooms.live(event.request_id, event.generation)
        if room is None:
            self.books.count("frames_late")
            return
        self.fire(room.request, event)

    def _room_failed(self, event: events.RoomFailed) -> None:
        if event.settled:
            self.insist(lambda: self.rooms.settle_unsent(event.request_id, event.generation))
        self._to_room(event)

    def _room_drained(self, event: events.RoomDrained) -> None:
        self.insist(lambda: self.rooms.drained(event.request_id, event.generation, event.rank))

    def _writer_lost(self, event: events.WriterLost) -> None:
        for room in self.rooms.of_writer(event.writer):
            assert self.rooms.live(*room.key) is room, "a request that leaves its room ends no other's"
            self.fire(room.request, event)

    def _writer_dead(self, event: events.WriterDead) -> None:
        # Who is dead is out of reach: its live rooms end first, and what they leave in the quarantine is free at once.
        self._writer_lost(events.WriterLost(at_s=event.at_s, writer=event.writer, cause="its process is gone"))
        self.insist(lambda: self.rooms.writer_dead(event.writer))

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
            self.books.dirty[request] = None
            if request.state is not before:
                self.moves.append((request.request_id, request.state))
        return done

    def _raised(self, request: Request, event: Event | None) -> None:
        """A rule of this request raised just now, taking `event` (None: a question of the core's own)."""
        request.raised += 1
        self.books.count("transitions_raised")
        if request.raised > RAISES_MAX:
            raise  # Called while the exception is handled: even failing the request does not work.
        before = request.state
        self.fire(request, steps.TransitionRaised(at_s=self.books.now_s, detail=traceback.format_exc()))
        if request.state is before and isinstance(event, Event) and not isinstance(event, OWN_QUESTIONS):
            # The request goes on, with fewer tiers; what the event said must not be lost.
            self.fire(request, event)

    def insist(self, rule: Callable[[], None], mend: Callable[[], None] | None = None) -> None:
        """Follow a rule that is of no single request. If it raises, mend what it left, or have it go on once more."""
        try:
            rule()
        except BrokenInvariant:
            raise
        except Exception:
            self.books.count("transitions_raised")
            (mend or rule)()

    def settle(self) -> None:
        """Draw all consequences until there are none left."""
        books = self.books
        while True:
            if books.homeless:
                request, cause = next(iter(books.homeless.items()))
                del books.homeless[request]
                self.fire(request, steps.PagesLost(at_s=books.now_s, cause=cause))
            elif books.unfilled:
                load = next(iter(books.unfilled))
                del books.unfilled[load]
                self._fill(load)
            elif books.landing:
                load = next(iter(books.landing))
                del books.landing[load]
                self.insist(partial(self.shared_transfers.take_landed, load))
            elif books.dirty:
                request = next(iter(books.dirty))
                del books.dirty[request]
                self._progress(request)
            elif self.backups.waiting and (backup := self.backups.next_waiting) is not None:
                self.backups.put_now(backup)
            elif self.tail_backups is not None and (put := self.tail_backups.puts.next_waiting) is not None:
                puts = self.tail_backups.puts
                self.insist(partial(puts.put_now, put), partial(puts.give_up, put))
            elif books.pages_freed or books.settled_loads:
                if books.settled_loads or self.loads.has_settled:
                    self.insist(self.loads.free_settled_voids)
                books.pages_freed = False
                self._admit()
            elif books.ahead_over or books.ahead_due or books.write_due:
                self._work_ahead()
            else:
                return

    def _work_ahead(self) -> None:
        """Everything else is done: bring nearer what will be needed, and save what will be evicted."""
        books = self.books
        while books.ahead_over:
            request, _ = books.ahead_over.popitem()
            self.insist(partial(self.lookahead.drop, request))
        if books.ahead_due:
            books.ahead_due = False
            for request in self.queue.candidates(books.now_s) if books.settings.lookahead_pages_max else ():
                self.insist(partial(self.lookahead.start, request), partial(self.lookahead.abandon, request))
        if books.write_due:
            self.insist(self.write_back.look)

    def _fill(self, load: Load) -> None:
        """Have a sharer of a failed load extend into it. A raise is the sharer's that was to."""
        filler = self.loads.filler_of(load)
        if filler is None:
            self.insist(lambda: self.loads.fill(load))
            return
        try:
            self.loads.fill(load)
        except BrokenInvariant:
            raise
        except Exception:
            self.books.unfilled[load] = None
            self._raised(filler, None)

    def _progress(self, request: Request) -> None:
        if self.books.requests.get(request.request_id) is not request:
            return
        if request.state is State.PREALLOC and not request.has_asked:
            request.has_asked = True
            self._ask(request, self.restore.ask_storage)
            return
        if request.state is State.MATCH and not request.is_planned and not request.query_op:
            self.fire(request, steps.PlanDue(at_s=self.books.now_s))
        if request.state in MOVES_ON:
            event = steps.Progressed(at_s=self.books.now_s)
            while self.fire(request, event):
                if request.state not in MOVES_ON:
                    return
            if request.is_planned or request.query_op:
                # That was the last word: nothing that it waits for has come since. (A plan that raised is due again.)
                self.books.dirty.pop(request, None)
            if request.loads and self.shared_transfers.waits_for(request) is not None:
                self.insist(partial(self.shared_transfers.watch, request))

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
        for request in self.queue.candidates(self.books.now_s):
            granted = self._ask(request, self.restore.grant)
            if granted is None:
                return
            if granted:
                self.queue.remove(request)
                self.fire(request, steps.Granted(at_s=self.books.now_s))
                for waiting in self.queue.candidates(self.books.now_s):
                    if waiting.arrival < request.arrival and waiting.short_need:
                        waiting.passed += 1
                self.books.pages_freed = True
                return
