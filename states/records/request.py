"""The request record, and the records that belong to a request.

    Request ──▶ Admission, StorageAnswer, Holdings, ...  what is of the request alone (`records.request_parts`)
            ──▶ Load                 device pages of the tree whose contents are on their way; requests share loads
            ──▶ RoomRecord ──▶ Span  pages that prefill was asked to write
            ──▶ Ahead                host pages fetched while the request waits for device pages
            ──▶ RequestComponents    pages of components, and their fetches from storage (ComponentFetch)
            ──▶ Loan                 device pages of the embedder, if the engine has none of its own

The records refer to one another in both directions, so they share a module. They hold facts and derived properties
only. The rules that change them are in the rooms of each concept above this one: `loads`, `handover`, `components`, and
`restore`, `plan_fetches` and `ready` of `request`.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from tidekv.states.component_specs import ComponentTable
from tidekv.states.records.loan import Loan
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
from tidekv.states.types import FULL, PageIds, page_ids, without

if TYPE_CHECKING:
    from tidekv.states.events import ChunkLanded, RequestArrived
    from tidekv.states.prefix.component_index import ComponentReceipt
    from tidekv.states.prefix.index import Receipt
    from tidekv.states.prefix.node import Node
    from tidekv.states.settings import CoreSettings

    RoomKey: TypeAlias = tuple[str, int]


class State(enum.Enum):
    """State of a request, named by what it waits for. `tidekv.states.request.table` lists what it owns in each."""

    PREALLOC = "PREALLOC"
    MATCH = "MATCH"
    PREFETCH = "PREFETCH"
    LOCAL_RESTORE = "LOCAL_RESTORE"
    TRANSFER = "TRANSFER"
    READY = "READY"
    FAILED = "FAILED"


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
        "prefills",
        "priority",
        "prompt_tokens",
        "recompute",
        "request_id",
        "rest",
        "room",
        "serial",
        "sources",
        "state",
        "tokens_max",
    )

    def __init__(self, event: RequestArrived, *, arrival: int, settings: CoreSettings) -> None:
        self.request_id = event.request_id
        self.serial = event.serial
        self.keys = event.keys
        self.rest = event.rest
        self.prompt_tokens = event.prompt_tokens
        self.namespace = event.namespace
        self.prefills = event.prefills
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
        """Give the request another priority. One in the queue is moved by the queue (`Queue.move`)."""
        self.priority = priority

    def change_deadline(self, at_s: float) -> None:
        """Give the request another deadline."""
        self.deadline_at_s = at_s

    def begin_generation(self) -> None:
        """Begin a new generation: what the last one has under way is not of this request any more."""
        self.generation += 1

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
        """Return the look-ahead reads of the request, which begin if there are none."""
        if self.ahead is None:
            self.ahead = Ahead(attachment=attachment)
        return self.ahead

    def end_look_ahead(self) -> None:
        """Note that all look-ahead reads are given up, or were adopted by the plan."""
        self.ahead = None

    def wait_for(self, load: Load) -> None:
        """Note that the request waits for a load."""
        self.loads[load] = None

    def wait_no_more(self, load: Load) -> None:
        """Note that the request does not wait for the load any more."""
        del self.loads[load]

    @property
    def prefill_number(self) -> int:
        """Place in `prefills` of the instance that serves the present generation."""
        return (self.attempts.first + self.attempts.count) % len(self.prefills)

    @property
    def prefill(self) -> str:
        """Name of that instance; "" if none is left and the caller computes the rest."""
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
        """Whether copies or fetches of its components are under way."""
        return self.component_pages is not None and self.component_pages.copies > 0

    @property
    def waits_for_filler(self) -> bool:
        """Whether it waits for component pages that the room of another request brings."""
        return self.component_pages is not None and self.component_pages.filler is not None

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


class Stage(enum.Enum):
    """Stage of a load, named by the next source of its contents. `tidekv.states.loads.loads` draws the transitions."""

    FETCHING = "FETCHING"
    COPYING = "COPYING"
    FAILED = "FAILED"
    RECEIVING = "RECEIVING"
    RECLAIMING = "RECLAIMING"


class Load:
    """A run of device pages whose contents are on their way: of the tree, of one or more nodes in path order, or lent.

    They are pages [first, first + page_count) of every prompt that shares the load.
    """

    __slots__ = (
        "begun_at_s",
        "cause",
        "fetch_until_s",
        "filler",
        "first",
        "host_pages",
        "is_damaged",
        "is_drained",
        "landed",
        "layers",
        "lent",
        "lock",
        "nodes",
        "op",
        "overdue_at_s",
        "pin",
        "queued_pages",
        "sharers",
        "source",
        "span",
        "stage",
        "tier",
    )

    def __init__(self, *, first: int, tier: str, stage: Stage) -> None:
        self.first = first
        self.nodes: list[Node] = []
        self.lent: PageIds = page_ids()
        """Its destination, if device pages are lent: then it has no nodes."""
        self.source: PageIds = page_ids()
        """With lent pages, the host pages of the tree that it copies, under `pin`."""
        self.is_drained = False
        """Whether its lent pages are in the quarantine."""
        self.lock: Receipt | None = None
        self.tier = tier
        self.stage = stage
        self.op = 0
        self.begun_at_s = 0.0
        """When its fetch began."""
        self.queued_pages = 0
        """Pages of all fetches under way when its fetch began, its own included."""
        self.fetch_until_s = 0.0
        """Deadline of its fetch."""
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
        self.host_pages: PageIds = page_ids()
        """Host pages that belong to the load, not to the tree: the destination of its fetch."""
        self.sharers: dict[Request, int] = {}
        """Requests that wait for the load, each with the number of leading pages that it needs."""
        self.filler: Request | None = None
        """The request whose room brings the pages, in stage RECEIVING."""
        self.span: Span | None = None
        """For a shared transfer, span 0 of the filler's room. None for an extend, and outside of RECEIVING."""
        self.landed = 0
        """End of the landed part of `span` when the watch on a stalled transfer was last set."""

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

    def split(self, upper: Node, lower: Node) -> None:
        """Insert `upper` before `lower`: the index has split one of the nodes."""
        at = self.nodes.index(lower)
        self.nodes.insert(at, upper)


