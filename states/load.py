"""What a load is: a run of the tree's device pages that something fills. `tidekv.states.loads` tells its life."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from tidekv.states.shapes import PageIds, page_ids

if TYPE_CHECKING:
    from tidekv.states.node import Node, Receipt
    from tidekv.states.request import Request
    from tidekv.states.request_tails import RequestTails
    from tidekv.states.rooms import Span


class Stage(enum.Enum):
    """Where the bytes of a load are on their way."""

    FETCHING = "FETCHING"
    COPYING = "COPYING"
    FAILED = "FAILED"
    FILLING = "FILLING"
    VOID = "VOID"


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
        """One of `LOAD_CAUSES`, where it failed."""
        self.pin: Receipt | None = None
        self.host_pages: PageIds = page_ids()
        """Host pages that the tree does not own: where a fetch lands, until they can join the tree."""
        self.sharers: dict[Request, int] = {}
        """Who waits for it, and for how many of its pages, counted from the first."""
        self.filler: Request | None = None
        """Whose room fills it."""
        self.span: Span | None = None
        """The delta of the filler that it is a part of; None: it is filled by an extend, or by no room."""
        self.landed = 0
        """Up to which page its span had landed when somebody began to wait for nothing else."""

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


class LateFetch:
    """A fetch that nobody waits for: it keeps its host pages until it has ended."""

    __slots__ = ("component", "host_pages")

    def __init__(self, host_pages: PageIds, component: str = "") -> None:
        self.host_pages = host_pages
        self.component = component
        """Whose host pages they are; nothing: full ones."""


class LateRecompute:
    """A computation of a caller that nobody waits for: it keeps its device pages until it has ended."""

    __slots__ = ("device_pages", "tails")

    def __init__(self, device_pages: PageIds, tails: RequestTails | None) -> None:
        self.device_pages = device_pages
        self.tails = tails
