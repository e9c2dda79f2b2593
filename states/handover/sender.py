"""What prefill sends for one room, and when: the pages of each span as they get computed, each exactly once.

A span is a run of prompt pages that decode wants written to pages of its own. Span 0 is what was not promised, the
others are asked for by Extend. In each span one cursor grows:

    [first, said)       written, and decode was told
    [said, cursor)      being written, or written behind a write that is not done yet
    [cursor, computed)  may be written now
    [computed, end)     prefill has not computed it yet

A chunk is said only after its write, and in the order of the pages. The last one of a span, empty if need be, is said
only when prefill has finished: it is what decode waits for. That of span 0 is said only when the tails of components
are in place as well (`tidekv.states.handover.sender`). When a room stops, nothing new starts, and it is drained
once nothing is in flight. This file must never do I/O and never know time.

What prefill sends of components for one room: the tails that decode asked for, each whole and once.

A tail is the last pages of a prompt in a component's own pool, up to the prompt's end: of a window those that cover it,
of a state one record. Decode says where each begins for it; what it has of a window already it does not ask for, and a
tail of no pages asks for nothing. Prefill has a tail only when it has computed the whole prompt, so it is handed over
at once; it is written in parts, and said when the last of them is in place.

The last chunk of span 0 is what decode waits for, so that must never be said before all tails that were asked for are.
This file must never do I/O and never know time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from tidekv.states.components.specs import ComponentPages
from tidekv.states.errors import InvalidRequest, LocalProtocolError, RemoteProtocolError
from tidekv.states.types import PageIds, page_ids


class ComponentRequest(msgspec.Struct, frozen=True):
    """What decode wants of one component: pages at positions [first, first + page_count) of the prompt, the last of
    which is the prompt's last page. No pages: it has all that it needs.
    """

    component: str
    first: int
    page_count: int


class ComponentPart(msgspec.Struct, frozen=True):
    """Pages of one component at positions from `first` on, ours and decode's."""

    component: str
    first: int
    our_pages: PageIds
    their_pages: PageIds


class _ComponentTransfer(msgspec.Struct):
    """One tail: of its pages `posted` are being written or in place, `landed` are in place."""

    requested: ComponentPages
    ours: PageIds | None = None
    posted: int = 0
    landed: int = 0
    is_reported: bool = False

    @property
    def is_landed(self) -> bool:
        return self.landed == len(self.requested.pages)