# --- Rooms ---


class Span:
    """Pages [first, first + count) of the prompt that a room asked for, of the full KV or of a component.

    The cursor of each rank only grows.
    """

    __slots__ = ("asked_at_s", "cause", "component", "count", "cursors", "ended", "first", "load", "queued_pages")

    def __init__(
        self,
        first: int,
        count: int,
        load: Load | None,
        *,
        asked_at_s: float = 0.0,
        queued_pages: int = 0,
        component: str = FULL,
        cause: str = "",
    ) -> None:
        self.component = component
        self.cause = cause
        """Key of `LOST_CAUSES`, of a component."""
        self.asked_at_s = asked_at_s
        """When it was asked for."""
        self.queued_pages = queued_pages
        """Pages that prefill owed at that time, its own included. 0 if its throughput is not measured."""
        self.first = first
        self.count = count
        self.load = load
        self.cursors: dict[int, int] = {}
        self.ended: set[int] = set()

    def take(self, event: ChunkLanded) -> None:
        """Note a chunk that continues the span: the cursor of its rank moves to its end."""
        self.cursors[event.rank] = event.first + event.count

    def was_connected(self, at_s: float) -> None:
        """Note that its writer is known only now: the time to connect is no property of prefill's throughput."""
        self.asked_at_s = at_s

    def continues(self, event: ChunkLanded) -> bool:
        """Whether a chunk begins at its rank's cursor and ends within the span."""
        cursor = self.cursors.get(event.rank, self.first)
        return (
            event.first == cursor
            and 0 <= event.count <= self.first + self.count - cursor
            and event.rank not in self.ended
        )

    def landed(self, ranks: int) -> int:
        """End of the part that has landed from every rank, as a page of the prompt."""
        return self.first + self.count - self.pages_missing(ranks)

    def pages_missing(self, ranks: int) -> int:
        """Number of pages that have not landed from every rank."""
        if not ranks:
            return self.count
        return self.first + self.count - min(self.cursors.get(rank, self.first) for rank in range(ranks))


