"""What the core remembers of a request: the request, and everything that hangs on it.

    Request ──▶ Load            a run of the tree's device pages that something fills, shared with other requests
            ──▶ Room ──▶ Span   what prefill was asked to write
            ──▶ Ahead           what is fetched while the request waits for device pages
            ──▶ RequestTails    pages of components, and their fetches from storage (TailFetch)

These records name one another, in both directions, so they share a module. They hold facts and answer questions about
themselves; the rules that change them are in the module of each concept (`loads`, `rooms`, `lookahead`,
`request_components`, `component_storage`, `restore`).
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, TypeAlias

from tidekv.states.components.specs import ComponentTable
from tidekv.states.types import PageIds, page_ids, without

if TYPE_CHECKING:
    from tidekv.states.commands import Fallback
    from tidekv.states.components.index import ComponentReceipt, Reserved
    from tidekv.states.events import ChunkLanded, RequestArrived, StoredComponent
    from tidekv.states.prefix.index import Receipt
    from tidekv.states.prefix.node import InsertResult, Node

    RoomKey: TypeAlias = tuple[str, int]


DECLINED = {
    "storage_left_alone": "storage may not be asked any more",
    "out_of_reach": "what is in front of them in the prompt has left the caches",
    "below_threshold": "they are too few to be worth a fetch",
    "limit": "a limit on fetches left too little",
    "slower": "the transfer brings them sooner",
    "no_host_page": "host memory was short",
    "in_the_way": "the remains of another load of the same prompt were in the way",
    "no_component": "there is no whole tail of every component to go on from",
}
"""Why a plan does not fetch pages that storage has: name and meaning."""


class State(enum.Enum):
    """Where a request waits. `tidekv.states.request.table` says what it owns there."""

    PREALLOC = "PREALLOC"
    MATCH = "MATCH"
    PREFETCH = "PREFETCH"
    LOCAL_RESTORE = "LOCAL_RESTORE"
    TRANSFER = "TRANSFER"
    READY = "READY"
    FAILED = "FAILED"


class Request:
    """One request, from its arrival until the caller gave everything back. Compared by identity.

    The prompt's pages, once the plan is fixed:

        [0, promised)            owned by the tree, locked by `lock`; some may still be under load (`loads`)
        [promised, page_count)   `own`: ours, written by prefill (span 0 of the room)

    From READY on, full pages of the prompt belong to the tree as well; `own` keeps the pages that are not in it.
    """

    __slots__ = (
        "ahead",
        "answered_at_s",
        "arrival",
        "arrived_at_s",
        "attempts",
        "cache",
        "can_recompute",
        "component_limit",
        "component_pages",
        "deadline_at_s",
        "declined",
        "ending",
        "fallbacks",
        "first_generation",
        "full_pages",
        "generation",
        "has_asked",
        "inserted",
        "keys",
        "loads",
        "lock",
        "matched",
        "namespace",
        "own",
        "page_count",
        "passed",
        "pin",
        "prefill_count",
        "priority",
        "promised",
        "prompt_tokens",
        "query_op",
        "raised",
        "raises",
        "recompute_op",
        "recomputed",
        "recomputes",
        "request_id",
        "reserve",
        "room",
        "serial",
        "short_need",
        "short_version",
        "source_pages",
        "state",
        "stored_cause",
        "stored_components",
        "stored_end",
        "stored_first",
        "stored_found",
        "table",
        "trouble",
    )

    def __init__(self, event: RequestArrived, *, arrival: int, page_count: int, full_pages: int) -> None:
        self.request_id = event.request_id
        self.serial = event.serial
        self.keys = event.keys
        self.prompt_tokens = event.prompt_tokens
        self.namespace = event.namespace
        self.prefill_count = event.prefill_count
        self.deadline_at_s = event.deadline_at_s
        self.priority = event.priority
        self.cache = event.cache
        self.can_recompute = event.can_recompute
        self.recomputes = False
        """No prefill is left: the caller computes what the device does not have."""
        self.arrived_at_s = event.at_s
        self.arrival = arrival
        self.page_count = page_count
        self.full_pages = full_pages
        self.state = State.PREALLOC
        self.generation = event.generation
        self.first_generation = event.generation
        self.attempts = 0
        self.raised = 0
        """How often a rule raised that was its own."""
        self.raises: dict[tuple[State, str], int] = {}
        """The same by step: the state, and the event that was taken."""
        self.fallbacks: tuple[Fallback, ...] = ()
        """What it gave up because rules raised, in order."""
        self.ending: Ending | None = None
        """How far the caller's `finish` or `retract` has come."""
        self.passed = 0
        self.short_need = 0
        self.short_version = -1
        self.query_op = 0
        self.has_asked = False
        """Whether storage was asked since it waits for admission, or need not be."""
        self.answered_at_s = float("inf")
        """When storage answered last: infinite if it has not, failed or was late."""
        self.stored_first = 0
        self.stored_found = 0
        self.stored_components: tuple[StoredComponent, ...] = ()
        self.ahead: Ahead | None = None
        """What is fetched for it while it waits for device pages."""
        self.component_limit = 0
        """What it uses of cached components: 0 all, 1 nothing of storage, 2 nothing that is to be loaded from the host
        either, 3 nothing.
        """
        self.trouble = ""
        """Why it fell back last, in words. Nothing is decided by it, nor by `declined`."""
        self.forget_plan()

    def forget_plan(self) -> None:
        """Start over with nothing held: the state of a request that waits for admission."""
        self.lock: Receipt | None = None
        self.pin: Receipt | None = None
        self.own: PageIds = page_ids()
        self.table: PageIds = page_ids()
        self.reserve: PageIds = page_ids()
        self.inserted: InsertResult | None = None
        """What the tree took of its pages, while they are being kept."""
        self.loads: dict[Load, None] = {}
        self.room: Room | None = None
        self.component_pages: RequestComponents | None = None
        self.stored_end = 0
        """With components: where it goes on from with what storage brings; 0: where the caches end."""
        self.stored_cause = ""
        """Why storage does not bring more than that: one of `DECLINED`."""
        self.recompute_op = 0
        self.recomputed = False
        self.matched = 0
        self.promised = 0
        self.declined: tuple[str, int] = ("", 0)
        """Why so many pages that storage has are not fetched: one of `DECLINED`, or nothing."""
        self.source_pages = {"l1": 0, "l2": 0, "l3": 0, "transfer": 0}

    @property
    def waits_for_admission(self) -> bool:
        """Whether it waits in the queue, and holds nothing."""
        return self.state is State.PREALLOC

    @property
    def is_ready(self) -> bool:
        """Whether the restore is over, and the caller has the pages."""
        return self.state is State.READY

    @property
    def is_beyond_plan(self) -> bool:
        """Whether it waits for what its plan has started."""
        return self.state in (State.PREFETCH, State.LOCAL_RESTORE, State.TRANSFER)

    def count_raise(self, taking: str) -> int:
        """Count a raise of the step that takes this; returns how often it has raised."""
        self.raised += 1
        step = (self.state, taking)
        count = self.raises[step] = self.raises.get(step, 0) + 1
        return count

    def raises_of(self, taking: str) -> int:
        """How often the step that takes this has raised in the state that the request is in."""
        return self.raises.get((self.state, taking), 0)

    def gave_up(self, what: str) -> bool:
        """Whether it gave this up because a rule raised: one of `FALLBACKS`."""
        return any(fallback.gave_up == what for fallback in self.fallbacks)

    @property
    def restore_limit(self) -> int:
        """What the fallback leaves of the plan: 0 all tiers, 1 no storage, 2 neither storage nor host."""
        return 2 if self.recomputes else min(self.raised, 2)

    @property
    def fetches_components(self) -> bool:
        """Whether pages of components are on their way from storage."""
        return self.component_pages is not None and any(
            fetch.stage is ComponentStage.FETCHING for fetch in self.component_pages.fetches
        )

    @property
    def waits_for_components(self) -> bool:
        """Whether copies of its components are under way."""
        return self.component_pages is not None and self.component_pages.copies > 0

    @property
    def fetches(self) -> list[Load]:
        """Loads of its plan that storage has not brought yet, in the order of their pages."""
        return [load for load in self.loads if load.stage is Stage.FETCHING]

    @property
    def is_planned(self) -> bool:
        """Whether prefill, or the caller itself, was asked for what the local tiers do not have."""
        return self.room is not None or self.recompute_op > 0 or self.recomputed

    def __repr__(self) -> str:
        return f"<Request {self.request_id!r} generation {self.generation} {self.state.value}>"


