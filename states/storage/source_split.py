"""Split of a restore between a tier and prefill, for pages that both could deliver.

Pure arithmetic on two figures per source: the seconds of a page in recent transfers
(`tidekv.states.storage.fetch_source`), and the number of pages that wait before it. It applies to the fetch policy
"soonest" and is made at two moments:

- A plan takes what storage has from there, behind what waits there already, unless the prompt is ready sooner if
  prefill sends all of it, or markedly sooner if both share it: then both end at the same time, storage fetches the
  front, and prefill sends the rest. It does the same with what host memory has, which is trusted until its copies are
  measured to be slower than prefill. A page from storage passes host memory, so the slower of both counts.
- Whenever prefill has sent everything requested while fetches are in flight, the split of the pages still being fetched
  is recomputed, and prefill is asked for the last part by *extend*. So a storage that has become slower does not delay
  pages that the network delivers sooner; a fetch that should have arrived by then counts in its throughput. It is
  recomputed once more if a fetch that was kept is overdue. The opposite correction is impossible, because nothing may
  be loaded into pages that prefill may be writing to, but the next plan uses the new figures.

Plans rely on the last figures, however old: an extend is cheap, and so is being wrong. A storage that is not used
because it was slow is measured again once the figure is old, by one plan at a time, with the shortest fetch.

If the cost of prefill is unknown, a plan fetches everything: what prefill was asked for cannot be taken back, and
fetches can be given up. If that of storage is unknown, one plan at a time fetches the first 1/PROBE_PARTS of what
storage has, but no less than the shortest hit that is fetched, as a measurement; if both are unknown, it fetches
everything, and each recomputation halves its fetches, and others wait for a first measurement, for a short time
(`StorageAdmission.awaits_measurement`). Plans that are made before it fetch nothing, because reads cannot be cancelled:
those of a slow storage would delay the fetches of all later plans. Mostly storage is known before its first hit,
because pages that were just stored are read until a read is no faster than the last one (`StorageAdmission.measure`).

The cost of a page from prefill includes its computation. So a prefill instance that computes slowly is asked for few
pages that storage has.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

TRUSTED_S = 0.05
"""Copies from host memory that end this soon are not compared with prefill: a busy processor may have delayed those
that were measured, and prefill's work and link are worth more than what such a prompt could gain.
"""
PROBE_PARTS = 8
"""A plan that measures an unknown storage fetches one of so many parts of what storage has."""
MARKED_GAIN = 1.2
"""A split is made, and changed, if the prompt takes so many times as long otherwise. Figures are less exact than that,
and each part has a fixed cost.
"""
SMALL_GAIN = 1.05
"""Pages that storage has are left to prefill if the prompt takes more than so many times as long otherwise."""


class SourceLoad(NamedTuple):
    """Load of a source: seconds per page (0: unknown), and pages under way before a new one."""

    page_s: float
    queued_pages: int

    def before(self, copies: SourceLoad) -> SourceLoad:
        """Return the load of this source if `copies` bring its pages to the device: that of the slower one."""
        if not self.page_s or copies.page_s <= self.page_s:
            return self
        return SourceLoad(copies.page_s, self.queued_pages + copies.queued_pages)


def gain_s(count: int, *, storage: SourceLoad, link: SourceLoad) -> float:
    """Return the seconds that `count` pages take less from both sources than from prefill. 0 if its cost is unknown.

    A storage of unknown cost counts as one that is as fast as prefill.
    """
    if not link.page_s:
        return 0.0
    return count * link.page_s**2 / (link.page_s + (storage.page_s or link.page_s))


def pages_to_copy(count: int, rest: int, *, host: SourceLoad, link: SourceLoad, is_old: bool = False) -> int:
    """Return how many of the first `count` pages to copy from host memory. See `pages_to_load`.

    All of them, unless its copies are known to be slower than prefill, and to take longer than TRUSTED_S.
    """
    if host.page_s <= link.page_s or not link.page_s or (host.queued_pages + count) * host.page_s <= TRUSTED_S:
        return count
    return pages_to_load(count, rest, tier=host, link=link, is_old=is_old)


def pages_to_load(
    count: int, rest: int, *, tier: SourceLoad, link: SourceLoad, is_old: bool = False, shortest: int = 1
) -> int:
    """Return how many of the first `count` pages to load, so that the last page of all arrives early.

    Both sources have these pages; prefill also sends `rest` further ones that only it has. At least `shortest` pages
    are loaded, or all if there are fewer, or none. If the figure of an idle tier `is_old`, they are loaded to renew it.
    """
    if not tier.page_s and tier.queued_pages:
        return 0
    if not link.page_s:
        return count
    if not tier.page_s:
        return min(max(-(-count // PROBE_PARTS), shortest), count)
    sent_s = (link.queued_pages + rest + count) * link.page_s
    even = (sent_s - tier.queued_pages * tier.page_s) / (tier.page_s + link.page_s)
    # The even split is a fraction; the better of the two whole numbers around it is the minimum.
    fewer = min(max(int(even), 0), count)
    candidates = [min(max(loaded, shortest), count) if loaded > 0 else 0 for loaded in (fewer + 1, fewer)]
    if candidates[1] > fewer:
        # Both are above the even split. None at all may be better.
        candidates.append(0)

    def ready_s(loaded: int) -> float:
        return max((tier.queued_pages + loaded) * tier.page_s if loaded else 0.0, sent_s - loaded * link.page_s)

    # What prefill is asked for delays what only it can send to others.
    best, faster = min(candidates, key=ready_s), 0 if ready_s(0) * SMALL_GAIN < ready_s(count) else count
    chosen = best if ready_s(best) * MARKED_GAIN < ready_s(faster) else faster
    return chosen if chosen or not is_old or tier.queued_pages else min(shortest, count)


def fetches_to_keep(fetches: Sequence[tuple[float, int]], *, link: SourceLoad) -> int:
    """Return how many of the fetches in flight to keep; prefill is asked for the pages of the others.

    `fetches` are in the order of the prompt, each with the seconds until it ends (0: unknown) and its pages.
    """
    if not link.page_s or not all(lands_s for lands_s, _ in fetches):
        return -(-len(fetches) // 2)
    sent_pages, ready_s = 0, []
    # All that are kept must end in time: a fetch that has stalled may be expected after those behind it.
    all_land_s = [0.0, *accumulate((lands_s for lands_s, _ in fetches), max)]
    for keep in range(len(fetches), -1, -1):
        lands_s = all_land_s[keep]
        sent_s = (link.queued_pages + sent_pages) * link.page_s if sent_pages else 0.0
        ready_s.append(max(lands_s, sent_s))
        if keep:
            sent_pages += fetches[keep - 1][1]
    # A fetch given up is still read, in vain.
    best = min(ready_s)
    return len(fetches) - ready_s.index(best) if best * MARKED_GAIN < ready_s[0] else len(fetches)
