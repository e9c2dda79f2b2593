"""One simulated rank: an unmodified core, and everything that it exchanges events and commands with.

It has pools of tags, tiers and prefill peers, whose faults affect only this rank, and a caller of each request.
Invariants between two steps are recomputed from scratch: the state of the core, and the content of the pages.
"""

from __future__ import annotations

import zlib
from collections import Counter, deque
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec

from simulation.callers import Caller, OwnPages, Script, Work
from simulation.components import SimulatedComponents
from simulation.early_callers import EarlyCaller, EarlyCallers
from simulation.lending_callers import HostEngine
from simulation.memory import SimulatedPool, Violation
from simulation.neighbours import NeighboursOfRank
from simulation.prefill import Peer, Prompt
from simulation.raising import Injected, Raising
from simulation.rooms import Frames, RoomsOut
from simulation.schedule import Life
from simulation.stored import StoredTags
from simulation.tiers import Outcomes, SimulatedCopies, SimulatedStorage
from simulation.votes import HOLD_S, Alone, Member
from tidekv.states import commands, events
from tidekv.states.core import Core
from tidekv.states.ranks.vote_items import LOST_RANK
from tidekv.states.records.stages import State
from tidekv.states.types import FULL, page_ids

if TYPE_CHECKING:
    from collections.abc import Callable

    from simulation.world import World
    from tidekv.states.prefix.node import Node, TierName
    from tidekv.states.ranks.call_votes import Refusal
    from tidekv.states.types import PageIds

AUDIT_EVENTS = 100
PREFILL_CAUSES = ("refused by prefill", "prefill failed", "prefill lost", "pages damaged")
OWN_FIELDS: dict[type[events.Event | commands.Command], dict[str, object]] = {
    events.ShareRequested: {"call": 0},
    commands.SharePages: {"call": 0},
    commands.ReportHinted: {"call": 0},
}
"""Fields in which the same event or command differs between ranks, with an empty value."""
OWN_FIELDS_LENT: dict[type[events.Event | commands.Command], dict[str, object]] = {
    **OWN_FIELDS,
    events.RequestArrived: {"lent_pages": (), "lent_components": {}},
    events.PagesOffered: {"pages": (), "offered_components": {}, "offer": 0},
    commands.SendPromise: {"pages": page_ids(), "component_pages": None},
    commands.SendExtend: {"pages": page_ids()},
    commands.ReportOffered: {"offer": 0},
}
"""Those of ranks that are lent pages."""


def without_own_fields(item: events.Event | commands.Command, *, are_lent: bool) -> events.Event | commands.Command:
    """Return what must be the same on all ranks."""
    if are_lent and isinstance(item, commands.CopyPages):
        item = msgspec.structs.replace(
            item,
            source_pages=page_ids() if item.source == "device" else item.source_pages,
            target_pages=page_ids() if item.target == "device" else item.target_pages,
        )
    empty = (OWN_FIELDS_LENT if are_lent else OWN_FIELDS).get(type(item))
    return item if empty is None else msgspec.structs.replace(item, **empty)


def audit(rank: Rank) -> None:
    """Raise BrokenInvariant or Violation at the first contradiction."""
    rank.core.check()
    rank.device.check()
    rank.host.check()
    rank.component_pages.check_cached(rank.core)
    width = rank.settings.key_bytes
    tags: dict[Node, list[int]] = {}
    for node in rank.core.state.index.nodes():
        parent = node.parent
        assert parent is not None
        before: int | str = node.namespace if parent.is_root else tags[parent][-1]
        own: list[int] = []
        for start in range(0, len(node.edge), width):
            before = rank.contents.tag(before, node.edge[start : start + width])
            own.append(before)
        tags[node] = own
        if node.device is not None and node.load is None and not node.is_reclaiming:
            rank.device.expect(node.device, own, f"cached node {node}")
        if node.host is not None:
            rank.host.expect(node.host, own, f"cached node {node}", may_be_flipped=True)
    for request in rank.core.state.requests.values():
        if request.request_id not in rank.callers:
            raise Violation(f"{request} lives, but its caller is gone")


