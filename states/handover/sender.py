"""The sending side of a room: when prefill writes which pages, and when it reports them to decode.

A span is a run of prompt pages that decode wants written to pages of its own. Span 0 is the part that was not promised,
Extend requests the others. Each page is written exactly once. A cursor per span divides it:

    [first, reported)    written, and reported to decode
    [reported, cursor)   being written, or written behind a write that has not ended
    [cursor, computed)   may be written now
    [computed, end)      not computed by prefill yet

A chunk is reported only after its write, in the order of the pages. The last chunk of a span of full pages, which may
be empty, is reported only when prefill has finished: decode waits for it. That of span 0 is reported only when all
component pages of the promise are in place as well. After a stop nothing new starts, and the room is drained once no
write is in flight.

Component pages are the last pages of a prompt in the pool of a component, up to the end of the prompt: for a window the
pages that cover it, for a state one snapshot. They are requested by spans of their own, as full pages are: span 0 of
each component has the positions that decode lacks, if any, and an Extend requests what a tier of decode did not
deliver. Prefill has component pages only after it has computed the whole prompt, so it hands over all of a component at
once, whatever decode has; they are kept for an Extend as the full pages are.

A context-parallel rank holds a part of the pages (`tidekv.states.handover.context_parts`). It takes over and writes
only those; its cursors and chunks pass over the others, so a chunk reports the pages of its range that this rank holds.

Ownership: prefill's pages stay with its engine, which keeps them until decode has received the room or the room is
drained; decode's pages stay with decode's request. This module performs no I/O and knows no time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from tidekv.states.component_specs import ComponentPages
from tidekv.states.errors import InvalidRequest, LocalProtocolError, RemoteProtocolError
from tidekv.states.handover.context_parts import EVERY_PAGE, ContextPart
from tidekv.states.types import FULL, PageIds, page_ids

ELSEWHERE = -1
"""In place of the id of a page that another context-parallel rank holds."""


class RequestedComponent(msgspec.Struct, frozen=True):
    """The pages of one component that prefill hands over: positions [first, first + page_count) of the prompt, which
    end with its last page. They are all that the end of the prompt needs. The last `requested` of them are written for
    the promise, and the others only if a tier of decode does not deliver them.
    """

    component: str
    first: int
    page_count: int
    requested: int


SPANS_MAX = 1024


class WriteJob(msgspec.Struct, frozen=True):
    """One write for a span: `our_pages` over `their_pages`, the pages of the prompt from `first` on that this rank
    holds. Without pages nothing is written: other ranks hold the pages that the job passes over.
    """

    span: int
    first: int
    our_pages: PageIds
    their_pages: PageIds
    component: str = FULL


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
    component: str = FULL


class SpanRefused(msgspec.Struct, frozen=True):
    """A report for decode: a span will not be served."""

    span: int
    cause: str


class _Posted(msgspec.Struct):
    """A chunk between the start of its write and its report."""

    first: int
    count: int
    last: bool
    written: bool
    checksums: bytes = b""


class _Source(msgspec.Struct):
    """Prefill's pages of one component, at positions [first, first + len(pages)) of the prompt."""

    first: int
    pages: PageIds

    @property
    def end(self) -> int:
        return self.first + len(self.pages)


class _Span(msgspec.Struct):
    """One requested run of pages; see the drawing above."""

    component: str
    number: int
    first: int
    pages: PageIds
    cursor: int
    is_posted: bool = False
    posted: deque[_Posted] = msgspec.field(default_factory=deque)

    @property
    def end(self) -> int:
        return self.first + len(self.pages)


