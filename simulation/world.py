"""Simulated environment of one unmodified core: it executes commands, delivers events, and checks for violations.

Invariants between two steps, recomputed from scratch: the state of the core, and the content of the pages.
"""

from __future__ import annotations

import zlib
from collections import Counter, deque
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec

from simulation.callers import SESSIONS, Caller, Client
from simulation.component_storage import SimulatedComponentStorage
from simulation.components import LiveComponents, SimulatedComponents
from simulation.early_callers import EarlyCaller, EarlyCallers
from simulation.faults import Chosen, Faults
from simulation.hints import Orchestrator
from simulation.lending_callers import Blocks, ComponentBlocks, LendingClient
from simulation.memory import Contents, SimulatedPool, Violation
from simulation.neighbours import Neighbours
from simulation.policies import draw_policy
from simulation.prefill import Peer, Prompt
from simulation.raising import Injected, Raising
from simulation.rooms import Frames, RoomsOut
from simulation.schedule import Schedule
from simulation.stored import by_group
from simulation.tiers import Outcomes, SimulatedCopies, SimulatedStorage
from tidekv.states import commands, events
from tidekv.states.core import Core
from tidekv.states.records.stages import State
from tidekv.states.types import FULL

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from simulation.surroundings import Surroundings
    from tidekv.states.prefix.node import Node
    from tidekv.states.settings import CoreSettings
    from tidekv.states.types import PageIds


def audit(world: Surroundings) -> None:
    """Raise BrokenInvariant or Violation at the first contradiction."""
    world.core.check()
    world.device.check()
    world.host.check()
    world.component_pages.check_cached(world.core)
    width = world.settings.key_bytes
    tags: dict[Node, list[int]] = {}
    for node in world.core.state.index.nodes():
        parent = node.parent
        assert parent is not None
        before: int | str = node.namespace if parent.is_root else tags[parent][-1]
        own: list[int] = []
        for start in range(0, len(node.edge), width):
            before = world.contents.tag(before, node.edge[start : start + width])
            own.append(before)
        tags[node] = own
        if node.device is not None and node.load is None and not node.is_reclaiming:
            world.device.expect(node.device, own, f"cached node {node}")
        if node.host is not None:
            world.host.expect(node.host, own, f"cached node {node}", may_be_flipped=True)
    for request in world.core.state.requests.values():
        if not world.caller(request.request_id):
            raise Violation(f"{request} lives, but its caller is gone")


AUDIT_EVENTS = 100
STORED_SEEDS = 4
"""One of so many seeds stores everything now and then, and at its end."""
PREFILL_CAUSES = ("refused by prefill", "prefill failed", "prefill lost", "pages damaged")


