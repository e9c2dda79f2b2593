"""Loads: device pages of the tree that are still being filled, from storage, from the host, or by a room's extend.

A load owns its source pins and destination pages. Requests whose path runs through it are its sharers: they wait for it
and nothing else connects them to it. Its life:

    FETCHING ──landed──▶ COPYING ──done──▶ (ended: the pages are cache like any other)
        │ short, late        │ error
        ▼                    ▼
      FAILED ──a sharer with an open room extends into the pages──▶ FILLING ──last chunk──▶ (ended)
        │ no sharer left                                              │ the filler left, or is lost
        ▼                                                             ▼
      VOID: no match passes it; its pages are freed when they have no writer and nothing below is in use

A transfer that requests share is a load, too: it begins as FILLING, by the delta of its filler's room, and ends as it
lands. `tidekv.states.loads.shared_transfers` says what happens if its filler leaves or is slow.

A fetch that is too late goes on in the background: its host pages are given back when it has ended (`LateFetch`), and
its device pages, which only the copy would have written, are free to be extended into at once. A copy that is too late
still writes to the device pages: that load is void, and its sharers start over on other pages.

Every step here may be cut short by a raise. A method that begins a load undoes itself; one that ends a load can be
called again.

Parts of a load: where it is cut in two, and what of it joins the tree's host pages. See `loads`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidekv.states.commands import CopyToDevice, FetchPages
from tidekv.states.request.request import Load, Request, Stage
from tidekv.states.rollback import Rollback
from tidekv.states.storage.policy import FETCH_TIMEOUT_MAX_S
from tidekv.states.types import PageIds, page_ids

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tidekv.states.core_state import CoreState
    from tidekv.states.events import Outcome
    from tidekv.states.handover.rooms import Rooms
    from tidekv.states.prefix.index import Node, PrefixIndex
    from tidekv.states.storage.admission import StorageAdmission


def cut_load(index: PrefixIndex, load: Load, at: int) -> Load:
    """Cut a load at its page `at`; `load` keeps the first part, the rest is returned, without sharers."""
    kept = pages = 0
    while pages + load.nodes[kept].page_count <= at:
        pages += load.nodes[kept].page_count
        kept += 1
    if pages < at:
        # The upper half joins the nodes of the load in front of the lower one.
        index.split(load.nodes[kept], at - pages)
        kept += 1
    rest = Load(first=load.first + at, tier=load.tier, stage=load.stage)
    with Rollback() as undo:
        shorter = index.lock(load.nodes[kept - 1])
        undo.callback(index.unlock, shorter)
        for node in load.nodes[kept:]:
            index.set_load(node, rest)
            undo.callback(index.set_load, node, load)
        undo.keep()
    rest.cause, rest.filler, rest.span = load.cause, load.filler, load.span
    # The lock of the whole ends where the rest ends.
    rest.lock, load.lock = load.lock, shorter
    rest.nodes, load.nodes = load.nodes[kept:], load.nodes[:kept]
    rest.host_pages, load.host_pages = load.host_pages[at:], load.host_pages[:at]
    return rest


def publish_host(state: CoreState, load: Load) -> None:
    """What was fetched joins the tree as host pages where its parent is there too; else it is a bounce buffer."""
    for node in load.nodes:
        state.index.mark_stored(node)
    parent = load.nodes[0].parent
    assert parent is not None
    if not state.index.has_host(parent):
        return
    for node in load.nodes:
        ours = load.host_pages[: node.page_count]
        if node.host is None:
            state.index.give_host(node, ours)
        else:
            # The same pages were fetched ahead for another request meanwhile.
            state.host.give_back(ours)
        load.host_pages = load.host_pages[node.page_count :]


class LoadFetch:
    """Operation: storage brings the pages of a load to host memory."""

    __slots__ = ("_loads", "_storage", "load")

    def __init__(self, loads: Loads, storage: StorageAdmission, load: Load) -> None:
        self._loads = loads
        self._storage = storage
        self.load = load

    def ended(self, event: Outcome, error: str) -> None:
        """Copy what is good to the device; the rest has failed."""
        self._loads.fetched(self.load, self._storage.fetch_ended(event))

    def late(self) -> None:
        """The load has failed; the fetch goes on without it."""
        self._storage.call_is_late()
        self._storage.note_throughput(begun_at_s=self.load.begun_at_s, pages=self.load.queued_pages)
        self._loads.fetch_is_late(self.load)

    def abandon(self) -> None:
        """The load has failed."""
        self._loads.outcome_raised(self.load)


class LoadCopy:
    """Operation: a copy brings the pages of a load from host memory to the device."""

    __slots__ = ("_loads", "load")

    def __init__(self, loads: Loads, load: Load) -> None:
        self._loads = loads
        self.load = load

    def ended(self, event: Outcome, error: str) -> None:
        """The pages are in place, or the load has failed."""
        self._loads.copied(self.load, error)

    def late(self) -> None:
        """The load is void: the copy may still write to its pages."""
        self._loads.copy_is_late(self.load)

    def abandon(self) -> None:
        """The load has failed."""
        self._loads.outcome_raised(self.load)


class Loads:
    """All loads of a core."""

    def __init__(self, state: CoreState, storage: StorageAdmission, rooms: Rooms) -> None:
        self._state = state
        self._storage = storage
        self._rooms = rooms
        self._live: dict[Load, None] = {}
        self._settled_voids: list[Load] = []
        self._loose: PageIds = page_ids()

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Load]:
        return iter(self._live)

    @property
    def settled_reclaiming(self) -> list[Load]:
        """Void loads without a writer. Their pages are freed when nothing below them is in use."""
        return self._settled_voids

    @property
    def has_settled(self) -> bool:
        """Whether pages of void loads wait to be freed."""
        return bool(self._settled_voids or self._loose)

    # --- Starting ---

    def begin_copy(self, first: int, nodes: list[Node], pages: PageIds, *, tier: str = "l2") -> Load:
        """Load nodes that are in host memory only into `pages`, the caller's until now. `tier` brought them there."""
        load = Load(first=first, tier=tier, stage=Stage.COPYING)
        try:
            for node in nodes:
                at = node.depth_pages - node.page_count - first
                self._state.index.give_device(node, pages[at : at + node.page_count], load)
                load.nodes.append(node)
            self.hold(load)
            self.start_copy(load)
        except BaseException:
            self.abandon(load)
            raise
        return load

    def begin_fetch(
        self, request: Request, parent: Node, first: int, keys: bytes, pages: PageIds, *, deadline_s: float
    ) -> Load:
        """Load a new child of `parent` from storage into `pages`, the caller's until now, by way of free host pages."""
        state = self._state
        load = Load(first=first, tier="l3", stage=Stage.FETCHING)
        try:
            load.nodes.append(state.index.insert_pending(parent, request.namespace, keys, pages, load))
            load.host_pages = state.host.take(len(pages))
            self.hold(load)
            load.op = state.start_operation(LoadFetch(self, self._storage, load), deadline_s=deadline_s)
            state.emit(
                FetchPages(
                    op=load.op,
                    request_id=request.request_id,
                    first=first,
                    host_pages=load.host_pages,
                    timeout_s=min(deadline_s, FETCH_TIMEOUT_MAX_S),
                )
            )
            self._storage.fetch_began(load, len(pages))
            load.begun_at_s, load.queued_pages = state.now_s, self._storage.pages_in_flight
        except BaseException:
            self.abandon(load)
            raise
        return load

    def abandon(self, load: Load) -> None:
        """Rollback the begin of a load in the step that it began in: its device pages are the caller's again."""
        state = self._state
        self._live.pop(load, None)
        self._storage.fetch_over(load)
        state.operations.pop(load.op, None)
        self._let_go_of_source(load)
        self._unlock(load)
        for node in reversed(load.nodes):
            state.index.set_load(node, None)
            state.index.withdraw_device(node)
        load.nodes = []

    def share(self, load: Load, request: Request, page_count: int) -> None:
        """`request` waits for the first `page_count` pages of the load."""
        load.sharers[request] = page_count
        request.loads[load] = None
        if load.span is not None:
            # Maybe that much has landed already.
            self._state.progressed_loads[load] = None

    def hold(self, load: Load) -> None:
        """Lock the nodes of a new load, which lives from now on."""
        load.lock = self._state.index.lock(load.nodes[-1])
        self._live[load] = None

    def start_copy(self, load: Load) -> None:
        """Copy to the device what is on the host: the pages of the load's own, or those of its nodes."""
        source = load.host_pages
        if not source:
            load.pin = self._state.index.pin(load.nodes[-1])
            source = page_ids()
            for node in load.nodes:
                assert node.host is not None
                source += node.host
        load.op = self._state.start_operation(LoadCopy(self, load), deadline_s=self._state.settings.copy_deadline_s)
        self._state.emit(CopyToDevice(op=load.op, host_pages=source, device_pages=load.device_pages))
        load.stage = Stage.COPYING
        self._storage.fetch_over(load)
        for request in load.sharers:
            self._state.dirty[request] = None

    # --- Outcomes ---

    def fetched(self, load: Load, good: int) -> None:
        """The fetch ended with its first `good` pages verified; the rest, if any, has failed."""
        good = max(0, min(good, load.page_count))
        if good == load.page_count:
            self._storage.note_throughput(begun_at_s=load.begun_at_s, pages=load.queued_pages)
        else:
            self._state.count("l3_pages_short", load.page_count - good)
            rest = load if good == 0 else self.split(load, good)
            rest.cause = "fetch_short"
            self.fail(rest)
            if rest is load:
                return
        publish_host(self._state, load)
        if load.sharers:
            self.start_copy(load)
        else:
            # The bytes are in host memory, and no request waits for them on the device.
            self._give_up(load)

    def fetch_is_late(self, load: Load) -> None:
        """Fail the load; the fetch keeps its host pages until it ends."""
        self._state.count("l3_fetches_late")
        load.cause = "fetch_late"
        self._cut_fetch(load)

    def transfer_is_done(self, request: Request, *, keep: int = 0) -> None:
        """Prefill has brought all that it was asked for: what storage has not brought by now is asked of it, too, but
        for the first `keep` fetches."""
        for load in request.fetches[keep:]:
            self._state.count("l3_fetches_cut")
            load.cause = "transfer_done"
            self._cut_fetch(load)

    def _cut_fetch(self, load: Load) -> None:
        self._storage.fetch_given_up(load.op, load.host_pages)
        load.host_pages = page_ids()
        self.fail(load)

    def copied(self, load: Load, error: str) -> None:
        """The copy to the device is over: the pages are in place, or have no writer any more."""
        if load.stage is Stage.RECLAIMING:
            self._state.reclaimable_loads.append(load)
        elif error:
            self._state.count("copies_failed")
            load.cause = "copy_failed"
            self.fail(load)
        else:
            self._let_go_of_source(load)
            self._end(load, load.tier)

    def copy_is_late(self, load: Load) -> None:
        """The copy may still write: its pages cannot be extended into, so the sharers start over on others."""
        self._state.count("copies_late")
        self._void(load, "a copy to the device did not end in time")

    def filled(self, load: Load) -> None:
        """A room has brought the pages."""
        self._end(load, "transfer")

    def handed_over(self, load: Load) -> None:
        """The room of one sharer has brought the pages; the others find them on the device, and cost no transfer."""
        self._end(load, "l1", filler_source="transfer")

    def outcome_raised(self, load: Load) -> None:
        """Taking an outcome raised. The operation is over, so the pages have no local writer: they have failed."""
        self._state.operations.pop(load.op, None)
        load.cause = "rule_raised"
        if load.stage is not Stage.RECLAIMING:
            self.fail(load)
        elif load not in self._state.reclaimable_loads:
            self._state.reclaimable_loads.append(load)

    def cut(self, load: Load) -> None:
        """A sharer no longer trusts local tiers: what has not landed yet is asked of prefill instead."""
        if load.stage is Stage.FETCHING and len(load.sharers) == 1:
            self.fetch_is_late(load)
            load.cause = "rule_raised"

    # --- Filling what failed ---

    def filler_of(self, load: Load) -> Request | None:
        """The request that is to extend into the pages of a failed load: the oldest sharer with an open room."""
        fillers = [(request.room, request) for request in load.sharers if request.room is not None]
        if self._state.settings.share_transfers and any(room.is_complete for room, _ in fillers):
            # A request whose prefill has sent everything else must not wait for one whose prefill has not.
            fillers = [(room, request) for room, request in fillers if room.is_complete]
        return min((request for _, request in fillers), key=lambda request: request.arrival, default=None)

    def fill(self, load: Load) -> None:
        """No local writer touches the pages of a failed load: a sharer extends into them, or they are given up.

        Where no sharer has a room yet, the load waits for the first that opens one.
        """
        assert load.stage is Stage.FAILED, "only what has failed waits to be filled"
        self._let_go_of_source(load)
        if not load.sharers:
            self._give_up(load)
            return
        filler = self.filler_of(load)
        if filler is None:
            return
        assert filler.room is not None
        if load.sharers[filler] < load.page_count:
            # The filler's prompt goes another way from there on: its prefill does not have these pages.
            self.fail(self.split(load, load.sharers[filler]))
        self._rooms.extend(filler.room, load)
        load.filler = filler
        load.stage = Stage.RECEIVING
        for request in load.sharers:
            self._state.dirty[request] = None

    def leave(self, load: Load, request: Request) -> None:
        """`request`, which is about to leave its room, waits for the load no longer."""
        if load.filler is request:
            assert request.room is not None
            if load not in request.room.lost:
                request.room.lost.append(load)
            self._void(load, "the transfer that was to fill its pages was lost")
        del load.sharers[request]
        del request.loads[load]
        if not load.sharers and load.stage is Stage.FAILED:
            self._state.failed_loads[load] = None

    # --- Ends ---

    def _end(self, load: Load, source: str, *, filler_source: str = "") -> None:
        self._unlock(load)
        index = self._state.index
        ended: list[Node] = []
        try:
            for node in load.nodes:
                index.set_load(node, None)
                ended.append(node)
        except BaseException:
            for node in ended:
                index.set_load(node, load)
            raise
        filler = load.filler if filler_source else None
        self.forget(load)
        for request, page_count in load.sharers.items():
            del request.loads[load]
            request.source_pages[filler_source if request is filler else source] += page_count
            self._state.dirty[request] = None
        load.sharers = {}

    def fail(self, load: Load) -> None:
        """The load has no source any more: it waits for a sharer to extend into it."""
        load.stage = Stage.FAILED
        self._fills_no_longer(load)
        self._storage.fetch_over(load)
        self._state.failed_loads[load] = None
        for request in load.sharers:
            self._state.dirty[request] = None

    def _give_up(self, load: Load) -> None:
        """Give up a load whose pages are not needed and have no writer."""
        self._let_go_of_source(load)
        self._void(load, "nobody needs it")
        self._state.reclaimable_loads.append(load)

    def _void(self, load: Load, cause: str) -> None:
        for node in load.nodes:
            if not node.void:
                self._state.index.set_reclaiming(node)
        self._unlock(load)
        load.stage = Stage.RECLAIMING
        self._storage.fetch_over(load)
        self._state.count("loads_void")
        for request in load.sharers:
            self._state.preempted.setdefault(request, cause)
        self.forget(load)

    def _fills_no_longer(self, load: Load) -> None:
        if load.span is not None:
            # Requests that waited for the filler wait for it no longer.
            self._state.operations.pop(load.op, None)
            load.op, load.span = 0, None
        load.filler = None

    def forget(self, load: Load) -> None:
        """It is over."""
        self._fills_no_longer(load)
        self._live.pop(load, None)
        self._state.failed_loads.pop(load, None)
        self._state.pages_freed = True

    def _unlock(self, load: Load) -> None:
        if load.lock is not None:
            self._state.index.unlock(load.lock)
            load.lock = None

    def _let_go_of_source(self, load: Load) -> None:
        if load.pin is not None:
            self._state.index.unpin(load.pin)
            load.pin = None
        if load.host_pages:
            self._state.host.give_back(load.host_pages)
            load.host_pages = page_ids()

    def free_settled_reclaiming(self) -> None:
        """Free the pages of void loads without a writer, deepest first, as far as nothing below them is in use."""
        state = self._state
        self._settled_voids += state.reclaimable_loads
        state.reclaimable_loads = []
        self._settled_voids.sort(key=lambda load: -load.first)
        for load in list(self._settled_voids):
            self._let_go_of_source(load)
            while load.nodes:
                pages = state.index.drop_reclaiming(load.nodes[-1])
                if pages is None:
                    break
                load.nodes.pop()
                self._loose += pages
            if not load.nodes:
                self._settled_voids.remove(load)
        if self._loose:
            state.device.settle(self._loose)
            self._loose = page_ids()
            state.pages_freed = True

    # --- Parts ---

    def split(self, load: Load, at: int) -> Load:
        """Cut the load in two at page `at`; `load` keeps the first part, the rest is returned, with its sharers."""
        rest = cut_load(self._state.index, load, at)
        self._live[rest] = None
        for request, wanted in load.sharers.items():
            if wanted > at:
                load.sharers[request] = at
                self.share(rest, request, wanted - at)
        return rest
