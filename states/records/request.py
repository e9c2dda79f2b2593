"""The request record, and the records that belong to a request.

    Request ──▶ Admission, StorageAnswer, Holdings, ...  what is of the request alone (`records.request_parts`)
            ──▶ Load                 device pages of the tree whose contents are on their way; requests share loads
            ──▶ RoomRecord           pages that prefill was asked to write (`records.span`)
            ──▶ Ahead                host pages fetched while the request waits for device pages (`records.ahead`)
            ──▶ RequestComponents    pages of components, and their fetches from storage (`records.reads`)
            ──▶ Loan                 device pages of the embedder, if the engine has none of its own

The records of this module refer to one another in both directions. They hold facts and derived properties
only. The rules that change them are in the rooms of each concept above this one: `loads`, `handover`, `components`, and
`restore`, `plan_fetches` and `ready` of `request`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from tidekv.states.component_specs import ComponentTable
from tidekv.states.records.ahead import Ahead
from tidekv.states.records.component_plan import ComponentPlan
from tidekv.states.records.loan import Loan
from tidekv.states.records.reads import ComponentFetch
from tidekv.states.records.request_parts import (
    Admission,
    Attempts,
    EarlyRecord,
    Ending,
    Fallbacks,
    Holdings,
    RecomputeRecord,
    Sources,
    StorageAnswer,
)
from tidekv.states.records.span import Span
from tidekv.states.records.stages import ComponentStage, Stage, State
from tidekv.states.types import FULL, NO_PAGES, PageIds, page_ids, without

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tidekv.states.events import ChunkReceived, RequestArrived
    from tidekv.states.prefix.component_index import ComponentIndex, ComponentReceipt
    from tidekv.states.prefix.index import PrefixIndex, Receipt
    from tidekv.states.prefix.node import Node
    from tidekv.states.settings import CoreSettings

    RoomKey: TypeAlias = tuple[str, int]


class Request:
    """One request, from its arrival until it has given everything back. Compared by identity.

    Owners of the prompt's pages once the plan is fixed:

        [0, promised)            the tree, locked by `lock`; contents of some are still on their way (`loads`)
        [promised, page_count)   the request, as `held.own`; prefill writes them (span 0 of the room)

    With shared transfers, the full pages of the second part are in the tree as well, under a load. From READY on, the
    tree owns the full pages of a cached prompt, and `held.own` keeps the pages that are not in the tree.

    With lent pages (`lent`), the tree has no device pages: `held.own` are those of the second part, loads have those of
    the first part that were not held from the start, and the request ends with READY.
    """

    __slots__ = (
        "admission",
        "ahead",
        "answer",
        "arrival",
        "arrived_at_s",
        "attempts",
        "cache",
        "can_recompute",
        "component_pages",
        "deadline_at_s",
        "early",
        "ending",
        "fallbacks",
        "first_generation",
        "full_pages",
        "generation",
        "held",
        "keys",
        "lent",
        "loads",
        "namespace",
        "page_count",
        "peers",
        "prefills",
        "priority",
        "prompt_tokens",
        "recompute",
        "request_id",
        "request_number",
        "rest",
        "room",
        "sources",
        "state",
        "tokens_max",
    )

    def __init__(self, event: RequestArrived, *, arrival: int, settings: CoreSettings) -> None:
        self.request_id = event.request_id
        self.request_number = event.request_number
        self.keys = event.keys
        self.rest = event.rest
        self.prompt_tokens = event.prompt_tokens
        self.namespace = event.namespace
        self.prefills = event.prefills
        self.peers = event.peers
        self.deadline_at_s = event.deadline_at_s
        self.priority = event.priority
        self.tokens_max = event.tokens_max
        self.cache = event.cache
        self.can_recompute = event.can_recompute
        self.arrived_at_s = event.at_s
        self.arrival = arrival
        self.page_count = settings.pages_of(event.prompt_tokens)
        self.full_pages = len(event.keys) // settings.key_bytes
        self.first_generation = event.generation

        self.state = State.PREALLOC
        self.generation = event.generation
        attempts_max = len(event.prefills) * settings.attempts_per_prefill
        self.attempts = Attempts(attempts_max, retries_late=settings.retries_late)
        self.admission = Admission()
        self.answer = StorageAnswer()
        self.fallbacks = Fallbacks()
        self.recompute = RecomputeRecord()
        self.early = EarlyRecord(is_wanted=event.early)
        self.sources = Sources()
        self.held = Holdings()
        self.ending = Ending()
        """Progress of the caller's `finish` or `retract`."""
        self.loads: dict[Load, None] = {}
        self.room: RoomRecord | None = None
        self.component_pages: RequestComponents | None = None
        self.ahead: Ahead | None = None
        """Reads from storage that were started while it waits for device pages."""
        self.lent: Loan | None = None
        """Pages of the embedder, by group, if device pages are lent."""
        if event.lent_pages:
            self.lent = Loan(
                event.lent_pages,
                event.lent_components,
                settings.components,
                held=event.held_pages,
                page_size=settings.page_size,
            )

    def forget_plan(self) -> None:
        """Reset all fields of a plan, as for a request that waits for admission. Frees nothing."""
        self.held = Holdings()
        self.loads = {}
        self.room = None
        self.component_pages = None
        self.early.report(0)
        self.recompute.forget()
        self.sources.forget()

    def change_priority(self, priority: int) -> None:
        """Give the request another priority. `Queue.move` moves one in the queue."""
        self.priority = priority

    def change_deadline(self, at_s: float) -> None:
        """Give the request another deadline."""
        self.deadline_at_s = at_s

    def begin_generation(self) -> None:
        """Begin a new generation without a plan: what the last one has under way is not of this request any more."""
        self.generation += 1
        self.forget_plan()

    def enter_room(self, room: RoomRecord) -> None:
        """Note the room that prefill writes to."""
        self.room = room

    def leave_room(self) -> None:
        """Note that the request has no room any more."""
        self.room = None

    def hold_components(self) -> RequestComponents:
        """Begin to hold component pages."""
        self.component_pages = RequestComponents(self)
        return self.component_pages

    def give_up_components(self) -> RequestComponents | None:
        """Return the component pages, which the caller of this method owns from now on."""
        component_pages, self.component_pages = self.component_pages, None
        return component_pages

    def look_ahead(self, attachment: int) -> Ahead:
        """Return the record of the request's look-ahead reads, made at the first call."""
        if self.ahead is None:
            self.ahead = Ahead(attachment=attachment)
        return self.ahead

    def end_look_ahead(self) -> None:
        """Note that all look-ahead reads are given up, or were adopted by the plan."""
        self.ahead = None

    def wait_no_more(self, load: Load) -> None:
        """Note that the request does not wait for the load any more."""
        del self.loads[load]

    @property
    def prefill_number(self) -> int:
        """Place in `prefills` of the instance that serves the present generation."""
        return (self.attempts.first + self.attempts.count) % len(self.prefills)

    @property
    def prefill(self) -> str:
        """Name of the prefill instance that serves the present generation; "" if the caller computes the rest."""
        return "" if self.recompute.is_last_resort else self.prefills[self.prefill_number]

    @property
    def waits_for_admission(self) -> bool:
        """Whether it is in the queue and holds no device pages."""
        return self.state is State.PREALLOC

    @property
    def is_ready(self) -> bool:
        """Whether the restore has ended and the caller uses the pages."""
        return self.state is State.READY

    @property
    def is_beyond_plan(self) -> bool:
        """Whether it has left MATCH and waits for the operations of its plan."""
        return self.state in (State.PREFETCH, State.LOCAL_RESTORE, State.TRANSFER)

    def count_raise(self, taking: str) -> int:
        """Count an exception of the step that handles `taking`; return the count of this step."""
        return self.fallbacks.count_raise(self.state.value, taking)

    def raises_of(self, taking: str) -> int:
        """How often the step that handles `taking` has raised in the present state."""
        return self.fallbacks.raises_of(self.state.value, taking)

    def note_loaded(self, first: int, count: int, source: str) -> None:
        """Note that pages [first, first + count) are in place, from this source (see `Sources`)."""
        self.sources.note(source, count)
        if self.lent is not None:
            self.lent.full.note(first, count, source)

    @property
    def restore_limit(self) -> int:
        """Tiers that the plan may not use after fallbacks: 0 all allowed, 1 no storage, 2 neither storage nor host."""
        return 2 if self.recompute.is_chosen else min(self.fallbacks.raised, 2)

    @property
    def fetches_components(self) -> bool:
        """Whether pages of components are being fetched from storage."""
        return self.component_pages is not None and any(
            fetch.stage is ComponentStage.FETCHING for fetch in self.component_pages.fetches
        )

    @property
    def waits_for_components(self) -> bool:
        """Whether copies or fetches of its components are under way, or its caller writes to records that were lost."""
        return self.component_pages is not None and (self.component_pages.copies > 0 or self.early.is_spoilt)

    @property
    def waits_for_sender(self) -> bool:
        """Whether it waits for component pages that the room of another request brings."""
        return self.component_pages is not None and self.component_pages.sender is not None

    @property
    def fetches(self) -> list[Load]:
        """Loads of its plan that are still in stage FETCHING, in page order."""
        return [load for load in self.loads if load.stage is Stage.FETCHING]

    @property
    def is_planned(self) -> bool:
        """Whether the plan is fixed: prefill, or the caller itself, was asked for the rest of the prompt."""
        return self.room is not None or self.recompute.has_begun

    def __repr__(self) -> str:
        return f"<Request {self.request_id!r} generation {self.generation} {self.state.value}>"


