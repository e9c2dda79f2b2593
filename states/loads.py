"""Loads: device pages of the tree that are still being filled, from storage, from the host, or by a room's extend.

A load owns its source pins and destination pages. Requests whose path runs through it are its sharers: they wait for it
and nothing else connects them to it. Its life:

    FETCHING ──landed──▶ COPYING ──done──▶ (ended: the pages are cache like any other)
        │ short, late        │ error
        ▼                    ▼
      FAILED ──a sharer with an open room extends into the pages──▶ FILLING ──last chunk──▶ (ended)
        │ no sharer left                                              │ the filler left, or is lost
        ▼                                                             ▼
      VOID: no match passes it; its pages are freed when nobody writes to them and nothing below is in use

A fetch that is too late goes on in the background: its host pages are given back when it has ended (`LateFetch`), and
its device pages, which only the copy would have written, are free to be extended into at once. A copy that is too late
still writes to the device pages: that load is void, and its sharers start over on other pages.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from tidekv.states.commands import CopyToDevice, FetchPages
from tidekv.states.shapes import PageIds, page_ids

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tidekv.states.books import Books
    from tidekv.states.index import Node, Receipt
    from tidekv.states.request import Request
    from tidekv.states.rooms import Draining, Rooms


class Stage(enum.Enum):
    """Where the bytes of a load are on their way."""

    FETCHING = "FETCHING"
    COPYING = "COPYING"
    FAILED = "FAILED"
    FILLING = "FILLING"
    VOID = "VOID"


class Load:
    """A run of pages of the tree under load. Pages [first, first + page_count) of every prompt that shares it."""

    __slots__ = ("filler", "first", "host_pages", "lock", "nodes", "op", "pin", "sharers", "stage", "tier")

    def __init__(self, *, first: int, nodes: list[Node], lock: Receipt, tier: str, stage: Stage) -> None:
        self.first = first
        self.nodes = nodes
        self.lock: Receipt | None = lock
        self.tier = tier
        self.stage = stage
        self.op = 0
        self.pin: Receipt | None = None
        self.host_pages: PageIds = page_ids()
        """Host pages that the tree does not own: where a fetch lands, until they can join the tree."""
        self.sharers: dict[Request, int] = {}
        """Who waits for it, and for how many of its pages, counted from the first."""
        self.filler: Request | None = None

    @property
    def page_count(self) -> int:
        """Pages under load."""
        return sum(node.page_count for node in self.nodes)

    @property
    def device_pages(self) -> PageIds:
        """The pages that are being filled."""
        pages = page_ids()
        for node in self.nodes:
            assert node.device is not None
            pages += node.device
        return pages

    def split(self, upper: Node, lower: Node) -> None:
        """The index split one of the nodes."""
        at = self.nodes.index(lower)
        self.nodes.insert(at, upper)


class LateFetch:
    """A fetch that nobody waits for: it keeps its host pages until it has ended."""

    __slots__ = ("host_pages",)

    def __init__(self, host_pages: PageIds) -> None:
        self.host_pages = host_pages


class LateRecompute:
    """A computation of a caller that nobody waits for: it keeps its device pages until it has ended."""

    __slots__ = ("device_pages",)

    def __init__(self, device_pages: PageIds) -> None:
        self.device_pages = device_pages


class Loads:
    """All loads of a core."""

    def __init__(self, books: Books, rooms: Rooms) -> None:
        self._books = books
        self._rooms = rooms
        self._live: dict[Load, None] = {}
        self._settled_voids: list[Load] = []

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Load]:
        return iter(self._live)

    @property
    def settled_voids(self) -> list[Load]:
        """Void loads that nobody writes to, whose pages wait until nothing below them is in use."""
        return self._settled_voids

    # --- Starting ---

    def begin_copy(self, first: int, nodes: list[Node]) -> Load:
        """Load nodes that have host pages, and have been given device pages, from the host."""
        load = self._new(first, nodes, tier="l2", stage=Stage.COPYING)
        self._start_copy(load)
        return load

    def begin_fetch(self, request: Request, first: int, node: Node, host_pages: PageIds, *, deadline_s: float) -> Load:
        """Load a new node from storage by way of `host_pages`, which the load takes over."""
        load = self._new(first, [node], tier="l3", stage=Stage.FETCHING)
        load.host_pages = host_pages
        load.op = self._books.begin(load, deadline_s=deadline_s)
        self._books.say(FetchPages(op=load.op, request_id=request.request_id, first=first, host_pages=host_pages))
        return load

    def share(self, load: Load, request: Request, page_count: int) -> None:
        """`request` waits for the first `page_count` pages of the load."""
        load.sharers[request] = page_count
        request.loads[load] = None

    def _new(self, first: int, nodes: list[Node], *, tier: str, stage: Stage) -> Load:
        lock = self._books.index.lock(nodes[-1])
        load = Load(first=first, nodes=nodes, lock=lock, tier=tier, stage=stage)
        for node in nodes:
            self._books.index.set_load(node, load)
        self._live[load] = None
        return load

    def _start_copy(self, load: Load) -> None:
        source = load.host_pages
        if not source:
            source = page_ids()
            for node in load.nodes:
                assert node.host is not None
                source += node.host
            load.pin = self._books.index.pin(load.nodes[-1])
        load.stage = Stage.COPYING
        load.op = self._books.begin(load, deadline_s=self._books.settings.copy_deadline_s)
        self._books.say(CopyToDevice(op=load.op, host_pages=source, device_pages=load.device_pages))

    # --- Outcomes ---

    def fetched(self, load: Load, good: int) -> None:
        """The fetch ended with its first `good` pages verified; the rest, if any, has failed."""
        good = max(0, min(good, load.page_count))
        if good < load.page_count:
            self._books.count("l3_pages_short", load.page_count - good)
            rest = load if good == 0 else self._split_load(load, good)
            self._books.host.give_back(rest.host_pages)
            rest.host_pages = page_ids()
            self._fail(rest)
            if rest is load:
                return
        self._publish_host(load)
        if load.sharers:
            self._start_copy(load)
        else:
            self._drop_unneeded(load)

    def fetch_is_late(self, load: Load) -> None:
        """Nobody waits for the fetch any longer; it keeps its host pages until it ends."""
        self._books.count("l3_fetches_late")
        self._books.operations[load.op] = LateFetch(load.host_pages)
        load.host_pages = page_ids()
        self._fail(load)

    def late_fetch_ended(self, late: LateFetch) -> None:
        """A fetch that nobody waited for has ended."""
        self._books.host.give_back(late.host_pages)

    def copied(self, load: Load, error: str) -> None:
        """The copy to the device is over: the pages are in place, or nobody writes to them any more."""
        self._let_go_of_source(load)
        if load.stage is Stage.VOID:
            self._books.settled_loads.append(load)
        elif error:
            self._books.count("copies_failed")
            self._fail(load)
        else:
            self._end(load, load.tier)

    def copy_is_late(self, load: Load) -> None:
        """The copy may still write: its pages cannot be extended into, so the sharers start over on others."""
        self._books.count("copies_late")
        self._void(load, "a copy to the device did not end in time")

    def filled(self, load: Load) -> None:
        """A room has brought the pages."""
        self._end(load, "transfer")

    def cut(self, load: Load) -> None:
        """A sharer no longer trusts local tiers: what has not landed yet is asked of prefill instead."""
        if load.stage is Stage.FETCHING and len(load.sharers) == 1:
            self.fetch_is_late(load)

    # --- Leaving ---

    def leave(self, load: Load, request: Request, draining: Draining | None) -> None:
        """`request` waits for the load no longer, and has left its room (into `draining`, where writes may go on)."""
        del load.sharers[request]
        del request.loads[load]
        if load.filler is request:
            (self._books.settled_loads if draining is None else draining.loads).append(load)
            self._void(load, "the transfer that was to fill its pages was lost")
        elif not load.sharers and load.stage is Stage.FAILED:
            self._books.settled_loads.append(load)
            self._void(load, "nobody needs it")

    def find_fillers(self, request: Request) -> None:
        """The request has an open room now: failed loads that wait for one are extended into."""
        for load in list(request.loads):
            if load.stage is Stage.FAILED:
                self._fail(load)

    # --- Ends ---

    def _end(self, load: Load, source: str) -> None:
        for node in load.nodes:
            self._books.index.set_load(node, None)
        self._forget(load)
        for request, page_count in load.sharers.items():
            del request.loads[load]
            request.source_pages[source] += page_count
            self._books.dirty[request] = None
        load.sharers = {}

    def _fail(self, load: Load) -> None:
        """No local writer touches the pages now: the oldest sharer that has a room extends into them."""
        load.stage = Stage.FAILED
        fillers = [request for request in load.sharers if request.room is not None]
        if fillers:
            filler = min(fillers, key=lambda request: request.arrival)
            assert filler.room is not None
            wanted = load.sharers[filler]
            rest = self._split_load(load, wanted) if wanted < load.page_count else None
            load.filler = filler
            load.stage = Stage.FILLING
            self._rooms.extend(filler.room, load)
            for request in load.sharers:
                self._books.dirty[request] = None
            if rest is not None:
                # The filler's prompt goes another way from there on: its prefill does not have these pages.
                self._fail(rest)
        elif not load.sharers:
            self._books.settled_loads.append(load)
            self._void(load, "nobody needs it")

    def _void(self, load: Load, cause: str) -> None:
        load.stage = Stage.VOID
        for node in load.nodes:
            assert node.device is not None
            self._books.index.set_void(node)
        self._books.count("loads_void")
        for request in list(load.sharers):
            self._books.homeless.setdefault(request, cause)
        self._forget(load)

    def _forget(self, load: Load) -> None:
        if load.lock is not None:
            self._books.index.unlock(load.lock)
            load.lock = None
        load.filler = None
        del self._live[load]
        self._books.pages_freed = True

    def _drop_unneeded(self, load: Load) -> None:
        """The bytes are in host memory and nobody waits for them on the device: free the device pages unwritten."""
        self._let_go_of_source(load)
        self._books.settled_loads.append(load)
        self._void(load, "nobody needs it")

    def _let_go_of_source(self, load: Load) -> None:
        if load.pin is not None:
            self._books.index.unpin(load.pin)
            load.pin = None
        if load.host_pages:
            self._books.host.give_back(load.host_pages)
            load.host_pages = page_ids()

    def free_settled_voids(self) -> None:
        """Free the pages of void loads that nobody writes to, deepest first, as far as nothing below them is in use."""
        waiting = self._settled_voids
        waiting += self._books.settled_loads
        self._books.settled_loads = []
        waiting.sort(key=lambda load: -load.first)
        self._settled_voids = []
        for load in waiting:
            for node in reversed(load.nodes):
                pages = self._books.index.drop_void(node)
                if pages is None:
                    self._settled_voids.append(load)
                    break
                self._books.device.settle(pages)
                load.nodes.remove(node)
                self._books.pages_freed = True

    # --- Parts ---

    def _split_load(self, load: Load, at: int) -> Load:
        """Cut the load in two at page `at`; `load` keeps the first part, the rest is returned, with its sharers."""
        kept: list[Node] = []
        pages = 0
        while pages + load.nodes[0].page_count <= at:
            node = load.nodes.pop(0)
            kept.append(node)
            pages += node.page_count
        if pages < at:
            kept.append(self._books.index.split(load.nodes[0], at - pages))
            load.nodes.remove(kept[-1])
        rest = self._new(load.first + at, load.nodes, tier=load.tier, stage=Stage.FAILED)
        assert load.lock is not None
        shorter = self._books.index.lock(kept[-1])
        self._books.index.unlock(load.lock)
        load.lock, load.nodes = shorter, kept
        rest.host_pages, load.host_pages = load.host_pages[at:], load.host_pages[:at]
        for request, wanted in list(load.sharers.items()):
            if wanted > at:
                load.sharers[request] = at
                self.share(rest, request, wanted - at)
        return rest

    def _publish_host(self, load: Load) -> None:
        """What was fetched joins the tree as host pages where its parent is there too; else it is a bounce buffer."""
        index = self._books.index
        for node in load.nodes:
            index.mark_stored(node)
        parent = load.nodes[0].parent
        assert parent is not None
        if not index.has_host(parent):
            return
        for node in load.nodes:
            pages, load.host_pages = load.host_pages[: node.page_count], load.host_pages[node.page_count :]
            index.give_host(node, pages)
