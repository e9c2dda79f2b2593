"""Checks of received pages at the decode side: the bytes in place against the checksums that prefill sent with them.

A report of pages is passed on only after they were hashed. The messages of a rank link stay in their order: those that
follow the report wait with it. The pages stay those of the room meanwhile, even if it ends: then the result is dropped.

The checksums are of what one prefill rank writes to this decode rank: whole pages, or the heads that both of them hold.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from tidekv.states.errors import RemoteProtocolError
from tidekv.states.handover.context_parts import EVERY_PAGE, ContextPart
from tidekv.states.types import FULL, PageIds, page_ids
from tidekv.transports import wire

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Coroutine

    from tidekv.transports import base


Begin: TypeAlias = "Callable[[], asyncio.Future[bytes | None] | None]"
"""Begins what a message waits for: checksums of pages, or a copy, which has none. None: it waits for nothing."""
OTHER_MESSAGES_MAX = 16
"""Maximum messages of a room about its end and its first token, repeats included."""


class Destinations(msgspec.Struct):
    """The pages here that one prefill rank was asked to write: of those named, the ones that it holds (`part`)."""

    page_count: int
    """Pages of the prompt."""
    spans: dict[tuple[str, int], tuple[int, PageIds]]
    """First page of the prompt, and pages, of each span, by component and number."""
    part: ContextPart = EVERY_PAGE

    @property
    def messages_max(self) -> int:
        """Maximum messages about the room: two for each page (Chunk, Staged) and each span, and OTHER_MESSAGES_MAX."""
        pages = sum(len(pages) for _, pages in self.spans.values())
        return 2 * pages + 2 * len(self.spans) + OTHER_MESSAGES_MAX

    def reported(self, message: wire.AnyMessage) -> dict[int, int] | None:
        """Return the pages, by position, that a message reports as in place. None if there are none, or if they were
        not requested.
        """
        match message:
            case wire.Chunk(component=component, span=span, first=first, count=count):
                return self._held(component, span, first, first + count)
        return None

    def written(self, component: str, span: int, first: int, count: int) -> PageIds | None:
        """Return the first `count` pages from position `first` on that the rank writes, of a span of a component. None
        if not all were requested.
        """
        pages = self._held(component, span, first, None)
        return page_ids(pages.values())[:count] if pages is not None and len(pages) >= count else None

    def _held(self, component: str, span: int, first: int, end: int | None) -> dict[int, int] | None:
        """The pages at positions [first, end), by default to the end; None if not all were requested."""
        requested = self.spans.get((component, span))
        if requested is None:
            return None
        begin, pages = requested
        last = begin + len(pages)
        end = last if end is None else end
        if not begin <= first <= end <= last:
            return None
        return {at: pages[at - begin] for at in self.part.held(range(first, end), self.page_count)}


class DamagedPage(msgspec.Struct, frozen=True):
    """The first page of a report whose bytes are not those that prefill sent."""

    component: str
    """The component of the page."""
    position: int
    """Its number in the prompt."""
    page: int
    """Its page id in the pool."""

    def __str__(self) -> str:
        of = "" if self.component == FULL else f" of component {self.component!r}"
        return f"page {self.position} of the prompt{of}, in device page {self.page}, is not what prefill sent"


class PageChecks:
    """Hashes what a prefill process has written here."""

    def __init__(self, hashing: base.Hashing, exchanges: dict[str, base.Exchange]) -> None:
        """`exchanges` are what it writes here, by component."""
        self._begins = {name: hashing.hashing(exchange.theirs) for name, exchange in exchanges.items()}

    def begin(self, destinations: Destinations, message: wire.AnyMessage) -> asyncio.Future[bytes] | None:
        """Begin to hash the pages that a message reports; None if it reports none, or pages that were not requested."""
        pages = destinations.reported(message)
        if not pages or not isinstance(message, wire.Chunk) or message.component not in self._begins:
            return None
        return self._begins[message.component](page_ids(pages.values()))


class InOrder:
    """The messages of one rank link that wait for the hashing of pages, in order."""

    def __init__(self, take: Callable[[wire.AnyMessage, bytes | None], None]) -> None:
        """`take` handles a message whose turn has come, with the checksums of the pages that it reports; None: they are
        not verified.
        """
        self._take = take
        self._waiting: deque[tuple[wire.AnyMessage, Begin]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(
        self,
        message: wire.AnyMessage,
        begin: Begin,
        spawn: Callable[[Coroutine[object, object, None]], object],
        *,
        in_turn: bool = False,
    ) -> None:
        """Handle a message now if nothing is waited for, or else by a task of `spawn`.

        `begin` starts what the message waits for: at once, or with `in_turn` once the earlier messages are handled.
        """
        if not (in_turn and self._waiting):
            future = begin()
            if not self._waiting and (future is None or future.done()):
                self._take(message, None if future is None else future.result())
                return
            begin = partial(_started, future)
        self._waiting.append((message, begin))
        if len(self._waiting) == 1:
            spawn(self._run())

    async def _run(self) -> None:
        while self._waiting:
            message, begin = self._waiting[0]
            try:
                future = begin()
                self._take(message, None if future is None else await future)
            finally:
                self._waiting.popleft()


def _started(future: asyncio.Future[bytes | None] | None) -> asyncio.Future[bytes | None] | None:
    return future


def damaged_page(destinations: Destinations, message: wire.AnyMessage, hashed: bytes) -> DamagedPage | None:
    """Return the first page of a report whose checksum is not the one of its bytes here, None if all are intact.

    Raises RemoteProtocolError if prefill sent another number of checksums than pages.
    """
    pages = destinations.reported(message)
    if pages is None:
        return None
    assert isinstance(message, wire.Chunk)
    size = wire.CHECKSUM_BYTES
    if len(message.checksums) != size * len(pages):
        raise RemoteProtocolError(f"{len(message.checksums)} bytes of checksums came for {len(pages)} pages")
    if message.checksums == hashed:
        return None
    at = next(at for at in range(len(pages)) if message.checksums[at * size :][:size] != hashed[at * size :][:size])
    position, page = list(pages.items())[at]
    return DamagedPage(message.component, position, page)
