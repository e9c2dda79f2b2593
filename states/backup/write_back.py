"""Write-back: pages are copied to the next tier only when they are about to be evicted, and before they are.

Eviction never waits. It frees a page at once, whether another copy exists or not, because a page under copy cannot be
handed out. So the copies are made ahead of it. In each pool a share (`write_back_ahead`) is kept free or *clean*: next
to be evicted, with another copy.

    device pool   [ in use, or recently used       | clean: also on the host, or in storage | free ]
    host pool     [ in use, or recently used       | clean: also in storage                 | free ]
                                                   ^ eviction begins at the right      ahead ^

When pages are taken or a request has finished, `look` examines the leaves that eviction would take first: as many as
fill the part of the share that is not free. A leaf without another copy is copied, with everything above it that has
none either:

- on the device by a backup of its path that ends after the copy to the host. Copies stay closed under ancestors,
  because a backup walks from the root. No page under copy can be evicted, because a backup holds a device receipt
  until the copy has ended;
- on the host by a write of its path to storage, under a host receipt. Its request may have ended long ago: page names
  come from the keys of the path (`Core.keys_stored`).

A copy to the host may evict other copies there, whose pages would then be copied again, without end if the host is too
small for the share. So each time that pages are taken or left, at most as many pages as the share has may be copied
(`write_credit`).

While a whole share is free, nothing is examined: pages that need no room are written nowhere, and are lost with the
process. Eviction that is faster than the copies drops pages; they are counted by tier. A copy or write without a result
(no host page, an error, a forbidding policy) is not followed by another before something else happens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidekv.states.core_state import WRITE_BACK
from tidekv.states.prefix.node import TierName

if TYPE_CHECKING:
    from tidekv.states.backup.backups import Backups
    from tidekv.states.core_state import CoreState
    from tidekv.states.prefix.node import Node
    from tidekv.states.storage.admission import StorageAdmission


class WriteBack:
    """Finds the pages to copy before they are evicted."""

    def __init__(self, state: CoreState, storage: StorageAdmission, backups: Backups) -> None:
        self._state = state
        self._storage = storage
        self._backups = backups
        state.index.on_evict.append(self._note_eviction)

    def look(self) -> None:
        """Start the copies and writes that are due. Safe to call again after a raise."""
        state = self._state
        state.begin_ahead(WRITE_BACK)
        if state.settings.write != "back" or not state.settings.host_pages:
            return
        # A page needs a copy in either of the other tiers before it leaves the device, and one in storage before it
        # leaves the host.
        for node in self._first_to_go("device") if state.write_credit > 0 else ():
            if node.host is not None:
                continue
            if not state.index.tree.is_stored(node):
                self._backups.copy_ahead(node)
            else:
                # The mark may be wrong by now. If it is, the answer drops it, and the page is copied.
                self._backups.renew_ahead(node)
        if not self._storage.is_usable:
            return
        for node in self._first_to_go("host"):
            if not self._storage.is_renewed(node):
                self._backups.store_ahead(node)

    def _first_to_go(self, tier: TierName) -> list[Node]:
        """The leaves that eviction takes first, as many as fill the part of the share that is not free."""
        pool = self._state.device if tier == "device" else self._state.host
        short = int(pool.total * self._state.settings.write_back_ahead) - pool.free
        return self._state.index.first_to_go(tier, short) if short > 0 else []

    def _note_eviction(self, node: Node, tier: TierName) -> None:
        state = self._state
        if state.settings.write == "back":
            state.may_write_back()
            if tier == "device":
                state.renew_write_credit()
        if node.is_reclaiming or state.index.tree.is_stored(node):
            return
        if tier == "host" and node.device is None:
            state.count("l2_pages_dropped", node.page_count)
        elif tier == "device" and node.host is None:
            state.count("l1_pages_dropped", node.page_count)
