"""Tails in storage: how far they let a plan reach, and how they come from there to the device.

In storage each page of a window, and each record of a state, is a record of its own, named by the page at its position.
With components storage is asked for both at once, and before anything is reserved: how much a request needs of each
component depends on the boundary that it goes on from. That is the longest one which all of these serve together:

    full pages           on the device, on the host, then in storage
    every component's    on the device, on the host, or in storage, each page of it wherever it is
    whole tail

Not all of a tail is needed where prefill writes the end of it. What is needed and only storage has goes by way of host
pages that nobody else sees, so that nothing of it is cached before the request's own pages are:

    RESERVED ──plan──▶ FETCHING ──all of it──▶ COPYING ──▶ over: the host pages are free
                           │ short, late           │ error
                           ▼                       ▼
                         the request starts over, without storage    (without host copies of components)

A tail cannot be asked of prefill later on, as full pages can (*extend*): so whatever the policy for fetches is, a tail
is waited for until its deadline. A fetch that nobody waits for keeps its host pages until it ends, and nothing else.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import msgspec

from tidekv.states.commands import CopyTail, FetchTail, QueryTails
from tidekv.states.components import longest_boundary
from tidekv.states.policy import FETCH_TIMEOUT_MAX_S
from tidekv.states.shapes import PageIds, page_ids
from tidekv.states.undo import Undo

if TYPE_CHECKING:
    from tidekv.states.books import Books
    from tidekv.states.component_index import ComponentIndex
    from tidekv.states.components import Ranges
    from tidekv.states.events import StoredTail
    from tidekv.states.request import Request
    from tidekv.states.request_tails import RequestTails

WITHOUT_STORAGE, WITHOUT_HOST, WITHOUT_TAILS = 1, 2, 3
"""What a request's `tail_limit` says that it does not use: cached tails of storage, those of the host too, all."""
BOUNDARIES_TRIED_MAX = 16
"""So many boundaries that limits on fetches forbid are tried before a request does without storage."""


class TailStage(enum.Enum):
    """Where a tail from storage is on its way."""

    RESERVED = "RESERVED"
    FETCHING = "FETCHING"
    COPYING = "COPYING"


class TailFetch:
    """Pages of one component that a request gets from storage. The host pages are its own, the device pages the
    request's.
    """

    __slots__ = (
        "begun_at_s",
        "component",
        "device_pages",
        "host_pages",
        "op",
        "positions",
        "queued_pages",
        "stage",
        "tails",
    )

    def __init__(self, tails: RequestTails, component: str, positions: PageIds, device_pages: PageIds) -> None:
        self.tails = tails
        self.component = component
        self.positions = positions
        self.host_pages: PageIds = page_ids()
        self.device_pages = device_pages
        self.op = 0
        self.stage = TailStage.RESERVED
        self.begun_at_s = 0.0
        self.queued_pages = 0


class Reach(msgspec.Struct, frozen=True):
    """How far a prompt can go on from the caches, and from these together with what storage says that it has."""

    here: int
    """The longest boundary that the caches serve alone."""
    full: int
    """Full pages in the caches."""
    end: int
    """Full pages in the caches and then in storage."""
    served: list[Ranges]
    """For each component, the boundaries that it serves."""

    def longest(self, limit: int) -> int:
        """The longest boundary up to `limit`; 0 where none is longer than what the caches serve."""
        found = longest_boundary(min(limit, self.end), self.served)
        return found if found > self.here else 0