class World:
    """One run: a core, and everything that it exchanges events and commands with."""

    def __init__(
        self,
        *,
        seed: int,
        requests: int,
        faults: Chosen,
        settings: CoreSettings,
        without: Collection[str] = (),
        early: bool = False,
        hints: bool = False,
        neighbours: bool = False,
    ) -> None:
        """With `early`, callers begin with the first layers of their prompts; with `hints` an orchestrator gives hints
        about them; with `neighbours` other decode workers share host memory with this one.
        """
        self._random = random = Random(seed)
        self.settings = settings
        self.core = Core(settings)
        self.schedule = Schedule()
        self.faults = Faults(
            random,
            faults,
            without,
            with_lending=settings.lends_device,
        )
        self.contents = Contents()
        self.device = SimulatedPool(self.core.state.device)
        self.host = SimulatedPool(self.core.state.host)
        self.component_pages = SimulatedComponents(self.core, self.contents)
        self.outcomes = Outcomes(self)
        self.storage = SimulatedStorage(self, random)
        self.component_storage = SimulatedComponentStorage(self, self.storage, random)
        self.copies = SimulatedCopies(self, random)
        self.early_callers = EarlyCallers(self, seed, Counter()) if early else None
        self.peers = [Peer(self, random, f"prefill-{number}") for number in range(3)]
        self.rooms_out = RoomsOut(self)
        self.frames = Frames(self, random)
        self.raising = Raising(self.core, random, self.faults)
        self.orchestrator: Orchestrator | None = None
        if hints:
            self.orchestrator = Orchestrator(
                seed, settings, give=self.step, after=self.schedule.after, now_s=lambda: self.now_s
            )
        self.neighbours = Neighbours(self, seed, faults, without) if neighbours else None
        self.dead_writers: set[str] = set()
        self.retracting: dict[str, tuple[Caller, bytes]] = {}
        self.retracted_ids: set[str] = set()
        self.offered_by: dict[int, LendingClient] = {}
        self.recent: deque[tuple[events.Event, list[commands.Command]]] = deque(maxlen=60)
        self.event_count = 0
        self.digest = 0
        self.ends: dict[str, int] = {}
        self.prompt_tokens_max = max(1, (settings.device_pages * 3 // 5 - settings.growth_reserve_pages)) * (
            settings.page_size
        )
        self.arrivals_left = requests
        self._ids = 0
        self._numbers = 0
        self._stores_all = self.faults.is_on("all_is_stored") and seed % STORED_SEEDS == STORED_SEEDS - 1
        self._to_report: set[int] = set()
        """Requests to store everything that have no report."""
        self._stored: commands.ReportStored | None = None
        self._callers: dict[str, Caller] = {}
        self._generations: dict[str, int] = {}
        self._left: dict[int, list[int]] = {}
        self._clock_at_s = float("inf")
        self._latency_s = random.choice((0.001, 0.004, 0.015))
        self._is_stepping = False
        # Any: each taker has its own command type.
        self._execute: dict[type[commands.Command], Callable[[Any], None]] = {
            commands.QueryStorage: self.component_storage.query,
            commands.FetchPages: self._fetch,
            commands.SharePages: self._share,
            commands.StorePages: by_group(self.storage.store, self.component_storage.store),
            commands.ProbeStorage: self.storage.probe,
            commands.CopyPages: by_group(self.copies.copy, self.copies.copy_component),
            commands.SendPromise: self._promise,
            commands.SendExtend: self.rooms_out.extend,
            commands.SendAbort: self.rooms_out.abort,
            commands.SendReceived: self.rooms_out.received,
            commands.Recompute: self._recompute,
            commands.ReportReady: self._ready,
            commands.ReportEarly: self._early,
            commands.ReportLayers: self._early,
            commands.ReportLayersLost: self._early,
            commands.ReportRestored: self._restored,
            commands.ReportOffered: self._offered,
            commands.ReportFailed: self._failed,
            commands.GiveReserve: self._give_reserve,
            commands.ReportFinished: self._nothing,
            commands.ReportDropped: self._nothing,
            commands.ReportRetracted: self._retracted,
            commands.ReportFlushed: self._nothing,
            commands.ReportStored: self._all_stored,
            commands.ReportHinted: self._hinted,
            commands.ForgetTokens: self._forget_tokens,
        }

    def run(self, clients: int) -> None:
        """Serve all requests, and check that nothing is left."""
        sessions = [(self._random.choice(("", "", "adapter")), b"") for _ in range(SESSIONS)]
        self._change_storage(available=True)
        blocks = Blocks(self.settings.device_pages)
        component_blocks = ComponentBlocks(self.settings, self.component_pages)
        for _ in range(clients):
            client: Client | LendingClient
            if self.settings.lends_device:
                client = LendingClient(self, self._random, sessions, blocks, component_blocks)
            else:
                client = Client(self, self._random, sessions)
            self.schedule.after(self.delay(), client.begin)
        while self.schedule.run_next():
            pass
        if self._stores_all:
            self._store_at_end()
        self._check_end()

    # --- Used by the parts of the world ---

    @property
    def now_s(self) -> float:
        """The virtual time."""
        return self.schedule.now_s

    def delay(self) -> float:
        """Return the duration of an action without a fault."""
        return self._latency_s * (self._random.random() + 0.1 * (self._random.random() < 0.1) * 50)

    def tags_of(self, namespace: str, tokens: bytes) -> list[int]:
        """Return the tags of the full pages of these tokens."""
        full = len(tokens) // self.settings.page_size * self.settings.page_size
        return self.contents.tags(namespace, tokens[:full], self.settings.page_size)

    def caller(self, request_id: str) -> Caller:
        """Return the caller of a live request."""
        return self._callers[request_id]

    def is_live(self, caller: Caller) -> bool:
        """Whether the request is live."""
        return self._callers.get(caller.request_id) is caller

    @property
    def restoring(self) -> list[Caller]:
        """The callers of requests that are not READY."""
        return [caller for caller in self._callers.values() if not caller.is_ready]

    def next_number(self) -> int:
        """Return a new number, which identifies the tokens of a request."""
        self._numbers += 1
        return self._numbers

    def new_id(self) -> str:
        """Return a request id: a new one, or occasionally one that was used before."""
        if self._ids and self.faults.hits("id_returns"):
            name = f"r{self._random.randrange(max(1, self._ids - 6), self._ids + 1)}"
            if name not in self._callers and name not in self.retracted_ids:
                return name
        self._ids += 1
        return f"r{self._ids}"

    def take_arrival(self) -> bool:
        """Whether one more request may be made. Faults of peers and storage are drawn at this moment, too."""
        if not self.arrivals_left:
            return False
        self.arrivals_left -= 1
        if self.faults.hits("peer_crashes"):
            self.schedule.after(self.delay(), self._random.choice(self.peers).crash)
        if self.faults.hits("peer_is_partitioned"):
            self.schedule.after(self.delay(), self._random.choice(self.peers).cut_off)
        if self.faults.hits("peer_is_silent"):
            self.schedule.after(self.delay(), self._random.choice(self.peers).fall_silent)
        if self.faults.hits("policy_changes"):
            self.step(events.PolicyChanged(at_s=self.now_s, policy=draw_policy(self._random, self.settings.page_size)))
        if self.faults.hits("storage_is_detached"):
            self._change_storage(available=False)
            self.schedule.after(self.delay() * 20, lambda: self._change_storage(available=True))
        # By their numbers and not drawn, so that other draws of a seed stay what they were.
        if self._stores_all and self.arrivals_left % 23 == 7 and self.faults.hits("all_is_stored"):
            self.schedule.after(0.0, self._store_all, (0.02, 1.0, 20.0, 0.0)[self.arrivals_left % 4])
        return True

    def _store_all(self, within_s: float) -> None:
        call = self.faults.counts["all_is_stored"]
        self._to_report.add(call)
        self.step(events.StoreRequested(at_s=self.now_s, call=call, within_s=within_s))

    def _all_stored(self, command: commands.ReportStored) -> None:
        if command.call not in self._to_report:
            raise Violation(f"{command}, which was not asked for, or is reported twice")
        self._to_report.remove(command.call)
        self._stored = command
        if min(command.stored, command.present, command.left - command.failed, command.failed) < 0:
            raise Violation(f"{command} does not add up")

    def _store_at_end(self) -> None:
        """Store everything without faults: of what the policy lets pass, storage must have all that fits the host."""
        self.faults.counts["all_is_stored"] += 1
        self.faults.is_over = True
        self._store_all(3600.0)
        while self.schedule.run_next():
            pass
        if self._to_report:
            raise Violation(f"requests {self._to_report} to store everything have no report")
        assert self._stored is not None
        core, settings = self.core, self.core.state.settings  # The policies may have changed.
        tree, is_held = core.state.index.tree, bool(core.hints.pins) or bool(core.state.index.host_protected)
        lacking = [node for node in core.state.index.nodes() if not tree.is_stored(node)]
        if self._stored.left != sum(node.page_count for node in lacking):
            raise Violation(f"{self._stored}, but storage lacks {lacking}")
        for node in lacking:
            # Below a page that the policy keeps out nothing is stored, and of a path only what the host has room for.
            path = core.state.index.path(node)
            is_rare = settings.write == "selective" and any(each.served < settings.write_hits_min for each in path)
            is_short = max(each.depth_pages for each in node.subtree()) * settings.page_size < settings.write_tokens_min
            is_flipped = any(page in self.host.flipped for each in path for page in each.host or ())
            if not (is_held or is_rare or is_short or is_flipped or node.depth_pages > settings.host_pages):
                raise Violation(f"{self._stored}, but storage lacks {node}")

    def _change_storage(self, *, available: bool) -> None:
        component_pages = available and bool(self.settings.components)
        self.step(events.StorageChanged(at_s=self.now_s, available=available, component_pages=component_pages))

    def arrive(self, caller: Caller, *, cache: bool, priority: int) -> None:
        """Submit a request."""
        self._callers[caller.request_id] = caller
        full = len(caller.tags) * self.settings.page_size
        self.step(
            events.RequestArrived(
                at_s=self.now_s,
                request_id=caller.request_id,
                request_number=caller.request_number,
                keys=caller.tokens[:full],
                rest=caller.tokens[full:] if self.settings.components else b"",
                prompt_tokens=len(caller.tokens),
                namespace=caller.namespace,
                prefills=tuple(self.peers[number].name for number in caller.prefills),
                deadline_at_s=caller.deadline_at_s,
                priority=priority,
                cache=cache,
                can_recompute=caller.can_recompute,
                generation=self._generations.get(caller.request_id, -1) + 1,
                lent_pages=tuple(caller.pages),
                lent_components={name: tuple(pages) for name, pages in caller.lent_components.items()},
                held_pages=caller.held,
                early=self.early_callers is not None and self.early_callers.draw(),
                # By the number and not drawn, so that other draws of a seed stay what they were.
                tokens_max=len(caller.tokens) + caller.request_number % 5 if caller.request_number % 3 == 0 else 0,
                peers=() if self.neighbours is None else self.neighbours.draw(),
            )
        )
        if self.neighbours is not None:
            self.neighbours.arrived(caller.namespace, caller.tokens[:full])
        if self.orchestrator is not None:
            self.orchestrator.arrived(caller.namespace, caller.tokens[:full])

    def end(self, caller: Caller) -> None:
        """Forget a request that has ended for its caller."""
        del self._callers[caller.request_id]

    def leave_tokens(self, caller: Caller, tags: list[int]) -> None:
        """Keep the tokens that a request leaves, which operations may name until the core forgets them."""
        self._left[caller.request_number] = tags

    def tokens_left(self, request_number: int) -> list[int]:
        """Return the tags of the tokens that a request left."""
        if request_number not in self._left:
            raise Violation(f"the tokens of request number {request_number} were forgotten while they are needed")
        return self._left[request_number]

    def tags_put(self, command: commands.StorePages | commands.FetchPages) -> list[int]:
        """Return the tags of the prompt whose pages are put."""
        if isinstance(command, commands.StorePages) and command.request_number:
            return self.tokens_left(command.request_number)
        namespace, keys = self.core.keys_put(command.op)
        return self.contents.tags(namespace, keys, self.settings.key_bytes)

    def lose_writer(self, writer: str) -> None:
        """Report that a peer is unreachable."""
        event = events.WriterLost(at_s=self.now_s, writer=writer, cause="injected")
        for room in self.core.rooms.of_writer(writer):
            self._lose(room.request.request_id)
        self.step(event)

    def flip_one(self, pool: SimulatedPool, pages: PageIds) -> None:
        """Flip a bit of one of these host pages, if that fault strikes."""
        if self.faults.hits("host_page_is_flipped"):
            pool.flipped.add(self._random.choice(pages))

    def note_losses(self, event: events.Event) -> None:
        """Count the loss of a live room that an event ends: its request may fail."""
        if isinstance(event, events.RoomRefused | events.RoomFailed) and self.core.rooms.live(
            event.request_id, event.generation
        ):
            self._lose(event.request_id)

    def _lose(self, request_id: str) -> None:
        self._callers[request_id].losses += 1

    def _attempts(self) -> dict[str, int]:
        """Attempts of live requests at their prefills."""
        return {request_id: request.attempts.count for request_id, request in self.core.state.requests.items()}

    # --- The core ---

    def step(self, event: events.Event) -> None:
        """Pass an event to the core, and execute its commands."""
        if self._is_stepping:
            raise Violation("a command was answered before its step was over")
        self._is_stepping = True
        self.event_count += 1
        self.recent.append((event, []))
        self.raising.begin_step()
        attempts = self._attempts() if isinstance(event, events.ClockAdvanced) else {}
        wishes = self.core.step(event)
        for request_id, count in self._attempts().items() if attempts else ():
            if count > attempts.get(request_id, count):
                self._lose(request_id)  # Its prefill sent nothing within its share of the deadline.
        self.raising.end_step()
        self.recent[-1] = (event, wishes)
        self.digest = zlib.crc32(ENCODER.encode(event), self.digest)
        for wish in wishes:
            self.digest = zlib.crc32(ENCODER.encode(wish), self.digest)
            self._execute[type(wish)](wish)
        self._is_stepping = False
        for pool in (self.core.state.device, self.core.state.host):
            if pool.free + pool.owned + pool.cached + pool.draining != pool.total:
                raise Violation(f"pool {pool.name} does not add up")
        self.component_pages.check_sums()
        self.component_pages.check_moves(self.core)
        if not any(isinstance(wish, commands.SendAbort) for wish in wishes):
            # A room left in the same step may have pages in the quarantine that it extended into.
            self._check_quota({request_id for request_id, state in self.core.moves if state is State.MATCH})
        if self.event_count % AUDIT_EVENTS == 0:
            audit(self)
        self._arm_clock()

    def _check_quota(self, admitted: set[str]) -> None:
        """Check that peers of the requests just admitted are within their quotas, or serve one large prompt alone."""
        limit = self.settings.prefill_quota_pages
        if limit is None or not admitted:
            return
        withheld: dict[str, list[int]] = {}
        for request in self.core.state.requests.values():
            if request.held.lock is not None and not request.is_ready and not request.recompute.is_chosen:
                peer = self.peers[self._callers[request.request_id].prefills[request.prefill_number]].name
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

    def tell_now(self, event: events.Event) -> None:
        """Pass on an event that was created earlier, with the current time."""
        self.step(msgspec.structs.replace(event, at_s=self.now_s))

    def _arm_clock(self) -> None:
        due_s = self.core.next_deadline_s()
        if due_s is not None and due_s < self._clock_at_s:
            late_s = self.delay() * 10 if self.faults.hits("clock_is_late") else 0.0
            self._clock_at_s = max(due_s, self.now_s) + late_s
            self.schedule.at(self._clock_at_s, self._tick)

    def _tick(self) -> None:
        self._clock_at_s = float("inf")
        due_s = self.core.next_deadline_s()
        if due_s is not None and due_s <= self.now_s:
            self.step(events.ClockAdvanced(at_s=self.now_s))
        else:
            self._arm_clock()

    # --- Commands ---

    def _nothing(self, command: commands.Command) -> None:
        pass

    def _fetch(self, command: commands.FetchPages) -> None:
        if command.peer:
            self._with_neighbours(command).fetch(command)
        elif command.component == FULL:
            self.storage.fetch(command)
        else:
            self.component_storage.fetch(command)

    def _share(self, command: commands.SharePages) -> None:
        self._with_neighbours(command).share(command)

    def _with_neighbours(self, command: commands.Command) -> Neighbours:
        if self.neighbours is None:
            raise Violation(f"{command}, but there is no other decode worker")
        return self.neighbours

    def _hinted(self, command: commands.ReportHinted) -> None:
        if self.neighbours is not None and self.neighbours.is_asked_by(command):
            self.neighbours.answered(command)
        elif self.orchestrator is not None:
            self.orchestrator.answered(command)

    def _promise(self, command: commands.SendPromise) -> None:
        caller = self._callers[command.request_id]
        settings = self.settings
        if command.generation <= self._generations.get(command.request_id, -1):
            raise Violation(f"{command} has a generation that was used before")
        self._generations[command.request_id] = command.generation
        tags = caller.tags + caller.tail
        promised_pages = -(-command.promised_tokens // settings.page_size)
        if (
            command.prompt_tokens != len(caller.tokens)
            or promised_pages + len(command.pages) != len(tags)
            or (command.promised_tokens % settings.page_size and command.promised_tokens != len(caller.tokens))
        ):
            raise Violation(f"{command} does not cover the prompt once")
        self.component_pages.check_promise(command.component_pages, command.prompt_tokens)
        prompt = Prompt(tags, caller.component_tags)
        self.rooms_out.promise(command, self.peers[caller.prefills[command.prefill]], prompt)

    def _recompute(self, command: commands.Recompute) -> None:
        caller = self._callers[command.request_id]
        assert isinstance(caller.client, Client)
        caller.client.recompute(caller, command)

    def _ready(self, command: commands.ReportReady) -> None:
        caller = self._callers[command.request_id]
        caller.ends.append("READY")
        self._count_end(caller, "READY")
        self.device.expect(command.pages, caller.tags + caller.tail, command.request_id)
        if self.early_callers is not None:
            self.early_callers.ready(command)
        if sum(command.sources.values()) != len(caller.tokens) or min(command.sources.values()) < 0:
            raise Violation(f"{command} has sources that are not {len(caller.tokens)} tokens")
        caller.pages, caller.reserve = command.pages[:], command.reserve[:]
        if (command.component_pages is None) != (not self.settings.components):
            raise Violation(f"{command} has tails although there are no components, or none although there are")
        component_pages = command.component_pages or ()
        caller.component_pages = LiveComponents(component_pages, len(caller.tokens))
        self.check_components(caller, command.request_id)
        assert isinstance(caller.client, Client)
        caller.client.ready(caller)

    def _early(self, command: commands.ReportEarly | commands.ReportLayers | commands.ReportLayersLost) -> None:
        callers = self.early_callers
        if callers is None:
            raise Violation(f"{command}, but no caller begins early")
        match command:
            case commands.ReportEarly():
                callers.begin(command)
            case commands.ReportLayers():
                callers.advance(command)
            case commands.ReportLayersLost():
                callers.lose(command)

    def has_aborted(self, caller: Caller) -> None:
        """End what a caller that has just aborted its request still uses of its pages."""
        if self.early_callers is not None:
            self.early_callers.aborted(caller)

    # --- Used by callers that begin early ---

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.settings.page_size

    def after(self, delay_s: float, action: Callable[..., None], *arguments: object) -> None:
        """Schedule an action."""
        self.schedule.after(delay_s, action, *arguments)

    def early_caller(self, request_id: str) -> Caller:
        """Return the caller of a live request."""
        return self._callers[request_id]

    @property
    def may_abort(self) -> bool:
        """Whether callers abort between layers."""
        return self.faults.is_on("abort")

    def abort_early(self, caller: EarlyCaller) -> None:
        """Abort the request, unless it has ended."""
        if self._callers.get(caller.request_id) is caller:
            assert isinstance(caller, Caller)
            caller.client.abort(caller)

    def _restored(self, command: commands.ReportRestored) -> None:
        caller = self._callers[command.request_id]
        caller.ends.append(command.cause)
        self._count_end(caller, f"partial: {command.cause}" if command.cause else "READY")
        self._check_cause(caller, command.cause, command.detail)
        assert isinstance(caller.client, LendingClient)
        caller.client.restored(caller, command)

    def _offered(self, command: commands.ReportOffered) -> None:
        self.offered_by.pop(command.offer).offered(command)

    def check_components(self, caller: Caller, who: str) -> None:
        """Check the component pages of a ready request."""
        self.component_pages.check_ready(caller.component_pages.tables, len(caller.tokens), caller.component_tags, who)

    def _failed(self, command: commands.ReportFailed) -> None:
        caller = self._callers[command.request_id]
        if caller.is_ready and command.cause == "internal error":
            # A rule raised after the restore had succeeded: the request fails although its caller already had it.
            caller.ends = []
            if all(backup.request_number != caller.request_number for backup in self.core.backups):
                self._left.pop(caller.request_number, None)
            if self.retracting.pop(caller.request_id, None):
                self.retracted_ids.remove(caller.request_id)
        caller.ends.append(command.cause)
        self._count_end(caller, command.cause)
        if self.settings.lends_device and command.cause not in ("aborted", "internal error"):
            raise Violation(f"{command}, but with lent pages that is a partial outcome")
        self._check_cause(caller, command.cause, command.detail)
        caller.client.failed(caller)

    def _check_cause(self, caller: Caller, cause: str, detail: str) -> None:
        allowed = {
            "": True,
            "aborted": caller.has_aborted,
            "deadline": caller.deadline_at_s <= self.now_s,
            "internal error": Injected.__name__ in detail,
            "recompute failed": caller.recompute_failed,
            **dict.fromkeys(PREFILL_CAUSES, caller.losses >= len(caller.prefills) * self.settings.attempts_per_prefill),
        }
        if not allowed.get(cause, False):
            raise Violation(f"{caller.request_id} ended by {cause!r}, but nothing of that kind has happened to it")

    def _count_end(self, caller: Caller, end: str) -> None:
        if len(caller.ends) > 1:
            raise Violation(f"{caller.request_id} ended more than once: {caller.ends}")
        self.ends[end] = self.ends.get(end, 0) + 1

    def _give_reserve(self, command: commands.GiveReserve) -> None:
        self._callers[command.request_id].reserve += command.pages

    def _retracted(self, command: commands.ReportRetracted) -> None:
        caller, tokens = self.retracting.pop(command.request_id)
        assert isinstance(caller.client, Client)
        caller.client.retracted(caller, tokens, command)

    def _forget_tokens(self, command: commands.ForgetTokens) -> None:
        if self._left.pop(command.request_number, None) is None:
            raise Violation(f"{command}, which were forgotten before")

    # --- The end ---

    def _check_end(self) -> None:
        audit(self)
        if self.orchestrator is not None:
            self.orchestrator.check_end()
        if self.neighbours is not None:
            self.neighbours.check_end()
        core = self.core
        if self._callers:
            stuck = next(iter(self._callers))
            raise Violation(f"{len(self._callers)} requests never ended, among them {core.request(stuck)}")
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
        if left or not core.is_idle or core.next_deadline_s() is not None:
            raise Violation(f"all requests have ended, but the core still holds {left}")
        is_quiet = self.device.is_quiet and self.host.is_quiet and self.component_pages.is_quiet
        if self._left or self.outcomes.open_count or not is_quiet:
            raise Violation("all requests have ended, but tokens or operations are left")


def _encode_array(value: object) -> bytes:
    assert hasattr(value, "tobytes"), value
    encoded = value.tobytes()
    assert isinstance(encoded, bytes)
    return encoded


ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode_array)
