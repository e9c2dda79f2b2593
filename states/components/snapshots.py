"""Where snapshots of recurrent states are kept, and the counts of what they cost and bring.

A snapshot is a record of a state as it was after a full page. It serves a prompt that ends exactly there, and a
computation that continues from there. `SnapshotPolicy` names the kinds of places that are worth one:

    place            boundary                                               written by
    branch           where cached prompts part                              a caller that recomputes the prompt
    prompt_end       the last full page of a prompt                         the same, or a caller at READY
    output_end       the last full page of prompt and output                a caller that finishes or retracts
    interval         every n-th page                                        both

A request that recomputes gets the boundaries before it computes, with a page for each (`assign`). Everything else is
what callers leave: `place_of` decides whether it is kept. Snapshots are bounded by `ComponentTier.cached_max`, and the
least recently used one is evicted first, whatever happens to the full pages.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from tidekv.states.records.component_plan import Snapshot

if TYPE_CHECKING:
    from tidekv.states.component_specs import SnapshotPolicy
    from tidekv.states.prefix.component_index import ComponentIndex
    from tidekv.states.prefix.node import Node
    from tidekv.states.records.request import Request

PLACES: Final = ("branch", "prompt_end", "output_end", "interval")
COUNTS: Final = (
    *(f"kept_{place}" for place in PLACES),
    "declined",
    "hits_device",
    "hits_host",
    "hits_storage",
    "resumed",
    "resumed_tokens",
)
"""Counts of each state: snapshots kept by place; snapshots that callers left and that were not kept; prompts whose end
was served by a snapshot, by tier; computations that continued from one, and the tokens that they did not compute.
"""


class Snapshots:
    """The policy of one core, applied to all of its states, and their counts."""

    def __init__(self, policy: SnapshotPolicy, index: ComponentIndex, *, page_size: int) -> None:
        self._policy = policy
        self._index = index
        self._page_size = page_size
        self.states = [name for name, component in index.components.items() if not component.is_shared]
        self.counts: dict[str, Counter[str]] = {name: Counter(dict.fromkeys(COUNTS, 0)) for name in self.states}

    def spare_pages(self, request: Request, name: str) -> int:
        """Number of spare records that the request gets of a state, as far as the pool has room."""
        tier = self._index.device[name]
        if not request.cache or not tier.cached_max:
            return 0
        return max(0, min(self._policy.per_request, tier.room))

    def assign(self, request: Request, name: str, spare: list[int], *, first: int) -> list[Snapshot]:
        """The snapshots of a state that a computation from page `first` on takes, one for each spare page at most.

        Boundaries that the device has one of are left out. Branch points come first, then the end of the prompt, then
        the last ones at regular intervals.
        """
        here = self._index.positions(request.namespace, request.keys, name, first)
        policy, end = self._policy, request.full_pages
        places: dict[int, str] = {}
        if policy.branch_points:
            for boundary in reversed(self._index.branch_points(request.namespace, request.keys)):
                places.setdefault(boundary, "branch")
        if policy.prompt_end:
            places.setdefault(end, "prompt_end")
        if policy.every_pages:
            for boundary in range(end // policy.every_pages * policy.every_pages, first, -policy.every_pages):
                places.setdefault(boundary, "interval")
        wanted = [each for each in places.items() if first < each[0] <= end and each[0] - 1 not in here]
        return [Snapshot(boundary, page, place) for (boundary, place), page in zip(wanted, spare, strict=False)]

    def place_of(self, boundary: int, *, prompt_pages: int, node: Node, holds: bool) -> str:
        """Return the kind of place by which the policy keeps a snapshot at `boundary`; "" if it is not kept.

        `node` is the end of the full pages that are kept; `holds`: a retracted request needs the snapshot at its end.
        """
        policy = self._policy
        if boundary == node.depth_pages and (policy.output_end or holds) and (boundary > prompt_pages or holds):
            return "output_end"
        if boundary == prompt_pages and policy.prompt_end:
            return "prompt_end"
        if boundary == node.depth_pages and policy.output_end:
            return "output_end"
        if policy.every_pages and boundary % policy.every_pages == 0:
            return "interval"
        return "branch" if policy.branch_points and self._index.is_branch(node, boundary) else ""

    def note_kept(self, name: str, place: str, *, is_kept: bool) -> None:
        """Count a snapshot that was kept for a place, or declined."""
        self.counts[name][f"kept_{place}" if is_kept and place else "declined"] += 1

    def note_served(self, hits: dict[str, str], resumed_pages: int) -> None:
        """Count the snapshots that served a request: by state, the tier of the one at its prompt's end; and the page
        from which its computation continued.
        """
        for name, tier in hits.items():
            self.counts[name][f"hits_{tier}"] += 1
        if resumed_pages:
            for name in self.states:
                self.counts[name]["resumed"] += 1
                self.counts[name]["resumed_tokens"] += resumed_pages * self._page_size

    def statistics(self) -> dict[str, dict[str, int]]:
        """By state, all counts, and the snapshots evicted so far by tier."""
        return {
            name: {
                **self.counts[name],
                "evicted_device": self._index.device[name].evicted,
                "evicted_host": self._index.host[name].evicted,
            }
            for name in self.states
        }