# --- Loads ---


class Load:
    """A run of device pages whose contents are on their way: of the tree, of one or more nodes in path order, or lent.

    They are pages [first, first + page_count) of every prompt that shares the load.
    """

    __slots__ = (
        "begun_at_s",
        "cause",
        "fetch_until_s",
        "first",
        "host_pages",
        "is_damaged",
        "is_drained",
        "layers",
        "lent",
        "lock",
        "nodes",
        "op",
        "overdue_at_s",
        "pin",
        "planned_s",
        "queued_pages",
        "received",
        "sender",
        "source",
        "span",
        "stage",
        "tier",
        "waiters",
    )

    def __init__(self, *, first: int, tier: str, stage: Stage) -> None:
        self.first = first
        self.nodes: list[Node] = []
        self.lent: PageIds = NO_PAGES[:]
        """Its destination, if device pages are lent: then it has no nodes."""
        self.source: PageIds = NO_PAGES[:]
        """With lent pages, the host pages of the tree that it copies, under `pin`."""
        self.is_drained = False
        """Whether its lent pages are in the quarantine."""
        self.lock: Receipt | None = None
        self.tier = tier
        self.stage = stage
        self.op = 0
        self.begun_at_s, self.queued_pages = 0.0, 0
        """When its fetch or copy began, and the pages of all such under way then, its own included."""
        self.fetch_until_s = 0.0
        """Deadline of its fetch."""
        self.planned_s = 0.0
        """The time that its fetch was expected to take when it was planned; 0: unknown."""
        self.overdue_at_s = float("inf")
        """When its fetch is overdue, if only this fetch keeps a request waiting."""
        self.cause = ""
        """Key of `LOAD_CAUSES` if it failed."""
        self.layers = 0
        """Leading layers of all its pages that its copy by layer has brought."""
        self.is_damaged = False
        """Whether a host page of its nodes did not have its checksum: they leave host memory after its end."""
        self.pin: Receipt | None = None
        """Pin on its nodes in host memory, if these are the source of its copy."""
        self.host_pages: PageIds = NO_PAGES[:]
        """Host pages that belong to the load, not to the tree: the destination of its fetch."""
        self.waiters: dict[Request, int] = {}
        """Requests that wait for the load, each with the number of leading pages that it needs."""
        self.sender: Request | None = None
        """The request whose room brings the pages, in stage RECEIVING."""
        self.span: Span | None = None
        """For a shared transfer, span 0 of the sender's room. None for an extend, and outside of RECEIVING."""
        self.received = 0
        """End of the received part of `span` when the watch on a stalled transfer was last set."""

    @property
    def page_count(self) -> int:
        """Number of its device pages."""
        count = len(self.lent)
        for node in self.nodes:
            count += node.page_count
        return count

    @property
    def device_pages(self) -> PageIds:
        """Device pages of all its nodes, or lent pages: the destination."""
        pages = self.lent[:]
        for node in self.nodes:
            assert node.device is not None
            pages += node.device
        return pages

    def add_node(self, node: Node) -> None:
        """Add the next node of its path."""
        self.nodes.append(node)

    def drop_node(self) -> None:
        """Remove the last node, which has left the tree or is no destination of the load any more."""
        self.nodes.pop()

    def split(self, upper: Node, lower: Node) -> None:
        """Insert `upper` before `lower`: the index has split one of the nodes."""
        self.nodes.insert(self.nodes.index(lower), upper)

    def lend(self, pages: PageIds) -> None:
        """Make lent pages the destination."""
        self.lent = pages

    def take_lent(self) -> PageIds:
        """Give up the lent pages; the caller of this method owns them."""
        lent, self.lent = self.lent, NO_PAGES[:]
        return lent

    def was_drained(self) -> None:
        """Note that the lent pages are in the quarantine."""
        self.is_drained = True

    def was_locked(self, lock: Receipt) -> None:
        """Note the lock on its nodes."""
        self.lock = lock

    def unlock(self, index: PrefixIndex) -> None:
        """Give back the lock, if there is one. Can be called again after an exception."""
        if self.lock is not None:
            index.unlock(self.lock)
            self.lock = None

    def own_host(self, pages: PageIds) -> None:
        """Own these host pages, and no others."""
        self.host_pages = pages

    def copy_from(self, pin: Receipt | None, source: PageIds | None = None) -> None:
        """Note the pin on the source of its copy, or that it has none; with lent pages, the host pages as well."""
        self.pin = pin
        if source is not None:
            self.source = source

    def unpin(self, index: PrefixIndex) -> Node | None:
        """Give back the pin; return the node that it was on, or None. Can be called again after an exception."""
        if self.pin is None:
            return None
        leaf = self.pin.node
        index.unpin(self.pin)
        self.pin = None
        return leaf

    def note_damage(self, *, is_damaged: bool) -> None:
        """Note whether a damaged host page is to leave host memory after the load's end."""
        self.is_damaged = is_damaged

    def run_as(self, op: int) -> None:
        """Note the operation that brings the pages, or that watches the room that does; 0 for none."""
        self.op = op

    def was_queued(self, at_s: float, queued_pages: int, *, until_s: float, page_s: float = 0.0) -> None:
        """Note when its fetch or copy began, all pages under way then, the deadline, and the seconds of a page."""
        self.begun_at_s, self.queued_pages, self.fetch_until_s = at_s, queued_pages, until_s
        self.planned_s = queued_pages * page_s

    def expect_by(self, at_s: float) -> None:
        """Note when its fetch is overdue."""
        self.overdue_at_s = at_s

    def copy(self) -> None:
        """Note that its copy to the device has begun."""
        self.stage = Stage.COPYING

    def layers_copied(self, layers: int) -> None:
        """Note how many leading layers its copy has brought."""
        self.layers = layers

    def fail(self, cause: str) -> None:
        """Note that it has lost its source, and the key of `LOAD_CAUSES` that says why."""
        self.stage, self.cause = Stage.FAILED, cause

    def reclaim(self) -> None:
        """Note that its pages are given up."""
        self.stage = Stage.RECLAIMING

    def receive_from(self, sender: Request, span: Span | None = None) -> None:
        """Note the request whose room brings the pages; for a shared transfer, the span as well."""
        self.sender, self.span = sender, span
        self.stage = Stage.RECEIVING

    def stop_receiving(self) -> None:
        """Note that no room brings the pages, or that they are all in place: there is nothing to watch."""
        if self.span is not None:
            self.op, self.span = 0, None
        self.sender = None

    def note_received(self, received: int) -> None:
        """Note the end of the received part of its span, at the begin of a watch."""
        self.received = received

    def add_waiter(self, request: Request, page_count: int) -> None:
        """Let a request wait for the first `page_count` pages."""
        self.waiters[request] = page_count
        request.loads[self] = None

    def remove_waiter(self, request: Request) -> None:
        """Let a request wait no more."""
        del self.waiters[request]
        request.wait_no_more(self)

    def forget_waiters(self) -> None:
        """Remove all waiters, which do not wait for it any more."""
        self.waiters = {}

    def hand_rest(self, rest: Load, at: int, *, lock: Receipt | None = None) -> None:
        """Pass what belongs to the pages starting at `at` to `rest`, except for the waiters.

        With nodes, it has been split at `at`; `lock` is on its shorter path, and `rest` takes over its present one.
        """
        rest.cause, rest.sender, rest.span, rest.is_damaged = self.cause, self.sender, self.span, self.is_damaged
        rest.host_pages, self.host_pages = self.host_pages[at:], self.host_pages[:at]
        rest.lent, self.lent = self.lent[at:], self.lent[:at]
        rest.lock, self.lock = self.lock, lock
        pages = kept = 0
        while kept < len(self.nodes) and pages < at:
            pages += self.nodes[kept].page_count
            kept += 1
        rest.nodes, self.nodes = self.nodes[kept:], self.nodes[:kept]

    def cut_waiter(self, request: Request, page_count: int) -> None:
        """Reduce what a waiter waits for to the first `page_count` pages."""
        self.waiters[request] = page_count


