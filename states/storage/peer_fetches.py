"""Fetches of a prompt's pages from the host memory of other decode workers, which a request names.

A peer is one more tier, between storage and prefill. A plan asks it for all full pages that no tier above has, in one
fetch to host pages. The peer is not asked before whether it has them: what it does not send, or not in time, is
asked of prefill by an extend, as for storage. A peer that was late or failed is not asked for some seconds. There is
no circuit breaker with probes: the next fetch after the pause is the probe.

One estimate of speed serves all peers: they are workers of the same kind on the same network.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tidekv.states.events import CommandRaised, PagesFetched
from tidekv.states.storage.fetch_source import FetchSource

if TYPE_CHECKING:
    from tidekv.states.core_state import CoreState
    from tidekv.states.events import Outcome

PAUSED_MAX: Final = 256
"""Maximum peers remembered as paused; the first ones are forgotten beyond that."""
STOP_SHARE: Final = 0.8
"""Share of the time of a fetch after which the driver stops the peer, so that what has arrived by then still counts."""


class PeerFetches(FetchSource):
    """Decides whether a peer is asked, and accounts for the fetches from all peers."""

    def __init__(self, state: CoreState) -> None:
        super().__init__(state)
        self._paused: dict[str, float] = {}
        """By address, until when a peer is not asked."""

    def choose(self, peers: tuple[str, ...]) -> str:
        """Return the first of these peers that may be asked; empty if all are in pause."""
        now_s = self._state.now_s
        return next((peer for peer in peers if self._paused.get(peer, 0.0) <= now_s), "")

    def allowance(self, wanted: int) -> int:
        """Return how many of `wanted` pages may be fetched now."""
        settings = self._state.settings
        return max(0, min(wanted, int(settings.peer_host_share * settings.host_pages) - self.pages_in_flight))

    def deadline_s(self, left_s: float) -> float:
        """Return the seconds that a fetch may take for a request with `left_s` seconds left."""
        settings = self._state.settings
        return max(min(settings.peer_wait_s, settings.peer_wait_share * left_s), 0.0)

    def note(self, peer: str, *, failed: bool) -> None:
        """Record that a fetch from this peer has ended, or is late: pause it, or end its pause."""
        self._paused.pop(peer, None)
        if failed:
            self._paused[peer] = self._state.now_s + self._state.settings.peer_pause_s
            if len(self._paused) > PAUSED_MAX:
                del self._paused[next(iter(self._paused))]


class PeerCalls:
    """The calls of one fetch to its peer, in the form in which an operation of a load knows those to storage."""

    __slots__ = ("_peers", "address")

    def __init__(self, peers: PeerFetches, address: str) -> None:
        self._peers = peers
        self.address = address

    def fetch_is_late(self) -> None:
        """Pause a late peer."""
        self._peers.note(self.address, failed=True)

    def fetch_ended(self, event: Outcome) -> int:
        """Record the outcome of a fetch; returns how many of its pages are valid, from the first on."""
        if not isinstance(event, CommandRaised):
            self._peers.note(self.address, failed=isinstance(event, PagesFetched) and bool(event.error))
        return event.valid if isinstance(event, PagesFetched) else 0

    def note_throughput(self, *, begun_at_s: float, pages: int) -> None:
        """See `FetchSource.note_throughput`."""
        self._peers.note_throughput(begun_at_s=begun_at_s, pages=pages)