class Ending:
    """How far the end of a READY request has come, so that it can be taken up again after a raise."""

    __slots__ = ("inserted", "is_backed_up")

    def __init__(self) -> None:
        self.inserted = -1
        """Pages that were new to the cache; -1: they are not kept yet."""
        self.is_backed_up = False
        """Whether its backup has begun, or there will be none."""


# --- Loads ---


class Stage(enum.Enum):
    """Where the bytes of a load are on their way."""

    FETCHING = "FETCHING"
    COPYING = "COPYING"
    FAILED = "FAILED"
    RECEIVING = "RECEIVING"
    RECLAIMING = "RECLAIMING"


LOAD_CAUSES = {
    "fetch_short": "the fetch from storage failed or was short",
    "fetch_late": "the fetch from storage was late",
    "transfer_done": "the transfer was done before the fetch from storage, and the policy waits no longer",
    "copy_failed": "the copy from host to device failed",
    "sender_left": "the request whose transfer was to bring them has left",
    "sender_slow": "the transfer of another request, which was to bring them, brought nothing for too long",
    "rule_raised": "a rule of the core raised",
}
"""Why a load fails and its pages are asked of prefill: name and meaning. Nothing is decided by it."""


class Load:
    """A run of pages of the tree under load. Pages [first, first + page_count) of every prompt that shares it."""

    __slots__ = (
        "begun_at_s",
        "cause",
        "filler",
        "first",
        "host_pages",
        "landed",
        "lock",
        "nodes",
        "op",
        "pin",
        "queued_pages",
        "sharers",
        "span",
        "stage",
        "tier",
    )

    def __init__(self, *, first: int, tier: str, stage: Stage) -> None:
        self.first = first
        self.nodes: list[Node] = []
        self.lock: Receipt | None = None
        self.tier = tier
        self.stage = stage
        self.op = 0
        self.begun_at_s = 0.0
        """When its fetch began, with so many pages under way, its own included."""
        self.queued_pages = 0
        self.cause = ""
        """One of `LOAD_CAUSES`, if it failed."""
        self.pin: Receipt | None = None
        self.host_pages: PageIds = page_ids()
        """Host pages that the tree does not own: where a fetch lands, until they can join the tree."""
        self.sharers: dict[Request, int] = {}
        """The requests that wait for it, and for how many of its pages, counted from the first."""
        self.filler: Request | None = None
        """The request whose room fills it."""
        self.span: Span | None = None
        """The delta of the filler that it is a part of. None if it is filled by an extend, or by no room."""
        self.landed = 0
        """Up to which page its span had landed when a request began to wait for nothing else."""

    @property
    def page_count(self) -> int:
        """Pages under load."""
        count = 0
        for node in self.nodes:
            count += node.page_count
        return count

    @property
    def device_pages(self) -> PageIds:
        """The pages that are being filled."""
        pages = page_ids()
        for node in self.nodes:
            assert node.device is not None
            pages += node.device
        return pages

    def split(self, upper: Node, lower: Node) -> None:
        """The index split one of the nodes."""
        at = self.nodes.index(lower)
        self.nodes.insert(at, upper)


