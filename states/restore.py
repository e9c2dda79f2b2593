"""Restoring a prompt: the grant, the plan, the commit, and giving everything back.

What each function does to a request is one step of its life; `tidekv.states.table` says when. A prompt's pages while
the plan is made:

    [0, matched)             in device memory (L1), locked; some of it under another request's load
    [matched, host_end)      in host memory (L2), pinned: loads by copy
    [host_end, promised)     in storage (L3), as it answered: loads by fetch, then copy
    [promised, page_count)   the delta: prefill writes it (span 0 of the room)

Deciding comes first and is free to raise; index and accounts change after that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidekv.states.commands import QueryStorage, Recompute, TellReady
from tidekv.states.loads import LateRecompute, Load
from tidekv.states.node import Match
from tidekv.states.shapes import PageIds, page_ids

if TYPE_CHECKING:
    from tidekv.states.books import Books
    from tidekv.states.index import Node
    from tidekv.states.loads import Loads
    from tidekv.states.request import Request
    from tidekv.states.rooms import Rooms


class Restore:
    """The steps of a restore."""

    def __init__(self, books: Books, rooms: Rooms, loads: Loads) -> None:
        self._books = books
        self._rooms = rooms
        self._loads = loads
        self._insertions = 0

    # --- PREALLOC ---

    def ask_storage(self, request: Request) -> None:
        """Ask storage for what neither device nor host has, while the request waits, unless that is too little."""
        books = self._books
        if not books.storage_available or request.restore_limit or request.query_op:
            return
        first = sum(books.index.peek(request.namespace, request.keys))
        count = request.full_pages - first
        if count < 1 or count * books.settings.page_size < books.settings.prefetch_threshold_tokens:
            return
        request.query_op = books.begin(request, deadline_s=books.settings.query_deadline_s)
        request.stored_first, request.stored_found = first, 0
        books.say(QueryStorage(op=request.query_op, request_id=request.request_id, first=first, count=count))

    def note_answer(self, request: Request, found: int) -> None:
        """Storage has answered, or is too late with its answer."""
        request.query_op = 0
        request.stored_found = max(0, min(found, request.full_pages - request.stored_first))

    def grant(self, request: Request) -> bool:
        """Match, lock and reserve in one step: all of it, or nothing and False."""
        books = self._books
        available = books.device.free + books.index.device_evictable
        if request.short_version == self._insertions and available < request.short_need:
            return False
        match = self._match(request)
        lock = books.index.lock(match.device_node)
        needed = request.page_count - match.device_pages + books.settings.growth_reserve_pages
        if not books.make_device_room(needed):
            books.index.unlock(lock)
            request.short_need, request.short_version = needed, self._insertions
            return False
        pages = books.device.take(needed)
        reserved = needed - books.settings.growth_reserve_pages
        request.own, request.reserve = pages[:reserved], pages[reserved:]
        request.lock = lock
        request.pin = books.index.pin(match.host_node)
        request.matched = match.device_pages
        self._share_loads(request, match.device_node)
        known_to = match.device_pages + match.host_pages
        if known_to < request.stored_first:
            self.ask_storage(request)
        return True

    # --- MATCH ---

    def fix_plan(self, request: Request) -> None:
        """Cut the prompt into runs by source, start the loads, and send the promise."""
        books = self._books
        match = self._match(request)
        self._relock(request, match)
        node, end = match.device_node, match.device_pages
        if request.restore_limit < 2:
            node, end = self._load_from_host(request, match)
        if request.restore_limit < 1:
            node, end = self._load_from_storage(request, node, end)
        self._lock_at(request, node)
        assert request.pin is not None
        books.index.unpin(request.pin)
        request.pin = None
        request.promised = end
        waiting = sum(load.sharers[request] for load in request.loads)
        request.source_pages["l1"] = end - waiting - sum(request.source_pages.values())
        if request.recomputes:
            self._ask_caller(request)
            return
        self._rooms.open(request)
        self._loads.find_fillers(request)

    def _match(self, request: Request) -> Match:
        """What the index has of the prompt. Who recomputes shares no loads: it could not extend into them."""
        match = self._books.index.match(request.namespace, request.keys)
        if not request.recomputes:
            return match
        path = self._books.index.path(match.device_node)
        leaf = match.device_node if not path else path[0].parent
        assert leaf is not None
        for node in path:
            if node.load is not None:
                break
            leaf = node
        return Match(leaf.depth_pages, 0, leaf, leaf)

    def _ask_caller(self, request: Request) -> None:
        books = self._books
        assert request.lock is not None
        request.recompute_op = books.begin(request, deadline_s=float("inf"))
        books.say(
            Recompute(
                op=request.recompute_op,
                request_id=request.request_id,
                generation=request.generation,
                first=request.promised,
                pages=books.index.device_path(request.lock.node) + request.own,
            )
        )

    def _relock(self, request: Request, match: Match) -> None:
        """Others may have extended the match since the grant; what we reserved for that part is given back."""
        surplus = len(request.own) - (request.page_count - match.device_pages)
        assert surplus >= 0, "what was locked is still there"
        self._books.device.give_back(request.own[:surplus])
        request.own = request.own[surplus:]
        request.matched = match.device_pages
        self._lock_at(request, match.device_node)
        self._share_loads(request, match.device_node)

    def _lock_at(self, request: Request, node: Node) -> None:
        before, request.lock = request.lock, self._books.index.lock(node)
        assert before is not None
        self._books.index.unlock(before)

    def _share_loads(self, request: Request, leaf: Node) -> None:
        """Wait for every load that the path to `leaf` runs through."""
        wanted: dict[Load, int] = {}
        for node in self._books.index.path(leaf):
            load = node.load
            if load is not None:
                assert isinstance(load, Load)
                wanted[load] = wanted.get(load, 0) + node.page_count
        for load, page_count in wanted.items():
            self._loads.share(load, request, page_count)

    def _take_own(self, request: Request, count: int) -> PageIds:
        taken, request.own = request.own[:count], request.own[count:]
        return taken

    def _load_from_host(self, request: Request, match: Match) -> tuple[Node, int]:
        """Start copies of the matched host pages, in runs of whole nodes. Returns where the plan ends now."""
        index = self._books.index
        leaf, end = match.device_node, match.device_pages
        path = index.path(match.host_node)
        run: list[Node] = []
        first = end
        for node in path:
            if node.depth_pages <= match.device_pages:
                continue
            index.give_device(node, self._take_own(request, node.page_count))
            run.append(node)
            leaf, end = node, node.depth_pages
            if end - first >= self._books.settings.copy_run_pages or node is path[-1]:
                load = self._loads.begin_copy(first, run)
                self._loads.share(load, request, end - first)
                run, first = [], end
        return leaf, end

    def _load_from_storage(self, request: Request, leaf: Node, end: int) -> tuple[Node, int]:
        """Start fetches of what storage said it has, as far as host pages can be had."""
        books = self._books
        settings = books.settings
        found_to = request.stored_first + request.stored_found
        count = found_to - end if request.stored_first <= end else 0
        if not books.storage_available or count * settings.page_size < max(settings.prefetch_threshold_tokens, 1):
            return leaf, end
        deadline_s = settings.prefetch_deadline_s(count)
        width = settings.key_bytes
        while end < found_to:
            first_key = request.keys[end * width : (end + 1) * width]
            pages = books.make_host_room(min(settings.fetch_run_pages, found_to - end))
            if not pages or first_key in leaf.children:
                # No host memory, or a void run of the same prompt is still in the way: the transfer brings the rest.
                books.count("l3_declined_pages", found_to - end)
                break
            keys = request.keys[end * width : (end + pages) * width]
            leaf = books.index.insert_pending(leaf, request.namespace, keys, self._take_own(request, pages), None)
            load = self._loads.begin_fetch(request, end, leaf, books.host.take(pages), deadline_s=deadline_s)
            self._loads.share(load, request, pages)
            end += pages
        return leaf, end

    # --- READY ---

    def commit(self, request: Request) -> None:
        """All pages are here: the prompt joins the cache, and the caller gets the page table."""
        books = self._books
        settings = books.settings
        assert request.lock is not None
        source = "recompute" if request.recomputed else "transfer"
        request.source_pages[source] = request.source_pages.get(source, 0) + len(request.own)
        request.table = books.index.device_path(request.lock.node) + request.own
        assert len(request.table) == request.page_count
        if request.cache and request.full_pages > request.promised:
            self.keep(request, request.keys)
        if request.room is not None:
            self._rooms.receive(request.room)
        sources = {tier: pages * settings.page_size for tier, pages in request.source_pages.items()}
        # Only the last page can be filled in part, and it is never cached then.
        sources[source] -= request.page_count * settings.page_size - request.prompt_tokens
        books.say(
            TellReady(
                request_id=request.request_id,
                generation=request.generation,
                pages=request.table,
                sources=sources,
                reserve=request.reserve,
            )
        )

    def keep(self, request: Request, keys: bytes) -> int:
        """Insert the request's pages under `keys` (full pages, from the first on) in the cache.

        Where the cache has other pages for the same tokens the request goes over to those. Its lock moves to the end
        of what was inserted; `own` keeps the pages that could not be. Returns how many pages are new to the cache.
        """
        books = self._books
        count = len(keys) // books.settings.key_bytes
        inserted = books.index.insert(request.namespace, keys, request.table[:count])
        request.table = inserted.pages + request.table[count:]
        books.device.give_back(inserted.duplicates)
        beyond = len(request.table) - count
        request.own = inserted.rejected + request.own[len(request.own) - beyond :]
        self._lock_at(request, inserted.node)
        self._insertions += 1
        books.pages_freed = True
        return inserted.inserted_count

    # --- Leaving ---

    def leave(self, request: Request, *, settled: bool) -> None:
        """Give everything back, or to the quarantine where prefill may still write; the request holds nothing now."""
        books = self._books
        draining = None
        if request.room is not None:
            draining = self._rooms.leave(request.room, settled=settled)
        elif request.recompute_op:
            # The caller's own computation writes to these pages until it says that it has ended.
            books.operations[request.recompute_op] = LateRecompute(request.own)
            request.own = page_ids()
        else:
            books.device.give_back(request.own)
        for load in list(request.loads):
            self._loads.leave(load, request, draining)
        if request.lock is not None:
            books.index.unlock(request.lock)
        if request.pin is not None:
            books.index.unpin(request.pin)
        books.device.give_back(request.reserve)
        books.operations.pop(request.query_op, None)
        books.homeless.pop(request, None)
        request.query_op = 0
        request.forget_plan()
        books.pages_freed = True

    def fall_back(self, request: Request) -> None:
        """A transition raised: trust fewer tiers. The first time no storage, the second time no host memory either."""
        for load in list(request.loads):
            self._loads.cut(load)
