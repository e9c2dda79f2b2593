"""The core: makes every decision of one decode worker. Events in, commands out; no I/O, no clock, no randomness.

The core is deterministic: the same events in the same order give the same commands, states, plans, locks and
allocations. Replay, simulation, property tests and rank agreement rely on that.

    event ──▶ Core.step ──▶ its handler: the request machine, an operation, a room, ...
                                │ adds work to the queues of CoreState
                                ▼
                            Core.settle: CONSEQUENCES, until none is due ──▶ commands

The consequences of an event are data, as the table of the request machine is. CONSEQUENCES lists rules in order of
precedence, each with the work queue that makes it due, some with a condition. `settle` runs the first rule that is due
and starts again at the top, so a rule runs only when no rule above it has work left. The order has three reasons:

- Outcomes of requests and loads are applied before any request moves on, so no request moves on over lost pages.
- Every request moves on as far as it can before waiting requests are admitted: it may enter pages in the tree that
  the next admitted request then shares.
- Work that only prepares for later (deferred writes, look-ahead, write-back) comes last.

A rule takes one item of work per run. The last rule is the exception: it processes everything it finds, and creates no
work for itself.

An exception in a rule does not end the core. If a row of the machine raises, the core fires `TransitionRaised` at that
request. If any other rule raises, `CoreState.run_guarded` abandons the operation or runs the rule once more. Every
exception is recorded in `CoreState.raises`, for the log, the metrics and the journal. Only `BrokenInvariant` always
leaves `step`; the core must not be used after that.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, TypeVar

from tidekv.states import events
from tidekv.states.backup.backups import Backups
from tidekv.states.backup.found_pages import FoundPages
from tidekv.states.backup.offers import Offers
from tidekv.states.backup.store_all import StoreAll
from tidekv.states.backup.write_back import WriteBack
from tidekv.states.components.backups import ComponentBackups
from tidekv.states.components.request_components import ComponentRestore
from tidekv.states.core_state import LOOK_AHEAD, PASS, STORE, WRITE_BACK, Continuation, CoreState
from tidekv.states.errors import BrokenInvariant, IllegalEvent, PrefillCause
from tidekv.states.events import Event
from tidekv.states.handover.rooms import Rooms
from tidekv.states.hints import Hints
from tidekv.states.inspect.invariants import audit_core
from tidekv.states.inspect.statistics import count_core, operations_in_flight
from tidekv.states.loads.loads import Loads
from tidekv.states.loads.look_ahead import LookAhead
from tidekv.states.loads.placement import LentPlacement, TreePlacement
from tidekv.states.loads.shared_transfers import SharedTransfers
from tidekv.states.records.request import Request
from tidekv.states.records.stages import State
from tidekv.states.request.admission_queue import Queue
from tidekv.states.request.early_ready import EarlyReady
from tidekv.states.request.guards_and_actions import Actions, Receiving
from tidekv.states.request.lending import Lending
from tidekv.states.request.ready import Serving
from tidekv.states.request.restore import PlanSources, Restore
from tidekv.states.request.table import Rules, build_machine
from tidekv.states.storage.admission import StorageAdmission
from tidekv.states.storage.passing import Passages
from tidekv.states.storage.peer_fetches import PeerFetches
from tidekv.states.storage.taken_prompts import TakenPrompts

if TYPE_CHECKING:
    from collections.abc import Callable, Sized

    from tidekv.states.commands import Command
    from tidekv.states.records.request import RoomKey
    from tidekv.states.records.request_parts import Admission
    from tidekv.states.settings import CoreSettings

Key = TypeVar("Key")
Value = TypeVar("Value")

RAISES_MAX = 8
"""Maximum exceptions handled per step of a request, those raised while failing it included; the next one leaves
`step`.
"""

PART_MAX = 64
"""Maximum deadlines, lost rooms and admissions of one step; what is left goes on in the next steps. Otherwise thousands
at once would stop the event loop for too long.
"""

MAY_MOVE_ON = (events.Granted, events.PlanDue, events.PromiseSent, events.TransitionRaised)
"""Events that change what a guard of `PlanDue` or `Progressed` reads, whatever their action finds. Loads, received
pages and component pages mark the request themselves if they have changed that; most chunks have not.
"""

REPEATED = (events.StorageDue, events.PlanDue, events.Progressed, events.TransitionRaised)
"""Events that the core fires again whenever they are due, so an interrupted one need not be repeated."""


class Core:
    """All requests, the prefix index, the page pools and the rooms of one decode worker."""

    def __init__(self, settings: CoreSettings) -> None:
        self.settings = settings
        self.state = CoreState(settings)
        self.next_deadline_s = self.state.next_deadline_s
        """Returns when to send ClockAdvanced; None if nothing has a deadline."""
        self.queue = Queue(settings)
        self.rooms = Rooms(self.state)
        self.storage = StorageAdmission(self.state, lambda: self.rooms.source_load)
        placement = LentPlacement(self.state) if settings.lends_device else TreePlacement(self.state)
        self.peers = PeerFetches(self.state)
        self.loads = Loads(self.state, self.storage, self.peers, self.rooms, placement)
        self.shared_transfers = SharedTransfers(self.state, self.loads)
        components = self.state.components
        self.component_pages = (
            None
            if components is None
            else ComponentRestore(self.state, self.storage, components, self.rooms.extend_component)
        )
        self.component_backups = None if components is None else ComponentBackups(self.state, self.storage, components)
        self.backups = Backups(self.state, self.storage, self.component_backups)
        self.passages = Passages(self.state, self.storage)
        self.offers = Offers(self.state, self.backups, self.component_backups, self.passages)
        self.lending = Lending(self.state, self.storage, self.rooms, self.offers, self.backups, self.component_pages)
        self.write_back = WriteBack(self.state, self.storage, self.backups)
        self.store_all = StoreAll(self.state, self.storage, self.backups)
        component_storage = None if self.component_pages is None else self.component_pages.storage
        self.lookahead = LookAhead(self.state, self.storage, component_storage)
        self.hints = Hints(self.state, self.storage, lambda: self.lookahead.pages)
        self.taken_prompts = TakenPrompts(self.state, self.peers)
        missing = None if self.component_pages is None else self.component_pages.missing
        self.early = EarlyReady(self.state, self.rooms, missing)
        self.restore = Restore(
            self.state,
            PlanSources(
                storage=self.storage,
                peers=self.peers,
                rooms=self.rooms,
                loads=self.loads,
                shared_transfers=self.shared_transfers,
                lookahead=self.lookahead,
                component_pages=self.component_pages,
            ),
            self.backups,
            self.lending,
            self.early,
        )
        self.serving = Serving(self.state, self.restore, self.backups)
        self.actions = Actions(self.state, self.queue, self.restore, self.backups, self.lending)
        self.moves: list[tuple[str, State]] = []
        """Request id and new state for each state change of the last step, in order."""
        self.admitted = 0
        """Requests that this step has admitted."""
        self._arrivals = 0
        self._queues = tuple(each.queue(self) for each in CONSEQUENCES)
        self.rows = build_machine(
            Rules(
                restore=self.restore,
                lending=self.lending,
                rooms=self.rooms,
                receiving=Receiving(self.state, self.rooms, self.loads, self.shared_transfers),
                serving=self.serving,
                actions=self.actions,
            )
        )
        self._takers: dict[type[Event], Callable[..., None]] = {
            events.HostPagesFound: FoundPages(self.state).take,
            events.RequestArrived: self._arrived,
            **dict.fromkeys((events.AbortRequested, events.RequestChanged, events.GrowthTaken), self._to_request),
            **dict.fromkeys((events.FinishRequested, events.RetractRequested), self._to_request),
            events.RetractedDropped: self._retracted_dropped,
            events.PagesOffered: self._pages_offered,
            events.FlushRequested: self._flush_requested,
            events.StoreRequested: self._store_requested,
            events.HintReceived: self._hint_received,
            events.ShareRequested: self._share_requested,
            events.StorageChanged: self.storage.changed,
            events.PolicyChanged: self.storage.policy_changed,
            events.ClockAdvanced: self._time_passed,
            **dict.fromkeys(events.Outcome.__args__, self._operation_ended),
            events.LayersCopied: self.loads.layers_copied,
            events.PromiseSent: self._promise_sent,
            **dict.fromkeys((events.ChunkReceived, events.AuxReceived), self._to_room),
            events.RoomRefused: self._room_refused,
            events.RoomFailed: self._room_failed,
            events.RoomDrained: self._room_drained,
            events.WriterLost: self._writer_lost,
            events.WriterDead: self._writer_dead,
        }

    def step(self, event: Event) -> list[Command]:
        """Apply one event; return the resulting commands, in the order in which the driver must start them.

        Raises IllegalEvent, having changed nothing, if the table has no row for the event in the request's state.
        Raises BrokenInvariant if pools and index contradict each other; the core must not be used after that.
        """
        self.moves, self.admitted = [], 0
        commands = self.state.begin_step(event.at_s)
        self._takers[type(event)](event)
        self.settle()
        return commands

    def request(self, request_id: str) -> Request | None:
        """Return the live request with this id: restoring, or READY and not yet finished. None if there is none."""
        return self.state.requests.get(request_id)

    @property
    def operations_in_flight(self) -> int:
        """Number of operations under way, without those of the circuit breaker and queries whose request has left."""
        return operations_in_flight(self)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in flight: no request, load, backup or operation, and nothing in the quarantine.

        The circuit breaker's wait and probe do not count, so an engine with unreachable storage can be idle.
        Retracted requests do not count either: their pages wait for `resume` or `drop`.
        """
        in_flight = self.state.requests or self.operations_in_flight or self.loads or self.backups
        return not (in_flight or self.rooms.draining_rooms or self.lending.returning)

    def statistics(self) -> dict[str, int]:
        """Current counts, and counters since the start."""
        return count_core(self)

    def keys_stored(self, op: int) -> tuple[str, bytes]:
        """Return the namespace, and the keys from the first page on, of what the write `op` stores.

        The driver calls it when it starts StorePages with request number 0 (no request's tokens).
        """
        return self.backups.keys_stored(op)

    def check(self) -> None:
        """Recount everything from scratch; raise BrokenInvariant for the first contradiction."""
        audit_core(self)

    # --- Events ---

    def _arrived(self, event: events.RequestArrived) -> None:
        if event.request_id in self.state.requests:
            raise IllegalEvent(f"request {event.request_id!r} arrived twice; the driver must refuse the second")
        if self.settings.lends_device != bool(event.lent_pages):
            raise IllegalEvent(f"request {event.request_id!r} brings device pages to a core that has its own, or none")
        if event.lent_pages:
            self._check_lent(event)
        self._arrivals += 1
        request = Request(
            event,
            arrival=self._arrivals,
            settings=self.settings,
        )
        self.lending.lend(request)
        self.state.request_arrived(request)
        self.moves.append((request.request_id, request.state))
        self.state.set_deadline(request, event.deadline_at_s)
        self.actions.enqueue(request)

    def _check_lent(self, event: events.RequestArrived) -> None:
        """Raise IllegalEvent unless a request lends one page for each position that its prompt's end needs."""
        pages, size = self.settings.pages_of(event.prompt_tokens), self.settings.page_size
        needed = {
            component.name: pages - component.needed_from(event.prompt_tokens, size)
            for component in self.settings.components
        }
        lent = {name: len(given) for name, given in event.lent_components.items()}
        if len(event.lent_pages) != pages or lent != needed:
            raise IllegalEvent(f"request {event.request_id!r} lends pages {lent} of components, and needs {needed}")

    def _to_request(self, event: events.AbortRequested | events.RequestChanged) -> None:
        request = self.state.requests.get(event.request_id)
        if request is None:
            self.state.count("calls_late")
        else:
            self.fire(request, event)

    def _retracted_dropped(self, event: events.RetractedDropped) -> None:
        self.state.run_guarded(partial(self.backups.release_retracted, event.request_id))
        self.state.pages_were_freed()

    def _pages_offered(self, event: events.PagesOffered) -> None:
        if not self.settings.lends_device or len(event.pages) * self.settings.key_bytes > len(event.keys):
            raise IllegalEvent(f"offer {event.offer} of pages without keys, or to a core with device pages of its own")
        end, size = len(event.keys) // self.settings.key_bytes, self.settings.page_size
        needed = {each.name: min(each.trailing_pages(size), end) for each in self.settings.components}
        if any(not 0 < len(given) <= needed.get(name, 0) for name, given in event.offered_components.items()):
            raise IllegalEvent(f"offer {event.offer} of component pages that are not those of its end")
        self.offers.begin(event)

    def _hint_received(self, event: events.HintReceived) -> None:
        taker = self.taken_prompts if event.action == "take" else self.hints
        self.state.run_guarded(partial(taker.take, event), recover=partial(taker.refuse, event))

    def _share_requested(self, event: events.ShareRequested) -> None:
        self.state.run_guarded(partial(self.hints.share, event), recover=partial(self.hints.refuse_share, event))

    def _flush_requested(self, event: events.FlushRequested) -> None:
        if "l2" in event.tiers:
            self.state.run_guarded(partial(self.hints.flushed, event.namespace))
        self.state.run_guarded(partial(self.serving.flush, event))

    def _store_requested(self, event: events.StoreRequested) -> None:
        self.state.run_guarded(partial(self.store_all.take, event))

    def _operation_ended(self, event: events.Outcome) -> None:
        # Pop first, so that a repeated outcome, or one of an abandoned operation, finds nothing and changes nothing.
        operation = self.state.operations.pop(event.op, None)
        if operation is None:
            self.state.count("outcomes_late")
            return
        error = (event.detail or "raised") if isinstance(event, events.CommandRaised) else event.error
        self.state.run_guarded(partial(operation.ended, event, error), recover=operation.abandon)

    def _time_passed(self, event: events.ClockAdvanced) -> None:
        for _ in range(PART_MAX):
            due = self.state.pop_due()
            if due is None:
                return
            if isinstance(due, Request):
                self._request_due(due, event.at_s)
            else:
                self.state.run_guarded(due.late)
            # Draw the consequences of each deadline before the next one fires: they may end what is due next.
            self.settle()

    def _request_due(self, request: Request, at_s: float) -> None:
        """Handle the deadline of a request, or the share of it within which its prefill was to send something."""
        room = request.room
        if at_s >= request.deadline_at_s:
            self.fire(request, events.DeadlinePassed(at_s=at_s))
        elif request.waits_for_admission:
            self.state.pages_were_freed()  # Its pause is over, or another request of its lane had one.
        elif room is None or at_s < room.answer_due_s or room.aux_from or any(span.cursors for span in room.spans):
            return
        elif request.state.name in self.rows[events.PrefillLost]:
            words = f"{request.prefill} has sent nothing within its share of the request's time; the next one is asked"
            self.fire(request, _prefill_lost(at_s, PrefillCause.SILENT, words))

    # Rooms. A frame for a room that its request has left only affects what the quarantine waits for.

    def _promise_sent(self, event: events.PromiseSent) -> None:
        room = self.rooms.live(event.request_id, event.generation)
        if room is None:
            self.rooms.note_late_writer(event)
        else:
            self.fire(room.request, event)

    def _to_room(self, event: events.ChunkReceived | events.AuxReceived) -> None:
        self._fire_at_room(event.request_id, event.generation, event)

    def _room_refused(self, event: events.RoomRefused) -> None:
        lost = _prefill_lost(event.at_s, PrefillCause.REFUSED, event.cause)
        self._fire_at_room(event.request_id, event.generation, lost)

    def _room_failed(self, event: events.RoomFailed) -> None:
        if event.settled:
            self.state.run_guarded(partial(self.rooms.settle_unsent, event.request_id, event.generation))
        lost = _prefill_lost(event.at_s, PrefillCause.FAILED, event.cause, settled=event.settled)
        self._fire_at_room(event.request_id, event.generation, lost)

    def _fire_at_room(self, request_id: str, generation: int, event: Event) -> None:
        room = self.rooms.live(request_id, generation)
        if room is None:
            self.state.count("frames_late")
        else:
            self.fire(room.request, event)

    def _room_drained(self, event: events.RoomDrained) -> None:
        self.state.run_guarded(partial(self.rooms.drained, event.request_id, event.generation, event.rank))

    def _writer_lost(self, event: events.WriterLost) -> None:
        rooms = deque(room.key for room in self.rooms.of_writer(event.writer))
        self.state.begin_work(partial(self._lose, rooms, event.cause, is_dead=False))

    def _writer_dead(self, event: events.WriterDead) -> None:
        rooms = deque([*(room.key for room in self.rooms.of_writer(event.writer)), *self.rooms.left_to(event.writer)])
        self.state.begin_work(partial(self._lose, rooms, "its process is gone", is_dead=True))

    def _lose(self, rooms: deque[RoomKey], cause: str, *, is_dead: bool) -> bool:
        """Leave the next rooms whose writer is lost; return whether there are more. A dead one writes to none."""
        part = [rooms[place] for place in range(min(PART_MAX, len(rooms)))]
        lost = _prefill_lost(self.state.now_s, PrefillCause.LOST, cause)
        for key in part:
            if (room := self.rooms.live(*key)) is not None:
                self.fire(room.request, lost)
        # After all of them: the end of one quarantine may let requests be admitted.
        for key in part if is_dead else ():
            self.state.run_guarded(partial(self.rooms.settle_unsent, *key))
        for _ in part:
            rooms.popleft()
        return bool(rooms)

    # --- The request machine ---

    def fire(self, request: Request, event: Event) -> bool:
        """Fire `event` at the request machine; return whether a row was taken.

        If the row raises, fire TransitionRaised. Raises IllegalEvent, having changed nothing, if the table has no row
        for the event in the request's state.
        """
        before, kind = request.state, type(event)
        rows = self.rows[kind].get(before._name_)
        if rows is None:
            raise IllegalEvent(f"{kind.__name__} in {before.value} of {request!r}: no such row")
        try:
            for only_if, take in rows:
                if only_if is None or only_if(request, event):
                    if take is not None:
                        take(request, event)
                    break
            else:
                return False
        except BrokenInvariant:
            raise
        except Exception:
            self._raised(request, event, kind.__name__)
            return True
        if kind in MAY_MOVE_ON:
            self.state.request_changed(request)
        if request.fallbacks.raises:
            request.fallbacks.step_succeeded(before.value, kind.__name__)
        after = request.state
        if after is not before:
            self.moves.append((request.request_id, after))
        return True

    def _raised(self, request: Request, event: Event | None, taking: str) -> None:
        """Handle the exception that a rule of this request raised on `event`. Call it in the `except` block.

        `taking` names the step: the class of the event, or the rule if it was not handling an event (None).
        """
        raised = self.state.note_raise(request)
        before = request.state
        if isinstance(event, events.TransitionRaised):
            # The fallback itself raised: count it for the step that it belongs to.
            taking = event.taking
        if request.count_raise(taking) > RAISES_MAX:
            raise  # Re-raises the exception being handled: even failing the request has raised.
        fact = events.TransitionRaised(
            at_s=self.state.now_s, taking=taking, rule=raised.rule, error=raised.error, detail=raised.detail
        )
        self.fire(request, fact)
        after = request.state
        if after is before and event is not None and not isinstance(event, REPEATED):
            # The request continues on fewer tiers. The event is a fact that will not come again, so fire it again.
            self.fire(request, event)

    # --- Consequences ---

    def settle(self) -> None:
        """Run the first due rule of CONSEQUENCES, from the top each time, until none is due."""
        while True:
            # Most events of a request leave no work; `compress` tests all queues in one call.
            for consequence in compress(CONSEQUENCES, self._queues):
                if consequence.is_due is None or consequence.is_due(self):
                    consequence.rule(self)
                    break
            else:
                return

    def send_back(self) -> None:
        """Fire `PagesLost`: the request starts over on other pages."""
        request, cause = _pop_first(self.state.preempted)
        self.fire(request, events.PagesLost(at_s=self.state.now_s, cause=cause))

    def ask_for_component_pages(self) -> None:
        """Ask prefill, by an extend, for the component pages of a request that have lost their source."""
        request, _ = _pop_first(self.state.unserved)
        assert self.component_pages is not None
        try:
            self.component_pages.missing.ask(request)
        except BrokenInvariant:
            raise
        except Exception:
            # Its fallback may leave the room; until then the pages are still missing.
            self.state.component_pages_were_lost(request)
            self._raised(request, None, "ask_for_component_pages")

    def fill_failed(self) -> None:
        """Let a waiter of the load extend into its pages; without waiters, give the load up."""
        load, _ = _pop_first(self.state.failed_loads)
        sender = self.loads.sender_of(load)
        if sender is None:
            self.state.run_guarded(partial(self.loads.fill, load))
            return
        try:
            self.loads.fill(load)
        except BrokenInvariant:
            raise
        except Exception:
            # Attribute the exception to the sender. Its fallback leaves the load to another waiter, so queue it again.
            self.state.load_failed(load)
            self._raised(sender, None, "fill")

    def serve_waiters(self) -> None:
        """End the load up to the last received page that another request waits for."""
        load, _ = _pop_first(self.state.progressed_loads)
        self.state.run_guarded(partial(self.shared_transfers.take_received, load))

    def move_on(self) -> None:
        """Fire `StorageDue`, `PlanDue` and `Progressed` at the request, if the table has a row for them that holds."""
        state = self.state
        request, _ = _pop_first(state.dirty)
        if state.requests.get(request.request_id) is not request:
            # The request ended, and its id may be in use again.
            return
        # An event is fired only where the table has rows for it.
        if request.state._name_ in self.rows[events.PlanDue]:
            self.fire(request, events.PlanDue(at_s=state.now_s))
        if self.component_pages is not None:
            self.component_pages.shared_ends.look(request)
        progressing = self.rows[events.Progressed]
        if request.state._name_ in progressing:
            progressed = events.Progressed(at_s=state.now_s)
            while self.fire(request, progressed):
                if request.state._name_ not in progressing:
                    return
            if request.is_planned:
                # An action may have marked the request dirty, but it has just been moved as far as it can. A request
                # without a plan stays dirty: its plan raised and is due again.
                state.dirty.pop(request, None)
            if request.loads and self.shared_transfers.waits_for(request) is not None:
                state.run_guarded(partial(self.shared_transfers.watch, request))
            if request.early.is_wanted:
                state.run_guarded(partial(self.early.look, request))
        elif request.waits_for_admission:
            self.fire(request, events.StorageDue(at_s=state.now_s))
            if not request.answer.is_awaited:
                self.queue.line_up(request)
                state.pages_were_freed()

    def store_waiting(self) -> None:
        """Start the first waiting write of full pages to storage, once no fetch needs storage any more."""
        self.backups.store_now(next(iter(self.backups.waiting)))

    def store_waiting_components(self) -> None:
        """Start the first waiting write of component pages, once no fetch needs storage any more."""
        assert self.component_backups is not None
        writes = self.component_backups.writes
        write = next(iter(writes.waiting))
        self.state.run_guarded(partial(writes.store_now, write), recover=write.abandon)

    def reclaim_and_admit(self) -> None:
        """Free the pages of loads in RECLAIMING, then grant pages to the first waiting request that fits."""
        if self.state.reclaimable_loads or self.loads.has_settled:
            self.state.run_guarded(self.loads.free_settled_reclaiming)
        self.state.begin_admission()
        if self.admitted == PART_MAX or not self.queue or (self.settings.running_max and self._runs_as_many_as_may()):
            return
        passed: list[Admission] = []
        for request in self.queue.candidates(self.state.now_s):
            if request.answer.is_awaited:
                continue  # Storage was asked once more: the wait must not hold pages.
            try:
                granted = self.restore.grant(request)
            except BrokenInvariant:
                raise
            except Exception:
                self._raised(request, None, "grant")
                return
            if granted:
                self._admit(request, passed)
                return
            if request.admission.over_quota:
                if self._gives_way(request):
                    return
            elif request.admission.short_need:
                passed.append(request.admission)

    def _runs_as_many_as_may(self) -> bool:
        """Whether no further request may leave the queue, whose first one then waits for the end of another."""
        if self.running < self.settings.running_max:
            return False
        first = next(self.queue.candidates(self.state.now_s), None)
        if first is not None and first.admission.wait_to_run():
            self.state.count("running_waits")
        return True

    def _gives_way(self, request: Request) -> bool:
        """Let a request whose prefill is at its quota wait for the next one of its list that is not; False if all are.

        The quota holds what a prefill has not sent yet, so that one that hangs does not hold back requests that others
        can serve. It is tried again after those.
        """
        for step in range(1, len(request.prefills)):
            place = (request.prefill_number + step) % len(request.prefills)
            if self.state.quota.admits(request.prefills[place], request.admission.quota_need):
                self.queue.remove(request)
                request.attempts.give_way(step)
                request.admission.note_quota(is_over=False)
                self.queue.add(request)
                self.state.count("quota_ways_given")
                self.state.pages_were_freed()
                return True
        return False

    @property
    def running(self) -> int:
        """Number of requests that have left the queue and not ended."""
        return len(self.state.requests) - len(self.queue)

    def _admit(self, request: Request, passed: list[Admission]) -> None:
        """Admit a request that passes these, which do not fit."""
        self.queue.remove(request)
        self.fire(request, events.Granted(at_s=self.state.now_s))
        for admission in passed:
            admission.pass_by()
        self.admitted += 1
        if self.admitted == PART_MAX:
            Continuation(self.state, self._go_on)
        else:
            self._go_on()

    def _go_on(self) -> bool:
        """Let the next request be tried, which may fit as well."""
        self.state.pages_were_freed()
        return False

    def return_lent(self) -> None:
        """Return lent pages without a writer to the embedder, with the outcome of their request."""
        self.state.run_guarded(self.lending.return_lent)

    def release_ahead(self) -> None:
        """Release what was fetched ahead for the request and its plan does not use."""
        request, _ = self.state.ahead_over.popitem()
        self.state.run_guarded(partial(self.lookahead.drop, request))

    def work_ahead(self) -> None:
        """Prefetch for waiting requests; write what is about to be evicted, what storage lacks, and what passes."""
        state = self.state
        if LOOK_AHEAD in state.ahead_due:
            state.begin_ahead(LOOK_AHEAD)
            for request in self.queue.candidates(state.now_s) if state.settings.lookahead_pages_max else ():
                abandon = partial(self.lookahead.abandon, request)
                state.run_guarded(partial(self.lookahead.start, request), recover=abandon)
        if WRITE_BACK in state.ahead_due:
            state.run_guarded(self.write_back.look)
        if STORE in state.ahead_due:
            state.run_guarded(self.store_all.look)
        if PASS in state.ahead_due:
            state.run_guarded(self.passages.look)