# --- Rooms ---


class Span:
    """Pages [first, first + count) of the prompt that a room asked for; the cursor of each rank only grows."""

    __slots__ = ("asked_at_s", "count", "cursors", "ended", "first", "load", "queued_pages")

    def __init__(
        self, first: int, count: int, load: Load | None, *, asked_at_s: float = 0.0, queued_pages: int = 0
    ) -> None:
        self.asked_at_s = asked_at_s
        """When it was asked for, with so many pages under way from prefill, its own included."""
        self.queued_pages = queued_pages
        self.first = first
        self.count = count
        self.load = load
        self.cursors: dict[int, int] = {}
        self.ended: set[int] = set()

    def continues(self, event: ChunkLanded) -> bool:
        """Whether a chunk begins at its rank's cursor and ends within the span."""
        cursor = self.cursors.get(event.rank, self.first)
        return (
            event.first == cursor
            and 0 <= event.count <= self.first + self.count - cursor
            and event.rank not in self.ended
        )

    def landed(self, ranks: int) -> int:
        """Up to which page of the prompt it has come from every rank."""
        return self.first + self.count - self.pages_missing(ranks)

    def pages_missing(self, ranks: int) -> int:
        """Pages that have not come from every rank."""
        if not ranks:
            return self.count
        return self.first + self.count - min(self.cursors.get(rank, self.first) for rank in range(ranks))


