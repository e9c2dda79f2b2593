"""Recount of ownership over the whole core: every page has exactly one owner, and no receipt is lost.

The page pools record the state of each page, the index its own nodes. The audit collects what every request, load,
backup, room and operation holds, and compares. It visits everything and changes nothing.

Owners of device pages: a request (`own`, `reserve`), a recomputation whose request has left, the index (cached), the
quarantine of a left room and nodes in RECLAIMING (draining). Owners of host pages: a load, a backup, a read ahead, a
late fetch, a batch of passing pages, the index. Owners of component pages: `RequestComponents`, component fetches and
backups, late fetches, batches of passing pages, the quarantine, the index.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Protocol

from tidekv.states import events
from tidekv.states.backup.backups import Backup
from tidekv.states.backup.offers import Offer
from tidekv.states.components.backups import ComponentBackup, ComponentWrite
from tidekv.states.components.look_ahead import ComponentAheadRead
from tidekv.states.components.missing import LateComponentCopy
from tidekv.states.components.offered import OfferedCopy
from tidekv.states.components.request_components import ComponentCopy
from tidekv.states.components.shared_ends import SharedEndCopy, SharedEndWatch
from tidekv.states.components.storage import ComponentRead
from tidekv.states.errors import BrokenInvariant
from tidekv.states.hints import HintPin, Share
from tidekv.states.loads.loads import LateCopy, LoadCopy, LoadFetch
from tidekv.states.loads.look_ahead import AheadRead
from tidekv.states.loads.shared_transfers import ShareWatch
from tidekv.states.pages.page_pool import PagePool, PageState
from tidekv.states.records.ahead import AheadRun, ComponentAhead
from tidekv.states.records.request import Load, RequestComponents
from tidekv.states.records.stages import ComponentStage, Stage
from tidekv.states.request.early_ready import EarlyUse, layers_in_place
from tidekv.states.request.restore import LateRecomputation, Recomputation
from tidekv.states.storage.admission import StorageQuery
from tidekv.states.storage.fetch_source import LateFetch
from tidekv.states.storage.passing import Passage, PassedBatch
from tidekv.states.types import FULL, PageIds, page_ids, without

if TYPE_CHECKING:
    from tidekv.states.backup.backups import Backups
    from tidekv.states.backup.offers import Offers
    from tidekv.states.backup.store_all import StoreAll
    from tidekv.states.core_state import CoreState
    from tidekv.states.handover.rooms import Rooms
    from tidekv.states.hints import Hints
    from tidekv.states.loads.loads import Loads
    from tidekv.states.loads.look_ahead import LookAhead
    from tidekv.states.prefix.node import Node, Receipt
    from tidekv.states.records.request import Request
    from tidekv.states.request.admission_queue import Queue
    from tidekv.states.request.lending import Lending
    from tidekv.states.request.table import BoundRows
    from tidekv.states.settings import CoreSettings
    from tidekv.states.storage.admission import StorageAdmission
    from tidekv.states.storage.passing import Passages
    from tidekv.states.storage.peer_fetches import PeerFetches


class Parts(Protocol):
    """The parts of a core that own pages, receipts or operations."""

    settings: CoreSettings
    state: CoreState
    storage: StorageAdmission
    peers: PeerFetches
    queue: Queue
    rooms: Rooms
    loads: Loads
    lookahead: LookAhead
    hints: Hints
    backups: Backups
    lending: Lending
    offers: Offers
    passages: Passages
    store_all: StoreAll
    rows: BoundRows

    @property
    def running(self) -> int:
        """See `Core.running`."""
        ...


def audit_core(core: Parts) -> None:
    """Raise BrokenInvariant at the first contradiction found."""
    core.state.index.check()
    core.state.device.check()
    core.state.host.check()
    loads = _loads_of(core)
    _check_components(core)
    if core.settings.lends_device:
        _check_lent_pages(core, loads)
    else:
        _check_device_pages(core)
    _check_quota(core)
    _check_host_pages(core, loads)
    _check_receipts(core, loads)
    _check_loads(core, loads)
    _check_operations(core, loads)
    _check_early_uses(core)
    progressed = events.Progressed(at_s=core.state.now_s)
    for request in core.state.requests.values():
        _check_request(core, request)
        due = core.rows[events.Progressed].get(request.state.name, ())
        can_move_on = any(only_if is None or only_if(request, progressed) for only_if, _ in due)
        _require(not can_move_on, f"{request} could move on, but was not visited")
    state = core.state
    _require(
        not (
            state.dirty
            or state.preempted
            or state.unserved
            or state.failed_loads
            or state.reclaimable_loads
            or state.admission_due
            or state.ahead_over
        )
        and not state.progressed_loads,
        "a step left work",
    )
    waiting = {request for request in core.state.requests.values() if request.waits_for_admission}
    _require(
        set(core.queue) == waiting and len(core.queue) == len(waiting),
        "the queue does not hold exactly the requests that wait for admission",
    )


def _require(condition: object, contradiction: str) -> None:
    if not condition:
        raise BrokenInvariant(contradiction)


def _loads_of(core: Parts) -> dict[Load, None]:
    """Every load that still holds something: live, or in RECLAIMING, waiting for a writer or for nodes below it."""
    loads = dict.fromkeys(core.loads)
    operations = core.state.operations.values()
    loads.update(dict.fromkeys(one.load for one in operations if isinstance(one, LoadFetch | LoadCopy | ShareWatch)))
    loads.update(dict.fromkeys(load for draining in core.rooms.quarantine for load in draining.loads))
    loads.update(dict.fromkeys(core.loads.settled_reclaiming))
    return loads


def _runs_of(core: Parts) -> list[AheadRun]:
    return [run for request in core.state.requests.values() if request.ahead is not None for run in request.ahead.runs]


def _component_reads_of(core: Parts) -> list[ComponentAhead]:
    aheads = [request.ahead for request in core.state.requests.values() if request.ahead is not None]
    return [read for ahead in aheads for read in ahead.components.values()]


def _check_device_pages(core: Parts) -> None:
    owned, draining = page_ids(), page_ids()
    for request in core.state.requests.values():
        owned += request.held.own + request.held.reserve
    for owner in core.state.operations.values():
        if isinstance(owner, LateRecomputation | LateCopy):
            owned += owner.device_pages
    for left in core.rooms.quarantine:
        draining += left.pages
    for node in core.state.index.nodes():
        if node.is_reclaiming and node.device is not None:
            draining += node.device
    _check_pages(core.state.device, owned, draining)


def _check_quota(core: Parts) -> None:
    """Check that every page that a request or a quarantine withholds is charged to its prefill."""
    charged = Counter[str]()
    for request in core.state.requests.values():
        # Lent pages are not withheld from other requests.
        is_held = request.held.lock is not None and not request.is_ready and request.lent is None
        # A lower bound: the charge has the cached pages as well that the request was the first to lock.
        pages = request.page_count - request.held.matched + len(request.held.reserve) if is_held else 0
        _require(
            request.admission.charged >= pages,
            f"{request} withholds {pages} pages, but is charged {request.admission.charged}",
        )
        _require(
            is_held or not request.admission.charged,
            f"{request} is charged with {request.admission.charged} pages without a grant",
        )
        charged[request.recompute.withheld_by(request.prefill)] += request.admission.charged
    for left in core.rooms.quarantine:
        pages = len(left.pages) + sum(load.page_count for load in left.loads)
        _require(left.charged == pages, f"a quarantine of {pages} pages is charged with {left.charged}")
        charged[left.prefill] += pages
    charged[""] = 0
    held = core.state.quota.held
    _require(+charged == Counter(held), f"prefills are charged {held}, recounted {dict(+charged)}")


def _check_early_uses(core: Parts) -> None:
    """Check that the caller of an early READY was reported no layer too many, and that a live or left room keeps what
    it may write to.
    """
    uses = {op: use for op, use in core.state.operations.items() if isinstance(use, EarlyUse)}
    for op, use in uses.items():
        _require(use.op == op and use.request.early.op == op, f"{use.request} does not refer to its early READY")
    for request in core.state.requests.values():
        _require(not request.early.op or request.early.op in uses, f"{request} has an early READY that has ended")
        _require(
            not request.early.layers or request.early.is_wanted,
            f"{request} reports layers, but its caller waits for all",
        )
        if request.early.layers:
            in_place = layers_in_place(request)
            _require(
                request.early.layers == in_place,
                f"{request} reports {request.early.layers} layers of {in_place} in place",
            )
            is_kept = request.room is not None and request.room.user_op == request.early.op > 0
            _require(is_kept, f"the caller of {request} has begun, but its room may be left without it")
    missing = sum(room.pages_missing for room in core.rooms)
    _require(
        core.rooms.pages_missing == missing,
        f"{missing} pages are missing in rooms, and {core.rooms.pages_missing} counted",
    )
    for room in core.rooms:
        _require(not room.user_op or room.user_op in uses, f"an early READY of {room.request} ended without its room")
    for left in core.rooms.quarantine:
        _require(not left.user_op or left.user_op in uses, "a quarantine waits for an early READY that has ended")
        _require(left.has_writer or left.user_op, "a quarantine waits for nothing")


def _check_lent_pages(core: Parts, loads: dict[Load, None]) -> None:
    """Every lent page belongs to one request, live or returning, and is draining exactly while it may be written."""
    _require(not any(node.device for node in core.state.index.nodes()), "the index has device pages, which are lent")
    draining = {FULL: page_ids()}
    for left in core.rooms.quarantine:
        draining[FULL] += left.pages
    for load in loads:
        _require(not load.nodes, "a load has nodes, but device pages are lent")
        if load.stage is Stage.RECLAIMING:
            draining[FULL] += load.lent
    pools = {FULL: core.state.device}
    for name, tier in () if core.state.components is None else core.state.components.device.items():
        pools[name], draining[name] = tier.pool, page_ids()
        for left in core.rooms.quarantine:
            draining[name] += left.component_pages.get(name, page_ids())
        for held in _component_pages_of(core):
            draining[name] += held.draining.get(name, page_ids())
    lent = [*(request.lent for request in core.state.requests.values()), *core.lending.returning]
    for group, pool in pools.items():
        owned = page_ids()
        for groups in lent:
            assert groups is not None, "a request has no lent pages"
            owned += groups.lent[group]
        twice = [page for page, owners in Counter(owned).items() if owners > 1]
        _require(not twice, f"pages {twice} of {group} are lent to two requests")
        _require(set(draining[group]) <= set(owned), f"pages of {group} are draining that belong to no request")
        _check_pages(pool, without(owned, draining[group]), draining[group])
        _require(not core.offers.reads(group, owned), f"pages of {group} are lent, but an offer still reads them")
    for groups in core.lending.returning:
        writes = any(set(pages) & set(draining[group]) for group, pages in groups.lent.items())
        _require(writes, "an ended request has not got its outcome, but no page is draining")


def _component_pages_of(core: Parts) -> list[RequestComponents]:
    """Component pages of requests, and those of left requests that an operation still writes to."""
    component_pages = {request.component_pages: None for request in core.state.requests.values()}
    for owner in core.state.operations.values():
        if isinstance(owner, ComponentCopy | ComponentRead | LateRecomputation):
            component_pages[owner.component_pages] = None
        elif isinstance(owner, LateComponentCopy):
            component_pages.update(dict.fromkeys(owner.left))
        elif isinstance(owner, SharedEndCopy):
            component_pages[owner.sender] = component_pages[owner.waiter] = None
    return [held for held in component_pages if held is not None]


def _check_components(core: Parts) -> None:
    components = core.state.components
    if components is None:
        return
    components.check()
    operations = core.state.operations.values()
    copies = Counter(owner.component_pages for owner in operations if isinstance(owner, ComponentCopy))
    copies += Counter(owner.component_pages for owner in operations if isinstance(owner, ComponentRead))
    fetches = {
        op: one.fetch for op, one in core.state.operations.items() if isinstance(one, ComponentRead | ComponentCopy)
    }
    late_copies = [owner for owner in operations if isinstance(owner, LateComponentCopy)]
    for owner in operations:
        if isinstance(owner, SharedEndCopy):
            copies.update((owner.sender, owner.waiter))
        elif isinstance(owner, LateComponentCopy):
            copies.update(owner.left)
    late = [owner for owner in operations if isinstance(owner, LateFetch)]
    for held in _component_pages_of(core):
        _check_shared_end(core, held)
        _require(not held.plan.missing, f"component pages of {held.request} are missing, and were not asked of prefill")
        _require(held.copies == copies[held], f"{held.request} waits for {held.copies} copies of component pages")
        _require(
            all(fetches.get(fetch.op) is fetch for fetch in held.fetches), "a component fetch waits for no operation"
        )
    backups = [owner for owner in operations if isinstance(owner, ComponentBackup)]
    for name in components.components:
        owned, draining, on_host = page_ids(), page_ids(), page_ids()
        for held in _component_pages_of(core):
            owned += held.own.get(name, page_ids()) if core.settings.lends_device else held.own[name]
            for fetch in held.fetches:
                on_host += fetch.host_pages if fetch.component == name else page_ids()
        for left in core.rooms.quarantine:
            # Missing, if they were free already when the rest of the room went to the quarantine.
            draining += left.component_pages.get(name, page_ids())
        for backup in backups:
            on_host += backup.fresh if backup.component == name else page_ids()
        for read in _component_reads_of(core):
            on_host += read.host_pages if read.component == name else page_ids()
        for late_copy in late_copies:
            owned += late_copy.device_pages if late_copy.component == name else page_ids()
            on_host += late_copy.host_pages if late_copy.component == name else page_ids()
        for late_fetch in late:
            on_host += late_fetch.host_pages if late_fetch.component == name else page_ids()
        for copy in _offered_copies_of(core):
            on_host += copy.host_pages if copy.component == name else page_ids()
        for batch in _batches_of(core, name):
            on_host += batch.host_pages
        if core.settings.lends_device:
            # `_check_lent_pages` recounts the lent ones, whether a request has been admitted or not.
            _require(components.device[name].pool.holds(owned, PageState.OWNED), f"{name} pages are not lent")
        else:
            _check_pages(components.device[name].pool, owned, draining)
        _check_pages(components.host[name].pool, on_host, page_ids())


def _batches_of(core: Parts, group: str) -> list[PassedBatch]:
    return [batch for passage in core.passages if passage.group == group for batch in passage.batches]


def _offered_copies_of(core: Parts) -> list[OfferedCopy]:
    offered = [offer.components for offer in core.offers]
    return [copy for components in offered if components is not None for copy in components.copies]


def _check_shared_end(core: Parts, held: RequestComponents) -> None:
    """Check that a sender and its waiters refer to each other, and that no waiter was left without a copy."""
    request = held.request
    room = None if request is None else request.room
    _require(not (held.end or held.waiters) or room is not None, f"{request} has no room that others could wait for")
    _require(all(waiter.sender is held for waiter in held.waiters), f"{request} has waiters that do not wait for it")
    is_in_place = room is not None and room.is_complete and not held.copies
    _require(not (held.waiters and is_in_place), f"the waiters of {request} were not handed what is in place")
    if held.sender is not None:
        is_live = request is not None and request.is_beyond_plan
        _require(is_live and held in held.sender.waiters, f"{request} waits for a sender that does not know it")
        _require(bool(held.plan.received), f"{request} waits for a sender, but needs nothing of it")


def _check_host_pages(core: Parts, loads: dict[Load, None]) -> None:
    owned = page_ids()
    for load in loads:
        owned += load.host_pages
    for owner in core.state.operations.values():
        if (isinstance(owner, LateFetch) and not owner.component) or isinstance(owner, LateCopy):
            owned += owner.host_pages
    for writer in (*core.backups, *core.offers, *_batches_of(core, FULL)):
        owned += writer.host_pages
    for run in _runs_of(core):
        owned += run.host_pages
    _check_pages(core.state.host, owned, page_ids())


def _check_pages(pool: PagePool, owned: PageIds, draining: PageIds) -> None:
    for pages, page_state, count in (
        (owned, PageState.OWNED, pool.owned),
        (draining, PageState.DRAINING, pool.draining),
    ):
        state_name = page_state.name.lower()
        twice = [page for page, owners in Counter(pages).items() if owners > 1]
        _require(not twice, f"{pool.name} pages {twice} have two owners")
        _require(
            pool.holds(pages, page_state),
            f"an owner of {state_name} {pool.name} pages has pages in another state",
        )
        _require(len(pages) == count, f"{count} {pool.name} pages are {state_name}, their owners have {len(pages)}")


def _check_receipts(core: Parts, loads: dict[Load, None]) -> None:
    receipts: list[Receipt | None] = list(core.backups.held)
    for request in core.state.requests.values():
        receipts += (request.held.lock, request.held.pin, None if request.ahead is None else request.ahead.pin)
    for holder in (*loads, *core.backups):
        receipts += (holder.lock, holder.pin)
    receipts += (offer.pin for offer in core.offers)
    receipts += (pin.receipt for pin in core.hints.pins)
    receipts += (share.receipt for share in core.hints.shares)
    for component_pages in _component_pages_of(core):
        receipts += [part.full for part in (component_pages.lock, component_pages.pin) if part is not None]
    for owner in core.state.operations.values():
        if isinstance(owner, ComponentBackup | LateComponentCopy):
            receipts += [part.full for part in (owner.lock, owner.pin) if part is not None]
        elif isinstance(owner, ComponentWrite) and owner.pin is not None:
            receipts.append(owner.pin.full)
        elif isinstance(owner, LateCopy):
            receipts.append(owner.pin)
    held = [receipt for receipt in receipts if receipt is not None]
    _require(not any(receipt.released for receipt in held), "a receipt that was given back is still held")
    _require(len(set(map(id, held))) == len(held), "a receipt has two holders")
    device: Counter[Node] = Counter(receipt.node for receipt in held if receipt.kind == "device")
    host: Counter[Node] = Counter(receipt.node for receipt in held if receipt.kind == "host")
    index = core.state.index
    for node in (*index.nodes(), *index.tree.roots.values()):
        _require(node.anchored == device.pop(node, 0), f"{node} counts other device receipts than are held")
        _require(node.host_anchored == host.pop(node, 0), f"{node} counts other host receipts than are held")
    _require(not device and not host, "receipts are held for nodes that are not in the tree")


def _check_loads(core: Parts, loads: dict[Load, None]) -> None:
    under = Counter[Load]()
    reclaiming: set[Node] = set()
    for node in core.state.index.nodes():
        if node.load is not None:
            _require(node.load in loads and node in node.load.nodes, f"{node} is under a load that does not list it")
            under[node.load] += 1
        if node.is_reclaiming:
            reclaiming.add(node)
    for load in loads:
        if load.stage is Stage.RECLAIMING:
            for node in load.nodes:
                _require(node in reclaiming, f"{node} of a load in RECLAIMING is not")
                reclaiming.discard(node)
            _require(load.lock is None and not load.waiters, "a load in RECLAIMING has a lock or waiters")
        else:
            _require(load in set(core.loads), "a load is not in RECLAIMING, but missing among the loads")
            _require(under[load] == len(load.nodes), "a load lists nodes that are not under it")
            begins = [node.depth_pages - node.page_count for node in load.nodes[:1]] or [load.first]
            _require(begins == [load.first], "a load does not begin at its first node")
        for request, count in load.waiters.items():
            _require(0 < count <= load.page_count, f"{request} shares {count} pages of a load")
            _require(load in request.loads, f"{request} does not list a load that it shares")
        _require(load.sender is None or load.sender in load.waiters, "the sender of a load does not share it")
        _require(
            (load.stage is Stage.RECEIVING) == (load.sender is not None),
            "a load is received without a sender, or has a sender without being received",
        )
        if load.span is not None:
            room = None if load.sender is None else load.sender.room
            is_open = room is not None and room.spans[0] is load.span
            _require(is_open and load.first >= load.span.first, "a shared transfer belongs to no open room")
    _require(not reclaiming, f"{reclaiming} are in RECLAIMING without a load")


def _check_operations(core: Parts, loads: dict[Load, None]) -> None:
    backups, runs, offers = set(core.backups), set(_runs_of(core)), set(core.offers)
    component_reads, passages = _component_reads_of(core), set(core.passages)
    for op, owner in core.state.operations.items():
        if isinstance(owner, StorageQuery | Recomputation):
            request = owner.request
            if request is None:
                _require(owner in core.storage.queries_left, "a query without a request is not counted")
                continue
            _require(
                core.state.requests.get(request.request_id) is request,
                f"an operation belongs to {request}, which is gone",
            )
            _require(op in (request.answer.op, request.recompute.op), f"{request} does not refer to its operation")
        elif isinstance(owner, LoadFetch | LoadCopy | ShareWatch):
            _require(
                owner.load in loads and owner.load.op == op, "an operation belongs to a load that does not refer to it"
            )
        elif isinstance(owner, Backup):
            _require(owner in backups, "an operation belongs to a backup that is over")
        elif isinstance(owner, Offer):
            _require(owner in offers and owner.op == op, "an operation belongs to an offer that is over")
            offers.discard(owner)
        elif isinstance(owner, OfferedCopy):
            is_live = owner in _offered_copies_of(core) and owner.op == op and owner.is_copying
            _require(is_live, "an operation belongs to a copy of an offer that is over")
        elif isinstance(owner, PassedBatch):
            is_live = owner.passage in passages and owner in owner.passage.batches and owner.op == op
            _require(is_live, "an operation belongs to a batch of pages that have passed")
        elif isinstance(owner, Passage):
            is_live = owner in passages and owner.begun < owner.end and owner.op == op
            _require(is_live, "an operation belongs to a passage without pages to copy")
        elif isinstance(owner, AheadRead):
            run = owner.run
            _require(run in runs and run.op == op, "an operation belongs to a read ahead that does not refer to it")
            _require(not run.has_ended, "a read ahead has arrived, but its operation is in flight")
        elif isinstance(owner, HintPin):
            _require(owner in core.hints.pins and owner.op == op, "an operation belongs to a pin that is over")
        elif isinstance(owner, Share):
            _require(owner in core.hints.shares and owner.op == op, "an operation belongs to a share that is over")
        elif isinstance(owner, SharedEndWatch):
            is_live = owner.waiter.sender is not None and owner.waiter.request is not None
            _require(is_live, "a request is watched that waits for no other")
        elif isinstance(owner, ComponentAheadRead):
            is_live = owner.read in component_reads and owner.read.op == op and not owner.read.has_ended
            _require(is_live, "an operation belongs to a read of component pages that is over")
    operations = core.state.operations
    _require(all(offer.reads or offer.follows in set(core.offers) for offer in offers), "an offer waits for nothing")
    for passage in passages:
        is_waiting = operations.get(passage.op) is passage
        _require(is_waiting == (passage.begun < passage.end), "a passage waits without a bound")
        for batch in passage.batches:
            _require(operations.get(batch.op) is batch, "a batch of passing pages waits for nothing")
        _require(is_waiting or passage.batches, "a passage waits for nothing")
        _require(passage.reads == (passage.on_read is not None), "an offer waits for a passage that is over")
    from_peers = {load for load in core.loads if load.stage is Stage.FETCHING and load.tier == "peer"}
    fetching = {load for load in core.loads if load.stage is Stage.FETCHING} - from_peers
    _require(set(core.peers.fetching) == from_peers, "other loads wait for a peer than are counted")
    of_components = {one.fetch for one in operations.values() if isinstance(one, ComponentRead)}
    _require(
        all(fetch.stage is ComponentStage.FETCHING for fetch in of_components),
        "a component fetch that is read is not FETCHING",
    )
    _require(
        set(core.storage.fetching) == fetching | of_components,
        "storage counts other loads than those that wait for a fetch",
    )
    reading = [run for run in runs if not run.has_ended]
    reading_components = [read for read in component_reads if not read.has_ended]
    late = [owner for owner in core.state.operations.values() if isinstance(owner, LateFetch)]
    late_of_peers = [owner for owner in late if owner.source is core.peers]
    late = [owner for owner in late if owner.source is core.storage]
    sent = sum(load.page_count for load in from_peers) + sum(len(fetch.host_pages) for fetch in late_of_peers)
    _require(core.peers.pages_in_flight == sent, f"{sent} pages come from peers, not {core.peers.pages_in_flight}")
    in_flight = sum(load.page_count for load in fetching) + sum(len(fetch.host_pages) for fetch in of_components)
    in_flight += sum(len(run.host_pages) for run in reading) + sum(len(fetch.host_pages) for fetch in late)
    in_flight += sum(len(read.host_pages) for read in reading_components)
    storage = core.storage
    reads = len(reading) + len(reading_components)
    _require(storage.ahead_in_flight == reads, f"{reads} reads ahead are under way, not {storage.ahead_in_flight}")
    _require(storage.pages_in_flight == in_flight, f"{in_flight} pages are fetched, not {storage.pages_in_flight}")
    taken = sum(request.ahead.taken for request in core.state.requests.values() if request.ahead is not None)
    _require(core.lookahead.pages == taken, f"{taken} host pages were taken ahead, not {core.lookahead.pages}")
    for run in reading:
        read = operations.get(run.op)
        _require(isinstance(read, AheadRead) and read.run is run, "a read ahead waits for an operation that is over")
    for ahead in reading_components:
        reader = operations.get(ahead.op)
        is_its_own = isinstance(reader, ComponentAheadRead) and reader.read is ahead
        _require(is_its_own, "a read of component pages ahead waits for an operation that is over")
    _require(not any(read.is_adopted for read in component_reads), "an adopted read still belongs to the look-ahead")
    for load in core.loads:
        if load.stage in (Stage.FETCHING, Stage.COPYING):
            kind = LoadFetch if load.stage is Stage.FETCHING else LoadCopy
            under_way = operations.get(load.op)
            is_its_own = isinstance(under_way, kind) and under_way.load is load
            _require(is_its_own, "a load waits for an operation that is over")


def _check_request(core: Parts, request: Request) -> None:
    holds = request.held.lock is not None
    _require(holds != request.waits_for_admission, f"{request} has no lock, or one before its grant")
    has_components = holds and core.state.components is not None
    _require(
        has_components == (request.component_pages is not None),
        f"{request} has component pages without a grant, or none with one",
    )
    is_planned = request.is_beyond_plan or request.is_ready
    _require(not is_planned or request.ahead is None, f"{request} has its plan, but still holds pages fetched ahead")
    _require(all(request in load.waiters for load in request.loads), f"{request} waits for a load that is over")
    if request.is_ready:
        _require(request.room is None and not request.loads, f"{request} still waits for something")
    else:
        _require(request.is_planned == request.is_beyond_plan, f"{request} has no room, or one too early")
    if request.waits_for_admission:
        _require(
            not request.held.own and not request.held.reserve and not request.loads,
            f"{request} waits for admission, but holds pages",
        )
    if request.held.lock is None or request.is_ready:
        return
    if request.lent is not None:
        _check_lent_request(request)
        return
    path = core.state.index.path(request.held.lock.node)
    shared = Counter[Load]()
    for node in path:
        _require(not node.is_reclaiming, f"the path of {request} runs through pages in RECLAIMING")
        if node.load is not None:
            shared[node.load] += node.page_count
    _require(
        dict(request_loads := {load: load.waiters[request] for load in request.loads}) == dict(shared),
        f"{request} shares {request_loads}, its path runs through {dict(shared)}",
    )
    end = request.held.lock.node.depth_pages
    _require(
        end + len(request.held.own) == request.page_count,
        f"{request} does not have every page of its prompt exactly once",
    )
    if request.room is not None:
        span = request.room.spans[0]
        _require(
            request.held.promised == span.first <= end, f"{request} promised {request.held.promised} pages of {end}"
        )
        is_shared = core.settings.share_transfers or request.held.promised == end
        _require(is_shared, f"{request} has {end} pages in the tree, and promised {request.held.promised}")
        _require(core.rooms.live(*request.room.key) is request.room, f"the room of {request} is not live")
        known = sum(request.sources.pages.values()) + sum(shared.values())
        _require(known == end, f"{request} counts the sources of {known} pages of {end}")


def _check_lent_request(request: Request) -> None:
    """Each lent page is in place, or on its way to the request, or its own."""
    assert request.lent is not None
    loading = {load.first: load for load in request.loads}
    at, rest = 0, page_ids()
    end = request.held.promised if request.is_planned else request.held.matched
    for first in sorted(loading):
        _require(at <= first, f"{request} has two loads of one page")
        at = first + loading[first].page_count
        rest += loading[first].lent
    _require(at <= end, f"{request} loads pages up to {at}, but promised {end}")
    _require(request.held.own == request.lent.full.pages[end:], f"{request} does not own the lent pages from {end} on")
    _require(
        set(rest) <= set(request.lent.full.pages[request.held.matched : end]), f"{request} loads into pages of others"
    )
    known = sum(request.sources.pages.values()) + len(rest)
    _require(not request.is_planned or known == end, f"{request} counts the sources of {known} pages of {end}")
