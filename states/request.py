"""What the core remembers of one request, of its room, and of what it shares with others."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from tidekv.states.load import Stage
from tidekv.states.shapes import PageIds, page_ids
from tidekv.states.tail_storage import TailStage

if TYPE_CHECKING:
    from tidekv.states.events import RequestArrived, StoredTail
    from tidekv.states.index import Receipt
    from tidekv.states.load import Load
    from tidekv.states.lookahead import Ahead
    from tidekv.states.request_tails import RequestTails
    from tidekv.states.rooms import Room


DECLINED = {
    "storage_left_alone": "storage may not be asked any more",
    "out_of_reach": "what is in front of them in the prompt has left the caches",
    "below_threshold": "they are too few to be worth a fetch",
    "limit": "a limit on fetches left too little",
    "slower": "the transfer brings them sooner",
    "no_host_page": "host memory was short",
    "in_the_way": "the remains of another load of the same prompt were in the way",
    "no_tail": "there is no whole tail of every component to go on from",
}
"""Why a plan does not fetch pages that storage has: name and meaning."""


class State(enum.Enum):
    """Where a request waits. What it owns there is told in `tidekv.states.table`."""

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
        "arrival",
        "arrived_at_s",
        "attempts",
        "cache",
        "can_recompute",
        "deadline_at_s",
        "declined",
        "first_generation",
        "full_pages",
        "generation",
        "has_asked",
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
        "stored_end",
        "stored_first",
        "stored_found",
        "stored_tails",
        "table",
        "tail_limit",
        "tails",
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
        self.passed = 0
        self.short_need = 0
        self.short_version = -1
        self.query_op = 0
        self.has_asked = False
        """Whether storage was asked since it waits for admission, or need not be."""
        self.stored_first = 0
        self.stored_found = 0
        self.stored_tails: tuple[StoredTail, ...] = ()
        self.ahead: Ahead | None = None
        """What is fetched for it while it waits for device pages."""
        self.tail_limit = 0
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
        self.loads: dict[Load, None] = {}
        self.room: Room | None = None
        self.tails: RequestTails | None = None
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
    def restore_limit(self) -> int:
        """What the fallback leaves of the plan: 0 all tiers, 1 no storage, 2 neither storage nor host."""
        return 2 if self.recomputes else min(self.raised, 2)

    @property
    def fetches_tails(self) -> bool:
        """Whether pages of components are on their way from storage."""
        return self.tails is not None and any(fetch.stage is TailStage.FETCHING for fetch in self.tails.fetches)

    @property
    def waits_for_tails(self) -> bool:
        """Whether copies of its components are under way."""
        return self.tails is not None and self.tails.copies > 0

    @property
    def fetches(self) -> list[Load]:
        """Loads of its plan that storage has not brought yet, in the order of their pages."""
        return [load for load in self.loads if load.stage is Stage.FETCHING]

    @property
    def is_planned(self) -> bool:
        """Whether somebody was asked for what the local tiers do not have: prefill, or the caller itself."""
        return self.room is not None or self.recompute_op > 0 or self.recomputed

    def __repr__(self) -> str:
        return f"<Request {self.request_id!r} generation {self.generation} {self.state.value}>"