# --- Rooms ---


class RoomRecord:
    """The hand-over of one generation of a request."""

    __slots__ = (
        "answer_due_s",
        "aux_from",
        "fills",
        "generation",
        "is_aborted",
        "lost",
        "prefill",
        "ranks",
        "request",
        "spans",
        "user_op",
        "writer",
    )

    def __init__(self, request: Request, *, prefill: int) -> None:
        self.request = request
        self.generation = request.generation
        self.prefill = prefill
        self.ranks = 0
        self.writer = ""
        self.spans: list[Span] = []
        self.fills: dict[int, Load] = {}
        """By number of the span, the load that it extends into."""
        self.aux_from: set[int] = set()
        self.answer_due_s = float("inf")  # When the next prefill is asked unless this one has sent something.
        self.user_op = 0
        """Operation of the early READY on its pages: the caller may write to them until it has ended."""
        self.is_aborted = False
        self.lost: list[Load] = []
        """Loads that it was filling when its request left; they are reclaimed when the room has no writer."""

    @property
    def key(self) -> RoomKey:
        """Request id and generation: what frames of this room carry beside this process's instance and epoch."""
        return (self.request.request_id, self.generation)

    def ask_for(self, span: Span, load: Load | None = None) -> None:
        """Note a further span that prefill is asked for, which extends into a load."""
        if load is not None:
            self.fills[len(self.spans)] = load
        self.spans.append(span)

    def lose(self, load: Load) -> None:
        """Note that the request leaves while the room still fills this load."""
        if load not in self.lost:
            self.lost.append(load)

    def aux_received(self, rank: int) -> None:
        """Note that the first token came from this rank."""
        self.aux_from.add(rank)

    def await_answer(self, due_s: float) -> None:
        """Ask the next prefill at this time, unless this one has sent something by then."""
        self.answer_due_s = due_s

    def was_connected(self, writer: str, ranks: int, at_s: float) -> None:
        """Note the peer that writes to the room, and the number of its ranks."""
        self.writer, self.ranks = writer, ranks
        self.spans[0].was_connected(at_s)

    def was_aborted(self) -> None:
        """Record that prefill was asked to stop."""
        self.is_aborted = True

    def begin_use(self, op: int) -> None:
        """Note that the caller may write to its pages until this operation has ended."""
        self.user_op = op

    def end_use(self) -> None:
        """Note that the caller's operation on its pages has ended."""
        self.user_op = 0

    def span_of(self, event: ChunkReceived) -> Span | None:
        """Return the span that a chunk belongs to; None if the room has no such span or rank."""
        known = 0 <= event.span < len(self.spans) and 0 <= event.rank < self.ranks
        return self.spans[event.span] if known else None

    @property
    def pages_missing(self) -> int:
        """Number of full pages that it asked for and that have not arrived from every rank."""
        return sum([span.pages_missing(self.ranks) for span in self.spans if span.component == FULL])

    @property
    def is_written(self) -> bool:
        """Whether every rank has sent the last chunk of every span, so that the pages have no writer any more."""
        # Guards evaluate this on every event; a plain loop takes half the time of `all`.
        if not (ranks := self.ranks):
            return False
        for span in self.spans:  # noqa: SIM110
            if len(span.ended) != ranks:
                return False
        return True

    @property
    def is_complete(self) -> bool:
        """Whether all spans and the aux records of all ranks have arrived."""
        return len(self.aux_from) == self.ranks and self.is_written


