"""One simulated rank: a core, an agreement, pools of tags, and tiers whose faults affect only this rank."""

from __future__ import annotations

import zlib
from collections import Counter
from random import Random
from typing import TYPE_CHECKING, Any, Protocol

from simulation.components import LiveComponents, SimulatedComponents
from simulation.early_callers import EarlyCaller, EarlyCallers
from simulation.memory import SimulatedPool, Violation
from simulation.rank_callers import (
    RankCaller,
    Script,
    check_components,
    kept_components,
    leave_components,
)
from simulation.rank_lending import RankLender, without_own_fields
from simulation.rank_rooms import RankRooms
from simulation.rank_tiers import RankComponentStorage, RankTiers
from simulation.stored import by_group
from simulation.world import ENCODER
from tidekv.states import commands, events
from tidekv.states.core import Core
from tidekv.states.ranks.agreement import Agreement
from tidekv.states.ranks.call_votes import Refusal
from tidekv.states.ranks.vote_items import LOST_RANK

if TYPE_CHECKING:
    from collections.abc import Callable

    from simulation.memory import Contents
    from simulation.schedule import Schedule
    from tidekv.states.settings import CoreSettings
    from tidekv.states.types import PageIds


FAULTS: dict[str, str] = {
    "rank_lags": "a frame, a vote or a call of one rank is late",
    "rank_dies": "the process of one rank ends, and restarts",
    "command_raises": "starting a command raises on one rank",
    "storage_fails": "a call to storage fails on one rank",
    "storage_is_short": "storage of one rank has fewer pages",
    "storage_is_late": "storage of one rank takes longer than every deadline",
    "copy_fails": "a copy fails on one rank",
    "copy_is_late": "a copy of one rank takes longer than its deadline",
    "promise_fails": "one rank cannot reach its prefill rank",
    "room_fails": "one prefill rank fails a room",
    "room_is_refused": "one prefill rank refuses a room",
    "writer_dies": "one prefill rank dies, and is replaced",
    "outcome_repeats": "an outcome is delivered twice",
    "host_page_is_flipped": "a bit of a page in host memory flips on one rank",
    "same_id_elsewhere": "another decode instance has rooms of the same id, for another prompt, at each prefill rank",
}
"""Kinds of faults by name, with a description."""


class Group(Protocol):
    """Interface of the group for one of its ranks."""

    settings: CoreSettings
    contents: Contents
    schedule: Schedule
    epoch: int
    seed: int
    with_faults: bool

    def hits(self, name: str, random: Random) -> bool:
        """Whether a fault strikes a rank now."""
        ...

    def delay(self, rank: SimulatedRank) -> float:
        """Return the duration of an action on a rank."""
        ...

    def wish(self, rank: SimulatedRank) -> None:
        """Inform the leader that a rank has news."""
        ...

    def stepped(self, rank: SimulatedRank, word: int) -> None:
        """Compare the event that a rank's core has taken with those of the others."""
        ...

    def ended(self, script: Script, rank: int, end: str) -> None:
        """Record the end of a request for the caller of one rank."""
        ...

    def try_to_form(self) -> None:
        """Form a new group as soon as no rank has anything in flight."""
        ...