class TailStorage:
    """What storage does for tails."""

    def __init__(self, books: Books, index: ComponentIndex) -> None:
        self._books = books
        self._index = index

    # --- The question ---

    def ask(self, request: Request) -> None:
        """Ask storage for full pages and tails beyond what the caches can go on from, unless that is too little."""
        books = self._books
        settings = books.settings
        here = sum(self._index.probe_prefix(request.namespace, request.keys))
        gain = request.full_pages - here
        if gain < 1 or gain * settings.page_size < settings.prefetch_threshold_tokens:
            return
        first = sum(books.index.probe_prefix(request.namespace, request.keys))
        longest = max(component.tail_pages(settings.page_size) for component in self._index.components.values())
        request.query_op = books.begin(request, deadline_s=settings.query_deadline_s)
        request.stored_first, request.stored_found, request.stored_tails = first, 0, ()
        books.say(
            QueryTails(
                op=request.query_op,
                request_id=request.request_id,
                first=first,
                count=request.full_pages - first,
                tails_first=max(0, here + 1 - longest),
            )
        )

    def waits_for_answer(self, request: Request) -> bool:
        """Whether it is not known what storage has: the answer is to come. It is asked again where pages in front of
        those that it told of have left the caches; each time for more, so that this comes to an end.
        """
        may_ask = not request.query_op and request.stored_found and self._is_allowed(request)
        if may_ask and sum(self._books.index.probe_prefix(request.namespace, request.keys)) < request.stored_first:
            self.ask(request)
        return request.query_op > 0

    # --- The plan ---

    def boundary(self, request: Request) -> int:
        """The boundary to go on from with what storage has; 0 where the caches do as well without, or nearly so."""
        books = self._books
        request.stored_cause = "storage_left_alone"
        if not (request.stored_found or request.stored_tails) or not self._is_allowed(request):
            return 0
        reach = self.reach(
            request.namespace, request.keys, request.stored_first, request.stored_found, request.stored_tails
        )
        found = self._longest(request, reach)
        if (found - reach.here) * books.settings.page_size >= max(books.settings.prefetch_threshold_tokens, 1):
            return found
        return 0

    def reach(self, namespace: str, keys: bytes, first: int, found: int, tails: tuple[StoredTail, ...]) -> Reach:
        """How far the caches and storage reach together, now: storage has `found` full pages from `first` on, and these
        pages of components.
        """
        here = sum(self._index.probe_prefix(namespace, keys))
        full = sum(self._books.index.probe_prefix(namespace, keys))
        pages = len(keys) // self._books.settings.key_bytes
        end = full if full < first else max(full, min(first + max(found, 0), pages))
        stored = {tail.component: _positions(tail.ranges, pages) for tail in tails}
        return Reach(here, full, end, self._index.served(namespace, keys, full, stored))

    def _is_allowed(self, request: Request) -> bool:
        return self._books.storage.is_usable and not (request.restore_limit or request.tail_limit)

    def _longest(self, request: Request, reach: Reach) -> int:
        """The longest boundary for which no more is to be fetched than limits and host pages allow; that of the caches
        where there is none beyond it.
        """
        books = self._books
        request.stored_cause = "no_tail"
        left_s = request.deadline_at_s - books.now_s
        room = books.host.free + books.index.host_evictable
        full, limit = reach.full, reach.end
        for _ in range(BOUNDARIES_TRIED_MAX):
            end = reach.longest(limit)
            if not end:
                break
            pages = max(0, end - full)
            count = pages + self._index.count_only_stored(
                request.namespace, request.keys, end, in_index=min(end, full), needed_from=self.needed_from(request)
            )
            fitting = books.storage.allowance(count, books.settings.prefetch_deadline_s(count, left_s))
            if fitting >= count and pages <= room:
                return end
            request.stored_cause = "limit" if fitting < count else "no_host_page"
            limit = min(end - 1, full + min(fitting, room)) if pages > min(fitting, room) else end - 1
        return reach.here

    def needed_from(self, request: Request) -> dict[str, int]:
        """By component, the first position that a request needs at the end of its prompt."""
        page_size = self._books.settings.page_size
        components = self._index.components.items()
        return {name: component.needed_from(request.prompt_tokens, page_size) for name, component in components}

    def reserve(self, tails: RequestTails) -> bool:
        """Take host pages for what is to be fetched; False where there are too few, with some of them taken."""
        for name, tail in tails.reserved.tails.items():
            positions, targets = tail.stored
            if not positions:
                continue
            pages = self._index.take_host(name, len(positions))
            if pages is None:
                return False
            fetch = TailFetch(tails, name, positions, targets)
            fetch.host_pages = pages
            tails.fetches[fetch] = None
        return True

    def begin(self, request: Request, tails: RequestTails, undo: Undo) -> None:
        """Start the fetches. `undo` takes all of it back."""
        books = self._books
        count = tails.fetched_pages + sum(len(fetch.positions) for fetch in tails.fetches)
        deadline_s = books.settings.prefetch_deadline_s(count, request.deadline_at_s - books.now_s)
        for fetch in tails.fetches:
            undo.callback(self._unbegin, fetch)
            fetch.op = books.begin(fetch, deadline_s=deadline_s)
            books.say(
                FetchTail(
                    op=fetch.op,
                    request_id=request.request_id,
                    component=fetch.component,
                    positions=fetch.positions,
                    host_pages=fetch.host_pages,
                    timeout_s=min(deadline_s, FETCH_TIMEOUT_MAX_S),
                )
            )
            fetch.stage = TailStage.FETCHING
            tails.copies += 1
            books.storage.take(len(fetch.positions))
            books.storage.fetch_began(fetch, len(fetch.positions))
            fetch.begun_at_s, fetch.queued_pages = books.now_s, books.storage.pages_in_flight

    def _unbegin(self, fetch: TailFetch) -> None:
        books = self._books
        books.operations.pop(fetch.op, None)
        if fetch.stage is TailStage.FETCHING:
            books.storage.fetch_over(fetch)
            books.storage.take(-len(fetch.positions))
            fetch.stage = TailStage.RESERVED

    # --- Outcomes ---

    def fetched(self, fetch: TailFetch, good: int) -> None:
        """The fetch ended with its first `good` pages verified: a tail is whole or of no use. After a raise, `failed`
        ends it.
        """
        books = self._books
        count = len(fetch.positions)
        if good < count:
            books.count("l3_pages_short", count - max(good, 0))
            self.failed(fetch)
            return
        books.storage.note_pace(begun_at_s=fetch.begun_at_s, pages=fetch.queued_pages)
        with Undo() as undo:
            op = books.begin(fetch, deadline_s=books.settings.copy_deadline_s)
            undo.callback(books.operations.pop, op)
            books.say(
                CopyTail(
                    op=op,
                    component=fetch.component,
                    source="host",
                    source_pages=fetch.host_pages,
                    target="device",
                    target_pages=fetch.device_pages,
                )
            )
            undo.keep()
        fetch.op = op
        fetch.stage = TailStage.COPYING
        books.storage.fetch_over(fetch)
        request = fetch.tails.request
        assert request is not None, "who leaves gives up what is being fetched"
        books.dirty[request] = None

    def failed(self, fetch: TailFetch) -> None:
        """Nothing of it is of use, and nothing writes to its pages: the request starts over. Can be called again."""
        self._books.storage.fetch_over(fetch)
        self.copied(fetch)
        fetch.tails.copies -= 1
        fetch.tails.distrust(self._books, WITHOUT_STORAGE, "storage did not bring all of a component's tail")

    def is_late(self, fetch: TailFetch) -> None:
        """Nobody waits for the fetch any longer; it keeps its host pages until it ends."""
        self._books.count("l3_fetches_late")
        self._books.storage.note_pace(begun_at_s=fetch.begun_at_s, pages=fetch.queued_pages)
        self._give_up(fetch)
        fetch.tails.distrust(self._books, WITHOUT_STORAGE, "storage did not bring a component's tail in time")

    def copied(self, fetch: TailFetch) -> None:
        """The copy to the device is over, well or not, or there will be none. Can be called again where it raised."""
        self._index.give_back({fetch.component: fetch.host_pages}, "host")
        fetch.host_pages = page_ids()
        fetch.tails.fetches.pop(fetch, None)

    # --- The ends ---

    def let_go(self, tails: RequestTails) -> None:
        """The request leaves: it waits for no fetch any more. Copies go on to its device pages."""
        for fetch in list(tails.fetches):
            if fetch.stage is TailStage.FETCHING:
                self._give_up(fetch)

    def give_back(self, tails: RequestTails) -> None:
        """Nothing is under way: free the host pages that are still held. Can be called again."""
        for fetch in list(tails.fetches):
            self.copied(fetch)

    def _give_up(self, fetch: TailFetch) -> None:
        self._books.storage.fetch_over(fetch)
        self._books.storage.fetch_given_up(fetch.op, fetch.host_pages, fetch.component)
        del fetch.tails.fetches[fetch]
        fetch.tails.copies -= 1


def _positions(ranges: tuple[tuple[int, int], ...], end: int) -> set[int]:
    """The positions before `end` in ranges that somebody else has told."""
    return {at for first, stop in ranges for at in range(max(first, 0), min(stop, end))}