class Room:
    """One hand-over of one generation of a request."""

    __slots__ = ("aux_from", "generation", "is_aborted", "lost", "prefill", "ranks", "request", "spans", "writer")

    def __init__(self, request: Request, *, prefill: int) -> None:
        self.request = request
        self.generation = request.generation
        self.prefill = prefill
        self.ranks = 0
        self.writer = ""
        self.spans: list[Span] = []
        self.aux_from: set[int] = set()
        self.is_aborted = False
        self.lost: list[Load] = []
        """Loads that it was filling when its request left."""

    @property
    def key(self) -> RoomKey:
        """What frames of this room carry, beside this process's own instance and epoch."""
        return (self.request.request_id, self.generation)

    def span_of(self, event: ChunkLanded) -> Span | None:
        """The span that a chunk is for; None where this room asked for no such span, or not from that rank."""
        known = 0 <= event.span < len(self.spans) and 0 <= event.rank < self.ranks
        return self.spans[event.span] if known else None

    @property
    def is_written(self) -> bool:
        """Whether the last chunk of every span has come from every rank: its pages have no writer any more."""
        # Every guard asks this: a plain loop takes half of what `all` does.
        ranks = self.ranks
        if not ranks:
            return False
        for span in self.spans:  # noqa: SIM110
            if len(span.ended) != ranks:
                return False
        return True

    @property
    def is_complete(self) -> bool:
        """Whether the room has brought all that was asked for, aux included."""
        return len(self.aux_from) == self.ranks and self.is_written


# --- Look-ahead ---


class AheadRun:
    """One read ahead: `host_pages` are the run's until they join the tree."""

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
    """What is fetched ahead for one request that waits."""

    __slots__ = ("attachment", "first", "joined", "pin", "runs", "taken")

    def __init__(self, *, first: int, attachment: int) -> None:
        self.first = first
        self.joined = first
        self.attachment = attachment
        self.pin: Receipt | None = None
        self.runs: list[AheadRun] = []
        self.taken = 0
        """Pages of the common bound that it uses."""


# --- Components ---


class RequestComponents:
    """The tails of one request, or of one that has left while copies into its pages are under way."""

    __slots__ = (
        "boundary",
        "copies",
        "fetched_pages",
        "fetches",
        "firsts",
        "kept",
        "lock",
        "own",
        "pin",
        "remote",
        "request",
        "reserved",
        "tables",
    )

    def __init__(self, request: Request, reserved: Reserved) -> None:
        self.request: Request | None = request
        """None: it has left."""
        self.reserved = reserved
        self.boundary = reserved.boundary
        self.lock: ComponentReceipt | None = reserved.lock
        self.pin: ComponentReceipt | None = reserved.pin
        self.copies = 0
        """Copies and fetches under way that the request waits for."""
        self.fetches: dict[ComponentFetch, None] = {}
        """What is to come from storage, and is not on the device."""
        self.fetched_pages = 0
        """Full pages that are to come from storage."""
        self.own = {name: tail.own for name, tail in reserved.component_pages.items()}
        self.firsts: dict[str, int] = {}
        self.tables: dict[str, PageIds] = {}
        """By component, the pages of its tail at the prompt's end, at positions from `firsts` on."""
        self.kept: set[tuple[str, int]] = set()
        """What of what the caller left is in the index: component and first position."""
        self.remote: dict[str, PageIds] = {}
        """Those of `own` that prefill may write to."""

    def give_up_remote(self) -> dict[str, PageIds]:
        """Take out the pages that prefill may write to: they are the caller's."""
        remote, self.remote = self.remote, {}
        self.own = {name: without(pages, remote.get(name, ())) for name, pages in self.own.items()}
        return remote

    @property
    def table(self) -> tuple[ComponentTable, ...]:
        """The table of each component for the request's caller."""
        return tuple(ComponentTable(name, self.firsts[name], self.tables[name], own) for name, own in self.own.items())


class ComponentStage(enum.Enum):
    """Where a tail from storage is on its way."""

    RESERVED = "RESERVED"
    FETCHING = "FETCHING"
    COPYING = "COPYING"


class ComponentFetch:
    """Pages of one component that a request gets from storage. The host pages are its own, the device pages the
    request's.
    """

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
        self.stage = ComponentStage.RESERVED
        self.begun_at_s = 0.0
        self.queued_pages = 0