class RoomRecord:
    """The hand-over of one generation of a request."""

    __slots__ = (
        "answer_due_s",
        "aux_from",
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

    def await_answer(self, due_s: float) -> None:
        """Ask the next prefill at this time, unless this one has sent something by then."""
        self.answer_due_s = due_s

    def was_connected(self, writer: str, ranks: int, at_s: float) -> None:
        """Note the peer that writes to the room, and the number of its ranks."""
        self.writer, self.ranks = writer, ranks
        self.spans[0].was_connected(at_s)

    def was_aborted(self) -> None:
        """Note that prefill was told to stop."""
        self.is_aborted = True

    def begin_use(self, op: int) -> None:
        """Note that the caller may write to its pages until this operation has ended."""
        self.user_op = op

    def end_use(self) -> None:
        """Note that the caller's operation on its pages has ended."""
        self.user_op = 0

    def span_of(self, event: ChunkLanded) -> Span | None:
        """Return the span that a chunk belongs to; None if the room has no such span or rank."""
        known = 0 <= event.span < len(self.spans) and 0 <= event.rank < self.ranks
        return self.spans[event.span] if known else None

    @property
    def pages_missing(self) -> int:
        """Number of full pages that it asked for and that have not landed from every rank."""
        return sum([span.pages_missing(self.ranks) for span in self.spans if span.component == FULL])

    @property
    def is_written(self) -> bool:
        """Whether every rank has sent the last chunk of every span, so that the pages have no writer any more."""
        # Guards evaluate this on every event; a plain loop takes half the time of `all`.
        ranks = self.ranks
        if not ranks:
            return False
        for span in self.spans:  # noqa: SIM110
            if len(span.ended) != ranks:
                return False
        return True

    @property
    def is_complete(self) -> bool:
        """Whether all spans and the aux records of all ranks have landed."""
        return len(self.aux_from) == self.ranks and self.is_written


# --- Look-ahead ---


class AheadRun:
    """One look-ahead read. It owns `host_pages` until they join the tree or it is adopted by a load."""

    __slots__ = ("begun_at_s", "first", "host_pages", "is_landed", "op", "queued_pages", "request")

    def __init__(self, request: Request, *, first: int) -> None:
        self.request = request
        self.first = first
        self.host_pages: PageIds = page_ids()
        self.op = 0
        self.is_landed = False
        self.begun_at_s = 0.0
        self.queued_pages = 0


class Ahead:
    """The look-ahead reads of one waiting request. `tidekv.states.loads.look_ahead` explains the fields."""

    __slots__ = ("attachment", "components", "first", "joined", "pin", "runs", "taken")

    def __init__(self, *, attachment: int) -> None:
        self.first = 0
        self.joined = 0
        self.attachment = attachment
        self.pin: Receipt | None = None
        """None as long as no full page is read ahead."""
        self.runs: list[AheadRun] = []
        self.components: dict[str, ComponentAhead] = {}
        self.taken = 0
        """Pages that it uses of `lookahead_pages_max`."""

    def use(self, pages: int) -> None:
        """Count pages that it uses of `lookahead_pages_max`."""
        self.taken += pages

    def begin(self, first: int, pin: Receipt) -> None:
        """Begin to read full pages from this position on, behind pinned host pages."""
        self.first = self.joined = first
        self.pin = pin

    def read_nothing(self) -> None:
        """Note that no full page is read ahead, and that its pin was given back."""
        self.pin = None

    def join(self, pin: Receipt, depth_pages: int) -> None:
        """Note that the first run has joined the tree, which is pinned as far as that now."""
        self.pin = pin
        self.joined = depth_pages

    def forget_runs(self, count: int) -> None:
        """Remove the first runs: they have joined the tree, or are loads of the plan now."""
        del self.runs[:count]

    def add_component(self, read: ComponentAhead) -> None:
        """Note the read of a component's pages."""
        self.components[read.component] = read

    def forget_component(self, read: ComponentAhead) -> None:
        """Remove the read of a component's pages, if it is there: it was given up, or a fetch of the plan has it."""
        self.components.pop(read.component, None)


class ComponentAhead:
    """One look-ahead read of a component's pages. It owns `host_pages` until a fetch of the plan adopts it."""

    __slots__ = (
        "begun_at_s",
        "component",
        "host_pages",
        "is_adopted",
        "is_landed",
        "op",
        "positions",
        "queued_pages",
        "request",
    )

    def __init__(self, request: Request, component: str, positions: PageIds, host_pages: PageIds) -> None:
        self.request = request
        self.component = component
        self.positions = positions
        self.host_pages = host_pages
        self.op = 0
        self.is_landed = False
        self.is_adopted = False
        """Whether a fetch of the request's plan has taken it over."""
        self.begun_at_s = 0.0
        self.queued_pages = 0


# --- Components ---


class Snapshot:
    """A snapshot of a state that a caller takes while it computes: after `boundary` pages, in `page`."""

    __slots__ = ("boundary", "page", "place")

    def __init__(self, boundary: int, page: int, place: str) -> None:
        self.boundary = boundary
        self.page = page
        """One of the request's own pages of the state."""
        self.place = place
        """Why it is worth keeping, see `tidekv.states.components.snapshots`."""


class RequestComponents:
    """The component pages of one request. Outlives the request while copies into these pages are under way."""

    __slots__ = (
        "cause",
        "copies",
        "draining",
        "end",
        "fetches",
        "filler",
        "firsts",
        "hits",
        "is_damaged",
        "joining",
        "kept",
        "lock",
        "missing",
        "own",
        "pin",
        "received",
        "remote",
        "request",
        "resumed_pages",
        "sent_from",
        "sharers",
        "snapshots",
        "tables",
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
        """Number of copies and fetches under way that it waits for: to its pages, and from there to sharers."""
        self.fetches: dict[ComponentFetch, None] = {}
        """Fetches from storage whose pages are not on the device yet."""
        self.firsts: dict[str, int] = {}
        """By component, the first position that the end of the prompt needs."""
        self.sent_from: dict[str, int] = {}
        """By component, the first position that prefill, or a recomputing caller, writes."""
        self.tables: dict[str, PageIds] = {}
        """By component, its pages at the prompt's end, at positions from `firsts` on."""
        self.is_damaged = False
        """Whether a host page did not have its checksum: those of the prompt's end leave host memory with the pin."""
        self.joining: dict[str, int] = {}
        """By component, how many leading pages of its table join the index when the request becomes ready."""
        self.remote: dict[str, PageIds] = {}
        """By component, the pages of `own` that prefill may write to."""
        self.missing: dict[str, set[int]] = {}
        """By component, positions that have lost their source and are not asked of prefill yet."""
        self.cause = ""
        """Key of `LOST_CAUSES`: why the last ones have."""
        self.snapshots: dict[str, list[Snapshot]] = {}
        """By state, the snapshots that a recomputing caller takes, until READY."""
        self.hits: dict[str, str] = {}
        """By state, the tier that has the record of the prompt's end. Empty once it is counted."""
        self.resumed_pages = 0
        """The page from which a recomputing caller continues. 0 once it is counted."""
        self.end: tuple[str, int, bytes, bytes] | None = None
        """What its room brings for other requests as well (`tidekv.states.components.shared_ends`); None: nothing."""
        self.sharers: dict[RequestComponents, None] = {}
        """Component pages of the requests that wait for it, oldest first."""
        self.filler: RequestComponents | None = None
        """What it waits for itself, until the copies from there have started."""
        self.received: dict[str, int] = {}
        """By component, the first position that is copied from the filler."""

    def give_up_remote(self) -> dict[str, PageIds]:
        """Remove the pages that prefill may write to and return them; the caller of this method owns them."""
        remote, self.remote = self.remote, {}
        self.own = {name: without(pages, remote.get(name, ())) for name, pages in self.own.items()}
        return remote

    def give_up_own(self) -> dict[str, PageIds]:
        """Remove all pages of the request and return them; the caller of this method owns them."""
        own, self.own = self.own, {name: page_ids() for name in self.own}
        self.remote = {}
        return {name: pages for name, pages in own.items() if pages}

    @property
    def table(self) -> tuple[ComponentTable, ...]:
        """The page table of each component, for the request's caller."""
        return tuple(ComponentTable(name, self.firsts[name], self.tables[name], own) for name, own in self.own.items())

    @property
    def early_table(self) -> tuple[ComponentTable, ...]:
        """The same for a caller that begins early: it must not write to the pages that are to join the index."""
        return tuple(
            msgspec.structs.replace(each, own=without(each.own, each.pages[: self.joining.get(each.component, 0)]))
            for each in self.table
        )


class ComponentStage(enum.Enum):
    """Progress of a fetch of component pages."""

    FETCHING = "FETCHING"
    COPYING = "COPYING"


class ComponentFetch:
    """A fetch of one component's pages from storage. It owns the host pages; the request owns the device pages."""

    __slots__ = (
        "begun_at_s",
        "component",
        "component_pages",
        "device_pages",
        "host_pages",
        "op",
        "positions",
        "queued_pages",
        "stage",
    )

    def __init__(
        self, component_pages: RequestComponents, component: str, positions: PageIds, device_pages: PageIds
    ) -> None:
        self.component_pages = component_pages
        self.component = component
        self.positions = positions
        self.host_pages: PageIds = page_ids()
        self.device_pages = device_pages
        self.op = 0
        self.stage = ComponentStage.FETCHING
        self.begun_at_s = 0.0
        self.queued_pages = 0