class SenderComponents:
    """The tails of one room at the sending side."""

    def __init__(self, requested: Iterable[ComponentPages], *, page_count: int) -> None:
        """Take over what decode asked for of a prompt of so many pages. Raises RemoteProtocolError where that
        contradicts itself.
        """
        self._component_pages: dict[str, _ComponentTransfer] = {}
        for one in requested:
            name, count = one.component, len(one.pages)
            if name in self._component_pages:
                raise RemoteProtocolError(f"decode asks twice for the tail of component {name!r}")
            if count and one.first + count != page_count:
                raise RemoteProtocolError(
                    f"decode gave {count} pages for the tail of component {name!r} at positions from {one.first} on,"
                    f" which does not end with the prompt of {page_count} pages"
                )
            if len(set(one.pages)) != count:
                raise RemoteProtocolError(f"decode names a page of component {name!r} twice: a content would be lost")
            self._component_pages[name] = _ComponentTransfer(one)

    @property
    def requested(self) -> dict[str, ComponentRequest]:
        """What was asked for, by component."""
        return {
            name: ComponentRequest(name, transfer.requested.first, len(transfer.requested.pages))
            for name, transfer in self._component_pages.items()
        }

    @property
    def unsent(self) -> list[str]:
        """Components whose tail was asked for and not handed over yet."""
        return [
            name
            for name, transfer in self._component_pages.items()
            if transfer.requested.pages and transfer.ours is None
        ]

    @property
    def are_landed(self) -> bool:
        """Whether everything that was asked for is in place."""
        return all(transfer.is_landed for transfer in self._component_pages.values())

    def send(self, component: str, pages: PageIds) -> None:
        """Prefill has the tail of a component: one page for each position that was asked for.

        Repeating it is harmless, and so is handing over what nobody asked for. Raises InvalidRequest, and then nothing
        is changed.
        """
        transfer = self._component_pages.get(component)
        if transfer is None:
            known = ", ".join(map(repr, self._component_pages)) or "none"
            raise InvalidRequest(f"there is no component {component!r}: this worker has {known}")
        requested = transfer.requested
        if not requested.pages:
            return
        if len(pages) != len(requested.pages):
            raise InvalidRequest(
                f"{len(pages)} pages of component {component!r} were given; decode asks for {len(requested.pages)}, at"
                f" positions [{requested.first}, {requested.first + len(requested.pages)})"
            )
        if transfer.ours not in (None, pages):
            raise InvalidRequest(f"the tail of component {component!r} was sent before, as other pages")
        transfer.ours = pages[:]

    def can_write(self) -> bool:
        """True where `next_part` has something."""
        return any(
            transfer.ours is not None and transfer.posted < len(transfer.ours)
            for transfer in self._component_pages.values()
        )

    def next_part(self, *, pages_max: int) -> ComponentPart | None:
        """The next write, of at most so many pages; it is in flight from now on, until `settle`."""
        for name, transfer in self._component_pages.items():
            if transfer.ours is not None and transfer.posted < len(transfer.ours):
                part = slice(transfer.posted, transfer.posted + pages_max)
                first = transfer.requested.first + transfer.posted
                ours, theirs = transfer.ours[part], transfer.requested.pages[part]
                transfer.posted += len(ours)
                return ComponentPart(name, first, ours, theirs)
        return None

    def land(self, part: ComponentPart) -> None:
        """A part is in place."""
        self._component_pages[part.component].landed += len(part.our_pages)

    def take_landed(self) -> list[str]:
        """Components whose tail decode can be told of now; each is given out once."""
        here = [
            name
            for name, transfer in self._component_pages.items()
            if transfer.requested.pages and transfer.is_landed and not transfer.is_reported
        ]
        for name in here:
            self._component_pages[name].is_reported = True
        return here


SPANS_MAX = 1024


class WriteJob(msgspec.Struct, frozen=True):
    """Write `our_pages` over `their_pages`: pages [first, first + len(our_pages)) of the prompt, for one span."""

    span: int
    first: int
    our_pages: PageIds
    their_pages: PageIds


class ChunkReady(msgspec.Struct, frozen=True):
    """Decode can be told that pages [first, first + count) of the prompt are in place for this span."""

    span: int
    first: int
    count: int
    last: bool


class SpanRefused(msgspec.Struct, frozen=True):
    """A span can never be served."""

    span: int
    cause: str


class _Posted(msgspec.Struct):
    """A chunk between its posting and its telling."""

    first: int
    count: int
    last: bool
    landed: bool


class _Span(msgspec.Struct):
    """One run of pages that decode wants; see the drawing above."""

    number: int
    first: int
    pages: PageIds
    cursor: int
    ended: bool = False
    posted: deque[_Posted] = msgspec.field(default_factory=deque)

    @property
    def end(self) -> int:
        return self.first + len(self.pages)


