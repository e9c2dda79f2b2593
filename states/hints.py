"""KV hints: advice of an orchestrator about cached prefixes, for which no request is there.

A hint may bring pages to host memory, hold them there for a time, drop copies that a lower tier has too, or renew how
recently a prefix was used. It never takes device pages, never evicts what is in use, and never drops the last copy, so
the answers of requests are the same without it.

Pins hold host pages only, and each with an end: device memory belongs to requests. Of all pins together, `pages_max` of
the event is the limit.

A share copies host pages to another decode worker, which asked for them. It holds them until the copy has ended, and
evicts nothing; `pages_max` is the limit of all shares together.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from tidekv.states.commands import FetchPages, ReportHinted, SharePages
from tidekv.states.events import CopyEnded
from tidekv.states.rollback import Rollback
from tidekv.states.storage.admission import Measurement
from tidekv.states.storage_policy import FETCH_TIMEOUT_MAX_S
from tidekv.states.types import page_ids

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidekv.states.core_state import CoreState
    from tidekv.states.events import HintReceived, Outcome, ShareRequested
    from tidekv.states.prefix.node import Node, Receipt
    from tidekv.states.storage.admission import StorageAdmission
    from tidekv.states.types import PageIds

PINS_MAX: Final = 1024


class HintPin:
    """Operation: a hold of host pages. Its deadline is its end."""

    __slots__ = ("_hints", "namespace", "op", "page_count", "receipt")

    def __init__(self, hints: Hints, receipt: Receipt, page_count: int, namespace: str) -> None:
        self._hints = hints
        self.receipt = receipt
        self.page_count = page_count
        self.namespace = namespace
        self.op = 0

    def ended(self, event: Outcome, error: str) -> None:
        """Do nothing: without a command there is no outcome."""

    def late(self) -> None:
        """Give the pages up, because the time is over."""
        self._hints.end(self)

    def abandon(self) -> None:
        """Do nothing: see `ended`."""


class Share:
    """Operation: a copy of host pages to a peer, which holds them."""

    __slots__ = ("_hints", "op", "page_count", "receipt")

    def __init__(self, hints: Hints, receipt: Receipt, page_count: int) -> None:
        self._hints = hints
        self.receipt = receipt
        self.page_count = page_count
        self.op = 0

    def ended(self, event: Outcome, error: str) -> None:
        """Give the pages up: nothing reads them any more. Those that were found to be damaged leave host memory."""
        self._hints.shared(self, event.intact if isinstance(event, CopyEnded) else None)

    def late(self) -> None:
        """Never called: the lease of the peer bounds the copy, and only its end makes the pages safe to evict."""

    def abandon(self) -> None:
        """Give the pages up."""
        self._hints.shared(self, None)


class HintRead(Measurement):
    """Operation: a read of pages [first, first + len(host_pages)) of `keys`, which become cached host pages.

    It owns its host pages until then. If it is late, it goes on: nothing waits for it.
    """

    __slots__ = ("attachment", "first", "hints", "until_s")

    def aim(self, hints: Hints, *, first: int, until_s: float, attachment: int) -> None:
        """Note what the read is for; once, before it begins."""
        self.hints, self.first = hints, first
        self.until_s, self.attachment = until_s, attachment

    def ended(self, event: Outcome, error: str) -> None:
        """Enter the verified pages in the tree, and free the others."""
        count, valid = len(self.host_pages), self._storage.fetch_ended(event)
        valid = max(0, min(valid, count))
        if valid == count:
            self._storage.note_throughput(begun_at_s=self._begun_at_s, pages=self._queued_pages)
        if valid:
            self.hints.read_ended(self, valid)
        self.abandon()
        if valid == count:
            self._state.run_guarded(partial(self.hints.read_on, self, self.first + count), recover=lambda: None)

    def entered(self, left: PageIds) -> None:
        """Keep only the pages of the read that the tree has not taken: `left`."""
        self._storage.pages_in_flight -= len(self.host_pages) - len(left)
        self.host_pages = left


class Hints:
    """Pins, and reads that hints began."""

    def __init__(self, state: CoreState, storage: StorageAdmission, ahead_pages: Callable[[], int]) -> None:
        """`ahead_pages` returns the host pages that look-ahead has taken, of the same limit as reads of hints."""
        self._state = state
        self._storage = storage
        self._ahead_pages = ahead_pages
        self.pins: dict[HintPin, None] = {}
        self.shares: dict[Share, None] = {}
        self._actions: dict[str, Callable[[HintReceived], tuple[str, int]]] = {
            "prefetch": self._prefetch,
            "demote": self._demote,
            "pin": self._pin,
            "unpin": self._unpin,
            "retain": self._retain,
        }

    @property
    def pinned_pages(self) -> int:
        """Host pages held by pins; those of a common prefix count for each."""
        return sum(pin.page_count for pin in self.pins)

    def take(self, event: HintReceived) -> None:
        """Act on a hint, and report its outcome."""
        act = self._actions.get(event.action)
        outcome, pages = ("rejected", 0) if act is None else act(event)
        self._state.count(f"hints_{outcome}")
        self._state.emit(ReportHinted(call=event.call, outcome=outcome, page_count=pages))

    def refuse(self, event: HintReceived) -> None:
        """Report a hint on which acting has raised."""
        self._state.count("hints_rejected")
        self._state.emit(ReportHinted(call=event.call, outcome="rejected", page_count=0))

    def share(self, event: ShareRequested) -> None:
        """Share pages with a peer as far as bounds allow, and report how many."""
        outcome, pages = self._share(event)
        self._state.emit(ReportHinted(call=event.call, outcome=outcome, page_count=pages))

    def refuse_share(self, event: ShareRequested) -> None:
        """Report a read by a peer on which acting has raised."""
        self._state.emit(ReportHinted(call=event.call, outcome="rejected", page_count=0))

    # --- Pins ---

    def _pin(self, event: HintReceived) -> tuple[str, int]:
        state = self._state
        node, wanted = self._host_end(event), self._pages_of(event)
        allowed = min(wanted, event.pages_max - self.pinned_pages)
        if allowed < 1 or len(self.pins) >= PINS_MAX or event.ttl_s <= 0:
            return "rejected", 0
        node = self._cut_to(node, allowed)
        if not node.depth_pages:
            return "missing", 0
        with Rollback() as undo:
            receipt = state.index.pin(node)
            undo.callback(state.index.unpin, receipt)
            pin = HintPin(self, receipt, node.depth_pages, event.namespace)
            pin.op = state.start_operation(pin, deadline_s=event.ttl_s)
            undo.keep()
        self.pins[pin] = None
        return _outcome(node.depth_pages, wanted), node.depth_pages

    def _unpin(self, event: HintReceived) -> tuple[str, int]:
        path = {id(node) for node in self._state.index.path(self._host_end(event))}
        ended = [pin for pin in self.pins if id(pin.receipt.node) in path]
        for pin in ended:
            self.end(pin)
        return ("accepted" if ended else "missing"), sum(pin.page_count for pin in ended)

    def end(self, pin: HintPin) -> None:
        """Give up a pin. Can be called again after an exception."""
        if pin not in self.pins:
            return
        # First: if it raises, the pin keeps its end.
        if not pin.receipt.released:
            self._state.index.unpin(pin.receipt)
        self._state.end_operation(pin.op)
        del self.pins[pin]
        self._state.may_look_ahead()
        self._state.pages_were_freed()

    def flushed(self, namespace: str | None) -> None:
        """End the pins of a namespace, or all: host memory is about to be flushed."""
        for pin in [pin for pin in self.pins if namespace is None or pin.namespace == namespace]:
            self.end(pin)

    # --- Shares ---

    @property
    def shared_pages(self) -> int:
        """Host pages that are being copied to peers; those of a common prefix count for each."""
        return sum(share.page_count for share in self.shares)

    def _share(self, event: ShareRequested) -> tuple[str, int]:
        state = self._state
        wanted = self._pages_of(event)
        allowed = min(wanted, event.pages_max - self.shared_pages)
        if allowed < 1 or len(self.shares) >= state.settings.peer_reads_max:
            return "rejected", 0
        node = self._cut_to(self._host_end(event), allowed)
        if not node.depth_pages:
            return "missing", 0
        host_pages = page_ids()
        for part in state.index.path(node):
            assert part.host is not None, "a node with host pages has them up to its root"
            host_pages += part.host
        with Rollback() as undo:
            receipt = state.index.pin(node)
            undo.callback(state.index.unpin, receipt)
            share = Share(self, receipt, node.depth_pages)
            share.op = state.start_operation(share, deadline_s=float("inf"))
            undo.callback(state.operations.pop, share.op)
            state.emit(SharePages(op=share.op, call=event.call, host_pages=host_pages))
            undo.keep()
        self.shares[share] = None
        state.count("pages_shared", node.depth_pages)
        return _outcome(node.depth_pages, wanted), node.depth_pages

    def shared(self, share: Share, intact: int | None) -> None:
        """Give up a share, of which the first `intact` pages have their checksums, if one has not. Can be called again
        after an exception.
        """
        state = self._state
        leaf = share.receipt.node
        if not share.receipt.released:
            state.index.unpin(share.receipt)
        self.shares.pop(share, None)
        state.may_look_ahead()
        state.pages_were_freed()
        if intact is None:
            return
        state.count("l2_damaged")
        damaged = next((node for node in state.index.path(leaf) if node.depth_pages > intact), None)
        if damaged is not None:
            state.index.drop_host_path(damaged)

    # --- Other copies ---

    def _retain(self, event: HintReceived) -> tuple[str, int]:
        found = self._state.index.match(event.namespace, event.keys)
        pages = found.device_pages + found.host_pages
        return _outcome(pages, self._pages_of(event)), pages

    def _demote(self, event: HintReceived) -> tuple[str, int]:
        """Drop copies, from the end of the prefix on, that a lower tier has too, up to the first one in use."""
        index = self._state.index
        found = index.match(event.namespace, event.keys)
        dropped = seen = 0
        for node in reversed(index.path(found.host_node)):
            if event.tier == "host":
                if node.device is None:
                    continue
                seen += node.page_count
                if node.host is None or node.guarded or node.device_children or node.is_reclaiming:
                    break
                index.drop_device(node)
            else:
                if node.host is None:
                    continue
                seen += node.page_count
                is_only = node.device is None and not index.tree.is_stored(node)
                if is_only or node.host_guarded or node.host_children or node.children:
                    break
                index.drop_host(node)
            dropped += node.page_count
        if dropped:
            self._state.pages_were_freed()
            self._state.may_look_ahead()
        if not seen:
            return "missing", 0
        return ("accepted" if dropped == seen else "clipped" if dropped else "deferred"), dropped

    # --- Reads ---

    def _prefetch(self, event: HintReceived) -> tuple[str, int]:
        first = self._first_missing(event.namespace, event.keys)
        wanted = self._pages_of(event)
        if first is None:
            return "rejected", 0
        if first == wanted:
            return "accepted", 0
        if not self._storage.is_usable or event.ttl_s <= 0:
            return "missing", 0
        pages = self._read(event.namespace, event.keys, first, self._state.now_s + event.ttl_s)
        return ("clipped" if pages < wanted - first else "accepted") if pages else "rejected", pages

    def _first_missing(self, namespace: str, keys: bytes) -> int | None:
        """Return the first page of the prefix that memory lacks; None unless all before it are in host memory, as pages
        that join them must be.
        """
        found = self._state.index.match(namespace, keys)
        first = found.device_pages + found.host_pages
        fits = self._state.index.has_host(found.host_node) and found.host_node.depth_pages == first
        return first if fits else None

    def _read(self, namespace: str, keys: bytes, first: int, until_s: float) -> int:
        """Begin to read pages from `first` on; returns how many."""
        state = self._state
        settings = state.settings
        budget = max(settings.lookahead_pages_max, settings.host_pages // 8)
        left = budget - self._ahead_pages() - self._reading_pages()
        count = min(len(keys) // settings.key_bytes - first, settings.fetch_run_pages, left)
        deadline_s = min(settings.prefetch_deadline_s(max(count, 1)), until_s - state.now_s)
        if count < 1 or deadline_s <= 0:
            return 0
        count = state.make_host_room(min(count, self._storage.allowance(count, deadline_s)))
        if count < 1:
            return 0
        with Rollback() as undo:
            pages = state.host.take(count)
            undo.callback(state.host.give_back, pages)
            hinted = HintRead(state, self._storage, namespace=namespace, keys=keys, host_pages=pages)
            hinted.aim(self, first=first, until_s=until_s, attachment=state.index.tree.attachment)
            hinted.op = state.start_operation(hinted, deadline_s=deadline_s)
            undo.callback(state.operations.pop, hinted.op)
            timeout_s = min(deadline_s, FETCH_TIMEOUT_MAX_S)
            positions = page_ids(range(first, first + count))
            state.emit(
                FetchPages(op=hinted.op, request_id="", positions=positions, host_pages=pages, timeout_s=timeout_s)
            )
            undo.keep()
        self._storage.pages_in_flight += count
        self._storage.take(count)
        return count

    def read_on(self, read: HintRead, first: int) -> None:
        """Go on with a hint whose pages before `first` have arrived."""
        is_same = read.attachment == self._state.index.tree.attachment and self._storage.is_usable
        if is_same and self._first_missing(read.namespace, read.keys) == first < len(read.keys) // self._width:
            self._read(read.namespace, read.keys, first, read.until_s)

    def read_ended(self, read: HintRead, valid: int) -> None:
        """Enter the first `valid` pages of a read as cached host pages, unless the path to them is gone."""
        state, width = self._state, self._width
        begin = read.first * width
        found = state.index.match(read.namespace, read.keys[:begin])
        if found.host_node.depth_pages < read.first or not state.index.has_host(found.host_node):
            return
        keys = read.keys[begin : begin + valid * width]
        node, left = state.index.insert_host(found.host_node, keys, read.host_pages[:valid])
        rest = read.host_pages[valid:]
        state.count("pages_prefetched", valid - len(left))
        read.entered(left + rest)
        while read.attachment == state.index.tree.attachment and node.parent is not None:
            if node.depth_pages <= read.first:
                break
            state.index.mark_stored(node)
            node = node.parent

    # --- Parts ---

    @property
    def _width(self) -> int:
        return self._state.settings.key_bytes

    def _pages_of(self, event: HintReceived | ShareRequested) -> int:
        return len(event.keys) // self._width

    def _reading_pages(self) -> int:
        return sum(len(one.host_pages) for one in self._state.operations.values() if isinstance(one, HintRead))

    def _host_end(self, event: HintReceived | ShareRequested) -> Node:
        """Return the last node of the prefix that has host pages, perhaps a root."""
        node = self._state.index.match(event.namespace, event.keys).host_node
        while node.host is None:
            assert node.parent is not None, "a root has an empty list of host pages"
            node = node.parent
        return node

    def _cut_to(self, node: Node, pages: int) -> Node:
        """Return the node of the path that ends after at most `pages` pages; splits one if it must."""
        while node.depth_pages > pages:
            first = node.depth_pages - node.page_count
            if first < pages and not node.is_reclaiming and node.load is None:
                return self._state.index.split(node, pages - first)
            assert node.parent is not None, "a root ends after no page"
            node = node.parent
        return node


def _outcome(pages: int, wanted: int) -> str:
    if not pages:
        return "missing"
    return "accepted" if pages >= wanted else "clipped"
