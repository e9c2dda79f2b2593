"""Loads: device pages of the tree whose contents are on their way from storage, a peer, the host, or a room.

A load holds a lock on its destination nodes, and its source: host pages of its own or a pin. Requests whose path runs
through a load are its waiters and wait for it; nothing else connects them to it. Its stages:

    FETCHING ───read───▶ COPYING ──done──▶ (ended: ordinary cached pages)
        │ short, late        │ error
        ▼                    ▼
      FAILED ──a waiter with an open room extends into the pages──▶ RECEIVING ──last chunk──▶ (ended)
        │ no waiter left                                              │ the sender left, and no page is free
        ▼                                                             ▼
      RECLAIMING: no match passes it; the pages are freed when they have no writer and nothing below is in use

The sender of a load in RECEIVING is the request whose room brings its pages. A shared transfer is a load that starts in
RECEIVING, as a part of its sender's delta, and ends as pages arrive; see `tidekv.states.loads.shared_transfers`.

What is late may still write, and decides which pages a waiter extends into:

- A fetch past its deadline writes host pages only, which `LateFetch` keeps until it ends. A waiter extends into the
  device pages at once.
- A copy past its deadline may write the device pages. The load gets fresh ones and fails, and `LateCopy` keeps the old
  ones until it ends. If no device page is free, the load waits for the copy.
- The prefill of a sender that has left may write the device pages. The load gets fresh ones and fails, and the old ones
  stay with the sender. If no device page is free, the waiters start over on other pages.

Any step may raise. A method that begins a load reverses its own changes; a method that ends one can be called again.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tidekv.states.commands import CopyPages, FetchPages
from tidekv.states.events import NOBODY, CopyEnded
from tidekv.states.records.request import Load, Request
from tidekv.states.records.stages import Stage
from tidekv.states.storage.fetch_source import ThroughputEstimator
from tidekv.states.storage.peer_fetches import STOP_SHARE, PeerCalls
from tidekv.states.storage.source_split import SourceLoad, fetches_to_keep
from tidekv.states.storage_policy import FETCH_TIMEOUT_MAX_S
from tidekv.states.types import PageIds, page_ids

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tidekv.states.core_state import CoreState
    from tidekv.states.events import LayersCopied, Outcome
    from tidekv.states.handover.rooms import Rooms
    from tidekv.states.loads.placement import Placement
    from tidekv.states.prefix.index import Node
    from tidekv.states.storage.admission import StorageAdmission
    from tidekv.states.storage.fetch_source import FetchSource
    from tidekv.states.storage.peer_fetches import PeerFetches


OVERDUE_FACTOR = 1.5
"""A fetch that a request waits for, and prefill could replace, is overdue after this many times the expected time."""
OVERDUE_MIN_S = 0.005
"""Minimum of that time, in seconds."""


def _overdue_s(expected_s: float) -> float:
    """Return the time after which a fetch that was expected to take `expected_s` is overdue."""
    return max(OVERDUE_FACTOR * expected_s, OVERDUE_MIN_S)


def _is_of_peer(load: Load) -> bool:
    """Whether a load is fetched from a peer, or was."""
    return load.tier == "peer"


class LoadFetch:
    """Operation: a fetch of a load's pages from storage, or from a peer, to host memory."""

    __slots__ = ("_calls", "_loads", "load")

    def __init__(self, loads: Loads, calls: StorageAdmission | PeerCalls, load: Load) -> None:
        self._loads = loads
        self._calls = calls
        self.load = load

    def ended(self, event: Outcome, error: str) -> None:
        """Copy the verified pages to the device; fail the rest."""
        self._loads.fetched(self.load, self._calls.fetch_ended(event))

    def late(self) -> None:
        """Fail the load; the fetch continues without it. If it is overdue only, prefill may be asked for its pages."""
        if self._loads.is_only_overdue(self.load):
            self._loads.divide_overdue(self.load)
            return
        self._calls.fetch_is_late()
        self._calls.note_throughput(begun_at_s=self.load.begun_at_s, pages=self.load.queued_pages)
        self._loads.fetch_is_late(self.load)

    def abandon(self) -> None:
        """Fail the load."""
        self._loads.outcome_raised(self.load)


