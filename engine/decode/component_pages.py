"""Windows and states of a READY request: the pages granted, how a window advances, and the pages kept at the end.

    position          first             full pages of the tokens kept
    a window          [ tail at the prompt's end )[ the page that is written ]…
    given             `pages`, some shared and only read, others the request's `own`
    left at the end            [ whole pages of the tail of the last boundary )

A window holds all the pages that it will ever need: when it advances to a new page, it overwrites the oldest of its own
pages behind it (`WindowPages`). A state has one record, which the model updates; it can be left if it is at the end of
a page.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from tidekv.states.errors import InvalidRequest
from tidekv.states.events import ComponentLeft
from tidekv.states.validation import short

if TYPE_CHECKING:
    from tidekv.states.components.specs import ComponentPages, ComponentTable

LeftComponents: TypeAlias = "Mapping[str, tuple[int, Sequence[int] | npt.NDArray[np.int32]]]"
"""Pages left of components, by name: `(first, pages)`, pages of its device pool at positions [first, first +
len(pages)) of the tokens; position p stands for tokens [p * page_size, (p + 1) * page_size). A record is left at the
position of the last page that it covers."""


@dataclass(frozen=True, slots=True, eq=False)
class ReadyComponent:
    """Pages of one component that a READY request has.

    `pages`: pages of its device pool at positions [first, first + len(pages)) of the prompt, which cover the window
    before its end; of a state one, the record after the prompt's last token. `own`: the pages that the request may
    write to, whether they are among `pages` or not; all others are shared, and only read.
    """

    first: int
    pages: npt.NDArray[np.int32]
    own: npt.NDArray[np.int32]

    @property
    def record(self) -> int:
        """The record of a state, which the model may write to."""
        return int(self.pages[0])


def ready_component_pages(tables: tuple[ComponentTable, ...] | None) -> dict[str, ReadyComponent]:
    """Return the component pages of a READY request, by name, from the tables in the core's command."""
    return {
        table.component: ReadyComponent(
            table.first, np.array(table.pages, dtype=np.int32), np.array(table.own, dtype=np.int32)
        )
        for table in tables or ()
    }


def shared_component_pages(pages: tuple[ComponentPages, ...] | None) -> dict[str, ReadyComponent]:
    """Return pages of components that a caller only reads, by name."""
    none = np.array([], dtype=np.int32)
    return {
        each.component: ReadyComponent(each.first, np.array(each.pages, dtype=np.int32), none) for each in pages or ()
    }


class WindowPages:
    """The pages of one window while its request generates: the tail before the page that is being written.

    `pages` are pages of the component's device pool at positions [first, first + len(pages)).
    """

    def __init__(self, tail: ReadyComponent, *, window_tokens: int, page_size: int) -> None:
        self.first = tail.first
        self.pages: list[int] = tail.pages.tolist()
        self._page_size = page_size
        self._trailing_pages = -(-window_tokens // page_size)
        self._own = frozenset(tail.own.tolist())
        in_use = set(self.pages)
        self._free = deque(page for page in tail.own.tolist() if page not in in_use)

    def grow(self, tokens: int) -> list[int]:
        """Make room for the token before position `tokens`; returns the pages that this adds, usually none. Their old
        bytes are unused. Raises InvalidRequest if that would skip a page: grow token by token.
        """
        end = -(-tokens // self._page_size)
        position = self.first + len(self.pages)
        if end <= position:
            return []
        if end > position + 1:
            raise InvalidRequest(f"a window with pages up to position {position} cannot continue at {end - 1}")
        while self.pages and self.first < position - self._trailing_pages:
            left = self.pages.pop(0)
            self.first += 1
            if left in self._own:
                self._free.append(left)
        page = self._free.popleft()
        self.pages.append(page)
        return [page]

    def left(self, tokens: int) -> tuple[int, list[int]]:
        """Return the pages to leave for this number of tokens with KV: the tail at the end of their last full page."""
        boundary = tokens // self._page_size
        first = max(self.first, boundary - self._trailing_pages)
        return first, self.pages[first - self.first : boundary - self.first] if boundary > first else []


def component_pages_left(
    request_id: str, given: Mapping[str, ReadyComponent], left: LeftComponents | None, *, full_pages: int
) -> tuple[ComponentLeft, ...]:
    """Check the pages that a caller leaves of components, against its own pages and the full pages of its tokens.

    Raises InvalidRequest, which names component and page, for pages that are not the request's at that position.
    """
    if left is None:
        return ()
    if not isinstance(left, Mapping):
        raise InvalidRequest(f"tails must be a mapping of component to (first, pages), not {short(left)}")
    checked = []
    for name, each in left.items():
        tail = given.get(name)
        if tail is None:
            known = ", ".join(given) or "none"
            raise InvalidRequest(f"request {request_id!r} leaves component {name!r}; there are {known}")
        what = f"request {request_id!r} leaves of component {name!r}"
        try:
            first, pages = each
            begin, ids = index(first), tuple(index(page) for page in pages)
        except (TypeError, ValueError):
            raise InvalidRequest(f"{what} {short(each)}, which is no position with page ids") from None
        if begin < 0 or begin + len(ids) > full_pages:
            raise InvalidRequest(
                f"{what} positions [{begin}, {begin + len(ids)}), its tokens have full pages [0, {full_pages})"
            )
        own = frozenset(tail.own.tolist())
        shared = dict(zip(range(tail.first, tail.first + len(tail.pages)), tail.pages.tolist(), strict=True))
        for position, page in enumerate(ids, begin):
            if page not in own and shared.get(position) != page:
                raise InvalidRequest(f"{what} page {page} at position {position}, which it does not have there")
        if len(set(ids)) < len(ids):
            raise InvalidRequest(f"{what} a page twice: {list(ids)}")
        if ids:
            checked.append(ComponentLeft(name, begin, ids))
    return tuple(checked)
