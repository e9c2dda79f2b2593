"""Data about components: KV that a model needs beside the full KV, in sliding windows and recurrent states.

The prefix index itself holds the `full` component: one page per `page_size` tokens, for the whole prefix. Two kinds of
further components have their own pools, page sizes and page ids:

- `window`: KV of sliding-window attention. To continue from a boundary (the end of a page) a model needs only the KV of
  the last `window_tokens` tokens before it: the trailing pages that cover them.
- `state`: the snapshot of a recurrent layer (Mamba, linear attention) after a number of tokens. A boundary needs one
  snapshot, the one taken exactly there.

The pages that a boundary needs of a component are its *component pages*. The index treats both kinds alike: a window
page belongs to the full page at its position, a snapshot to the page that it follows, and *a component serves a
boundary if all of its component pages are there*. Nothing precedes the first page, so every component serves boundary
0, and a window that would reach beyond the first page ends there.

    pages          0   1   2   3   4   5   6   7          boundary 8 is served by the window pages [6, 8);
    window (2)     .   .   w   w   .   .   w   w          4 and 0 are served too, and no others
    state          .   .   .   s   .   .   .   .          boundaries 4 and 0: with both, a computation can continue at 4

Components that share the page ids of the full KV (KV of a draft model, indexer keys, scales: `mirror`) are layer groups
of a page, and do not appear here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from operator import itemgetter
from typing import Literal

import msgspec

from tidekv.states.errors import InvalidConfig
from tidekv.states.types import PageIds
from tidekv.states.validation import Count, Options, short

ComponentKind = Literal["window", "state"]


class Component(msgspec.Struct, frozen=True, kw_only=True):
    """A component and its pools. Raises InvalidConfig if the values contradict each other."""

    name: str
    kind: ComponentKind
    device_pages: int
    """Pages (window) or snapshots (state) in its device pool."""
    host_pages: int = 0
    window_tokens: int = 0
    """Tokens before a boundary that are needed to continue from there; for windows only."""
    device_snapshots_max: int | None = None
    """Maximum snapshots cached on the device, for states only. None: as many as its pool has room for."""
    host_snapshots_max: int | None = None
    """The same in host memory."""

    def __post_init__(self) -> None:
        if not self.name or self.name == "full":
            raise InvalidConfig(f"a component cannot be called {self.name!r}; choose another, non-empty name")
        if self.kind not in ("window", "state"):
            raise InvalidConfig(f"component {self.name!r}: {short(self.kind)} is no kind; there are window and state")
        if self.device_pages < 1 or self.host_pages < 0:
            raise InvalidConfig(
                f"component {self.name!r} cannot have {self.device_pages} device and {self.host_pages} host pages"
            )
        if (self.window_tokens > 0) != (self.kind == "window"):
            raise InvalidConfig(
                f"component {self.name!r}, a {self.kind}, cannot have window_tokens={self.window_tokens}"
            )
        for bound in (self.device_snapshots_max, self.host_snapshots_max):
            if bound is not None and (self.kind != "state" or bound < 0):
                raise InvalidConfig(f"component {self.name!r}, a {self.kind}, cannot keep at most {bound} snapshots")

    @property
    def is_shared(self) -> bool:
        """Whether several requests may use one page: window pages are only read, a snapshot is written in place."""
        return self.kind == "window"

    def trailing_pages(self, page_size: int) -> int:
        """Maximum number of component pages of a boundary."""
        return -(-self.window_tokens // page_size) if self.kind == "window" else 1

    def needed_from(self, prompt_tokens: int, page_size: int) -> int:
        """The first position needed at the end of a prompt, which need not be the end of a page."""
        return max(0, prompt_tokens - (self.window_tokens or 1)) // page_size

    def live_pages(self, page_size: int) -> int:
        """Maximum pages that one request needs while it generates: those of its current boundary and, for windows, the
        page being written.
        """
        return self.trailing_pages(page_size) + (self.kind == "window")


class SnapshotPolicy(Options, frozen=True, kw_only=True):
    """Where snapshots of recurrent states are kept: at the ends of pages, by the kind of the place.

    A snapshot that a caller leaves at another place is given back, except at the end of what a retracted request keeps.
    """

    every_pages: Count = 0
    """Keep a snapshot after every n-th page of a prompt and its output. 0: none for that reason."""
    prompt_end: bool = True
    """Keep a snapshot after the last full page of a prompt."""
    output_end: bool = True
    """Keep a snapshot after the last full page of prompt and output, from which the next turn continues."""
    branch_points: bool = True
    """Keep a snapshot where cached prompts part: a further prompt with the same beginning continues from there."""
    per_request: Count = 0
    """Spare records of each state that a request may write beside its live one. A caller must write those that
    `RecomputeJob.snapshots` names.
    """


class ComponentPages(msgspec.Struct, frozen=True, array_like=True):
    """Device pages of one component at positions [first, first + len(pages)) of a prompt.

    An entry without pages means that none are needed, unlike a missing entry.
    """

    component: str
    first: int
    pages: PageIds


class ComponentTable(msgspec.Struct, frozen=True, array_like=True):
    """A request's pages of one component.

    `pages`: those at positions [first, first + len(pages)). `own`: all pages that the request may write, whether they
    are among `pages` or spare. The others among `pages` are shared and only read.
    """

    component: str
    first: int
    pages: PageIds
    own: PageIds


Ranges = list[tuple[int, int]]
"""Ascending, disjoint ranges; both ends are included."""


def served_boundaries(positions: Sequence[int], trailing_pages: int) -> Ranges:
    """The boundaries above 0 that are served by component pages at `positions` (ascending, without duplicates)."""
    served: Ranges = []
    first = end = -1
    for position in (*positions, -1):
        if position == end:
            end += 1
            continue
        # The run [first, end) is over. A run that begins at the first page serves every boundary in it.
        low = 1 if first == 0 else first + trailing_pages
        if first >= 0 and low <= end:
            served.append((low, end))
        first, end = position, position + 1
    return served


def longest_boundary(limit: int, served: Sequence[Ranges]) -> int:
    """The greatest boundary up to `limit` that every component serves; 0 if there is none."""
    end = limit
    while end > 0:
        lowest = min((_last_served(ranges, end) for ranges in served), default=end)
        if lowest == end:
            break
        end = lowest
    return end


def _last_served(ranges: Ranges, end: int) -> int:
    at = bisect_right(ranges, end, key=itemgetter(0))
    return min(end, ranges[at - 1][1]) if at else 0
