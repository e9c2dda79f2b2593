"""The sending side of a room: when prefill writes which pages, and when it reports them to decode.

A span is a run of prompt pages that decode wants written to pages of its own. Span 0 is the part that was not promised,
Extend requests the others. Each page is written exactly once. A cursor per span divides it:

    [first, reported)    written, and reported to decode
    [reported, cursor)   being written, or written behind a write that has not ended
    [cursor, computed)   may be written now
    [computed, end)      not computed by prefill yet

A chunk is reported only after its write, in the order of the pages. The last chunk of a span, which may be empty, is
reported only when prefill has finished: decode waits for it. That of span 0 is reported only when all requested
component pages are in place as well. After a stop nothing new starts, and the room is drained once no write is in
flight.

Component pages are the last pages of a prompt in the pool of a component, up to the end of the prompt: for a window the
pages that cover it, for a state one snapshot. Decode requests the positions that it lacks; a request without pages
requests nothing. Prefill has component pages only after it has computed the whole prompt, so it hands them over at
once. They are written in parts, and reported when the last part is in place.

A context-parallel rank holds a part of the pages (`tidekv.states.handover.context_parts`). It takes over and writes
only those; its cursors and chunks pass over the others, so a chunk reports the pages of its range that this rank holds.

Ownership: prefill's pages stay with its engine, which keeps them until decode has received the room or the room is
drained; decode's pages stay with decode's request. This module performs no I/O and knows no time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from tidekv.states.component_specs import ComponentPages
from tidekv.states.errors import InvalidRequest, LocalProtocolError, RemoteProtocolError
from tidekv.states.handover.context_parts import EVERY_PAGE, ContextPart
from tidekv.states.types import PageIds, page_ids

ELSEWHERE = -1
"""In place of the id of a page that another context-parallel rank holds."""


class ComponentRequest(msgspec.Struct, frozen=True):
    """The pages of one component that decode requests: positions [first, first + page_count) of the prompt, which end
    with its last page. No pages: decode has all that it needs.
    """

    component: str
    first: int
    page_count: int


class ComponentPart(msgspec.Struct, frozen=True):
    """One write: pages of one component, prefill's and decode's; `first` is the position of the first of them."""

    component: str
    first: int
    our_pages: PageIds
    their_pages: PageIds


class ComponentReady(msgspec.Struct, frozen=True):
    """A report for decode: the requested pages of a component are in place."""

    component: str
    checksums: bytes = b""


class _ComponentTransfer(msgspec.Struct):
    """Progress of one component: `posted` pages are being written or in place, `landed` pages are in place.

    `positions` are those of the requested pages that this rank holds, `theirs` their destinations. `checksums` has
    those of the landed parts, by their first position.
    """

    requested: ComponentPages
    positions: list[int]
    theirs: PageIds
    ours: PageIds | None = None
    posted: int = 0
    landed: int = 0
    is_reported: bool = False
    checksums: dict[int, bytes] = msgspec.field(default_factory=dict)

    @property
    def is_landed(self) -> bool:
        return self.landed == len(self.theirs)


class SenderComponents:
    """Component pages of one room, at the sending side."""

    def __init__(self, requested: Iterable[ComponentPages], *, page_count: int, part: ContextPart = EVERY_PAGE) -> None:
        """Take over the requests for a prompt of `page_count` pages, of which this rank holds `part`.

        Raises RemoteProtocolError if they contradict each other or the prompt.
        """
        self._component_pages: dict[str, _ComponentTransfer] = {}
        for one in requested:
            name, count = one.component, len(one.pages)
            if name in self._component_pages:
                raise RemoteProtocolError(f"decode requests the pages of component {name!r} twice")
            if count and one.first + count != page_count:
                raise RemoteProtocolError(
                    f"decode gave {count} pages of component {name!r} at positions from {one.first} on,"
                    f" which does not end with the prompt of {page_count} pages"
                )
            if len(set(one.pages)) != count:
                raise RemoteProtocolError(f"decode names a page of component {name!r} twice: one content would be lost")
            positions = part.held(range(one.first, one.first + count), page_count)
            theirs = page_ids(one.pages[at - one.first] for at in positions)
            self._component_pages[name] = _ComponentTransfer(one, positions, theirs)

    @property
    def requested(self) -> dict[str, ComponentRequest]:
        """The requested pages, by component."""
        return {
            name: ComponentRequest(name, transfer.requested.first, len(transfer.requested.pages))
            for name, transfer in self._component_pages.items()
        }

    @property
    def unsent(self) -> list[str]:
        """Components whose pages were requested of this rank and have not been handed over yet."""
        return [name for name, transfer in self._component_pages.items() if transfer.theirs and transfer.ours is None]

    @property
    def pages_unlanded(self) -> int:
        """Number of requested pages that are not in place."""
        return sum(len(transfer.theirs) - transfer.landed for transfer in self._component_pages.values())

    @property
    def are_landed(self) -> bool:
        """Whether all requested pages are in place."""
        return all(transfer.is_landed for transfer in self._component_pages.values())

    def send(self, component: str, pages: PageIds) -> None:
        """Hand over a component's pages: one for each requested position that this rank holds.

        A repetition changes nothing, nor do pages of a component that was not requested. Raises InvalidRequest, and
        then changes nothing.
        """
        transfer = self._component_pages.get(component)
        if transfer is None:
            known = ", ".join(map(repr, self._component_pages)) or "none"
            raise InvalidRequest(f"there is no component {component!r}: this worker has {known}")
        requested = transfer.requested
        if not requested.pages:
            return
        if len(pages) != len(transfer.theirs):
            part = "" if len(transfer.theirs) == len(requested.pages) else f", {len(transfer.theirs)} of this rank"
            raise InvalidRequest(
                f"{len(pages)} pages of component {component!r} were given; decode requests {len(requested.pages)}, at"
                f" positions [{requested.first}, {requested.first + len(requested.pages)}){part}"
            )
        if transfer.ours not in (None, pages):
            raise InvalidRequest(f"other pages of component {component!r} were sent before")
        transfer.ours = pages[:]

    def can_write(self) -> bool:
        """Whether `next_part` has a write."""
        return any(
            transfer.ours is not None and transfer.posted < len(transfer.ours)
            for transfer in self._component_pages.values()
        )

    def next_part(self, *, pages_max: int) -> ComponentPart | None:
        """The next write, of at most `pages_max` pages. It is in flight until `settle`."""
        for name, transfer in self._component_pages.items():
            if transfer.ours is not None and transfer.posted < len(transfer.ours):
                part = slice(transfer.posted, transfer.posted + pages_max)
                first = transfer.positions[transfer.posted]
                ours, theirs = transfer.ours[part], transfer.theirs[part]
                transfer.posted += len(ours)
                return ComponentPart(name, first, ours, theirs)
        return None

    def land(self, part: ComponentPart, checksums: bytes) -> None:
        """Record that a part is in place."""
        transfer = self._component_pages[part.component]
        transfer.landed += len(part.our_pages)
        transfer.checksums[part.first] = checksums

    def take_landed(self) -> list[ComponentReady]:
        """Components whose pages can be reported to decode now; each is returned once."""
        here = []
        for name, transfer in self._component_pages.items():
            if transfer.requested.pages and transfer.is_landed and not transfer.is_reported:
                transfer.is_reported = True
                checksums = b"".join(transfer.checksums[first] for first in sorted(transfer.checksums))
                here.append(ComponentReady(name, checksums))
        return here


SPANS_MAX = 1024


class WriteJob(msgspec.Struct, frozen=True):
    """One write for a span: `our_pages` over `their_pages`, the pages of the prompt from `first` on that this rank
    holds. Without pages nothing is written: other ranks hold the pages that the job passes over.
    """

    span: int
    first: int
    our_pages: PageIds
    their_pages: PageIds


class ChunkReady(msgspec.Struct, frozen=True):
    """A report for decode: pages [first, first + count) of the prompt are in place for this span.

    They are in place as far as this rank holds them. `checksums` are those that `SenderRoom.settle` was given for the
    pages, joined.
    """

    span: int
    first: int
    count: int
    last: bool
    checksums: bytes = b""


class SpanRefused(msgspec.Struct, frozen=True):
    """A report for decode: a span will not be served."""

    span: int
    cause: str


class _Posted(msgspec.Struct):
    """A chunk between the start of its write and its report."""

    first: int
    count: int
    last: bool
    landed: bool
    checksums: bytes = b""


class _Span(msgspec.Struct):
    """One requested run of pages; see the drawing above."""

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
    """The sending side of one room."""

    def __init__(
        self,
        *,
        prompt_tokens: int,
        decode_prefix_len: int,
        page_size: int,
        pages: PageIds,
        component_pages: Iterable[ComponentPages] = (),
        part: ContextPart = EVERY_PAGE,
    ) -> None:
        """Take over a promise; this rank holds `part` of the pages. Raises RemoteProtocolError if it contradicts
        itself.
        """
        self.prompt_tokens = prompt_tokens
        self.decode_prefix_len = decode_prefix_len
        self.page_size = page_size
        self.page_count = -(-prompt_tokens // page_size)
        self.part = part
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
        self.component_pages = SenderComponents(component_pages, page_count=self.page_count, part=part)

    @property
    def is_drained(self) -> bool:
        """Whether no write is in flight and none will start."""
        return self.stopped is not None and self.in_flight == 0

    @property
    def is_complete(self) -> bool:
        """Whether all that was requested so far is in place and reported."""
        return (
            self.finished
            and self.component_pages.are_landed
            and all(span.ended and not span.posted for span in self._spans.values())
        )

    @property
    def pages_unlanded(self) -> int:
        """Number of requested pages that are not in place, those of components included."""
        requested = sum(len(self._held(span.first, span.end)) for span in self._spans.values())
        return requested - self.pages_landed + self.component_pages.pages_unlanded

    @property
    def computed_pages(self) -> int:
        """Number of leading prompt pages that prefill has handed over, or passed over as those of other ranks."""
        return len(self._ours)

    @property
    def computed(self) -> PageIds:
        """The handed over pages, from the first page of the prompt on, `ELSEWHERE` for those of other ranks; a new
        list.
        """
        return self._ours[:]

    def remember(self, pages: PageIds, *, start_token: int, end_token: int | None = None) -> None:
        """Take pages over: prefill has computed tokens [start_token, end_token), by default to the end of `pages`.

        With context parallelism `pages` are those that this rank holds of these tokens, and `end_token` is required:
        pages of other ranks are passed over. Chunks follow the order of the prompt; repeating one changes nothing. A
        page that is not full is left to the next chunk, unless it ends the prompt. Raises InvalidRequest, and then
        changes nothing.
        """
        if self.part.contexts > 1:
            pages = self._with_others(pages, start_token, end_token)
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
        # The last page of the prompt may be partial: nothing follows that could fill it.
        whole = end_token == self.prompt_tokens
        end = self.page_count if whole else end_token // self.page_size
        # A repetition must name the same pages: the first ones may be under a write already.
        known = pages[: max(0, min(len(self._ours), end) - first)]
        if known != self._ours[first : first + len(known)]:
            raise InvalidRequest(f"pages from token {start_token} were sent before, as other pages")
        self._ours.extend(pages[len(known) : max(len(known), end - first)])

    def send_component_pages(self, component: str, pages: PageIds) -> None:
        """Take over the pages of a component. Raises InvalidRequest, and then changes nothing."""
        if self.finished:
            raise InvalidRequest(f"the room is finished: pages of component {component!r} can no longer be sent")
        self.component_pages.send(component, pages)

    def extend(self, span: int, first: int, pages: PageIds) -> None:
        """Take over decode's request for pages [first, first + len(pages)); repeating a number changes nothing.

        Raises RemoteProtocolError for pages outside the prompt, and for a number that was used for other pages.
        """
        known = self._spans.get(span)
        if known is not None:
            if (known.first, known.pages) != (first, pages):
                raise RemoteProtocolError(f"decode requested span {span} twice, as different pages")
            return
        if len(self._spans) >= SPANS_MAX:
            raise RemoteProtocolError(f"decode requests more than {SPANS_MAX} spans in one room")
        self._open(span, first, pages)
        # A finished room without any pages is a full hit: there is nothing to serve this span with.
        if self.finished and pages and not self._ours:
            self._refuse(self._spans[span])

    def finish(self) -> None:
        """Record that prefill has handed over everything.

        Raises InvalidRequest, and changes nothing, if pages of the prompt or of a component are missing;
        LocalProtocolError if called twice. For a full hit prefill need not hand over any page; then an Extend is
        refused.
        """
        if self.finished:
            raise LocalProtocolError("the room is finished already")
        sent = len(self._ours)
        if sent < self.page_count and (sent or self._spans[0].pages):
            raise InvalidRequest(f"the room cannot finish: pages [{sent}, {self.page_count}) were never sent")
        if owed := self.component_pages.unsent:
            raise InvalidRequest(f"the room cannot finish: the pages of component {owed[0]!r} were never sent")
        self.finished = True
        for span in [span for span in self._spans.values() if span.pages and not sent]:
            self._refuse(span)

    def stop(self, cause: str) -> bool:
        """Start no writes and report nothing any more. Returns False if already stopped."""
        if self.stopped is not None:
            return False
        # A stopped room ends as a whole: refusals of single spans would follow its own end.
        self.stopped = cause
        self._refusals.clear()
        return True

    def can_write(self) -> bool:
        """Whether `next_job` has a write."""
        if self.stopped is not None:
            return False
        return self.component_pages.can_write() or any(
            self._writable_end(span) > span.cursor for span in self._spans.values()
        )

    def next_job(self, *, pages_max: int) -> WriteJob | ComponentPart | None:
        """The next write, of at most `pages_max` pages. It is in flight until `settle`."""
        if self.stopped is not None:
            return None
        for span in self._spans.values():
            first, end = span.cursor, self._writable_end(span)
            if first < end:
                # The pages of other ranks cost nothing, so a write reaches over them to its full size.
                held = self._held(first, end)
                if len(held) > pages_max:
                    held, end = held[:pages_max], held[pages_max]
                span.cursor = end
                span.ended = self.finished and end == span.end
                span.posted.append(_Posted(first, end - first, span.ended, landed=False))
                self.in_flight += 1
                return WriteJob(
                    span.number, first, _picked(self._ours, held, first=0), _picked(span.pages, held, first=span.first)
                )
        # Full pages first: component pages delay only the last chunk of span 0.
        part = self.component_pages.next_part(pages_max=pages_max)
        self.in_flight += part is not None
        return part

    def settle(self, job: WriteJob | ComponentPart, *, landed: bool, checksums: bytes = b"") -> None:
        """Record the end of a write. Only writes that landed are reported later, with the checksums of their pages."""
        assert self.in_flight > 0, "a write settles once"
        self.in_flight -= 1
        if not landed:
            return
        if isinstance(job, ComponentPart):
            self.component_pages.land(job, checksums)
            return
        self.pages_landed += len(job.our_pages)
        for posted in self._spans[job.span].posted:
            if posted.first == job.first:
                posted.landed = True
                posted.checksums = checksums

    def take_chunks(self) -> list[ChunkReady]:
        """Chunks that can be reported to decode now, in order; each is returned once.

        Chunks of a span that have landed together are merged into one; that usually includes the empty last one.
        """
        chunks: list[ChunkReady] = []
        if self.stopped is not None:
            return chunks
        for span in self._spans.values():
            if self.finished and not span.ended and span.cursor == span.end:
                # All pages were posted before prefill finished: an empty chunk marks the end.
                span.ended = True
                span.posted.append(_Posted(span.end, 0, last=True, landed=True))
            # A chunk is reported only after those before it, and the last one of span 0 only after the components.
            landed: list[_Posted] = []
            while span.posted and span.posted[0].landed:
                if span.posted[0].last and span.number == 0 and not self.component_pages.are_landed:
                    break
                landed.append(span.posted.popleft())
            if landed:
                count = sum(posted.count for posted in landed)
                checksums = b"".join(posted.checksums for posted in landed)
                chunks.append(ChunkReady(span.number, landed[0].first, count, landed[-1].last, checksums))
        return chunks

    def take_component_pages(self) -> list[ComponentReady]:
        """Components whose pages can be reported now, before any chunk of `take_chunks`; each is returned once."""
        return [] if self.stopped is not None else self.component_pages.take_landed()

    def take_refusals(self) -> list[SpanRefused]:
        """Spans that will not be served; each is returned once."""
        refusals, self._refusals = self._refusals, []
        return refusals

    def _open(self, number: int, first: int, pages: PageIds) -> None:
        if not 0 <= first <= first + len(pages) <= self.page_count:
            raise RemoteProtocolError(
                f"decode requests pages [{first}, {first + len(pages)}) of a prompt of {self.page_count} pages"
            )
        if len(set(pages)) != len(pages):
            raise RemoteProtocolError(f"decode names a page twice in span {number}: one content would be lost")
        self._spans[number] = _Span(number, first, pages, cursor=first)

    def _held(self, first: int, end: int) -> Sequence[int]:
        """The pages of the prompt in [first, end) that this rank holds."""
        return range(first, end) if self.part.contexts == 1 else self.part.held(range(first, end), self.page_count)

    def _with_others(self, pages: PageIds, start_token: int, end_token: int | None) -> PageIds:
        """The pages of these tokens, with a placeholder for each that another rank holds. Raises InvalidRequest."""
        if end_token is None or not 0 <= start_token <= end_token <= self.prompt_tokens:
            raise InvalidRequest(
                f"tokens [{start_token}, {end_token}) of a prompt of {self.prompt_tokens} tokens cannot be sent by a"
                " context-parallel rank, which must name the end of the tokens that were computed"
            )
        numbers = range(start_token // self.page_size, -(-end_token // self.page_size))
        held = self._held(numbers.start, numbers.stop)
        if len(held) != len(pages):
            raise InvalidRequest(
                f"{len(pages)} pages were given for tokens [{start_token}, {end_token}); context {self.part.context} of"
                f" {self.part.contexts} holds {len(held)} of these"
            )
        ours = iter(pages)
        return page_ids(next(ours) if self.part.holds(at, self.page_count) else ELSEWHERE for at in numbers)

    def _writable_end(self, span: _Span) -> int:
        """The end of the pages that can be written now."""
        return min(span.end, len(self._ours))

    def _refuse(self, span: _Span) -> None:
        """Give up a span of which nothing was written. A repeated Extend is refused again."""
        assert span.cursor == span.first, "a span is refused before any of its pages is written"
        del self._spans[span.number]
        self._refusals.append(SpanRefused(span.number, f"prefill sent only {len(self._ours)} pages of this room"))


def _picked(pages: PageIds, numbers: Sequence[int], *, first: int) -> PageIds:
    """The pages with these ascending numbers, in a list that begins with number `first`."""
    if isinstance(numbers, range):
        return pages[numbers.start - first : numbers.stop - first]
    return page_ids(pages[number - first] for number in numbers)