# --- Components ---


class RequestComponents:
    """The component pages of one request. Outlives the request while copies into these pages are under way."""

    __slots__ = (
        "copies",
        "draining",
        "end",
        "fetches",
        "is_damaged",
        "kept",
        "lock",
        "own",
        "pin",
        "plan",
        "remote",
        "request",
        "sender",
        "waiters",
    )

    def __init__(self, request: Request) -> None:
        self.request: Request | None = request
        """None if the request has left."""
        self.own: dict[str, PageIds] = {}
        """By component, all pages that the request owns."""
        self.kept: set[tuple[str, int]] = set()
        """Entries of the caller's ComponentLeft that are in the index: component and first position."""
        self.draining: dict[str, PageIds] = {}
        """By component, lent pages of a left request that copies under way may still write to."""
        self.forget_plan()

    def forget_plan(self) -> None:
        """Reset all fields of a plan. Frees nothing."""
        self.lock: ComponentReceipt | None = None
        self.pin: ComponentReceipt | None = None
        self.copies = 0
        """Number of copies and fetches under way that it waits for: to its pages, and from there to waiters."""
        self.fetches: dict[ComponentFetch, None] = {}
        """Fetches from storage whose pages are not on the device yet."""
        self.plan = ComponentPlan()
        self.is_damaged = False
        """Whether a host page did not have its checksum: those of the prompt's end leave host memory with the pin."""
        self.remote: dict[str, PageIds] = {}
        """By component, the pages of `own` that prefill may write to."""
        self.end: tuple[str, int, bytes, bytes] | None = None
        """What its room brings for other requests as well (`tidekv.states.components.shared_ends`); None: nothing."""
        self.waiters: dict[RequestComponents, None] = {}
        """Component pages of the requests that wait for it, oldest first."""
        self.sender: RequestComponents | None = None
        """What it waits for itself, until the copies from there have started."""

    def was_locked(self, lock: ComponentReceipt) -> None:
        """Note the lock on the device pages of its end."""
        self.lock = lock

    def unlock(self, index: ComponentIndex) -> None:
        """Give back the lock, if there is one. Can be called again after an exception."""
        if self.lock is not None:
            index.unlock(self.lock)
            self.lock = None

    def was_pinned(self, pin: ComponentReceipt | None) -> None:
        """Note the pin on the host pages of its end; None if it was given back."""
        self.pin = pin

    def note_damage(self, *, is_damaged: bool) -> None:
        """Note whether a host page of its end is to leave host memory with the pin."""
        self.is_damaged = is_damaged

    def begin_plan(self, firsts: dict[str, int]) -> None:
        """Begin a plan whose first needed positions these are. `revert_plan` gets what `own` and `lock` were before."""
        self.own = dict(self.own)
        self.plan = ComponentPlan(firsts)

    def revert_plan(self, own: dict[str, PageIds], lock: ComponentReceipt | None) -> None:
        """Reset all fields of a plan, except for what the grant has taken."""
        self.forget_plan()
        self.own, self.lock = own, lock

    def let_write(self, component: str, pages: PageIds) -> None:
        """Note pages of a component that prefill may write to, too."""
        remote = self.remote.get(component, NO_PAGES[:])
        self.remote[component] = remote + without(pages, remote)

    def take(self, component: str, pages: PageIds) -> None:
        """Own further pages of a component."""
        self.own[component] = self.own.get(component, NO_PAGES[:]) + pages

    def give_up(self, component: str, pages: Iterable[int]) -> None:
        """Remove pages of a component that have another owner now, or are about to be freed."""
        self.own[component] = without(self.own[component], pages)

    def drain(self, component: str) -> None:
        """Note that all pages of a component are draining."""
        self.draining[component] = self.draining.get(component, NO_PAGES[:]) + self.own[component]
        self.own = {**self.own, component: NO_PAGES[:]}

    def pages_were_freed(self) -> None:
        """Note that all pages were given back, those that were draining excepted."""
        self.own = {}

    def drained(self) -> None:
        """Note that nothing writes to the draining pages any more, and that they were given back."""
        self.draining = {}

    def exchange(self, component: str, positions: PageIds, fresh: PageIds) -> PageIds:
        """Take fresh pages at these positions; return the old ones, which the caller of this method owns."""
        old = self.plan.exchange(component, positions, fresh)
        # Each at the place of the old one: the record of a state comes before the spare ones.
        instead = dict(zip(old, fresh, strict=True))
        self.own[component] = page_ids(instead.get(page, page) for page in self.own[component])
        self.remote[component] = without(self.remote.get(component, NO_PAGES[:]), old)
        return old

    def note_kept(self, component: str, first: int) -> None:
        """Note an entry of the caller's ComponentLeft that is in the index."""
        self.kept.add((component, first))

    def write_ended(self) -> None:
        """Note that prefill writes to none of the pages any more."""
        self.remote = {}

    def request_left(self) -> None:
        """Note that the request has left, before all copies into its pages have ended."""
        self.request = None

    def copy_began(self) -> None:
        """Wait for one more copy or fetch."""
        self.copies += 1

    def copy_ended(self) -> None:
        """Wait for one copy or fetch less."""
        self.copies -= 1

    def add_fetch(self, fetch: ComponentFetch) -> None:
        """Own a fetch from storage, until `forget_fetch`."""
        self.fetches[fetch] = None

    def forget_fetch(self, fetch: ComponentFetch) -> None:
        """Remove a fetch, if it is there: its host pages have another owner, or are free."""
        self.fetches.pop(fetch, None)

    def offer_end(self, end: tuple[str, int, bytes, bytes]) -> None:
        """Note that requests with the same end may join."""
        self.end = end

    def close_end(self) -> None:
        """Note that no further request may join."""
        self.end = None

    def join(self, sender: RequestComponents) -> None:
        """Wait for what the room of another request brings."""
        self.sender = sender
        sender.waiters[self] = None

    def part(self) -> None:
        """Wait for no other request any more."""
        if self.sender is not None:
            del self.sender.waiters[self]
            self.sender = None

    def give_up_remote(self) -> dict[str, PageIds]:
        """Remove the pages that prefill may write to and return them; the caller of this method owns them."""
        remote, self.remote = self.remote, {}
        self.own = {name: without(pages, remote.get(name, ())) for name, pages in self.own.items()}
        return remote

    def give_up_own(self) -> dict[str, PageIds]:
        """Remove all pages of the request and return them; the caller of this method owns them."""
        own, self.own = self.own, dict.fromkeys(self.own, NO_PAGES[:])
        self.remote = {}
        return {name: pages for name, pages in own.items() if pages}

    @property
    def table(self) -> tuple[ComponentTable, ...]:
        """The page table of each component, for the request's caller."""
        return self.plan.page_tables(self.own)

    @property
    def early_table(self) -> tuple[ComponentTable, ...]:
        """The page table of each component, for a caller that begins early."""
        return self.plan.page_tables(self.own, is_early=True)
