"""Components that travel beside the KV of every page, as data: sliding windows and recurrent state.

The prefix index itself holds the `full` component: a page for every `page_size` tokens, for all of a prefix. Two kinds
of further components have pools of their own, with sizes and page ids of their own:

- `window`: KV of sliding-window attention. To go on at a boundary (the end of a page), a model needs the window's KV of
  the last `window_tokens` tokens alone: the *tail*, the trailing pages that cover them.
- `state`: the record of a recurrent layer (Mamba, linear attention) after so many tokens. Its tail is one record, that
  of the boundary itself.

Both are one thing to the index: a component page belongs to the page at its position, a record to the page that it ends
after, and *a boundary can be served where its tail is whole*. Before the first page there is nothing to keep, so
boundary 0 always can, and where a window would reach beyond the first page it ends there.

    pages          0   1   2   3   4   5   6   7          boundary 8 is served by the tail [6, 8);
    window (2)     .   .   w   w   .   .   w   w          so are 4 and 0, and no other
    state          .   .   .   s   .   .   .   .          boundary 4, and 0: with both, 4 is what can be restored

Components that have the same page ids as the full KV (a draft model's KV, indexer keys, scales: `mirror`) are layer
groups of a page, and nothing of their own here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from operator import itemgetter
from typing import Literal

import msgspec

from tidekv.states.errors import InvalidConfig
from tidekv.states.types import PageIds

ComponentKind = Literal["window", "state"]


class Component(msgspec.Struct, frozen=True, kw_only=True):
    """A component with its pools. Raises InvalidConfig where it makes no sense."""

    name: str
    kind: ComponentKind
    device_pages: int
    """Pages (of a window) or records (of a state) of its pool in device memory."""
    host_pages: int = 0
    window_tokens: int = 0
    """So many tokens before a boundary are needed to go on there; only of a window."""

    def __post_init__(self) -> None:
        if not self.name or self.name == "full":
            raise InvalidConfig(f"a component cannot be called {self.name!r}")
        if self.kind not in ("window", "state"):
            raise InvalidConfig(f"component {self.name!r}: {self.kind!r} is no kind; there are window and state")
        if self.device_pages < 1 or self.host_pages < 0:
            raise InvalidConfig(
                f"component {self.name!r} cannot have {self.device_pages} device and {self.host_pages} host pages"
            )
        if (self.window_tokens > 0) != (self.kind == "window"):
            raise InvalidConfig(
                f"component {self.name!r}, a {self.kind}, cannot have window_tokens={self.window_tokens}"
            )

    @property
    def is_shared(self) -> bool:
        """Whether many may go on from one page: those of a window are only read, a record is written in place."""
        return self.kind == "window"

    def trailing_pages(self, page_size: int) -> int:
        """Pages of a tail, at most."""
        return -(-self.window_tokens // page_size) if self.kind == "window" else 1

    def needed_from(self, prompt_tokens: int, page_size: int) -> int:
        """The first position of the tail at the end of a prompt, which need not be the end of a page."""
        return max(0, prompt_tokens - (self.window_tokens or 1)) // page_size

    def live_pages(self, page_size: int) -> int:
        """Pages that one request needs while it generates, at most: however long it grows, that is its tail and the
        page that it writes. A record is both.
        """
        return self.trailing_pages(page_size) + (self.kind == "window")


class ComponentPages(msgspec.Struct, frozen=True, array_like=True):
    """Device pages of one component at positions [first, first + len(pages)) of a prompt. None at all is said by no
    pages, which is another thing than saying nothing of the component.
    """

    component: str
    first: int
    pages: PageIds


class ComponentTable(msgspec.Struct, frozen=True, array_like=True):
    """What a request has of one component: `pages` are its tail, at positions [first, first + len(pages)); `own` are
    the pages that it may write, whether they are in use in the tail or not. The others are shared, and only read.
    """

    component: str
    first: int
    pages: PageIds
    own: PageIds


Ranges = list[tuple[int, int]]
"""Ascending, apart from each other, both ends included."""


def served_boundaries(positions: Sequence[int], trailing_pages: int) -> Ranges:
    """The boundaries, but 0, whose whole tail is among `positions` (ascending, each once)."""
    served: Ranges = []
    first = end = -1
    for position in (*positions, -1):
        if position == end:
            end += 1
            continue
        # The run [first, end) is over. A run from the first page on serves every boundary in it.
        low = 1 if first == 0 else first + trailing_pages
        if first >= 0 and low <= end:
            served.append((low, end))
        first, end = position, position + 1
    return served


def longest_boundary(limit: int, served: Sequence[Ranges]) -> int:
    """The greatest boundary up to `limit` that every component serves; 0 where there is none."""
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