class Rank:
    """One rank of the group."""

    def __init__(self, world: World, number: int, ranks: int) -> None:
        self.world = world
        self.number = number
        self.is_alone = ranks == 1
        self.random = Random(f"rank {number} of {world.seed}")
        self.settings, self.contents = world.settings, world.contents
        self.faults = world.faults.of_rank(self.random, ranks)
        self.is_dead = False
        self.is_solo = False
        """Whether it ends its requests without the others, because another rank is lost."""
        self.events = 0
        """Events that its core took in this epoch."""
        self.callers: dict[str, Caller] = {}
        """Callers of live requests, by request id."""
        self.early_counts: Counter[str] = Counter()
        self.component_counts: Counter[str] = Counter()
        self.on_core: list[Callable[[Core], None]] = []
        """Called with each new core."""
        self.recent: deque[tuple[events.Event, list[commands.Command]]] = deque(maxlen=60)
        self._writers = 0
        self._stored = StoredTags(self.faults, self.random)
        self.schedule = Life(world.schedule)
        self._begin()

    def _begin(self) -> None:
        """Start its process, with empty state; storage has what it had."""
        world = self.world
        self.schedule.is_over = True
        self.schedule = Life(world.schedule)
        self.core = Core(self.settings)
        self.events = 0
        self.device, self.host = SimulatedPool(self.core.state.device), SimulatedPool(self.core.state.host)
        self.component_pages = SimulatedComponents(self.core, self.contents, self.component_counts)
        self.outcomes = Outcomes(self)
        self.copies = SimulatedCopies(self, self.random)
        storage = SimulatedStorage(self, self.random, self._stored)
        self.peers = [Peer(self, self.random, f"prefill-{number}") for number in range(world.prefill_count)]
        self.neighbours = None if world.neighbours is None else NeighboursOfRank(self, world.neighbours)
        self.rooms_out = RoomsOut(self)
        self.frames = Frames(self, self.random)
        self.dead_writers: set[str] = set()
        self.records: dict[int, list[int]] = {}
        """Tags of the tokens that requests left, by request number."""
        self._generations: dict[str, int] = {}
        epoch = world.turns.epoch
        self.raising = Raising(self.core, f"{world.seed} {epoch}", self.faults)
        self.early_callers = (
            EarlyCallers(self, f"{world.seed} {self.number} {epoch}", self.early_counts) if world.is_early else None
        )
        self.driver: Alone | Member = Alone(self) if self.is_alone else Member(self, world.turns)
        # Any: each taker has its own command type.
        self._takers: dict[type[commands.Command], Callable[[Any], object]] = {
            commands.QueryStorage: storage.query,
            commands.FetchPages: lambda command: (self.with_neighbours if command.peer else storage).fetch(command),
            commands.SharePages: lambda command: self.with_neighbours.share(command),
            commands.HandPrompt: lambda command: self.with_neighbours.offered(command),
            commands.StorePages: storage.store,
            commands.ProbeStorage: storage.probe,
            commands.CopyPages: self.copies.copy,
            commands.SendPromise: self._promise,
            commands.SendExtend: self.rooms_out.extend,
            commands.SendAbort: self.rooms_out.abort,
            commands.SendReceived: self.rooms_out.received,
            commands.ReportFailed: self._failed,
            commands.ReportFinished: lambda command: self.end(self.callers[command.request_id], "finished"),
            commands.ReportDropped: lambda command: self.end(
                self.callers[command.request_id], LOST_RANK if self.is_solo else "aborted"
            ),
            commands.ReportFlushed: lambda command: None,
            commands.ReportStored: lambda command: world.all_stored(self, command),
            commands.ReportHinted: lambda command: world.hinted(self, command),
            commands.ForgetTokens: self._forget_tokens,
        }
        self.work: Work
        self._grown: Callable[[events.GrowthTaken], None] | None = None
        if self.settings.lends_device:
            engine = self.work = HostEngine(self)
            self._takers |= {commands.ReportRestored: engine.restored, commands.ReportOffered: engine.offered}
        else:
            own = self.work = OwnPages(self)
            self._grown = own.grown
            self._takers |= {
                commands.ReportReady: own.ready,
                commands.GiveReserve: own.give_reserve,
                commands.ReportRetracted: own.retracted,
                commands.Recompute: own.recompute,
            }
        if self.early_callers is not None:
            self._takers |= {
                commands.ReportEarly: self.early_callers.begin,
                commands.ReportLayers: self.early_callers.advance,
                commands.ReportLayersLost: self.early_callers.lose,
            }
        for look in self.on_core:
            look(self.core)

    # --- Used by its parts ---

    @property
    def with_neighbours(self) -> NeighboursOfRank:
        """The other decode workers. Raises a Violation if there are none."""
        if self.neighbours is None:
            raise Violation("a read from or for another decode worker, but there is none")
        return self.neighbours

    @property
    def now_s(self) -> float:
        """The virtual time."""
        return self.world.schedule.now_s

    def delay(self) -> float:
        """Return the duration of an action on this rank, or of a message to it, without another fault."""
        lag = 8 if self.faults.hits("rank_lags") else 1
        return self.world.delay_of(self.random) * lag

    def tags_of(self, namespace: str, tokens: bytes) -> list[int]:
        """Return the tags of the full pages of these tokens."""
        full = len(tokens) // self.settings.page_size * self.settings.page_size
        return self.contents.tags(namespace, tokens[:full], self.settings.page_size)

    def pool(self, tier: TierName, component: str) -> SimulatedPool:
        """Return the pages of a tier, of the full KV or of a component."""
        if component != FULL:
            return self.component_pages.pools[tier, component]
        return self.device if tier == "device" else self.host

    def caller(self, request_id: str) -> Caller:
        """Return the caller of a live request."""
        return self.callers[request_id]

    def early_caller(self, request_id: str) -> Caller:
        """Return the caller of a live request."""
        return self.callers[request_id]

    def is_live(self, caller: EarlyCaller) -> bool:
        """Whether the request is live."""
        return self.callers.get(caller.request_id) is caller

    def tags_put(self, command: commands.StorePages | commands.FetchPages) -> list[int]:
        """Return the tags of the tokens whose pages are put, or read without a request."""
        if isinstance(command, commands.StorePages) and command.request_number:
            if command.request_number not in self.records:
                raise Violation(f"the tokens of {command} were forgotten while they are needed")
            return self.records[command.request_number]
        namespace, keys = self.core.keys_stored(command.op)
        of_group = namespace if command.component == FULL else f"{command.component} of {namespace}"
        return self.contents.tags(of_group, keys, self.settings.key_bytes)

    def flip_one(self, pool: SimulatedPool, pages: PageIds) -> None:
        """Flip a bit of one of these host pages, if that fault strikes."""
        if self.faults.hits("host_page_is_flipped"):
            pool.flipped.add(self.random.choice(pages))

    def new_writer(self, peer: str) -> str:
        """Return the name of another life of a peer."""
        self._writers += 1
        return f"{peer}.{self.number}.{self._writers}"

    def lose_writer(self, writer: str) -> None:
        """Report that a peer is unreachable."""
        for request_id, generation in self.rooms_out.of_writer(writer):
            if self.core.rooms.live(request_id, generation):
                self.callers[request_id].script.losses.add(generation)
        self.tell(events.WriterLost(at_s=self.now_s, writer=writer, cause="injected"))

    def note_losses(self, event: events.Event) -> None:
        """Count the loss of a live room that an event ends: its request may fail."""
        if isinstance(event, events.RoomRefused | events.RoomFailed) and self.core.rooms.live(
            event.request_id, event.generation
        ):
            self.callers[event.request_id].script.losses.add(event.generation)

    # --- Events ---

    def tell(self, event: events.Event) -> None:
        """Pass an event to the core, and execute its commands; with several ranks, pass it to their next vote."""
        self.driver.tell(event)

    def tell_now(self, event: events.Event) -> None:
        """Pass on an event that was created earlier, with the current time."""
        self.tell(msgspec.structs.replace(event, at_s=self.now_s))

    def take(self, event: events.Event) -> None:
        """Have the core take an event, and execute its commands."""
        self.world.stepping = self
        self.recent.append((event, []))
        self.raising.begin_step(self.events)
        attempts = self._attempts() if isinstance(event, events.ClockAdvanced) else {}
        given = self.core.step(event)
        if isinstance(event, events.RequestArrived):
            self.callers[event.request_id].script.was_taken = True
        for request_id, count in self._attempts().items() if attempts else ():
            if count > attempts.get(request_id, count):
                # Its prefill sent nothing within its share of the deadline.
                self.callers[request_id].script.losses.add(f"late {count}")
        self.raising.end_step()
        self.recent[-1] = (event, given)
        self.driver.stepped(event, given)
        self._compare(event, given)
        for command in given:
            self._taker(command)(command)
        if isinstance(event, events.GrowthTaken) and event.wanted and self._grown is not None:
            self._grown(event)
        self._check_step(given)

    def _taker(self, command: commands.Command) -> Callable[[Any], object]:  # Any: see `_takers`.
        taker = self._takers.get(type(command))
        if taker is None:
            raise Violation(f"{command}, which nothing in this run takes")
        return taker

    def _compare(self, event: events.Event, given: list[commands.Command]) -> None:
        word = 0
        items: list[events.Event | commands.Command] = [event, *given]
        for item in items:
            if not self.is_alone:
                item = without_own_fields(item, are_lent=self.settings.lends_device)
            word = zlib.crc32(ENCODER.encode(item), word)
        self.world.turns.stepped(self, word)
        self.events += 1

    def _attempts(self) -> dict[str, int]:
        """Attempts of live requests at their prefills."""
        return {request_id: request.attempts.count for request_id, request in self.core.state.requests.items()}

    def _check_step(self, given: list[commands.Command]) -> None:
        for pool in (self.core.state.device, self.core.state.host):
            if pool.free + pool.owned + pool.cached + pool.draining != pool.total:
                raise Violation(f"pool {pool.name} does not add up")
        self.component_pages.check_sums()
        self.component_pages.check_moves(self.core)
        if not any(isinstance(command, commands.SendAbort) for command in given):
            # A room left in the same step may have pages in the quarantine that it extended into.
            self._check_quota({request_id for request_id, state in self.core.moves if state is State.MATCH})
        if self.events % AUDIT_EVENTS == 0:
            audit(self)

    def _check_quota(self, admitted: set[str]) -> None:
        """Check that peers of the requests just admitted are within their quotas, or serve one large prompt alone."""
        limit = self.settings.prefill_quota_pages
        if limit is None or not admitted:
            return
        withheld: dict[str, list[int]] = {}
        for request in self.core.state.requests.values():
            if request.held.lock is not None and not request.is_ready and not request.recompute.is_chosen:
                peer = self.peers[self.callers[request.request_id].script.prefills[request.prefill_number]].name
                pages = request.page_count - request.held.matched + len(request.held.reserve)
                withheld.setdefault(peer, []).append(pages)
        for left in self.core.rooms.quarantine:
            withheld.setdefault(left.prefill, []).append(len(left.pages))
        for request_id in admitted:
            request_now = self.core.request(request_id)
            if (
                request_now is None
                or request_now.is_ready
                or request_now.recompute.is_chosen
                or request_now.held.lock is None
            ):
                continue
            if request_now.page_count == request_now.held.matched and not request_now.held.reserve:
                continue  # It withholds nothing that others do not, and is always admitted.
            pages_by_room = [pages for pages in withheld[request_now.prefill] if pages]
            if len(pages_by_room) > 1 and sum(pages_by_room) > limit:
                raise Violation(
                    f"{request_id} was admitted, and {request_now.prefill} withholds {sum(pages_by_room)} device pages;"
                    f" its quota is {limit}"
                )

    # --- Callers ---

    def submit(self, script: Script, epoch: int) -> None:
        """Submit a request on behalf of this rank's caller."""
        if self.is_dead or self.is_solo or epoch != self.world.turns.epoch:
            self.world.ended(script, self.number, LOST_RANK)
        elif script.missing_on == self.number:
            self.world.ended(script, self.number, "ranks differ")
        else:
            caller = self.callers[script.request_id] = Caller(self, script)
            self.work.ask(caller)

    def arrive(self, caller: Caller) -> None:
        """Post the arrival of a request."""
        world, script = self.world, caller.script
        full = len(caller.tags) * self.settings.page_size
        self.tell(
            events.RequestArrived(
                at_s=self.now_s,
                request_id=script.request_id,
                request_number=script.number,
                keys=script.tokens[:full],
                rest=script.tokens[full:] if self.settings.components else b"",
                prompt_tokens=len(script.tokens),
                namespace=script.namespace,
                prefills=tuple(self.peers[number].name for number in script.prefills),
                deadline_at_s=script.deadline_at_s,
                priority=script.priority,
                cache=script.cache,
                can_recompute=script.can_recompute,
                generation=script.generation,
                lent_pages=tuple(caller.pages),
                lent_components={name: tuple(pages) for name, pages in caller.lent_components.items()},
                held_pages=caller.held,
                early=script.early,
                # By the number and not drawn, so that it is the same on all ranks.
                tokens_max=len(script.tokens) + script.number % 5 if script.number % 3 == 0 else 0,
                peers=() if world.neighbours is None else world.neighbours.draw(),
            )
        )
        self.look_for_refusals()
        if script.hits("abort_at_once") and script.aborts_on(self.number):
            self.schedule.after(0.0, self.abort, caller)
        elif script.hits("abort") and script.aborts_on(self.number):
            soon_s = self.random.choice((0.002, 0.01, 0.05, 0.2)) * self.random.random()
            self.schedule.after(soon_s, self.abort, caller)

    def look_for_refusals(self) -> None:
        """Take the calls that end without a vote, once the callers of other ranks have had their time."""
        if not self.is_alone:
            self.schedule.after(HOLD_S + 0.5, self.driver.tell_refusals)

    def abort(self, caller: Caller) -> None:
        """Abort the request, unless it has ended."""
        if self.is_live(caller) and caller.goes_on:
            caller.has_aborted = caller.script.has_aborted = True
            self.tell(events.AbortRequested(at_s=self.now_s, request_id=caller.request_id))
            if self.early_callers is not None:
                self.early_callers.aborted(caller)

    def abort_early(self, caller: EarlyCaller) -> None:
        """Abort the request, unless it has ended."""
        assert isinstance(caller, Caller)
        self.abort(caller)

    def flush_with(self, script: Script) -> None:
        """Flush the caches if that fault strikes with this request. Only the first rank may."""
        random = self.world.random
        if script.hits("flush") and self.number == 0:
            tiers = random.choice((("l1",), ("l2",), ("l1", "l2")))
            self.tell(events.FlushRequested(at_s=self.now_s, call=script.number, tiers=tiers))

    def change_storage(self, *, available: bool) -> None:
        """Attach this rank's storage, which keeps pages of all components, or detach it."""
        component_pages = available and bool(self.settings.components)
        self.tell(events.StorageChanged(at_s=self.now_s, available=available, component_pages=component_pages))

    def check_components(self, caller: Caller) -> None:
        """Check the component pages of a ready request."""
        who, tables = f"{caller.request_id}, whose restore is over", caller.component_pages.tables
        self.component_pages.check_ready(tables, len(caller.tokens), caller.component_tags, who)

    def end(self, caller: Caller, end: str) -> None:
        """Note the end of a request."""
        del self.callers[caller.request_id]
        number = caller.script.number
        if end in (LOST_RANK, "aborted", "internal error") and not any(
            backup.request_number == number for backup in self.core.backups
        ):
            # A request that was not finished or retracted leaves no tokens.
            self.records.pop(number, None)
        if not self.is_dead and not end.endswith("tokens"):
            # Pages of a process that has ended need not be taken back.
            self.work.failed(caller)
        self.world.ended(caller.script, self.number, end)
        if self.is_solo:
            # The last one may have waited for pages that a host engine lends, of which the core knows nothing.
            self.schedule.after(0.0, self.world.turns.try_to_form)

    def refused(self, refusal: Refusal) -> None:
        """Take a call that the core does not take."""
        call = refusal.call
        if isinstance(call, events.RequestArrived):
            caller = self.callers.get(call.request_id)
            if caller is not None and caller.script.number == call.request_number:
                self.end(caller, refusal.cause)
        elif isinstance(call, events.PagesOffered):
            self.work.declined(call)
        elif isinstance(call, events.ShareRequested):
            self.with_neighbours.refused(call)
        # A request whose call was refused after READY is dropped next, and ends there.

    # --- Commands ---

    def _promise(self, command: commands.SendPromise) -> None:
        caller, size, request_id = self.callers[command.request_id], self.settings.page_size, command.request_id
        if command.generation <= self._generations.get(request_id, -1):
            raise Violation(f"{command} has a generation that was used before")
        self._generations[request_id] = command.generation
        self.world.generations[request_id] = max(command.generation, self.world.generations.get(request_id, -1))
        tags = caller.tags + caller.tail
        promised_pages = -(-command.promised_tokens // size)
        if (
            command.prompt_tokens != len(caller.tokens)
            or promised_pages + len(command.pages) != len(tags)
            or (command.promised_tokens % size and command.promised_tokens != len(caller.tokens))
        ):
            raise Violation(f"{command} does not cover the prompt once")
        self.component_pages.check_promise(command.component_pages, command.prompt_tokens)
        prompt = Prompt(tags, caller.component_tags)
        self.rooms_out.promise(command, self.peers[caller.script.prefills[command.prefill]], prompt)

    def _failed(self, command: commands.ReportFailed) -> None:
        caller, cause = self.callers[command.request_id], command.cause
        if self.settings.lends_device and cause not in ("aborted", "internal error", LOST_RANK):
            raise Violation(f"{command}, but with lent pages that is a partial outcome")
        if caller.is_ready and cause != "internal error":
            raise Violation(f"{command}, which was ready")
        self.check_cause(caller, cause, command.detail)
        self.end(caller, cause)

    def check_cause(self, caller: Caller, cause: str, detail: str) -> None:
        """Raise a Violation unless something has happened that may end a request by this cause."""
        script = caller.script
        allowed = {
            "": True,
            "aborted": script.has_aborted,
            LOST_RANK: self.is_solo,
            "deadline": script.deadline_at_s <= self.now_s,
            "internal error": Injected.__name__ in detail,
            "recompute failed": script.recompute_failed,
            **dict.fromkeys(
                PREFILL_CAUSES, len(script.losses) >= len(script.prefills) * self.settings.attempts_per_prefill
            ),
        }
        if not allowed.get(cause, False):
            raise Violation(f"{script.request_id} ended by {cause!r}, but nothing of that kind has happened to it")

    def _forget_tokens(self, command: commands.ForgetTokens) -> None:
        if self.records.pop(command.request_number, None) is None:
            raise Violation(f"{command}, which were forgotten before")

    # --- Losing a rank ---

    def die(self) -> None:
        """End the process; all its callers are informed."""
        self.is_dead = True
        self.schedule.is_over = True
        for caller in list(self.callers.values()):
            self.end(caller, LOST_RANK)

    def come_back(self) -> None:
        """Restart the process, with empty state."""
        self.is_dead, self.is_solo, self.faults.is_over = False, True, True
        self._begin()
        self.world.turns.try_to_form()

    def go_solo(self) -> None:
        """End everything without the other ranks, because one of them is lost. Faults spare it until it is over."""
        if self.is_dead or self.is_solo:
            return
        self.is_solo = self.faults.is_over = True
        assert isinstance(self.driver, Member)
        self.driver.go_solo()

    def begin_epoch(self) -> None:
        """Start a new epoch with an empty core."""
        audit(self)
        self.is_solo, self.faults.is_over = False, self.world.faults.is_over
        self._begin()
        self.change_storage(available=True)

    @property
    def is_settled(self) -> bool:
        """Whether no request lives on this rank and nothing is in flight, so no access to its pages is under way."""
        pools = (self.device, self.host, self.component_pages)
        is_quiet = self.work.is_quiet and all(pool.is_quiet for pool in pools)
        is_idle = self.driver.is_idle and self.core.is_idle
        return is_quiet and is_idle and not self.outcomes.open_count and not self.callers

    # --- The end ---

    def books(self) -> tuple[object, ...]:
        """Return the state that must be equal on all ranks: tree, pages, and free lists in their order."""
        state = self.core.state
        nodes = tuple(
            (node.namespace, node.edge, tuple(node.device or ()), tuple(node.host or ()), node.anchored)
            for node in state.index.nodes()
        )
        tiers = () if state.components is None else state.components.tiers
        components = tuple(
            (tuple(tier.pool.free_pages), tuple(tuple(tier.pages_of(node).items()) for node in tier.nodes()))
            for tier in tiers
        )
        return nodes, tuple(state.device.free_pages), tuple(state.host.free_pages), components

    def check_end(self) -> None:
        """Raise a Violation if anything is left."""
        audit(self)
        if self.neighbours is not None:
            self.neighbours.check_end()
        core = self.core
        if self.callers:
            stuck = next(iter(self.callers))
            raise Violation(f"{len(self.callers)} requests never ended, among them {core.request(stuck)}")
        left = {
            name: count
            for name, count in core.statistics().items()
            if count
            and (
                name.startswith("requests_")
                or name.endswith(("_owned", "_draining", "_protected"))
                or name in ("queue", "loads", "backups", "offers", "operations", "rooms")
            )
        }
        slots = self.driver.agreement.slots_taken if isinstance(self.driver, Member) else 0
        if left or slots or core.next_deadline_s() is not None:
            raise Violation(f"all requests have ended, but the core still holds {left}, and {slots} slots are taken")
        if self.records or not self.is_settled:
            raise Violation(
                f"all requests have ended, but rank {self.number} has {len(self.records)} records of tokens, "
                f"{self.outcomes.open_count} operations, or accesses to pages"
            )


def _encode_array(value: object) -> bytes:
    assert hasattr(value, "tobytes"), value
    encoded = value.tobytes()
    assert isinstance(encoded, bytes)
    return encoded


ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode_array)
