"""What a request has of components: its tails, from the grant until it gives everything back.

With components a plan ends at a boundary that all of them can serve, and what the request needs of each is taken with
the grant, in the same step as its full pages, or the request waits. Of a component it needs the tail at the *prompt's
end*, part of which may lie before the boundary:

    positions of a window    [first, boundary)       of the index, shared; or loaded from the host into own pages
                             [boundary, page_count)  own, written by prefill
    the record of a state    own: a copy of the index's, where the boundary is the prompt's end; else prefill's

What storage alone has of [first, boundary) comes to own pages, too, by way of the host (`tidekv.states.components.storage`).

A window never grows beyond its tail and the page that is being written, so each request gets that many own pages at
once and never asks for more: what the window has left behind is written again. All of a component or nothing: where a
fetch from storage fails, the request starts over without storage; where a copy fails, it trusts no host copies of
components, and after another failure no copies at all.

A caller that computes by itself begins with the first page: its tails would have to be in place before it begins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidekv.states.commands import CopyTail
from tidekv.states.components.specs import TailPages, TailTable
from tidekv.states.components.storage import WITHOUT_HOST, WITHOUT_STORAGE, WITHOUT_TAILS, TailStorage, distrust
from tidekv.states.errors import BrokenInvariant
from tidekv.states.request.request import Request, RequestTails
from tidekv.states.rollback import Undo
from tidekv.states.types import PageIds, page_ids, without

if TYPE_CHECKING:
    from tidekv.states.components.index import ComponentIndex
    from tidekv.states.core_state import CoreState
    from tidekv.states.events import Outcome, TailLeft
    from tidekv.states.prefix.node import Match, Node, TierName
    from tidekv.states.storage.admission import StorageUse


class TailCopy:
    """Operation: a copy into a request's tails."""

    __slots__ = ("_rules", "tails")

    def __init__(self, rules: Tails, tails: RequestTails) -> None:
        self._rules = rules
        self.tails = tails

    def ended(self, event: Outcome, error: str) -> None:
        """The request waits for one copy less, or starts over."""
        self._rules.copied(self.tails, error)

    def late(self) -> None:
        """The request starts over on other pages."""
        self._rules.is_late(self.tails)

    def abandon(self) -> None:
        """Give the tails back."""
        self._rules.give_up(self.tails)