class LoadCopy:
    """Operation: a copy of a load's pages from host memory to the device."""

    __slots__ = ("_loads", "is_counted", "load")

    def __init__(self, loads: Loads, load: Load) -> None:
        self._loads = loads
        self.load = load
        self.is_counted = False
        """Whether it was counted as late."""

    def ended(self, event: Outcome, error: str) -> None:
        """End the load, or fail it if the copy failed."""
        self._loads.copied(self.load, error, is_damaged=isinstance(event, CopyEnded) and event.intact is not None)

    def late(self) -> None:
        """Give the load fresh pages: the copy may still write to its present ones."""
        self._loads.copy_is_late(self)

    def abandon(self) -> None:
        """Fail the load."""
        self._loads.outcome_raised(self.load)


class LateCopy:
    """Operation: a copy that no load waits for any more. It owns what it reads and writes until it has ended."""

    __slots__ = ("_loads", "device_pages", "first", "host_pages", "is_damaged", "pin")

    def __init__(self, loads: Loads, load: Load, device_pages: PageIds) -> None:
        """Take over what a load's copy reads; `device_pages` are those that it writes."""
        self._loads = loads
        self.first = load.first
        self.device_pages = device_pages
        self.pin, self.host_pages = load.pin, load.host_pages
        load.copy_from(None)
        load.own_host(page_ids())
        self.is_damaged = load.is_damaged
        """Whether a host page that it reads did not have its checksum."""

    def ended(self, event: Outcome, error: str) -> None:
        """Give everything back, and drop damaged host pages."""
        self.is_damaged |= isinstance(event, CopyEnded) and event.intact is not None
        self.abandon()

    def late(self) -> None:
        """Never called: the copy has no deadline any more."""

    def abandon(self) -> None:
        """Give everything back. Can be called again after an exception."""
        self._loads.late_copy_ended(self)


