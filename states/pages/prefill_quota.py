"""Quota of device pages per prefill instance: no instance can withhold the whole pool by sending nothing.

Every request waits for its prefill, if only for the first token. From its grant until it is READY it is charged with
the pages that the grant took from all others: those it allocated, and cached ones that it was the first to lock. A room
that is left in quarantine is charged with its draining pages until they are free. The charge belongs to the prefill
that the room of the request's present generation uses.

    grant ──charge──▶ request ──READY, or left without a writer──▶ nothing
                         └────left, a writer may be active──▶ quarantine ──drained──▶ nothing

A charge is admitted if the instance stays within the quota, or if it is charged with nothing: a prompt larger than the
quota is served alone. Requests whose caller computes the rest have no prefill, and are not charged.
"""

from __future__ import annotations

from tidekv.states.errors import BrokenInvariant


class PrefillQuota:
    """Device pages charged to each prefill instance, by name, and their limit."""

    __slots__ = ("held", "limit_pages")

    def __init__(self, limit_pages: int | None) -> None:
        """`limit_pages` None means no limit: charges are counted only."""
        self.limit_pages = limit_pages
        self.held: dict[str, int] = {}
        """Pages charged now. Instances without a charge are not listed."""

    def admits(self, prefill: str, pages: int) -> bool:
        """Whether a request of this instance may be charged with so many pages. "" names no instance."""
        if self.limit_pages is None or not prefill or not pages:
            return True
        held = self.held.get(prefill, 0)
        return not held or held + pages <= self.limit_pages

    def charge(self, prefill: str, pages: int) -> None:
        """Charge an instance with pages, beyond its quota if need be. "" names no instance."""
        if prefill and pages:
            self.held[prefill] = self.held.get(prefill, 0) + pages

    def discharge(self, prefill: str, pages: int) -> None:
        """Remove pages that `charge` added."""
        if not prefill or not pages:
            return
        left = self.held.get(prefill, 0) - pages
        if left < 0:
            raise BrokenInvariant(f"prefill {prefill!r} is charged with {left + pages} pages, not {pages}")
        if left:
            self.held[prefill] = left
        else:
            del self.held[prefill]
