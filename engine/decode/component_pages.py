"""Windows and states of a READY request: the pages granted, how a window advances, and the pages kept at the end.

    position          first             full pages of the tokens kept
    a window          [ pages at the prompt's end )[ the page that is written ]…
    given             `pages`, some shared and only read, others the request's `own`
    left at the end            [ whole pages before the last boundary )

A window holds all the pages that it will ever need: when it advances to a new page, it overwrites the oldest of its own
pages behind it (`WindowPages`). A state has one record, which the model updates; it can be left if it is at the end of
a page. Snapshots of it are taken in spare records (`StateRecords`), if the engine gives any.
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
    from tidekv.states.component_specs import ComponentPages, ComponentTable, SnapshotPolicy

LeftPages: TypeAlias = "tuple[int, Sequence[int] | npt.NDArray[np.int32]]"
"""`(first, pages)`: pages of a component's device pool at positions [first, first + len(pages)) of the tokens."""
LeftComponents: TypeAlias = "Mapping[str, LeftPages | list[LeftPages]]"
"""Pages left of components, by name: `(first, pages)`, or a list of those; position p stands for tokens [p * page_size,
(p + 1) * page_size). A record is left at the position of the last page that it covers."""


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

    @property
    def spare(self) -> list[int]:
        """The own pages that are not in use: of a window, those it moves to; of a state, records for snapshots."""
        in_use = set(self.pages.tolist())
        return [page for page in self.own.tolist() if page not in in_use]


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
    """The pages of one window while its request generates: those before the page that is being written.

    `pages` are pages of the component's device pool at positions [first, first + len(pages)).
    """

    def __init__(self, ready: ReadyComponent, *, window_tokens: int, page_size: int) -> None:
        self.first = ready.first
        self.pages: list[int] = ready.pages.tolist()
        self._page_size = page_size
        self._trailing_pages = -(-window_tokens // page_size)
        self._own = frozenset(ready.own.tolist())
        self._free = deque(ready.spare)

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
        """Return the pages to leave for this number of tokens with KV: those before the end of their last full page."""
        boundary = tokens // self._page_size
        first = max(self.first, boundary - self._trailing_pages)
        return first, self.pages[first - self.first : boundary - self.first] if boundary > first else []


class StateRecords:
    """The snapshots of one state that a request takes while it generates, in its spare records.

    `due` is called whenever the state has taken a token, before the next one; the caller copies the live record to the
    page that it returns. If there are more places worth a snapshot than spare records, the newest ones stay.
    """

    def __init__(self, record: ReadyComponent, *, policy: SnapshotPolicy, prompt_tokens: int, page_size: int) -> None:
        self._record = record.record
        self._policy = policy
        self._prompt_tokens = prompt_tokens
        self._page_size = page_size
        self._free = deque(record.spare)
        self._taken: dict[int, int] = {}
        """Pages by the number of tokens of their snapshots, oldest first."""

    def due(self, tokens: int) -> int | None:
        """Return the page that the live record is to be copied to, now that it covers `tokens` tokens; usually None."""
        if tokens % self._page_size or tokens in self._taken:
            return None
        if not (self._policy.output_end or self._is_kept_there(tokens)):
            return None
        if not self._free and self._taken:
            # A snapshot that only the end of the output was worth: the output has gone on since.
            passed = next((at for at in self._taken if not self._is_kept_there(at)), next(iter(self._taken)))
            self._free.append(self._taken.pop(passed))
        if not self._free:
            return None
        page = self._taken[tokens] = self._free.popleft()
        return page

    def left(self, tokens: int) -> list[LeftPages]:
        """Return the records to leave for this number of tokens with KV: `finish(component_pages={name: …})`."""
        end = tokens // self._page_size * self._page_size
        taken = {at: page for at, page in self._taken.items() if at == end or (at < end and self._is_kept_there(at))}
        if end == tokens and end:
            taken.setdefault(end, self._record)
        return [(at // self._page_size - 1, [page]) for at, page in sorted(taken.items())]

    def _is_kept_there(self, tokens: int) -> bool:
        every = self._policy.every_pages
        is_interval = bool(every) and tokens // self._page_size % every == 0
        return is_interval or (self._policy.prompt_end and tokens == self._prompt_tokens)


def component_pages_left(
    request_id: str, given: Mapping[str, ReadyComponent], left: LeftComponents | None, *, full_pages: int
) -> tuple[ComponentLeft, ...]:
    """Check the pages that a caller leaves of components, against its own pages and the full pages of its tokens.

    Raises InvalidRequest, which names component and page, for pages that are not the request's at that position.
    """
    if left is None:
        return ()
    if not isinstance(left, Mapping):
        raise InvalidRequest(f"component_pages must be a mapping of component to (first, pages), not {short(left)}")
    checked = []
    for name, each in left.items():
        ready = given.get(name)
        if ready is None:
            known = ", ".join(given) or "none"
            raise InvalidRequest(f"request {request_id!r} leaves component {name!r}; there are {known}")
        what = f"request {request_id!r} leaves of component {name!r}"
        entries = [
            _pages_left(what, given, ready, full_pages) for given in (each if isinstance(each, list) else [each])
        ]
        ids = [page for _, pages in entries for page in pages]
        places = [at for first, pages in entries for at in range(first, first + len(pages))]
        if len(set(ids)) < len(ids):
            raise InvalidRequest(f"{what} a page twice: {ids}")
        if len(set(places)) < len(places):
            raise InvalidRequest(f"{what} two pages at one position: {ids} at {places}")
        checked += [ComponentLeft(name, first, pages) for first, pages in entries if pages]
    return tuple(checked)


def _pages_left(what: str, each: LeftPages, ready: ReadyComponent, full_pages: int) -> tuple[int, tuple[int, ...]]:
    try:
        first, pages = each
        begin, ids = index(first), tuple(index(page) for page in pages)
    except (TypeError, ValueError):
        raise InvalidRequest(f"{what} {short(each)}, which is no position with page ids") from None
    if begin < 0 or begin + len(ids) > full_pages:
        raise InvalidRequest(
            f"{what} positions [{begin}, {begin + len(ids)}), its tokens have full pages [0, {full_pages})"
        )
    own = frozenset(ready.own.tolist())
    shared = dict(zip(range(ready.first, ready.first + len(ready.pages)), ready.pages.tolist(), strict=True))
    for position, page in enumerate(ids, begin):
        if page not in own and shared.get(position) != page:
            raise InvalidRequest(f"{what} page {page} at position {position}, which it does not have there")
    return begin, ids