class SenderRoom:
    """The sending side of one room: which pages may be written, are being written, and can be reported.

    It names pages and owns none.
    """

    def __init__(
        self,
        *,
        prompt_tokens: int,
        decode_prefix_len: int,
        page_size: int,
        pages: PageIds,
        component_pages: Iterable[ComponentPages] = (),
        needed_from: Mapping[str, int] | None = None,
        part: ContextPart = EVERY_PAGE,
    ) -> None:
        """Take over a promise; this rank holds `part` of the pages. `needed_from` is, by component, the first position
        that the end of the prompt needs. Raises RemoteProtocolError if the promise contradicts itself.
        """
        self.prompt_tokens = prompt_tokens
        self.decode_prefix_len = decode_prefix_len
        self.page_size = page_size
        self.page_count = -(-prompt_tokens // page_size)
        self.part = part
        self.finished = False
        self.stopped: str | None = None
        self.in_flight = 0
        self.pages_written = 0
        self._sources = {FULL: _Source(0, page_ids())}
        self._spans: dict[tuple[str, int], _Span] = {}
        self._refusals: list[SpanRefused] = []
        if not 0 <= decode_prefix_len <= prompt_tokens or decode_prefix_len % page_size:
            raise RemoteProtocolError(
                f"decode promises {decode_prefix_len} of {prompt_tokens} tokens, which is no number of whole pages"
                f" of {page_size} tokens within the prompt"
            )
        span = self._open(FULL, 0, decode_prefix_len // page_size, pages)
        if span.end != self.page_count:
            raise RemoteProtocolError(
                f"decode gave {len(pages)} pages for what it did not promise,"
                f" which is {self.page_count - decode_prefix_len // page_size}"
            )
        for name, first in (needed_from or {}).items():
            # A rank that holds none of these positions has nothing to hand over.
            is_elsewhere = not self._held(first, self.page_count)
            count = self.page_count - first if is_elsewhere else 0
            self._sources[name] = _Source(first, page_ids([ELSEWHERE] * count))
        named: set[str] = set()
        for requested in component_pages:
            if requested.component in named:
                raise RemoteProtocolError(f"decode requests the pages of component {requested.component!r} twice")
            named.add(requested.component)
            self._open_component(requested)

    @property
    def component_pages(self) -> dict[str, RequestedComponent]:
        """By component, the pages that prefill hands over."""
        return {
            name: RequestedComponent(name, source.first, self.page_count - source.first, self._promised_of(name))
            for name, source in self._sources.items()
            if name != FULL
        }

    def _promised_of(self, component: str) -> int:
        span = self._spans.get((component, 0))
        return 0 if span is None else len(span.pages)

    @property
    def is_drained(self) -> bool:
        """Whether no write is in flight and none will start."""
        return self.stopped is not None and self.in_flight == 0

    @property
    def is_complete(self) -> bool:
        """Whether all that was requested so far is in place and reported."""
        return self.finished and all(span.is_posted and not span.posted for span in self._spans.values())

    @property
    def pages_unwritten(self) -> int:
        """Number of requested pages that are not in place, those of components included."""
        return sum(len(self._held(span.first, span.end)) for span in self._spans.values()) - self.pages_written

    @property
    def computed_pages(self) -> int:
        """Number of leading prompt pages that prefill has handed over, or passed over as those of other ranks."""
        return self._sources[FULL].end

    @property
    def computed(self) -> PageIds:
        """The handed over pages, from the first page of the prompt on, `ELSEWHERE` for those of other ranks; a new
        list.
        """
        return self._sources[FULL].pages[:]

    def remember(self, pages: PageIds, *, start_token: int, end_token: int | None = None) -> None:
        """Take pages over: prefill has computed tokens [start_token, end_token), by default to the end of `pages`.

        With context parallelism `pages` are those that this rank holds of these tokens, and `end_token` is required:
        pages of other ranks are passed over. Chunks follow the order of the prompt; repeating one changes nothing. A
        page that is not full is left to the next chunk, unless it ends the prompt. Raises InvalidRequest, and then
        changes nothing.
        """
        ours = self._sources[FULL].pages
        if self.part.contexts > 1:
            pages = self._with_others(pages, start_token, end_token)
        reach = min(start_token + len(pages) * self.page_size, self.prompt_tokens)
        end_token = reach if end_token is None else end_token
        first = start_token // self.page_size
        if self.finished:
            raise InvalidRequest("the room is finished: no more pages can be sent")
        if start_token % self.page_size or not 0 <= first <= len(ours):
            raise InvalidRequest(
                f"pages from token {start_token} do not follow the {len(ours)} pages"
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
        known = pages[: max(0, min(len(ours), end) - first)]
        if known != ours[first : first + len(known)]:
            raise InvalidRequest(f"pages from token {start_token} were sent before, as other pages")
        ours.extend(pages[len(known) : max(len(known), end - first)])

    def send_component_pages(self, component: str, pages: PageIds) -> None:
        """Take over the pages of a component: one for each position of `component_pages` that this rank holds.

        Repeating them changes nothing. Raises InvalidRequest, and then changes nothing.
        """
        if self.finished:
            raise InvalidRequest(f"the room is finished: pages of component {component!r} can no longer be sent")
        source = self._sources.get(component)
        if source is None or component == FULL:
            known = ", ".join(repr(name) for name in self._sources if name != FULL) or "none"
            raise InvalidRequest(f"there is no component {component!r}: this worker has {known}")
        held = self._held(source.first, self.page_count)
        if len(pages) != len(held):
            count = self.page_count - source.first
            part = "" if len(held) == count else f", {len(held)} of this rank"
            raise InvalidRequest(
                f"{len(pages)} pages of component {component!r} were given; the end of the prompt needs {count}, at"
                f" positions [{source.first}, {self.page_count}){part}"
            )
        ours = self._spread(pages, range(source.first, self.page_count))
        if source.pages and source.pages != ours:
            raise InvalidRequest(f"other pages of component {component!r} were sent before")
        source.pages = ours

    def extend(self, span: int, first: int, pages: PageIds, component: str = FULL) -> None:
        """Take over decode's request for pages [first, first + len(pages)); repeating a number changes nothing.

        Raises RemoteProtocolError for pages outside the prompt, or before those that its end needs of a component, and
        for a number that was used for other pages.
        """
        known = next((one for one in self._spans.values() if one.number == span), None)
        if known is not None:
            if (known.component, known.first, known.pages) != (component, first, pages):
                raise RemoteProtocolError(f"decode requested span {span} twice, as different pages")
            return
        if len(self._spans) >= SPANS_MAX:
            raise RemoteProtocolError(f"decode requests more than {SPANS_MAX} spans in one room")
        opened = self._open(component, span, first, pages)
        # A finished room without pages of the component had a full hit: there is nothing to serve this span with.
        if self.finished and pages and not self._sources[component].pages:
            self._refuse(opened)

    def finish(self) -> None:
        """Record that prefill has handed over everything.

        Raises InvalidRequest, and changes nothing, if pages of the prompt or of a component are missing;
        LocalProtocolError if called twice. Prefill need not hand over any page of what decode has promised whole; then
        an Extend is refused.
        """
        if self.finished:
            raise LocalProtocolError("the room is finished already")
        sent = self.computed_pages
        if sent < self.page_count and (sent or self._spans[FULL, 0].pages):
            raise InvalidRequest(f"the room cannot finish: pages [{sent}, {self.page_count}) were never sent")
        for name, source in self._sources.items():
            if not source.pages and (span := self._spans.get((name, 0))) is not None and span.pages:
                raise InvalidRequest(f"the room cannot finish: the pages of component {name!r} were never sent")
        self.finished = True
        for span in [span for span in self._spans.values() if span.pages and not self._sources[span.component].pages]:
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
        return self.stopped is None and any(self._writable_end(span) > span.cursor for span in self._spans.values())

    def next_job(self, *, pages_max: int) -> WriteJob | None:
        """The next write, of at most `pages_max` pages. It is in flight until `settle`."""
        if self.stopped is not None:
            return None
        # Full pages first: component pages delay only the last chunk of span 0.
        for span in (*self._spans_of(full=True), *self._spans_of(full=False)):
            first, end = span.cursor, self._writable_end(span)
            if first < end:
                # The pages of other ranks cost nothing, so a write reaches over them to its full size.
                held = self._held(first, end)
                if len(held) > pages_max:
                    held, end = held[:pages_max], held[pages_max]
                span.cursor = end
                span.is_posted = self._is_final(span) and end == span.end
                span.posted.append(_Posted(first, end - first, span.is_posted, written=False))
                self.in_flight += 1
                source = self._sources[span.component]
                ours = _picked(source.pages, held, first=source.first)
                theirs = _picked(span.pages, held, first=span.first)
                return WriteJob(span.number, first, ours, theirs, span.component)
        return None

    def settle(self, job: WriteJob, *, written: bool, checksums: bytes = b"") -> None:
        """Record the end of a write. Only completed writes are reported later, with the checksums of their pages."""
        assert self.in_flight > 0, "a write settles once"
        self.in_flight -= 1
        if not written:
            return
        self.pages_written += len(job.our_pages)
        for posted in self._spans[job.component, job.span].posted:
            if posted.first == job.first:
                posted.written = True
                posted.checksums = checksums

    def take_chunks(self) -> list[ChunkReady]:
        """Chunks that can be reported to decode now, in order; each is returned once.

        Chunks of a span that were written together are merged into one; that usually includes the empty last one.
        """
        chunks: list[ChunkReady] = []
        if self.stopped is not None:
            return chunks
        # Component pages first: the last chunk of span 0 waits for them.
        for span in (*self._spans_of(full=False), *self._spans_of(full=True)):
            if self.finished and not span.is_posted and span.cursor == span.end:
                # All pages were posted before prefill finished: an empty chunk marks the end.
                span.is_posted = True
                span.posted.append(_Posted(span.end, 0, last=True, written=True))
            written: list[_Posted] = []
            while span.posted and span.posted[0].written:
                if span.posted[0].last and span is self._spans.get((FULL, 0)) and not self._are_components_reported:
                    break
                written.append(span.posted.popleft())
            if written:
                count = sum(posted.count for posted in written)
                checksums = b"".join(posted.checksums for posted in written)
                last = written[-1].last
                chunks.append(ChunkReady(span.number, written[0].first, count, last, checksums, span.component))
        return chunks

    def take_refusals(self) -> list[SpanRefused]:
        """Return the spans that will not be served and were not returned before."""
        refusals, self._refusals = self._refusals, []
        return refusals

    @property
    def _are_components_reported(self) -> bool:
        """Whether all component pages of the promise are in place and reported."""
        promised = (span for span in self._spans_of(full=False) if span.number == 0)
        return all(span.is_posted and not span.posted for span in promised)

    def _spans_of(self, *, full: bool) -> list[_Span]:
        """The spans of full pages, or those of components, in the order in which they were requested."""
        return [span for span in self._spans.values() if (span.component == FULL) is full]

    def _is_final(self, span: _Span) -> bool:
        """Whether no further pages of a span's component will be handed over. Component pages come at once."""
        return self.finished or span.component != FULL

    def _open_component(self, requested: ComponentPages) -> None:
        """Open span 0 of a component, if decode requests pages of it."""
        name, first, count = requested.component, requested.first, len(requested.pages)
        if count and first + count != self.page_count:
            raise RemoteProtocolError(
                f"decode gave {count} pages of component {name!r} at positions from {first} on,"
                f" which does not end with the prompt of {self.page_count} pages"
            )
        if count:
            self._open(name, 0, first, requested.pages)

    def _open(self, component: str, number: int, first: int, pages: PageIds) -> _Span:
        of = "" if component == FULL else f" of component {component!r}"
        source = self._sources.get(component)
        if source is None:
            raise RemoteProtocolError(f"decode requests pages{of}, which the prompt does not have")
        if not source.first <= first <= first + len(pages) <= self.page_count:
            needs = "" if component == FULL else f", whose end needs those from {source.first} on"
            wanted = f"pages [{first}, {first + len(pages)}){of}"
            raise RemoteProtocolError(f"decode requests {wanted} of a prompt of {self.page_count} pages{needs}")
        if len(set(pages)) != len(pages):
            raise RemoteProtocolError(f"decode names a page{of} twice in span {number}: one content would be lost")
        span = self._spans[component, number] = _Span(component, number, first, pages, cursor=first)
        return span

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
        return self._spread(pages, numbers)

    def _spread(self, pages: PageIds, numbers: range) -> PageIds:
        """The pages with these numbers, given those that this rank holds."""
        if self.part.contexts == 1:
            return pages[:]
        ours = iter(pages)
        return page_ids(next(ours) if self.part.holds(at, self.page_count) else ELSEWHERE for at in numbers)

    def _writable_end(self, span: _Span) -> int:
        """The end of the pages that can be written now."""
        return min(span.end, self._sources[span.component].end)

    def _refuse(self, span: _Span) -> None:
        """Give up a span of which nothing was written. A repeated Extend is refused again."""
        assert span.cursor == span.first, "a span is refused before any of its pages is written"
        del self._spans[span.component, span.number]
        of = "" if span.component == FULL else f" of component {span.component!r}"
        count = len(self._sources[span.component].pages)
        self._refusals.append(SpanRefused(span.number, f"prefill sent only {count} pages{of} of this room"))


def _picked(pages: PageIds, numbers: Sequence[int], *, first: int) -> PageIds:
    """The pages with these ascending numbers, in a list that begins with number `first`."""
    if isinstance(numbers, range):
        return pages[numbers.start - first : numbers.stop - first]
    return page_ids(pages[number - first] for number in numbers)