def _pop_first(queue: dict[Key, Value]) -> tuple[Key, Value]:
    """Take the oldest entry of a work queue."""
    key = next(iter(queue))
    return key, queue.pop(key)


@dataclass(frozen=True, slots=True)
class Consequence:
    """One entry: run `rule` if it is due. The documentation's table shows `when` and the rule's docstring."""

    when: str
    rule: Callable[[Core], None]
    queue: Callable[[Core], Sized]
    """The work queue, which is one object for the life of a core, and must not be empty."""
    is_due: Callable[[Core], bool] | None = None
    """A condition beside that."""


def _component_writes(core: Core) -> Sized:
    return () if core.component_backups is None else core.component_backups.writes.waiting


def _may_store(core: Core) -> bool:
    return not core.storage.holds_writes


CONSEQUENCES = (
    Consequence("A request has lost its pages to another writer", Core.send_back, lambda of: of.state.preempted),
    Consequence("Component pages have lost their source", Core.ask_for_component_pages, lambda of: of.state.unserved),
    Consequence("A load has failed", Core.fill_failed, lambda of: of.state.failed_loads),
    Consequence("A shared transfer has progressed", Core.serve_waiters, lambda of: of.state.progressed_loads),
    Consequence("A request may be able to move on", Core.move_on, lambda of: of.state.dirty),
    Consequence("A write was deferred", Core.store_waiting, lambda of: of.backups.waiting, _may_store),
    Consequence("A write of components was deferred", Core.store_waiting_components, _component_writes, _may_store),
    Consequence("Pages were freed, or can be", Core.reclaim_and_admit, lambda of: of.state.admission_due),
    Consequence("Lent pages may have no writer any more", Core.return_lent, lambda of: of.lending.due),
    Consequence("A plan is fixed, and pages were fetched ahead", Core.release_ahead, lambda of: of.state.ahead_over),
    Consequence("Pages can be fetched or written ahead", Core.work_ahead, lambda of: of.state.ahead_due),
)


def _prefill_lost(at_s: float, otherwise: PrefillCause, text: str, *, settled: bool = False) -> events.PrefillLost:
    """Build the machine's event for a lost room. `otherwise` is the cause if `text` does not begin with one."""
    cause, detail = PrefillCause.parse(text) or (otherwise, text)
    return events.PrefillLost(at_s=at_s, cause=cause.value, detail=detail, settled=settled)