class SimulatedRank:
    """One rank of the group."""

    def __init__(self, world: Group, number: int, random: Random) -> None:
        self.number = number
        self.random = random
        self.events = 0
        """Events that its core took in this epoch."""
        self.is_dead = False
        self.is_solo = False
        """Whether it ends its requests without the others, because another rank is lost."""
        self.callers: dict[str, RankCaller] = {}
        self.world = world
        self._life = 0
        self.early_counts: Counter[str] = Counter()
        self.stored: set[int] = set()
        """Tags of the pages in this rank's slice of storage, including those of components."""
        self._begin(0)

    def _begin(self, epoch: int) -> None:
        world = self.world
        self.core = Core(world.settings)
        self.agreement = Agreement(self.core, rank=self.number, epoch=epoch, hold_s=2.0)
        self.device, self.host = SimulatedPool(self.core.state.device), SimulatedPool(self.core.state.host)
        self.component_pages = SimulatedComponents(self.core, world.contents)
        self.events = 0
        tiers = RankTiers(self)
        component_storage = RankComponentStorage(self, tiers)
        self.rooms = RankRooms(self)
        self.lender = RankLender(self) if world.settings.lends_device else None
        self.early_callers = EarlyCallers(self, f"{world.seed} {self.number} {epoch}", self.early_counts)
        self.records: dict[int, list[int]] = {}
        """Tags of the tokens that requests left, by request number."""
        self.in_flight = 0
        """Operations on this rank that have not ended."""
        self._numbers: dict[str, int] = {}
        self._answers_growth = False
        self._takers: dict[type[commands.Command], Any] = {  # Any: each taker has its own command type.
            commands.QueryStorage: component_storage.query,
            commands.FetchPages: by_group(tiers.fetch, component_storage.fetch),
            commands.StorePages: by_group(tiers.store, component_storage.store),
            commands.ProbeStorage: tiers.probe,
            commands.CopyPages: by_group(tiers.copy, tiers.copy_component),
            commands.SendPromise: self.rooms.promise,
            commands.SendExtend: self.rooms.extend,
            commands.SendAbort: self.rooms.abort,
            commands.SendReceived: self.rooms.received,
            commands.ReportReady: self._ready,
            commands.ReportEarly: self.early_callers.begin,
            commands.ReportLayers: self.early_callers.advance,
            commands.ReportLayersLost: self.early_callers.lose,
            commands.ReportFailed: self._failed,
            commands.ReportDropped: self._dropped,
            commands.ReportFinished: lambda command: self.end(command.request_id, "finished"),
            commands.ReportRetracted: self._retracted,
            commands.GiveReserve: self._give_reserve,
            commands.ReportRestored: self._restored,
            commands.ReportOffered: self._offered,
            commands.ForgetTokens: lambda command: self.records.pop(command.request_number),
        }

    # --- Events ---

    def receive(self, event: events.Event) -> None:
        """Pass a local event to the agreement."""
        if self.is_dead:
            return
        self.agreement.receive(event)
        self._told()

    def _told(self) -> None:
        for refusal in self.agreement.take_refusals(self.world.schedule.now_s):
            self._refused(refusal)
        if self.is_solo:
            self.world.schedule.after(0.0, self._take_solo_turn)
        elif self.agreement.has_news:
            self.world.wish(self)

    def decide(self, reduced: Any) -> None:  # Any: a list here, an array in a solo turn.
        """Apply the result of a vote."""
        decision = self.agreement.decide(reduced)
        for event in decision.events:
            given = self.core.step(event)
            self.agreement.stepped(event, given)
            word = 0
            items: list[events.Event | commands.Command] = [event, *given]
            for item in items:
                word = zlib.crc32(ENCODER.encode(item if self.lender is None else without_own_fields(item)), word)
            self.world.stepped(self, word)
            self._answers_growth = isinstance(event, events.GrowthTaken) and event.wanted > 0
            if isinstance(event, events.RequestArrived):
                self._numbers[event.request_id] = event.request_number
            for command in given:
                taker = self._takers.get(type(command))
                if taker is not None:
                    taker(command)
        for refusal in decision.refusals:
            self._refused(refusal)
        if self.random.random() < 0.05:
            self.core.check()
            self.component_pages.check_cached(self.core)
        if self.agreement.has_news:
            self._told()

    def after(self, delay_s: float, action: Any, *arguments: Any) -> None:  # Any: as in Schedule.
        """Schedule an action on this rank; it is dropped if the rank's process has ended by then."""
        life = self._life

        def act() -> None:
            if not self.is_dead and self._life == life:
                action(*arguments)

        self.world.schedule.after(delay_s, act)

    def delay(self) -> float:
        return self.random.random() * 0.01

    # --- Callers ---

    def submit(self, script: Script, epoch: int) -> None:
        """Submit a request on behalf of this rank's caller."""
        world = self.world
        if self.is_dead or self.is_solo or epoch != world.epoch:
            world.ended(script, self.number, LOST_RANK)
            return
        if script.missing_on == self.number:
            world.ended(script, self.number, "ranks differ")
            return
        size = world.settings.page_size
        tags, tail = self.page_tags(script), self.component_pages.tags_of("", script.tokens)
        full = len(script.tokens) // size
        self.callers[script.request_id] = RankCaller(script, tags[:full], tags[full:], tail)
        if self.lender is None:
            self.arrive(self.callers[script.request_id])
        else:
            self.lender.ask(self.callers[script.request_id])
        if self.number == 0 and script.flushes:
            self.receive(events.FlushRequested(at_s=0.0, call=int(script.request_id[1:]), tiers=script.flushes))
        # By their numbers and not drawn, as in `simulation.world`.
        if self.number == 0 and world.seed % 4 == 3 and int(script.request_id[1:]) % 11 == 5:
            call = int(script.request_id[1:])
            self.receive(events.StoreRequested(at_s=0.0, call=call, within_s=(0.02, 1.0, 20.0)[call % 3]))
        if script.aborted_by == self.number:
            self.after(self.random.random() * 0.05, self._give_up, script.request_id)

    def arrive(self, caller: RankCaller, lent_pages: PageIds | None = None, held_pages: int = 0) -> None:
        """Post the arrival of a request."""
        world, script = self.world, caller.script
        size, request_number = world.settings.page_size, int(script.request_id[1:])
        self.receive(
            events.RequestArrived(
                at_s=world.schedule.now_s,
                request_id=script.request_id,
                request_number=request_number,
                keys=script.tokens[: len(script.tokens) // size * size],
                rest=script.tokens[len(script.tokens) // size * size :] if world.settings.components else b"",
                prompt_tokens=len(script.tokens),
                prefills=tuple(f"prefill-{number}" for number in range(script.prefill_count)),
                deadline_at_s=script.deadline_at_s,
                priority=script.priority,
                cache=script.cache,
                generation=request_number << 16,
                early=script.early,
                lent_pages=() if lent_pages is None else tuple(lent_pages),
                lent_components={name: tuple(pages) for name, pages in caller.lent_components.items()},
                held_pages=held_pages,
            )
        )
        self.after(2.5, self._told)

    def _give_up(self, request_id: str) -> None:
        caller = self.callers.get(request_id)
        if caller is not None and not caller.is_given_back:
            self.receive(
                events.AbortRequested(
                    at_s=self.world.schedule.now_s, request_id=request_id, cause="cancelled by the caller"
                )
            )
            self.early_callers.aborted(caller)

    def _ready(self, command: commands.ReportReady) -> None:
        caller = self.callers[command.request_id]
        caller.is_ready = True
        caller.pages, caller.reserve = command.pages[:], command.reserve[:]
        tags = self.tags(caller.script.tokens)
        self.device.expect(command.pages[: len(tags)], tags, command.request_id)
        self.early_callers.ready(command)
        caller.component_pages = LiveComponents(command.component_pages or (), len(caller.script.tokens))
        if self.early_callers.has_aborted(caller):
            return  # The abort is on its way to all ranks, and this report crossed it.
        check_components(self.component_pages, caller)
        self.after(self.delay(), self._generate, caller)

    def _generate(self, caller: RankCaller) -> None:
        script, size = caller.script, self.world.settings.page_size
        if self.callers.get(script.request_id) is not caller:
            return
        written = len(script.tokens) + max(0, len(caller.output) - 1)
        needed = self.world.settings.pages_of(written)
        if needed > len(caller.pages):
            if not caller.reserve:
                if not caller.wanted:
                    caller.wanted = True
                    self._take(caller, 0, 1)
                return
            caller.pages += caller.reserve[:1]
            del caller.reserve[:1]
            self._take(caller, 1, 0)
            self.after(self.delay(), self._generate, caller)
            return
        self._give_back(caller, (script.tokens + caller.output)[:written], size)

    def _take(self, caller: RankCaller, count: int, wanted: int) -> None:
        self.receive(events.GrowthTaken(at_s=0.0, request_id=caller.script.request_id, page_count=count, wanted=wanted))

    def _give_reserve(self, command: commands.GiveReserve) -> None:
        caller = self.callers[command.request_id]
        caller.reserve += command.pages
        if caller.wanted and (caller.reserve or self._answers_growth):
            caller.wanted = False
            if not caller.reserve:
                # All ranks got the same answer, so all callers continue with the pages that they have.
                caller.output = b""
            self.after(self.delay(), self._generate, caller)

    def _give_back(self, caller: RankCaller, tokens: bytes, size: int) -> None:
        request_id, full = caller.script.request_id, len(tokens) // size * size
        caller.is_given_back = True
        tags = self.tags(tokens)
        for at in range(len(self.tags(caller.script.tokens)), len(tags)):
            self.device.put(caller.pages[at], tags[at], f"decoding of {request_id}")
        left = leave_components(self.component_pages, caller, tokens, rank=self.number)
        self.records[self._numbers[request_id]] = tags
        kind = events.RetractRequested if caller.script.retracts else events.FinishRequested
        now_s = self.world.schedule.now_s
        self.receive(
            kind(at_s=now_s, request_id=request_id, keys=tokens[:full], tokens=len(tokens), component_pages=left)
        )

    def _retracted(self, command: commands.ReportRetracted) -> None:
        self.end(command.request_id, "retracted")
        self.after(self.delay(), self.receive, events.RetractedDropped(at_s=0.0, request_id=command.request_id))

    def _failed(self, command: commands.ReportFailed) -> None:
        self.end(command.request_id, command.cause)

    def _restored(self, command: commands.ReportRestored) -> None:
        assert self.lender is not None, "pages are lent to this rank"
        self.lender.restored(self.callers[command.request_id], command)

    def _offered(self, command: commands.ReportOffered) -> None:
        assert self.lender is not None, "pages are offered to this rank"
        self.lender.offered(command)

    def look_for_refusals(self) -> None:
        """See `RankSurroundings`."""
        self._told()

    def _dropped(self, command: commands.ReportDropped) -> None:
        self.end(command.request_id, LOST_RANK if self.is_solo else "aborted")

    def _refused(self, refusal: Refusal) -> None:
        # A request whose call was refused after READY is dropped next, and ends there.
        if isinstance(refusal.call, events.RequestArrived) and refusal.call.request_id in self.callers:
            self.end(refusal.call.request_id, refusal.cause)
        elif isinstance(refusal.call, events.PagesOffered) and self.lender is not None:
            self.lender.declined(refusal.call)

    def end(self, request_id: str, end: str) -> None:
        """Note the end of a request."""
        caller = self.callers.pop(request_id)
        if self.lender is not None and not self.is_dead and not end.startswith("restored"):
            # Pages of a process that has ended need not be taken back.
            self.lender.leave(caller)
        request_number = self._numbers.pop(request_id, 0)
        if end not in ("finished", "retracted"):
            # A request that was not finished or retracted leaves no tokens.
            self.records.pop(request_number, None)
        self.world.ended(caller.script, self.number, "cancelled" if end.startswith("cancelled") else end)

    def tags(self, tokens: bytes) -> list[int]:
        size = self.world.settings.page_size
        return self.world.contents.tags("", tokens[: len(tokens) // size * size], size)

    def page_tags(self, script: Script) -> list[int]:
        """Return the tags of all pages of a prompt. The tag of a partial page is unique."""
        full = len(self.tags(script.tokens)) * self.world.settings.page_size
        rest = script.tokens[full:]
        tail = [self.world.contents.tag(f"tail {script.request_id}", rest)] if rest else []
        return self.tags(script.tokens) + tail

    # --- Used by callers that begin early ---

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.world.settings.page_size

    def early_caller(self, request_id: str) -> RankCaller:
        """Return the caller of a live request."""
        return self.callers[request_id]

    def tell_now(self, event: events.Event) -> None:
        """Pass a local event to the agreement."""
        self.receive(event)

    @property
    def may_abort(self) -> bool:
        """Whether callers abort between layers."""
        return self.world.with_faults

    def abort_early(self, caller: EarlyCaller) -> None:
        """Abort the request, unless it has ended."""
        if self.callers.get(caller.request_id) is caller:
            self._give_up(caller.request_id)

    # --- Used by the tiers ---

    def hits(self, name: str) -> bool:
        """Decide whether a fault strikes this rank now. A rank that waits for a new group is spared."""
        return not self.is_solo and self.world.hits(name, self.random)

    def outcome(self, delay_s: float, make: Callable[[], events.Event]) -> None:
        """Deliver the outcome of an operation after a delay."""
        self.in_flight += 1

        def tell() -> None:
            self.in_flight -= 1
            event = make()
            self.receive(event)
            if self.hits("outcome_repeats"):
                self.after(self.delay(), self.receive, event)

        self.after(delay_s, tell)

    # --- Losing a rank ---

    def die(self) -> None:
        """End the process; all its callers are informed."""
        self.is_dead = True
        self._life += 1
        for request_id in list(self.callers):
            self.end(request_id, LOST_RANK)

    def come_back(self) -> None:
        """Restart the process, with empty state."""
        self.is_dead = False
        self.is_solo = True
        self._begin(self.world.epoch)
        self.world.try_to_form()

    def go_solo(self) -> None:
        """End everything without the other ranks, because one of them is lost."""
        if self.is_dead or self.is_solo:
            return
        self.is_solo = True
        for refusal in self.agreement.go_solo():
            self._refused(refusal)
        self._take_solo_turn()

    def _take_solo_turn(self) -> None:
        if not self.is_solo or self.is_dead:
            return
        agreement, now_s = self.agreement, self.world.schedule.now_s
        due_s = self.core.next_deadline_s()
        if agreement.has_news or (due_s is not None and due_s <= now_s):
            agreement.open_turn(now_s)
            self.decide(agreement.cast())
        due_s = self.core.next_deadline_s()
        if due_s is not None:
            self.after(max(due_s - now_s, 0.0) + 0.001, self._take_solo_turn)
        self.world.try_to_form()

    @property
    def is_ready_to_form(self) -> bool:
        """Whether it is alive and solo, with nothing in flight, so no access to its pages is under way."""
        return not self.is_dead and self.is_solo and self.is_settled

    @property
    def is_settled(self) -> bool:
        """Whether nothing is in flight on this rank."""
        return (
            self.agreement.is_idle
            and self.core.is_idle
            and not (self.in_flight or self.rooms.in_flight)
            and (self.lender is None or self.lender.is_quiet)
            and self.device.is_quiet
            and self.host.is_quiet
            and self.component_pages.is_quiet
        )

    def begin_epoch(self, epoch: int) -> None:
        """Start a new epoch with an empty core."""
        self.core.check()
        self._life += 1
        self.is_solo = False
        self._begin(epoch)
        self.attach_storage()

    def attach_storage(self) -> None:
        """Attach this rank's storage, which keeps pages of all components."""
        self.receive(
            events.StorageChanged(at_s=0.0, available=True, component_pages=bool(self.component_pages.components))
        )

    # --- The end ---

    def books(self) -> tuple[object, ...]:
        """Return the state that must be equal on all ranks: tree, pages, and free lists in their order."""
        index = self.core.state.index
        nodes = tuple(
            (node.namespace, node.edge, tuple(node.device or ()), tuple(node.host or ()), node.anchored)
            for node in index.nodes()
        )
        return (
            nodes,
            tuple(self.core.state.device.free_pages),
            tuple(self.core.state.host.free_pages),
            *kept_components(self.core),
        )

    def check_end(self) -> None:
        """Raise a Violation if anything is left."""
        self.core.check()
        if not self.is_settled or self.records or self.agreement.slots_taken:
            raise Violation(
                f"rank {self.number} is not settled at the end: {self.core.statistics()}, {self.in_flight} operations, "
                f"{self.rooms.in_flight} writes, {len(self.records)} records, {self.agreement.slots_taken} slots"
            )