class Tails:
    """The steps of requests with components."""

    def __init__(self, state: CoreState, storage: StorageUse, index: ComponentIndex) -> None:
        self._state = state
        self._index = index
        self.storage = TailStorage(state, storage, index, self.copy_of)

    # --- The grant ---

    def match(self, request: Request) -> Match:
        """What the index and all components have of the prompt; once it is granted, no more than was reserved for."""
        width = self._state.settings.key_bytes
        if request.tails is not None:
            return self._index.index.match(request.namespace, request.keys[: request.tails.boundary * width])
        request.stored_end = self.storage.boundary(request)
        if request.stored_end:
            return self._index.index.match(request.namespace, request.keys[: request.stored_end * width])
        keys = b"" if request.recomputes or request.tail_limit >= WITHOUT_TAILS else request.keys
        use_host = request.restore_limit < 2 and request.tail_limit < WITHOUT_HOST
        return self._index.match(request.namespace, keys, use_host=use_host)

    def reserve(self, request: Request, match: Match) -> bool:
        """Take what the request needs of every component, or nothing and False."""
        page_size = self._state.settings.page_size
        components = self._index.components
        spare = {name: c.live_pages(page_size) if c.is_shared else 0 for name, c in components.items()}
        needed = self.storage.needed_from(request)
        here = match.device_pages + match.host_pages
        reserved = self._index.reserve(match, spare, needed, boundary=request.stored_end or here)
        if reserved is None:
            return False
        tails = request.tails = RequestTails(request, reserved)
        tails.fetched_pages = reserved.boundary - here
        for name, tail in reserved.tails.items():
            first = tails.firsts[name] = max(tail.first, needed[name])
            begin = max(first, reserved.boundary)
            remote = tail.own[len(tail.own) - spare[name] :] if components[name].is_shared else tail.own
            remote = remote[: request.page_count - begin]
            # A caller that computes by itself writes to the same pages; prefill does not.
            tails.remote[name] = page_ids() if request.recomputes else remote
            tails.tables[name] = tail.table + remote if components[name].is_shared else tail.table
        holes = {name: tail.stored[0] for name, tail in reserved.tails.items() if tail.stored[0]}
        if holes and not request.stored_end:
            raise BrokenInvariant(f"the caches serve {request} at page {reserved.boundary}, and nobody holds {holes}")
        if not self.storage.reserve(tails):
            # As for full pages, host memory is not waited for.
            self.leave(request)
            request.tail_limit = WITHOUT_STORAGE
            return False
        return True

    def does_with_less(self, request: Request) -> bool:
        """Whether a request that could not reserve tries with less at once; else it waits for freed pages."""
        if request.stored_end and (request.tail_limit or self._is_alone()):
            request.tail_limit = WITHOUT_STORAGE
            return True
        if request.tail_limit < WITHOUT_TAILS and self._is_alone():
            request.tail_limit = WITHOUT_TAILS
            return True
        return False

    def _is_alone(self) -> bool:
        """Whether no request holds anything of components: waiting for them would be in vain."""
        tiers = self._index.device.values()
        return not any(tier.receipts or tier.account.owned or tier.account.draining for tier in tiers)

    # --- The plan ---

    def serves(self, request: Request, match: Match) -> bool:
        """Whether what was reserved still goes with what the index has, and with the tiers that are trusted."""
        tails = request.tails
        assert tails is not None
        if request.stored_end:
            return not request.restore_limit
        loads = any(len(tail.loads[0]) for tail in tails.reserved.tails.values())
        is_trusted = request.restore_limit < 2 or not (match.host_pages or loads)
        return is_trusted and match.device_pages + match.host_pages == tails.boundary

    def reaches(self, request: Request, end: int) -> bool:
        """Whether loads bring the plan to the boundary that was reserved for; else the request starts over."""
        tails = request.tails
        assert tails is not None
        if end < tails.boundary:
            distrust(self._state, tails, WITHOUT_STORAGE, "not all that storage has can be fetched")
        return end >= tails.boundary

    def begin(self, request: Request, node: Node, undo: Undo) -> None:
        """Start the copies, and lock the tails to `node`, the end of the plan. `undo` takes all of it back."""
        tails = request.tails
        assert tails is not None
        assert tails.lock is not None
        undo.callback(self._lock_at, tails, tails.lock.full.node)
        self._lock_at(tails, node)
        undo.callback(self._forget_copies, tails)
        for name, tail in tails.reserved.tails.items():
            self._copy(tails, name, "host", tail.loads, undo)
            self._copy(tails, name, "device", tail.clones, undo)
        self.storage.begin(request, tails, undo)

    def _copy(
        self, tails: RequestTails, name: str, source: TierName, pages: tuple[PageIds, PageIds], undo: Undo
    ) -> None:
        if not pages[0]:
            return
        op = self._state.start_operation(self.copy_of(tails), deadline_s=self._state.settings.copy_deadline_s)
        undo.callback(self._state.operations.pop, op)
        tails.copies += 1
        self._state.emit(
            CopyTail(
                op=op, component=name, source=source, source_pages=pages[0], target="device", target_pages=pages[1]
            )
        )

    def _forget_copies(self, tails: RequestTails) -> None:
        tails.copies = 0

    def _lock_at(self, tails: RequestTails, node: Node) -> None:
        assert tails.lock is not None
        lock = self._index.lock(node, boundary=tails.boundary)
        with Undo() as undo:
            undo.callback(self._index.unlock, lock)
            self._index.unlock(tails.lock)
            undo.keep()
        tails.lock = lock

    def promise(self, request: Request) -> tuple[TailPages, ...]:
        """What prefill is to send of each component."""
        tails = request.tails
        assert tails is not None
        return tuple(
            TailPages(name, max(tails.firsts[name], tails.boundary), pages) for name, pages in tails.remote.items()
        )

    # --- Copies ---

    def copy_of(self, tails: RequestTails) -> TailCopy:
        """The operation of a copy into these tails."""
        return TailCopy(self, tails)

    def copied(self, tails: RequestTails, error: str) -> None:
        """A copy is over."""
        tails.copies -= 1
        if error:
            self._state.count("copies_failed")
            distrust(self._state, tails, WITHOUT_HOST, "a copy of a component failed")
        if tails.request is not None:
            self._state.dirty[tails.request] = None
        elif not tails.copies:
            self.give_up(tails)

    def is_late(self, tails: RequestTails) -> None:
        """A copy did not end in time: the request starts over on other pages."""
        self._state.count("copies_late")
        distrust(self._state, tails, WITHOUT_HOST, "a copy of a component did not end in time")

    # --- The ends ---

    def commit(self, request: Request) -> tuple[TailTable, ...]:
        """Everything is here: what was loaded of windows joins the index. Returns the tables for the caller."""
        tails = request.tails
        assert tails is not None and tails.lock is not None
        tails.remote = {}
        for name, tail in tails.reserved.tails.items():
            if self._index.components[name].is_shared:
                self._enter(tails, name, tail.first, tail.table)
        self._let_go_of_sources(tails)
        return tails.table

    def keep(self, request: Request, left: tuple[TailLeft, ...], node: Node) -> None:
        """Enter what the caller has left of components into the index, as far as the full pages reach: to `node`."""
        tails = request.tails
        assert tails is not None
        for tail in left:
            pages = page_ids(tail.pages[: max(0, node.depth_pages - tail.first)])
            first = tails.firsts[tail.component]
            shared = tails.tables[tail.component]
            for position, page in enumerate(pages, tail.first):
                is_shared = first <= position < first + len(shared) and shared[position - first] == page
                if page not in tails.own[tail.component] and not is_shared:
                    raise BrokenInvariant(f"{request} leaves page {page} of {tail.component!r}, which it does not have")
            if not pages:
                # All of it lies beyond what is kept.
                continue
            _, unused = self._index.insert("device", tail.component, node, tail.first, pages)
            taken = without(pages, unused)
            tails.own[tail.component] = without(tails.own[tail.component], taken)

    def leave(self, request: Request) -> None:
        """Give everything back; pages that copies still write to when those have ended."""
        if request.tails is None:
            return
        self.storage.let_go(request.tails)
        if not request.tails.copies:
            self.give_up(request.tails)
        request.tails.request = None
        request.tails = None

    def give_up(self, tails: RequestTails) -> None:
        """The pages have no writer any more: they are free, and so is what was locked. Can be called again."""
        self._index.give_back(tails.own)
        tails.own = {}
        self.storage.give_back(tails)
        if tails.lock is not None:
            self._index.unlock(tails.lock)
            tails.lock = None
        self._let_go_of_sources(tails)
        self._state.pages_freed = True

    def _let_go_of_sources(self, tails: RequestTails) -> None:
        if tails.pin is not None:
            self._index.unpin(tails.pin)
            tails.pin = None

    def _enter(self, tails: RequestTails, name: str, first: int, pages: PageIds) -> None:
        """The index takes what it does not have; where it has another page, that is used from now on."""
        assert tails.lock is not None
        table, unused = self._index.insert("device", name, tails.lock.full.node, first, pages)
        # Said before anything is given back, so that a raise from here on loses no page.
        tails.own[name] = without(tails.own[name], without(pages, unused))
        self._index.give_back({name: unused})
        tails.own[name] = without(tails.own[name], unused)
        tails.tables[name] = table + tails.tables[name][len(table) :]