class Loads:
    """All loads of a core."""

    def __init__(
        self, state: CoreState, storage: StorageAdmission, peers: PeerFetches, rooms: Rooms, placement: Placement
    ) -> None:
        self._state = state
        self._storage = storage
        self._peers = peers
        self._rooms = rooms
        self.placement = placement
        self._live: dict[Load, None] = {}
        self._throughput = ThroughputEstimator()
        self._copying: dict[Load, int] = {}
        """Loads whose copies are under way, each with its pages."""
        self._pages_copying = 0
        self._settled: list[Load] = []
        self._dropped: PageIds = page_ids()
        """Pages that have left the tree and are still draining in their pool: kept here in case a step raises."""

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Load]:
        return iter(self._live)

    @property
    def source_load(self) -> SourceLoad:
        """Measured speed of copies from host memory, and the number of pages under way from there.

        The first copies may include the first touch of memory: until one is not faster than those before it, the speed
        is unknown.
        """
        page_s = self._throughput.page_s if self._throughput.is_confirmed else 0.0
        return SourceLoad(page_s, self._pages_copying)

    @property
    def is_measured(self) -> bool:
        """Whether a copy has been measured in the last seconds."""
        return not self._throughput.is_old(self._state.now_s)

    @property
    def settled_reclaiming(self) -> list[Load]:
        """Loads in RECLAIMING that have no writer. Their pages are freed when nothing below them is in use."""
        return self._settled

    @property
    def has_settled(self) -> bool:
        """Whether pages of loads in RECLAIMING wait to be freed."""
        return bool(self._settled or self._dropped)

    # --- Starting ---

    def begin_copy(
        self, first: int, nodes: list[Node], pages: PageIds, *, tier: str = "l2", by_layer: bool = False
    ) -> Load:
        """Start a load that copies nodes in host memory to `pages`, which it takes over from the caller.

        They are the pages of the nodes from page `first` of the prompt on. `tier` is where the host pages came from,
        for the statistics of the request. With `by_layer` the first layer of all pages is copied first.
        """
        load = Load(first=first, tier=tier, stage=Stage.COPYING)
        try:
            self.placement.place_copy(load, nodes, pages)
            self.hold(load)
            self.start_copy(load, by_layer=by_layer)
        except BaseException:
            self.abandon(load)
            raise
        return load

    def begin_fetch(
        self,
        request: Request,
        parent: Node,
        first: int,
        keys: bytes,
        pages: PageIds,
        *,
        deadline_s: float,
        peer: str = "",
    ) -> Load:
        """Start a load that fetches `keys` from storage, or from a peer, as a new child of `parent`.

        It takes over the device pages `pages` from the caller, and takes as many free host pages for the fetch.
        """
        state = self._state
        load = Load(first=first, tier="peer" if peer else "l3", stage=Stage.FETCHING)
        source = self._source_of(load)
        calls = PeerCalls(self._peers, peer) if peer else self._storage
        try:
            self.placement.place_fetch(load, request, parent, keys, pages)
            load.own_host(state.host.take(len(pages)))
            self.hold(load)
            load.run_as(state.start_operation(LoadFetch(self, calls, load), deadline_s=deadline_s))
            state.emit(
                FetchPages(
                    op=load.op,
                    request_id=request.request_id,
                    positions=page_ids(range(first, first + len(pages))),
                    host_pages=load.host_pages,
                    timeout_s=min((STOP_SHARE if peer else 1.0) * deadline_s, FETCH_TIMEOUT_MAX_S),
                    peer=peer,
                )
            )
            source.fetch_began(load, len(pages))
            until_s, page_s = state.now_s + deadline_s, source.source_load.page_s
            load.was_queued(state.now_s, source.pages_in_flight, until_s=until_s, page_s=page_s)
        except BaseException:
            self.abandon(load)
            raise
        return load

    def abandon(self, load: Load) -> None:
        """Reverse the begin of a load in the same step; the caller owns its device pages again."""
        state = self._state
        self._live.pop(load, None)
        self._source_of(load).fetch_over(load)
        self._copy_over(load)
        state.operations.pop(load.op, None)
        self._release_source(load)
        load.unlock(state.index)
        while load.nodes:
            state.index.set_load(load.nodes[-1], None)
            state.index.withdraw_device(load.nodes[-1])
            load.drop_node()

    def share(self, load: Load, request: Request, page_count: int) -> None:
        """Add a waiter, which waits for the first `page_count` pages of the load."""
        load.add_waiter(request, page_count)
        if load.span is not None:
            # These pages may have arrived already, and no further chunk would report it.
            self._state.load_progressed(load)

    def hold(self, load: Load) -> None:
        """Protect the destination of a new load and register it."""
        self.placement.hold(load)
        self._live[load] = None

    def start_copy(self, load: Load, *, by_layer: bool = False) -> None:
        """Copy the load's own host pages, or those of the tree, to the device; layer by layer if a waiter begins
        early.
        """
        by_layer = by_layer or any(request.early.is_wanted for request in load.waiters)
        source = self.placement.pin_source(load)
        deadline_s = self._state.settings.copy_deadline_s
        load.run_as(self._state.start_operation(LoadCopy(self, load), deadline_s=deadline_s))
        self._state.emit(
            CopyPages(
                op=load.op,
                source="host",
                source_pages=source,
                target="device",
                target_pages=load.device_pages,
                by_layer=by_layer,
            )
        )
        load.copy()
        self._source_of(load).fetch_over(load)
        self._copying[load] = load.page_count
        self._pages_copying += load.page_count
        load.was_queued(self._state.now_s, self._pages_copying, until_s=self._state.now_s + deadline_s)
        for request in load.waiters:
            self._state.request_changed(request)

    def _copy_over(self, load: Load) -> None:
        self._pages_copying -= self._copying.pop(load, 0)

    def _source_of(self, load: Load) -> FetchSource:
        """The source that a load is fetched from, or was."""
        return self._peers if _is_of_peer(load) else self._storage

    # --- Outcomes ---

    def fetched(self, load: Load, valid: int) -> None:
        """Take the outcome of a fetch: its first `valid` pages are verified; fail the rest."""
        valid = max(0, min(valid, load.page_count))
        if valid == load.page_count:
            self._source_of(load).note_throughput(begun_at_s=load.begun_at_s, pages=load.queued_pages)
        else:
            self._state.count("peer_pages_short" if _is_of_peer(load) else "l3_pages_short", load.page_count - valid)
            rest = load if valid == 0 else self.split(load, valid)
            self.fail(rest, "peer_short" if _is_of_peer(load) else "fetch_short")
            if rest is load:
                return
        self.placement.publish(load)
        if load.waiters:
            self.start_copy(load)
        else:
            # The pages are in host memory now, and no request waits for them on the device.
            self._give_up(load)

    def fetch_is_late(self, load: Load) -> None:
        """Fail the load; the fetch keeps its host pages until it ends."""
        self._state.count("peer_fetches_late" if _is_of_peer(load) else "l3_fetches_late")
        self._cut_fetch(load, "peer_late" if _is_of_peer(load) else "fetch_late")

    def divide_again(self, request: Request) -> None:
        """Give up fetches once prefill has sent everything else, if the policy prefers prefill for their pages."""
        policy = self._state.settings.prefetch
        if policy not in ("best_effort", "soonest") or request.room is None or not request.room.is_complete:
            return
        if request.prefills == NOBODY:
            return
        keep = self._fetches_to_keep(request) if policy == "soonest" else 0
        for load in request.fetches[keep:]:
            self._state.count("peer_fetches_cut" if _is_of_peer(load) else "l3_fetches_cut")
            self._cut_fetch(load, "transfer_done")

    def _fetches_to_keep(self, request: Request) -> int:
        """Return how many fetches, from the first on, are expected to end sooner than prefill could send the pages."""
        fetches = request.fetches
        if not fetches:
            return 0
        now_s, link, first = self._state.now_s, self._rooms.source_load, fetches[0]
        source, stalled_s = self._source_of(first), 0.0
        age_s = now_s - first.begun_at_s
        planned_s = first.planned_s or first.queued_pages * source.source_load.page_s
        is_late = age_s > _overdue_s(planned_s)
        if first.overdue_at_s <= now_s:
            # Its age is noted: without this, a storage that has become slow would keep the estimate of its better days
            # until the fetch ends. If it is much later than planned, it is expected to take as long again, and those
            # behind it the usual time after it, since this process may have been stalled.
            source.note_throughput(begun_at_s=first.begun_at_s, pages=first.queued_pages)
            stalled_s = age_s if is_late else 0.0
        elif planned_s and is_late:
            # Its outcome may wait behind this event.
            self._watch(first, OVERDUE_MIN_S)
            return len(fetches)
        elif not planned_s and len(fetches) == 1:
            # Nothing is known of storage but that it has not brought the first fetch in this time.
            stalled_s = age_s
        in_s = [self._ends_in_s(load, after=first, stalled_s=stalled_s) for load in fetches]
        pages = [load.page_count for load in fetches]
        keep = fetches_to_keep(list(zip(in_s, pages, strict=True)), link=link)
        for load, ends_in_s in zip(fetches[:keep], in_s, strict=False):
            # An unknown storage may take as long as prefill would.
            expected_s = ends_in_s or load.page_count * link.page_s
            self._watch(load, _overdue_s(expected_s))
        return keep

    def _ends_in_s(self, load: Load, *, after: Load, stalled_s: float) -> float:
        """Return the seconds until a fetch ends, 0 if unknown: when everything queued before it, and itself, is read.

        The time is the one by which it was planned: outcomes that many fetches wait for at once make a source look slow
        for a moment. With `stalled_s`, it comes so much later than `after` as the pages between them take. One that
        should have ended by now takes as long as its own pages do.
        """
        page_s = self._source_of(load).source_load.page_s
        if stalled_s:
            return stalled_s + max(load.queued_pages - after.queued_pages, 0) * page_s
        left_s = load.begun_at_s + (load.planned_s or load.queued_pages * page_s) - self._state.now_s
        return left_s if left_s > 0 else load.page_count * page_s

    def _watch(self, load: Load, delay_s: float) -> None:
        """Look at a fetch again if it has not ended by then."""
        load.expect_by(self._state.now_s + delay_s)
        self._state.set_deadline(self._state.operations[load.op], load.overdue_at_s, op=load.op)

    def is_only_overdue(self, load: Load) -> bool:
        """Whether the deadline of a fetch is ahead, so that it has only missed the time at which it was expected."""
        return self._state.now_s < load.fetch_until_s

    def divide_overdue(self, load: Load) -> None:
        """Let each waiter whose transfer is done ask prefill for the pages that it sends sooner than storage."""
        late_s = self._state.now_s - load.overdue_at_s
        if late_s > max(load.overdue_at_s - load.begun_at_s, OVERDUE_MIN_S):
            # Most of its age is a stall of this process. Its outcome may wait behind this event.
            self._watch(load, OVERDUE_MIN_S)
        elif late_s >= 0:
            for request in list(load.waiters):
                self.divide_again(request)

    def _cut_fetch(self, load: Load, cause: str) -> None:
        self._source_of(load).fetch_given_up(load, cause=cause)
        load.own_host(page_ids())
        self.fail(load, cause)

    def layers_copied(self, event: LayersCopied) -> None:
        """Note that the first layers of a load's pages are in place; too late, it changes nothing. Raises nothing."""
        copy = self._state.operations.get(event.op)
        if not isinstance(copy, LoadCopy):
            self._state.count("outcomes_late")
        elif copy.load.stage is Stage.COPYING and event.layers > copy.load.layers:
            copy.load.layers_copied(event.layers)
            for request in copy.load.waiters:
                self._state.request_changed(request)

    def copied(self, load: Load, error: str, *, is_damaged: bool = False) -> None:
        """Take the outcome of a copy: its pages have no writer any more, and are in place unless it failed.

        With `is_damaged` it failed because a host page did not have its checksum.
        """
        if is_damaged and not load.is_damaged:
            self._state.count("l2_damaged")
            load.note_damage(is_damaged=True)
        if load.stage is Stage.RECLAIMING:
            # The copy was late. Its end is what the pages waited for.
            self._state.writers_have_left([load])
        elif error:
            self._state.count("copies_failed")
            self.fail(load, "copy_failed")
        else:
            self._release_source(load)
            self._note_copy(load)
            self._end(load, load.tier)

    def _note_copy(self, load: Load) -> None:
        now_s = self._state.now_s
        self._throughput.note_trial(taken_s=now_s - load.begun_at_s, pages=load.queued_pages, now_s=now_s)

    def copy_is_late(self, copy: LoadCopy) -> None:
        """Fail the load of a late copy, on fresh pages; without any, wait for the copy. Can be called again."""
        load, state = copy.load, self._state
        if not copy.is_counted:
            copy.is_counted = True
            state.count("copies_late")
            self._note_copy(load)
        if not load.waiters:
            self._reclaim(load, "no request needs it")
            return
        if load.op:
            old = self.placement.renew(load)
            if old is None:
                state.set_deadline(copy, state.now_s + state.settings.copy_deadline_s, op=load.op)
                return
            # Nothing below raises, so that the old pages have one owner.
            state.replace_operation(load.op, LateCopy(self, load, old))
            load.run_as(0)
        self.fail(load, "copy_late")

    def late_copy_ended(self, copy: LateCopy) -> None:
        """Free what a late copy has kept. Can be called again after an exception."""
        state = self._state
        state.device.give_back(copy.device_pages)
        copy.device_pages = page_ids()
        state.host.give_back(copy.host_pages)
        copy.host_pages = page_ids()
        if copy.pin is not None:
            leaf = copy.pin.node
            state.index.unpin(copy.pin)
            copy.pin = None
            if copy.is_damaged:
                state.count("l2_damaged")
                # A cache tier never fails a request: the pages stay in the index if a hook raises.
                state.run_guarded(partial(self._drop_host_path, leaf, copy.first), recover=lambda: None)
        state.pages_were_freed()

    def filled(self, load: Load) -> None:
        """End a load whose pages a room has brought by extend."""
        self._end(load, "transfer")

    def received(self, load: Load) -> None:
        """End a load of a shared transfer. The pages count as transfer for the sender and as L1 for other waiters."""
        self._end(load, "l1", sender_source="transfer")

    def outcome_raised(self, load: Load) -> None:
        """Fail a load after an exception in its outcome. The operation has ended, so the pages have no local writer."""
        self._state.operations.pop(load.op, None)
        if load.stage is not Stage.RECLAIMING:
            self.fail(load, "rule_raised")
        else:
            self._state.writers_have_left([load])

    def cut(self, load: Load) -> None:
        """Fail a fetch on behalf of a waiter that gives up storage after an exception. Prefill sends the pages instead.

        A load with other waiters is left as it is: they still rely on the fetch. A copy cannot be interrupted.
        """
        if load.stage is Stage.FETCHING and len(load.waiters) == 1:
            self._state.count("peer_fetches_late" if _is_of_peer(load) else "l3_fetches_late")
            self._cut_fetch(load, "rule_raised")

    # --- Extending into failed loads ---

    def sender_of(self, load: Load) -> Request | None:
        """Return the request that should extend into a failed load: the oldest waiter with an open room, if any."""
        senders = [(request.room, request) for request in load.waiters if request.room is not None]
        if self._state.settings.share_transfers and any(room.is_complete for room, _ in senders):
            # Prefer rooms that have received everything else. Otherwise a waiter that lacks only these pages would
            # wait for a prefill that is not even done with its own request.
            senders = [(room, request) for room, request in senders if room.is_complete]
        return min((request for _, request in senders), key=lambda request: request.arrival, default=None)

    def fill(self, load: Load) -> None:
        """Let a waiter extend into a failed load, whose pages have no local writer. Without waiters, give the load up.

        If no waiter has an open room yet, the load waits for the first plan that opens one (`Restore.fix_plan`).
        """
        assert load.stage is Stage.FAILED, "a load that has not failed is in failed_loads"
        self._release_source(load)
        if not load.waiters:
            self._give_up(load)
            return
        sender = self.sender_of(load)
        if sender is None:
            return
        assert sender.room is not None
        if load.waiters[sender] < load.page_count:
            # The sender's prompt differs from there on, so its prefill does not have these pages.
            rest = self.split(load, load.waiters[sender])
            self.fail(rest, rest.cause)
        self._rooms.extend(sender.room, load)
        load.receive_from(sender)
        for request in load.waiters:
            self._state.request_changed(request)

    def leave(self, load: Load, request: Request) -> None:
        """Remove a waiter that is about to leave its room."""
        if load.sender is request and len(load.waiters) > 1 and (old := self.placement.renew(load)) is not None:
            # Prefill may still write the old pages. They leave with the others of its room.
            request.held.take_back(old)
            self.fail(load, "sender_left")
        elif load.sender is request:
            # So it is here. The pages are reclaimed when the room has no writer (`RoomRecord.lost`).
            assert request.room is not None
            request.room.lose(load)
            self._reclaim(load, "the transfer that was to fill its pages was lost")
        elif self.placement.ends_with_request:
            self._end_with(load)
        load.remove_waiter(request)
        if not load.waiters and load.stage is Stage.FAILED:
            self._state.load_failed(load)

    def _end_with(self, load: Load) -> None:
        """Give up a load whose only request leaves: its copy may still write, and its fetch continues without it."""
        if load.stage is Stage.COPYING:
            self._reclaim(load, "its request has left")
        elif load.stage is Stage.FETCHING:
            self._cut_fetch(load, load.cause)

    # --- Ends ---

    def _end(self, load: Load, source: str, *, sender_source: str = "") -> None:
        index = self._state.index
        load.unlock(index)
        ended: list[Node] = []
        try:
            # All nodes or none: a retry after an exception must find the load whole.
            for node in load.nodes:
                index.set_load(node, None)
                ended.append(node)
        except BaseException:
            for node in ended:
                index.set_load(node, load)
            raise
        sender = load.sender if sender_source else None
        self.forget(load)
        self._drop_damaged(load, load.nodes[-1] if load.nodes else None)
        for request, page_count in load.waiters.items():
            request.wait_no_more(load)
            request.note_loaded(load.first, page_count, sender_source if request is sender else source)
            self._state.request_changed(request)
        load.forget_waiters()

    def fail(self, load: Load, cause: str) -> None:
        """Note that the load has lost its source, for `cause`, a key of `LOAD_CAUSES`. Queue it for a waiter to extend
        into.
        """
        load.fail(cause)
        self._clear_sender(load)
        self._source_of(load).fetch_over(load)
        self._copy_over(load)
        self._state.load_failed(load)
        for request in load.waiters:
            self._state.request_changed(request)

    def _give_up(self, load: Load) -> None:
        """Reclaim a load whose pages are not needed and have no writer."""
        self._release_source(load)
        self._reclaim(load, "no request needs it")
        self._drop_damaged(load, load.nodes[-1] if load.nodes else None)
        self._state.writers_have_left([load])

    def _reclaim(self, load: Load, cause: str) -> None:
        # First: from here on, no other request can come to wait for the pages.
        self.placement.drain(load)
        load.unlock(self._state.index)
        load.reclaim()
        self._source_of(load).fetch_over(load)
        self._state.count("loads_reclaimed")
        for request in load.waiters:
            self._state.pages_were_lost(request, cause)
        self.forget(load)

    def _drop_damaged(self, load: Load, leaf: Node | None) -> None:
        """Drop the host pages on the path to `leaf` from the load's first page on if one of them is damaged, and those
        below them.

        Unless a receipt protects them: then the next load of them finds the damage again.
        """
        if load.is_damaged and leaf is not None:
            load.note_damage(is_damaged=False)
            # A cache tier never fails a request: the pages stay in the index if a hook raises.
            drop = partial(self._drop_host_path, leaf, load.first)
            self._state.run_guarded(drop, recover=lambda: None)

    def _drop_host_path(self, leaf: Node, first: int) -> None:
        for node in self._state.index.path(leaf):
            if node.depth_pages > first:
                self._state.index.drop_host_path(node)
                return

    def _clear_sender(self, load: Load) -> None:
        if load.span is not None:
            # `op` is the watch on a stalled shared transfer; without a sender there is nothing to watch.
            self._state.operations.pop(load.op, None)
        load.stop_receiving()

    def forget(self, load: Load) -> None:
        """Unregister a load that has ended or is being reclaimed."""
        self._clear_sender(load)
        self._live.pop(load, None)
        self._copy_over(load)
        self._state.failed_loads.pop(load, None)
        self._state.pages_were_freed()

    def _release_source(self, load: Load) -> None:
        leaf = load.unpin(self._state.index)
        if not load.nodes:
            # Nothing else protects these host pages from now on.
            self._drop_damaged(load, leaf)
        if load.host_pages:
            self._state.host.give_back(load.host_pages)
            load.own_host(page_ids())

    def free_settled_reclaiming(self) -> None:
        """Free the pages of loads in RECLAIMING without a writer, deepest first, unless pages below are in use."""
        state = self._state
        self._settled += state.take_reclaimable_loads()
        self._settled.sort(key=lambda load: -load.first)
        for load in list(self._settled):
            self._release_source(load)
            while pages := self.placement.take_drained(load):
                self._dropped += pages
            if not load.nodes:
                self._settled.remove(load)
        if self._dropped:
            state.device.settle(self._dropped)
            self._dropped = page_ids()
            state.pages_were_freed()

    # --- Parts ---

    def split(self, load: Load, at: int) -> Load:
        """Cut the load in two at page `at`. `load` keeps the first part; the rest is returned, with its waiters."""
        rest = self.placement.cut(load, at)
        self._live[rest] = None
        for request, wanted in load.waiters.items():
            if wanted > at:
                load.cut_waiter(request, at)
                self.share(rest, request, wanted - at)
        return rest
