"""Write-back: what is cached goes to the next tier only when it is about to be evicted, and before it is.

Eviction never waits: it frees a page at once, whether there is another copy of it or not, because a page that is being
copied cannot be handed out. So copies are made ahead of it. Of each pool a share (`write_back_ahead`) is kept free, or
*clean*: it would be evicted next, and has another copy.

    device pool   [ in use, or recently used       | clean: also on the host, or in storage | free ]
    host pool     [ in use, or recently used       | clean: also in storage                 | free ]
                                                   ^ eviction begins at the right      ahead ^

When pages are taken, or a request has finished, the leaves that eviction would take first are looked at, as many as
fill what the free pages leave of the share. One without another copy is copied, with all above it that has none either:

- on the device: by a backup of its path that ends with the copy to the host. Closure holds, since a backup walks from
  the root; no page under copy can be evicted, since a backup holds a device receipt until the copy's event;
- on the host: by a put of its path to storage, under a host receipt. Its request is long gone: the tokens that name its
  pages are the keys of the path (`Core.keys_put`).

To copy to the host may evict other copies there, whose pages would be copied again, and so on for ever where the host
is too small for the share. So each time that pages are taken or left, no more may be copied than the share has.

A pool whose free pages are the whole share is not looked at: what is not in need of room is written nowhere, and is
lost with the process. Eviction that comes faster than copies drops pages; they are counted, by tier. A copy or put that
brought nothing (no host page, an error, a policy against it) is not followed by another before something else happens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidekv.states.prefix.node import TierName

if TYPE_CHECKING:
    from tidekv.states.backup.backups import Backups
    from tidekv.states.core_state import CoreState
    from tidekv.states.prefix.node import Node
    from tidekv.states.storage.admission import StorageAdmission


class WriteBack:
    """Finds what is to be copied before it is evicted."""

    def __init__(self, state: CoreState, storage: StorageAdmission, backups: Backups) -> None:
        self._state = state
        self._storage = storage
        self._backups = backups
        state.index.on_evict.append(self._note_eviction)

    def look(self) -> None:
        """Begin the copies and puts that are due. Can be called again where it raised."""
        state = self._state
        state.write_due = False
        if state.settings.write != "back" or not state.settings.host_pages:
            return
        for node in self._first_to_go("device") if state.write_credit > 0 else ():
            if node.host is None and not state.index.tree.is_stored(node):
                self._backups.copy_ahead(node)
        if not self._storage.is_usable:
            return
        for node in self._first_to_go("host"):
            if not state.index.tree.is_stored(node):
                self._backups.put_ahead(node)

    def _first_to_go(self, tier: TierName) -> list[Node]:
        """The leaves that eviction takes first, as many as fill what is not free of the share."""
        account = self._state.device if tier == "device" else self._state.host
        short = int(account.total * self._state.settings.write_back_ahead) - account.free
        return self._state.index.first_to_go(tier, short) if short > 0 else []

    def _note_eviction(self, node: Node, tier: TierName) -> None:
        state = self._state
        if state.settings.write == "back":
            state.write_due = True
            if tier == "device":
                state.renew_write_credit()
        if node.void or state.index.tree.is_stored(node):
            return
        if tier == "host" and node.device is None:
            state.count("l2_pages_dropped", node.page_count)
        elif tier == "device" and node.host is None:
            state.count("l1_pages_dropped", node.page_count)
