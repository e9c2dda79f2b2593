"""Offers: pages that the embedder computed in device pages of its own, written through to host memory and storage.

With lent device pages the prefix index never has them, so no finished request can be backed up. The embedder offers its
pages instead. The part that host memory lacks is copied to new host pages, which join the tree after the copy, and the
path is then stored as by any other backup. Host pages only join the tree below host pages: what host memory has no room
for, and an offer whose prefix is not there, passes through to storage (`tidekv.states.storage.passing`).

    offered pages   [ in host memory | under way by an earlier offer | copied by this one | passed on, or declined ]

An offer reads the embedder's pages until its copies have ended; `ReportOffered` then gives them back. An offer that
begins where another one's copy ends joins the tree after that one. If that one fails, the pages before it are missing,
and what it has copied is put, and passes. Without a storage that may be called, what would pass is declined.

An offer that continues earlier ones names all keys, and only its own pages: it costs a walk of the tree.

Pages of components at the end of an offer are copied beside it, and join when its full pages have, or pass
(`tidekv.states.components.offered`).

Ownership. An offer owns its new host pages until they join the tree, and a host receipt for the pages before them.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tidekv.states.commands import CopyPages, ReportOffered
from tidekv.states.components.offered import OfferedComponents
from tidekv.states.types import FULL, page_ids

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tidekv.states.backup.backups import Backups
    from tidekv.states.components.backups import ComponentBackups
    from tidekv.states.core_state import CoreState
    from tidekv.states.events import Outcome, PagesOffered
    from tidekv.states.prefix.index import Node, Receipt
    from tidekv.states.storage.passing import Passage, Passages
    from tidekv.states.types import PageIds


class Offer:
    """Operation: the copy of offered pages to host memory."""

    __slots__ = (
        "_offers",
        "base",
        "components",
        "copied",
        "device_pages",
        "event",
        "follows",
        "has_joined",
        "host_pages",
        "is_copying",
        "op",
        "passage",
        "pin",
        "present",
        "taken_over",
    )

    def __init__(self, offers: Offers, event: PagesOffered) -> None:
        self._offers = offers
        self.event = event
        self.base = 0
        """Number of leading pages that are in host memory, or are brought there by the offer that it follows."""
        self.device_pages: PageIds = page_ids()
        """Pages of the embedder that it copies, from page `base` on."""
        self.host_pages: PageIds = page_ids()
        self.pin: Receipt | None = None
        """On the path of the first `base` pages. None while it follows another offer."""
        self.follows: Offer | None = None
        self.op = 0
        self.is_copying = False
        """Whether its copy of full pages is under way."""
        self.passage: Passage | None = None
        """Its full pages that pass through host memory."""
        self.taken_over = 0
        """Number of pages that pass because they could not join after their copy."""
        self.components = offers.components_of(event, self)
        """Its component pages. None without components."""
        self.present = 0
        """Number of its pages that are, or will be, in host memory without it."""
        self.copied = 0
        """Number of its pages that have joined the tree."""
        self.has_joined = False
        """Whether its host pages were offered to the tree."""

    @property
    def reads(self) -> bool:
        """Whether a copy reads pages of the embedder."""
        passes = self.passage is not None and self.passage.reads
        return self.is_copying or passes or (self.components is not None and self.components.is_copying)

    @property
    def passed(self) -> int:
        """Number of its full pages that are on their way to storage, or found there."""
        return self.taken_over + (0 if self.passage is None else self.passage.passed)

    @property
    def pages_read(self) -> dict[str, PageIds]:
        """By group, the pages of the embedder that its copies read."""
        passing = page_ids() if self.passage is None else self.passage.device_pages
        components = {} if self.components is None else self.components.pages_read
        return {FULL: self.device_pages + passing, **components}

    @property
    def has_pages(self) -> bool:
        """Whether host pages are to join the tree or the index."""
        return bool(self.host_pages) or (self.components is not None and self.components.has_pages)

    @property
    def end(self) -> int:
        """Number of leading pages in host memory once it has joined the tree."""
        return self.base + len(self.device_pages)

    def ended(self, event: Outcome, error: str) -> None:
        """Let the copied pages join the tree."""
        self._offers.copy_ended(self, error)

    def late(self) -> None:
        """Count the copy as late. It still reads the pages."""
        self._offers.is_late()

    def abandon(self) -> None:
        """End the offer at its current state."""
        self._offers.abandon(self)


class Offers:
    """All offers of a core."""

    def __init__(
        self, state: CoreState, backups: Backups, component_backups: ComponentBackups | None, passages: Passages
    ) -> None:
        self._state = state
        self._backups = backups
        self._component_backups = component_backups
        self._passages = passages
        self._live: dict[Offer, None] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Offer]:
        return iter(self._live)

    def reads(self, group: str, pages: PageIds) -> list[int]:
        """Return those of the embedder's device pages that offers read."""
        asked = set(pages)
        return sorted({page for offer in self._live for page in offer.pages_read.get(group, ()) if page in asked})

    def components_of(self, event: PagesOffered, offer: Offer) -> OfferedComponents | None:
        """Return the component pages of an offer, which are not copied yet."""
        index, backups = self._state.components, self._component_backups
        if index is None or backups is None:
            return None
        on_read = partial(self._end_when_copied, offer)
        return OfferedComponents(self._state, index, backups, self._passages, event, on_read)

    def begin(self, event: PagesOffered) -> None:
        """Start the copy of the pages that host memory lacks; report at once if there is none."""
        offer = Offer(self, event)
        self._live[offer] = None
        self._state.run_guarded(partial(self._begin, offer), recover=partial(self.abandon, offer))

    def _begin(self, offer: Offer) -> None:
        state, event = self._state, offer.event
        end = len(event.keys) // state.settings.key_bytes
        first = end - len(event.pages)
        leaf = state.index.match(event.namespace, event.keys).host_node
        offer.base = leaf.depth_pages
        self._find_followed(offer)
        offer.present = max(min(offer.base, end) - first, 0)
        at, lacking = first, max(end - offer.base, 0)
        is_reached = offer.base >= first
        if is_reached:
            at = offer.base + self._join(offer, leaf, event.pages[offer.base - first :] if lacking else ())
        else:
            offer.follows = None
        if at < end:
            offer.passage = self._passages.begin(event, FULL, at, page_ids(event.pages[at - first :]))
        if offer.components is not None:
            offer.components.begin(is_reached=is_reached and at >= end)
        if offer.passage is not None and offer.passage.reads:
            offer.passage.on_read = partial(self._end_when_copied, offer)
        self._end_when_copied(offer)

    def _join(self, offer: Offer, leaf: Node, pages: tuple[int, ...]) -> int:
        """Copy those of the pages from `base` on that host memory has room for; return their number."""
        state = self._state
        if offer.follows is None:
            # The pin comes first: making room must not evict the pages that the new ones join.
            offer.pin = state.index.pin(leaf)
        count = state.make_host_room(len(pages)) if pages else 0
        if count < len(pages):
            count = max(count - self._passages.reserve(offer.event.keys), 0)
        if count:
            self._copy(offer, pages[:count])
        elif not pages and offer.follows is None:
            # An earlier write of these pages may have failed, or their storage may be gone.
            self._backups.store_path(leaf)
        return count

    def _find_followed(self, offer: Offer) -> None:
        """Find the live offer that brings most of the pages after `base`."""
        keys, width = offer.event.keys, self._state.settings.key_bytes
        for other in self._live:
            if other.host_pages and other.event.namespace == offer.event.namespace:
                shared = min(other.end, len(keys) // width)
                if shared > offer.base and keys.startswith(other.event.keys[: shared * width]):
                    offer.follows, offer.base = other, shared

    def _copy(self, offer: Offer, pages: tuple[int, ...]) -> None:
        state = self._state
        offer.host_pages = state.host.take(len(pages))
        offer.op = state.start_operation(offer, deadline_s=state.settings.copy_deadline_s)
        offer.device_pages = page_ids(pages)
        state.emit(
            CopyPages(
                op=offer.op,
                source="device",
                source_pages=offer.device_pages,
                target="host",
                target_pages=offer.host_pages,
            )
        )
        offer.is_copying = True

    def is_late(self) -> None:
        """Count a late copy."""
        self._state.count("backups_late")

    def copy_ended(self, offer: Offer, error: str) -> None:
        """Let the copied pages join the tree, now or after those of the offer that this one follows."""
        if error:
            self._state.count("backups_failed")
            self._give_up_host_pages(offer)
        offer.is_copying = False
        self._end_when_copied(offer)

    def _end_when_copied(self, offer: Offer) -> None:
        """End an offer that reads nothing, unless its pages can only join after those of the offer that it follows."""
        if not offer.reads and (offer.follows is None or not offer.has_pages):
            self._end(offer)

    def abandon(self, offer: Offer) -> None:
        """End an offer of which a step raised. Can be called again after an exception."""
        self._state.count("backups_failed")
        self._state.operations.pop(offer.op, None)
        offer.is_copying = False
        self._give_up_host_pages(offer)
        if not offer.reads:
            self._end(offer)

    def _end(self, offer: Offer) -> None:
        """Join the tree, continue the offers that follow, and report. Can be called again after an exception."""
        state, width = self._state, self._state.settings.key_bytes
        leaf = None if offer.pin is None else offer.pin.node
        if leaf is not None and offer.host_pages and not offer.has_joined:
            count = len(offer.host_pages)
            keys = offer.event.keys[offer.base * width : (offer.base + count) * width]
            # Pages that another offer or a fetch has brought meanwhile come back: they are in the tree already.
            # If giving them back raises, the next call must not let them join once more.
            leaf, offer.host_pages = state.index.insert_host(leaf, keys, offer.host_pages)
            offer.has_joined = True
            offer.copied = count - len(offer.host_pages)
            offer.present += len(offer.host_pages)
            state.count("pages_backed_up", offer.copied)
        elif (
            offer.host_pages
            and not offer.has_joined
            and self._passages.take_over(offer.event, offer.base, offer.host_pages)
        ):
            offer.taken_over, offer.host_pages = len(offer.host_pages), page_ids()
        self._give_up_host_pages(offer)
        joins = leaf is not None and offer.components is not None and offer.components.has_pages
        if offer.components is not None:
            if leaf is not None:
                offer.components.join(leaf)
            offer.components.give_up()
        for other in [other for other in self._live if other.follows is offer]:
            self._continue(other)
        # Component pages are stored behind the full pages before them, which another offer may have brought.
        if leaf is not None and (offer.copied or (joins and not state.index.tree.is_stored(leaf))):
            self._backups.store_path(leaf)
        if offer.pin is not None:
            state.index.unpin(offer.pin)
            offer.pin = None
        self._report(offer)
        del self._live[offer]
        state.pages_were_freed()

    def _continue(self, offer: Offer) -> None:
        """Continue an offer after the one that it follows: pin the pages before its own, if they are there."""
        state = self._state
        found = state.index.match(offer.event.namespace, offer.event.keys[: offer.base * state.settings.key_bytes])
        if found.host_node.depth_pages == offer.base:
            offer.pin = state.index.pin(found.host_node)
        else:
            offer.present = 0
        offer.follows = None
        if not offer.reads:
            state.run_guarded(partial(self._end, offer), recover=partial(self.abandon, offer))

    def _give_up_host_pages(self, offer: Offer) -> None:
        self._state.host.give_back(offer.host_pages)
        offer.host_pages = page_ids()

    def _report(self, offer: Offer) -> None:
        """Give the pages back to the embedder."""
        declined = len(offer.event.pages) - offer.present - offer.copied - offer.passed
        self._state.emit(
            ReportOffered(
                offer=offer.event.offer,
                written=offer.copied,
                present=offer.present,
                declined=declined,
                passed=offer.passed,
                components_declined=() if offer.components is None else tuple(offer.components.declined),
            )
        )
        self._state.count("offered_pages_declined", declined)
