"""Agreement of the ranks of a decode instance on the events that all of their cores take.

The core is a function of its events: ranks that feed their cores the same events in the same order never diverge. This
module makes that sequence. It stands between the outcomes of a rank and its core:

    outcomes, calls ──receive──▶ slots of this rank ──vote (MIN)──▶ reduced slots ──decide──▶ events for the core

A turn has four steps. The leader (rank 0) opens it with a frame: its number, the leader's clock, and the calls of the
leader's callers in their order. Every rank casts its slots, whatever happens on it; nothing local to a rank decides
whether it takes part. From the reduced slots every rank derives the same events. It steps its core through all of them
before it takes the next frame. The commands of the core open new vote items, so all ranks have the same items in the
same order: slots, operation numbers and generations need no further agreement.

A turn is opened if a rank has news, or if the core or a held call has a deadline; while nothing changes there are no
votes. In the last turn before silence the ranks agree that they are idle, and compare everything that they keep.

A rank whose engine broke still votes: its header names it, and all ranks stop alike. Ranks whose state differs stop
with the names of the differing parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import msgspec

from tidekv.states import commands, events
from tidekv.states.errors import RankBroken, RanksDiverged
from tidekv.states.ranks.call_votes import (
    CALLS,
    Call,
    CallName,
    CallVote,
    Refusal,
    held_until_s,
    name_of,
    with_content,
    without_own_fields,
)
from tidekv.states.ranks.component_votes import ComponentVote
from tidekv.states.ranks.room_votes import FAILED, LOST, REFUSED, RoomVote
from tidekv.states.ranks.state_digest import StateDigest
from tidekv.states.ranks.vote_items import LOST_RANK, OfferVote, OperationVote, RequestVote
from tidekv.states.ranks.votes import NO_RANK, VoteVector, equality_slots, unequal

if TYPE_CHECKING:
    from tidekv.states.commands import Command
    from tidekv.states.core import Core
    from tidekv.states.events import Event
    from tidekv.states.ranks.votes import SlotValues, VoteItem

LEADER = 0
HOLD_S = 10.0
"""Seconds for which a call waits for the callers of all ranks."""
SOLE_FACTS = ("broken", "idle", "storage", "leaving")
"""Header slots that are not pairs: the lowest broken rank, whether all ranks are idle, the storage that all ranks have
(see `encode_storage`), whether all ranks want to end.
"""
CAPACITY_MAX = 1 << 40
ENDING = (events.FinishRequested, events.RetractRequested)
"""Calls that end a request."""
COMPARED = ("epoch", "turn", "slots")
"""Compared in front of the parts of the state digest."""


class Opening(msgspec.Struct, frozen=True, array_like=True):
    """The leader's frame that opens a turn."""

    epoch: int
    turn: int
    at_s: float
    slots: int
    """Number of slots of this vote."""
    whole: bool = False
    """Whether to compare everything, because the leader has nothing in flight."""
    calls: tuple[events.AnyEvent, ...] = ()
    """Calls in the leader's order, without the fields that each rank has for itself. Only the leader makes those that
    concern the whole group.
    """


class Decision(msgspec.Struct, frozen=True):
    """The result of a vote."""

    events: list[events.Event]
    """Events for the core, in this order."""
    refusals: list[Refusal]
    """Calls that the core does not take; their callers receive the refusal."""
    is_idle: bool
    """Whether nothing is in flight on any rank."""
    all_leave: bool