class SenderRoom:
    """One room at the sending side."""

    def __init__(
        self,
        *,
        prompt_tokens: int,
        decode_prefix_len: int,
        page_size: int,
        pages: PageIds,
        component_pages: Iterable[ComponentPages] = (),
    ) -> None:
        """Take a promise over. Raises RemoteProtocolError where it contradicts itself."""
        self.prompt_tokens = prompt_tokens
        self.decode_prefix_len = decode_prefix_len
        self.page_size = page_size
        self.page_count = -(-prompt_tokens // page_size)
        self.finished = False
        self.stopped: str | None = None
        self.in_flight = 0
        self.pages_landed = 0
        self._ours = page_ids()
        self._spans: dict[int, _Span] = {}
        self._refusals: list[SpanRefused] = []
        if not 0 <= decode_prefix_len <= prompt_tokens or decode_prefix_len % page_size:
            raise RemoteProtocolError(
                f"decode promises {decode_prefix_len} of {prompt_tokens} tokens, which is no number of whole pages"
                f" of {page_size} tokens within the prompt"
            )
        self._open(0, decode_prefix_len // page_size, pages)
        if self._spans[0].end != self.page_count:
            raise RemoteProtocolError(
                f"decode gave {len(pages)} pages for what it did not promise,"
                f" which is {self.page_count - decode_prefix_len // page_size}"
            )
        self.component_pages = SenderComponents(component_pages, page_count=self.page_count)

    @property
    def is_drained(self) -> bool:
        """No write is in flight and none will start."""
        return self.stopped is not None and self.in_flight == 0

    @property
    def is_complete(self) -> bool:
        """All that was asked for so far is in place and decode was told."""
        return (
            self.finished
            and self.component_pages.are_landed
            and all(span.ended and not span.posted for span in self._spans.values())
        )

    @property
    def computed_pages(self) -> int:
        """Pages of the prompt that are remembered, from the first on."""
        return len(self._ours)

    @property
    def computed(self) -> PageIds:
        """The pages that are remembered, from the prompt's first on; the list is the caller's."""
        return self._ours[:]

    def remember(self, pages: PageIds, *, start_token: int, end_token: int | None = None) -> None:
        """Prefill has computed the tokens from `start_token` to `end_token` (the end of `pages` by default).

        Chunks come in the order of the prompt; repeating one is harmless. A page that is not full yet is left to the
        next chunk, unless it ends the prompt. Raises InvalidRequest, and then nothing is changed.
        """
        reach = min(start_token + len(pages) * self.page_size, self.prompt_tokens)
        end_token = reach if end_token is None else end_token
        first = start_token // self.page_size
        if self.finished:
            raise InvalidRequest("the room is finished: no more pages can be sent")
        if start_token % self.page_size or not 0 <= first <= len(self._ours):
            raise InvalidRequest(
                f"pages from token {start_token} do not follow the {len(self._ours)} pages"
                f" of {self.page_size} tokens that were sent before"
            )
        if first + len(pages) > self.page_count or not start_token <= end_token <= reach:
            raise InvalidRequest(
                f"{len(pages)} pages for tokens [{start_token}, {end_token}) do not fit a prompt of"
                f" {self.prompt_tokens} tokens"
            )
        whole = end_token == self.prompt_tokens
        end = self.page_count if whole else end_token // self.page_size
        known = pages[: max(0, min(len(self._ours), end) - first)]
        if known != self._ours[first : first + len(known)]:
            raise InvalidRequest(f"pages from token {start_token} were sent before, as other pages")
        self._ours.extend(pages[len(known) : max(len(known), end - first)])

    def send_component_pages(self, component: str, pages: PageIds) -> None:
        """Prefill has the tail of a component. Raises InvalidRequest, and then nothing is changed."""
        if self.finished:
            raise InvalidRequest(f"the room is finished: the tail of component {component!r} can no longer be sent")
        self.component_pages.send(component, pages)

    def extend(self, span: int, first: int, pages: PageIds) -> None:
        """Decode wants pages [first, first + len(pages)) as well; repeating a number is harmless.

        Raises RemoteProtocolError for pages outside the prompt, and for a number that meant something else before.
        """
        known = self._spans.get(span)
        if known is not None:
            if (known.first, known.pages) != (first, pages):
                raise RemoteProtocolError(f"decode gave span {span} a second meaning")
            return
        if len(self._spans) >= SPANS_MAX:
            raise RemoteProtocolError(f"decode asks for more than {SPANS_MAX} spans in one room")
        self._open(span, first, pages)
        if self.finished and pages and not self._ours:
            self._refuse(self._spans[span])

    def finish(self) -> None:
        """Prefill has sent all that it will. Raises InvalidRequest, and changes nothing, where it still owes pages of
        the prompt or the tail of a component; LocalProtocolError when called twice. Of a full hit no page need be sent
        at all: an Extend of it is refused then.
        """
        if self.finished:
            raise LocalProtocolError("the room is finished already")
        sent = len(self._ours)
        if sent < self.page_count and (sent or self._spans[0].pages):
            raise InvalidRequest(f"the room cannot finish: pages [{sent}, {self.page_count}) were never sent")
        if owed := self.component_pages.unsent:
            raise InvalidRequest(f"the room cannot finish: the tail of component {owed[0]!r} was never sent")
        self.finished = True
        for span in [span for span in self._spans.values() if span.pages and not sent]:
            self._refuse(span)

    def stop(self, cause: str) -> bool:
        """Start nothing any more; what was not told is never told. False when it was stopped before."""
        if self.stopped is not None:
            return False
        self.stopped = cause
        self._refusals.clear()
        return True

    def can_write(self) -> bool:
        """True where `next_job` has something."""
        if self.stopped is not None:
            return False
        return self.component_pages.can_write() or any(
            self._writable_end(span) > span.cursor for span in self._spans.values()
        )

    def next_job(self, *, pages_max: int) -> WriteJob | ComponentPart | None:
        """The next write, of at most so many pages; it is in flight from now on, until `settle`."""
        if self.stopped is not None:
            return None
        for span in self._spans.values():
            first, end = span.cursor, min(self._writable_end(span), span.cursor + pages_max)
            if first < end:
                span.cursor = end
                span.ended = self.finished and end == span.end
                span.posted.append(_Posted(first, end - first, span.ended, landed=False))
                self.in_flight += 1
                theirs = span.pages[first - span.first : end - span.first]
                return WriteJob(span.number, first, self._ours[first:end], theirs)
        part = self.component_pages.next_part(pages_max=pages_max)
        self.in_flight += part is not None
        return part

    def settle(self, job: WriteJob | ComponentPart, *, landed: bool) -> None:
        """A write has ended; only one that landed may ever be told."""
        assert self.in_flight > 0, "a write settles once"
        self.in_flight -= 1
        if not landed:
            return
        if isinstance(job, ComponentPart):
            self.component_pages.land(job)
            return
        self.pages_landed += len(job.our_pages)
        for posted in self._spans[job.span].posted:
            if posted.first == job.first:
                posted.landed = True

    def take_chunks(self) -> list[ChunkReady]:
        """What decode can be told now, in order; each is given out once. Of each span at most one: those that landed
        together are told together, and the empty last one, mostly, with the pages before it.
        """
        chunks: list[ChunkReady] = []
        if self.stopped is not None:
            return chunks
        for span in self._spans.values():
            if self.finished and not span.ended and span.cursor == span.end:
                # All was posted before it was known to be the last: an empty chunk says so.
                span.ended = True
                span.posted.append(_Posted(span.end, 0, last=True, landed=True))
            landed: list[_Posted] = []
            while span.posted and span.posted[0].landed:
                if span.posted[0].last and span.number == 0 and not self.component_pages.are_landed:
                    break
                landed.append(span.posted.popleft())
            if landed:
                count = sum(posted.count for posted in landed)
                chunks.append(ChunkReady(span.number, landed[0].first, count, landed[-1].last))
        return chunks

    def take_component_pages(self) -> list[str]:
        """The components of whose tails decode can be told now, before any chunk of `take_chunks`; each once."""
        return [] if self.stopped is not None else self.component_pages.take_landed()

    def take_refusals(self) -> list[SpanRefused]:
        """Spans that will never be served; each is given out once."""
        refusals, self._refusals = self._refusals, []
        return refusals

    def _open(self, number: int, first: int, pages: PageIds) -> None:
        if not 0 <= first <= first + len(pages) <= self.page_count:
            raise RemoteProtocolError(
                f"decode wants pages [{first}, {first + len(pages)}) of a prompt of {self.page_count} pages"
            )
        if len(set(pages)) != len(pages):
            raise RemoteProtocolError(f"decode names a page twice in span {number}: one of its contents would be lost")
        self._spans[number] = _Span(number, first, pages, cursor=first)

    def _writable_end(self, span: _Span) -> int:
        """How far a span can be written now."""
        return min(span.end, len(self._ours))

    def _refuse(self, span: _Span) -> None:
        """Give up a span of which nothing was written; repeating its Extend repeats the answer."""
        assert span.cursor == span.first, "nothing of a refused span is ever written"
        del self._spans[span.number]
        self._refusals.append(SpanRefused(span.number, f"prefill sent {len(self._ours)} pages of this room only"))
