"""Which of two ways is to bring pages that both have: what storage has, prefill can send as well.

Pure arithmetic on two measures of each way: what a page costs on it of late (`tidekv.states.storage.throughput`), and
how many pages wait on it already. With `prefetch` "soonest" they are asked twice. A plan divides what storage has so
that both ways end at the same time: the front is fetched, the rest is part of the delta. And whenever prefill has
brought all that it was asked for while fetches are under way, their tail is divided anew and its last part is asked of
prefill by extend: so a storage that turns out slower than it was does not delay what the network brings sooner, and a
fetch that was to have landed by then counts in its pace. The other way round there is no remedy (nobody fetches to
pages that prefill may be writing to), but the next plan knows better.

Where nothing is known of one of them, a plan fetches all, and the tail is halved each time: after a few halvings what
is left is one fetch, and something is known.

What prefill has to compute first is part of what its pages cost. So a prefill that computes slowly is asked for little
that storage has, which is what a caller with a slow prefill wants.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class SourceLoad(NamedTuple):
    """How pages come: seconds that each costs (0: nothing is known), and those that wait before ours."""

    page_s: float
    queued_pages: int


def pages_to_fetch(count: int, rest: int, *, storage: SourceLoad, link: SourceLoad) -> int:
    """Of `count` pages that both have, in front of `rest` that prefill alone has: how many to fetch, from the first on,
    so that the last page of all comes as soon as it can.
    """
    if not storage.page_s or not link.page_s:
        return count
    sent_s = (link.queued_pages + rest + count) * link.page_s
    even = (sent_s - storage.queued_pages * storage.page_s) / (storage.page_s + link.page_s)
    # Whole pages: of the two numbers around the even one, the better.
    fewer = min(max(int(even), 0), count)
    return min(
        (min(fewer + 1, count), fewer),
        key=lambda fetched: max(
            (storage.queued_pages + fetched) * storage.page_s if fetched else 0.0, sent_s - fetched * link.page_s
        ),
    )


def fetches_to_keep(fetches: Sequence[tuple[float, int]], *, link: SourceLoad) -> int:
    """Of fetches under way, in order, each with the seconds until it lands (0: nothing is known) and its pages: how
    many to go on waiting for, while prefill is asked for the pages of the others.
    """
    if not link.page_s or not all(lands_s for lands_s, _ in fetches):
        return -(-len(fetches) // 2)
    best, kept = float("inf"), len(fetches)
    sent_pages = 0
    for keep in range(len(fetches), -1, -1):
        lands_s = fetches[keep - 1][0] if keep else 0.0
        sent_s = (link.queued_pages + sent_pages) * link.page_s if sent_pages else 0.0
        # Of equals the one that reads nothing for nobody.
        if max(lands_s, sent_s) < best:
            best, kept = max(lands_s, sent_s), keep
        if keep:
            sent_pages += fetches[keep - 1][1]
    return kept