class Agreement:
    """The votes of one rank. Pure: its driver carries frames and vectors."""

    def __init__(self, core: Core, *, rank: int, epoch: int = 0, hold_s: float = HOLD_S) -> None:
        self.rank = rank
        self.epoch = epoch
        self.turn = 0
        """The last decided turn."""
        self.is_leaving = False
        self.has_broken = False
        self.is_whole = True
        """Whether the last vote compared everything and nothing has been stepped since."""
        self._core = core
        self._hold_s = hold_s
        self._vote_vector = VoteVector()
        self._state_digest = StateDigest(core)
        self.compared = (*COMPARED, *self._state_digest.parts)
        """Names of what each vote compares."""
        self.header_slots = len(SOLE_FACTS) + 2 * len(self.compared)
        """Slots in front of those of the vote items."""
        self._opening: Opening | None = None
        self._number = 0
        self._operations: dict[int, OperationVote | ComponentVote | OfferVote] = {}
        self._rooms: dict[tuple[str, int], RoomVote] = {}
        self._requests: dict[str, RequestVote] = {}
        self._aborts: dict[str, str] = {}
        """Causes of aborts that came between this rank's vote on an arrival and its result, by request id."""
        self._named: dict[CallName, CallVote] = {}
        self._own_calls: dict[CallName, Call] = {}
        """Calls of this rank's callers that the leader has not named."""
        self._unnamed: list[Event] = []
        """Calls that the leader's next frame will name."""
        self._refusals: list[Refusal] = []
        self._storage = self._agreed_storage = 0
        self._has_news = False
        self.outcomes_unknown = 0
        """Outcomes that no vote item waits for."""

    @property
    def has_news(self) -> bool:
        """Whether this rank has something that the others must learn in a vote."""
        return self._has_news or self._vote_vector.has_news or bool(self._unnamed)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in flight here: no vote item except those of READY requests, and no call."""
        return not (self._operations or self._rooms or self._named or self._own_calls)

    @property
    def slots_taken(self) -> int:
        """Number of slots in use."""
        return self._vote_vector.taken

    def next_deadline_s(self) -> float | None:
        """The latest time for the next turn, by the leader's clock. None: nothing has a deadline."""
        held = [item.held_until_s(self._hold_s) for item in self._named.values()]
        if self.rank != LEADER:
            held += [held_until_s(call, call.at_s, self._hold_s) for call in self._own_calls.values()]
        due_s = self._core.next_deadline_s()
        return min([*held, due_s] if due_s is not None else held, default=None)

    def leave(self) -> None:
        """Announce that this rank wants to end; all ranks end when all want to."""
        self.is_leaving = self._has_news = True

    # --- Outcomes and calls of this rank ---

    def receive(self, event: Event) -> None:
        """Take an outcome, or a call of this rank's callers."""
        match event:
            case events.RequestArrived() | events.FinishRequested() | events.RetractRequested():
                self._receive_call(event)
            case events.RetractedDropped():
                self._receive_call(event)
            case events.PagesOffered():
                self._receive_once(with_content(event))
            case events.ShareRequested():
                self._receive_once(event)
            case events.AbortRequested():
                self._receive_abort(event)
            case events.GrowthTaken(request_id=request_id):
                if (request := self._requests.get(request_id)) is not None:
                    request.grow(self._vote_vector, event.page_count, event.wanted)
            case events.FlushRequested() | events.HintReceived() | events.StoreRequested():
                self._unnamed.append(event)
            case events.PolicyChanged() | events.RequestChanged():
                self._unnamed.append(event)
            case events.StorageChanged():
                self._storage, self._has_news = encode_storage(event), True
            case events.WriterLost(writer=writer, cause=cause):
                self._receive_writer(writer, cause, is_dead=False)
            case events.WriterDead(writer=writer):
                self._receive_writer(writer, "", is_dead=True)
            case _:
                self._receive_outcome(event)

    def _receive_call(self, call: Call) -> None:
        name = name_of(call)
        named = self._named.get(name)
        if named is not None and named.call is None:
            # The leader named the call before this rank's caller made it.
            named.make(self._vote_vector, call)
            return
        self._own_calls[name] = call
        if self.rank == LEADER:
            self._unnamed.append(call)

    def _receive_once(self, call: events.PagesOffered | events.ShareRequested) -> None:
        name = name_of(call)
        named = self._named.get(name)
        if name in self._own_calls or (named is not None and named.call is not None):
            # One vote carries one of them, and its caller would not know which.
            what = "offer" if isinstance(call, events.PagesOffered) else "read"
            self._refusals.append(Refusal(call, "ranks differ", f"the ranks are agreeing on the same {what}"))
        else:
            self._receive_call(call)

    def _receive_abort(self, event: events.AbortRequested) -> None:
        # The request is live, or its arrival is being voted on, or the leader has not named the arrival yet.
        name: CallName = (events.RequestArrived, event.request_id)
        if (request := self._requests.get(event.request_id)) is not None:
            request.abort(self._vote_vector, event.cause)
        elif (named := self._named.get(name)) is not None:
            named.abort(self._vote_vector, event.cause)
        elif (call := self._own_calls.pop(name, None)) is not None:
            self._unnamed = [other for other in self._unnamed if other is not call]
            self._refusals.append(Refusal(call, event.cause, "before all ranks had taken it"))

    def _receive_writer(self, writer: str, cause: str, *, is_dead: bool) -> None:
        for room in self._rooms.values():
            if room.writer == writer:
                room.fail(self._vote_vector, self.rank, LOST, cause, settled=is_dead)

    def _receive_outcome(self, event: Event) -> None:
        vote_vector = self._vote_vector
        op = getattr(event, "op", 0)
        if op:
            operation = self._operations.get(op)
            if operation is None:
                self.outcomes_unknown += 1
                return
            operation.receive(vote_vector, self.rank, event)
            return
        of_room = cast(
            "events.PromiseSent | events.ChunkReceived | events.AuxReceived | events.RoomRefused | events.RoomFailed"
            " | events.RoomDrained",
            event,
        )
        room = self._rooms.get((of_room.request_id, of_room.generation))
        if room is None:
            self.outcomes_unknown += 1
            return
        match of_room:
            case events.PromiseSent():
                room.sent(vote_vector, of_room)
            case events.ChunkReceived():
                room.receive(vote_vector, of_room)
            case events.AuxReceived(rank=rank):
                room.receive_aux(vote_vector, rank)
            case events.RoomRefused(cause=cause):
                room.fail(vote_vector, self.rank, REFUSED, cause)
            case events.RoomFailed(settled=settled, cause=cause):
                room.fail(vote_vector, self.rank, FAILED, cause, settled=settled)
            case _:
                room.drained(vote_vector, of_room.rank)

    def take_refusals(self, now_s: float) -> list[Refusal]:
        """Calls that end on this rank without a vote: aborted before the leader named them, or never named in time."""
        if self.rank != LEADER:
            for name, call in list(self._own_calls.items()):
                if now_s >= held_until_s(call, call.at_s, self._hold_s):
                    del self._own_calls[name]
                    self._refusals.append(Refusal(call, "ranks differ", f"rank {LEADER} did not make the call in time"))
        refusals, self._refusals = self._refusals, []
        return refusals

    def go_solo(self) -> list[Refusal]:
        """Vote without the other ranks from now on, because one of them is lost, to end what is in flight here.

        Aborts every live request. Returns the calls that were not agreed on, for their callers. A vote that was cast
        and not decided is forgotten.
        """
        self._opening = None
        # The undecided vote may have been the first with some outcome. Without news no further vote would carry it,
        # and its operation would be waited for forever.
        self._has_news = True
        self.rank = LEADER
        for request in self._requests.values():
            request.abort(self._vote_vector, LOST_RANK)
        calls: list[Call] = [item.call for item in self._named.values() if item.call is not None]
        calls += self._own_calls.values()
        for item in self._named.values():
            item.close(self._vote_vector)
        self._named, self._own_calls, self._unnamed = {}, {}, []
        return [Refusal(call, LOST_RANK, "before all ranks had taken it") for call in calls]

    # --- A turn ---

    def open_turn(self, at_s: float) -> Opening:
        """The leader's next frame."""
        named = tuple(cast("events.AnyEvent", without_own_fields(call)) for call in self._unnamed)
        self._unnamed = []
        self._name_calls(named, at_s)
        # Comparing everything costs time in proportion to the caches, so it is left to the turns before silence.
        whole = self.is_idle and self._core.is_idle
        self._opening = Opening(self.epoch, self.turn + 1, at_s, len(self._vote_vector), whole, named)
        return self._opening

    def take_opening(self, opening: Opening) -> None:
        """Take the leader's frame, as a follower."""
        self._opening = opening
        self._name_calls(opening.calls, opening.at_s)

    def cast(self) -> SlotValues:
        """This rank's vector for the opened turn."""
        opening = self._opening
        assert opening is not None, "a turn is opened before a rank votes"
        self._has_news = False
        facts = [
            self.rank if self.has_broken else NO_RANK,
            int(self.is_idle and self._core.is_idle),
            self._storage,
            int(self.is_leaving),
        ]
        # The state of a broken rank is not trusted, and reading it may raise: its digest is replaced by zeros. The
        # other ranks notice `broken` first.
        parts = (
            [0] * len(self._state_digest.parts)
            if self.has_broken
            else self._state_digest.numbers(opening.turn, whole=opening.whole)
        )
        numbers = [self.epoch, self.turn + 1, self._vote_vector.taken, *parts]
        values = self._vote_vector.cast(opening.slots)
        head = type(values)("q", facts + equality_slots(numbers))
        return head + values

    def decide(self, reduced: Sequence[int]) -> Decision:
        """Decode the reduced vector. Raises RankBroken if a rank cannot go on, RanksDiverged if parts differ."""
        opening = self._opening
        assert opening is not None, "a turn is opened before it is decided"
        self._opening, self.turn = None, opening.turn
        broken, idle, storage, leaving = reduced[: len(SOLE_FACTS)]
        if broken != NO_RANK:
            raise RankBroken(rank=broken)
        if parts := unequal(self.compared, reduced[len(SOLE_FACTS) : self.header_slots]):
            raise RanksDiverged(turn=opening.turn, parts=tuple(parts))
        self.is_whole = opening.whole
        # The same order on all ranks: storage, outcomes by age, calls on requests, calls on the group, the clock.
        decided: list[Event] = []
        if storage != self._agreed_storage:
            self._agreed_storage = storage
            decided.append(decode_storage(storage, at_s=opening.at_s))
        for item in self._vote_vector.take(reduced[self.header_slots :]):
            if not isinstance(item, CallVote):
                decided += item.decide(self._vote_vector, opening.at_s)
                self._close_decided(item)
        refusals = self._decide_calls(decided, opening)
        decided += [event for event in opening.calls if not isinstance(event, CALLS)]
        due_s = self._core.next_deadline_s()
        if due_s is not None and due_s <= opening.at_s:
            # Behind all outcomes: an operation that has ended in this turn must not time out in it.
            decided.append(events.ClockAdvanced(at_s=opening.at_s))
        return Decision(events=decided, refusals=refusals, is_idle=bool(idle), all_leave=bool(leaving))

    def _close_decided(self, item: VoteItem) -> None:
        if isinstance(item, OperationVote | ComponentVote | OfferVote):
            if item.is_over:
                del self._operations[item.op]
                item.close(self._vote_vector)
        elif isinstance(item, RoomVote) and item.is_over:
            del self._rooms[item.request_id, item.generation]
            item.close(self._vote_vector)

    def _decide_calls(self, decided: list[Event], opening: Opening) -> list[Refusal]:
        refusals = []
        for name, item in list(self._named.items()):
            if item.is_decidable(self._vote_vector, opening.at_s, self._hold_s):
                decided += item.decide(self._vote_vector, opening.at_s)
                if item.refusal is not None:
                    refusals.append(item.refusal)
                elif item.abort_cause and isinstance(item.leaders, events.RequestArrived):
                    self._aborts[item.leaders.request_id] = item.abort_cause
                del self._named[name]
                item.close(self._vote_vector)
        return refusals

    def _name_calls(self, named: Sequence[Event], at_s: float) -> None:
        for event in named:
            if isinstance(event, CALLS):
                name = name_of(event)
                item = CallVote(self._next(), self._vote_vector, event, rank=self.rank, at_s=at_s)
                self._named[name] = item
                if (own := self._own_calls.pop(name, None)) is not None:
                    item.make(self._vote_vector, own)

    # --- Commands of the core ---

    def stepped(self, event: Event, given: list[Command], error: str = "") -> None:
        """Take a step of the core (as a `Watcher` of the driver): its commands open and close vote items."""
        self._state_digest.stepped(event, given)
        self.is_whole = False
        if isinstance(event, events.RequestArrived) and not error:
            request = self._requests[event.request_id] = RequestVote(self._next(), self._vote_vector, event.request_id)
            if cause := self._aborts.pop(event.request_id, ""):
                request.abort(self._vote_vector, cause)
        elif isinstance(event, events.RetractRequested):
            self._close_request(event.request_id)
        for command in given:
            self._given(command)

    def _given(self, command: Command) -> None:
        vote_vector = self._vote_vector
        match command:
            case commands.SendPromise(request_id=request_id, generation=generation):
                room = RoomVote(self._next(), vote_vector, request_id, generation)
                first = self._core.settings.pages_of(command.prompt_tokens) - len(command.pages)
                room.add_span(vote_vector, first, len(command.pages))
                self._rooms[request_id, generation] = room
            case commands.SendExtend(request_id=request_id, generation=generation):
                self._rooms[request_id, generation].add_span(vote_vector, command.first, len(command.pages))
            case commands.SendAbort(request_id=request_id, generation=generation):
                self._rooms[request_id, generation].leave(vote_vector)
            case commands.SendReceived(request_id=request_id, generation=generation):
                self._rooms.pop((request_id, generation)).close(vote_vector)
            case commands.ReportReady(request_id=request_id):
                self._close_early(self._requests[request_id].early_op)
            case commands.ReportFailed(request_id=request_id) | commands.ReportDropped(request_id=request_id):
                self._close_request(request_id)
            case commands.ReportFinished(request_id=request_id) | commands.ReportRestored(request_id=request_id):
                self._close_request(request_id)
            case commands.QueryStorage(op=op) if command.components_first:
                self._operations[op] = ComponentVote(self._next(), vote_vector, command, self._core)
            case commands.HandPrompt(op=op):
                self._operations[op] = OfferVote(self._next(), vote_vector, command)
            case commands.OperationCommand(op=op):
                self._operations[op] = OperationVote(self._next(), vote_vector, command)
                if isinstance(command, commands.ReportEarly):
                    self._requests[command.request_id].early_op = op

    def _close_early(self, op: int) -> None:
        """Close the vote on an early READY if the core has ended it with READY: callers do not report its end then."""
        if op in self._operations and op not in self._core.state.operations:
            self._operations.pop(op).close(self._vote_vector)

    def _close_request(self, request_id: str) -> None:
        request = self._requests.pop(request_id, None)
        if request is not None:
            request.close(self._vote_vector)
        # A call that not all ranks have made ends with its request: a later request of the same id would get it.
        for kind in ENDING:
            self._own_calls.pop((kind, request_id), None)
            if (named := self._named.pop((kind, request_id), None)) is not None:
                named.close(self._vote_vector)
        self._unnamed = [
            call for call in self._unnamed if not (isinstance(call, ENDING) and call.request_id == request_id)
        ]

    def _next(self) -> int:
        self._number += 1
        return self._number


def encode_storage(event: events.StorageChanged) -> int:
    """The slot value of a storage: 0 for none; the smallest of all ranks is the storage that all of them have."""
    return (min(event.capacity_pages, CAPACITY_MAX) << 1 | event.component_pages) + 1 if event.available else 0


def decode_storage(value: int, *, at_s: float) -> events.StorageChanged:
    """The change to the storage that all ranks have."""
    capacity_pages, component_pages = divmod(max(value - 1, 0), 2)
    return events.StorageChanged(
        at_s=at_s, available=value > 0, component_pages=bool(component_pages), capacity_pages=capacity_pages
    )
