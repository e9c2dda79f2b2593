"""What can go wrong, by name, and how often it does in one run.

Each run draws from its seed which of the chosen kinds are on, and each kind's rate ("swarm testing"): a run with
everything on at once never reaches the states that need one kind to be rare.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from random import Random
from typing import Literal

from tidekv.states.errors import InvalidConfig

FAULTS: dict[str, str] = {
    # Storage.
    "query_fails": "storage answers a question with an error",
    "query_raises": "asking storage raises before anything was started",
    "query_is_late": "the answer comes after its deadline",
    "query_is_stuck": "the answer comes when everybody has forgotten the question",
    "query_promises_too_much": "storage says it has pages that it has not",
    "query_promises_too_little": "storage says it has fewer pages than it has",
    "query_is_nonsense": "the number in the answer is negative, or more than was asked for",
    "fetch_fails": "a read ends with an error",
    "fetch_raises": "starting a read raises",
    "fetch_is_short": "a read brings fewer pages than there are",
    "fetch_is_corrupt": "a page read does not match its checksum",
    "fetch_is_late": "a read ends after its deadline",
    "fetch_is_stuck": "a read ends when everybody has forgotten it",
    "fetch_reports_nonsense": "a read says that it brought more pages than were asked for",
    "page_is_lost": "storage loses pages between the answer and the read",
    "storage_forgets": "storage evicts pages",
    "store_fails": "a put ends with an error",
    "store_raises": "starting a put raises",
    "store_is_partial": "a put stores the first pages only",
    "store_is_late": "a put ends after its deadline",
    "store_is_stuck": "a put ends when everybody has forgotten it",
    "probe_fails": "storage that has failed fails its probe, too",
    "policy_changes": "storage is used by other policies from one moment on",
    "storage_is_detached": "the storage engine is taken away and brought back while requests run",
    # Copies on this machine.
    "copy_in_fails": "a copy to the device ends with an error; its destination holds garbage",
    "copy_in_raises": "starting a copy to the device raises",
    "copy_in_is_late": "a copy to the device ends after its deadline",
    "copy_in_is_stuck": "a copy to the device writes when everybody has forgotten it",
    "copy_out_fails": "a copy to the host ends with an error",
    "copy_out_raises": "starting a copy to the host raises",
    "copy_out_is_late": "a copy to the host ends after its deadline",
    "tail_copy_fails": "a copy of a component's pages ends with an error",
    "tail_copy_raises": "starting a copy of a component's pages raises",
    "tail_copy_is_late": "a copy of a component's pages ends after its deadline",
    "tail_copy_is_stuck": "a copy of a component's pages writes when everybody has forgotten it",
    "outcome_repeats": "an outcome is told twice",
    # Prefill.
    "connect_fails": "prefill cannot be reached when the promise is sent",
    "promise_is_slow": "the promise takes long to reach prefill",
    "room_is_refused": "prefill refuses the promise",
    "extend_is_refused": "prefill refuses to send a part of the promise that decode takes back",
    "room_fails": "prefill gives a room up; writes of it may be in flight",
    "room_fails_settled": "prefill gives a room up, and says that no write of it is in flight",
    "write_is_slow": "a remote write takes long",
    "tail_write_is_slow": "a remote write of a component's pages takes long",
    "aux_is_slow": "the first token takes long",
    "drain_is_slow": "the word that no write is in flight takes long",
    "peer_crashes": "prefill dies; writes in flight land or not; it comes back under another epoch",
    "peer_is_partitioned": "prefill is out of reach for a while, and goes on writing",
    "frame_repeats": "a frame is delivered twice",
    "frame_is_foreign": "a frame of a room that nobody knows",
    "frame_is_of_old_generation": "a frame of a generation that was left",
    "frame_of_wrong_rank": "a frame of a rank that the room does not have",
    "frame_of_wrong_span": "a frame of a span that was not asked for",
    "chunk_skips_pages": "a chunk that does not begin at the cursor",
    # Callers.
    "abort": "a caller gives up at a random moment",
    "abort_at_once": "a caller gives up in the instant of its arrival",
    "abort_when_ready": "a caller gives up in the instant in which its request is ready",
    "abort_of_nothing": "a caller gives up what is over, or never was",
    "deadline": "a caller's deadline is short",
    "flush": "the caches are flushed while requests run",
    "retract": "a ready request is retracted and resumed",
    "retracted_is_dropped": "a retracted request is not resumed",
    "output_is_dropped": "a caller keeps nothing of what was generated",
    "tail_is_not_left": "a caller leaves nothing of one of its components",
    "no_cache": "a request must leave nothing in the cache",
    "recompute_fails": "a caller that was asked to compute what no prefill can send cannot do it either",
    "recompute_raises": "asking a caller to compute raises",
    "recompute_is_slow": "a caller takes long to compute, and goes on when nobody waits any more",
    "id_returns": "an id is used again while the room of its former request is draining",
    "clock_is_late": "the core is told the time later than it asked for",
    # Ourselves.
    "rule_raises": "a rule of the core raises somewhere in its middle",
}
"""Name of each kind and what happens."""
OF_COMPONENTS = frozenset(name for name in FAULTS if name.startswith("tail_"))
"""Kinds that can strike only where there are components. A run without is the same whether they are chosen or not."""

Chosen = Literal["all", "none"] | Iterable[str]


class Faults:
    """The faults of one run: `hits` says whether one strikes now, and counts it."""

    def __init__(
        self, random: Random, chosen: Chosen, without: Collection[str] = (), *, with_components: bool = False
    ) -> None:
        """`without` are kinds that are drawn like all others, and never strike: but for that the run stays the same."""
        names = list(FAULTS) if chosen == "all" else [] if chosen == "none" else sorted(chosen)
        if unknown := [name for name in (*names, *without) if name not in FAULTS]:
            raise InvalidConfig(f"there is no fault {unknown[0]!r}; there are {', '.join(FAULTS)}")
        if not with_components:
            names = [name for name in names if name not in OF_COMPONENTS]
        self._random = random
        self._without = frozenset(without)
        self.counts: dict[str, int] = dict.fromkeys(names, 0)
        share = random.choice((0.1, 0.3, 0.6, 1.0)) if chosen == "all" else 1.0
        self._rates = {name: random.choice((0.002, 0.01, 0.05, 0.2)) for name in names if random.random() < share}
        self.is_over = False
        """Set when the last request is to end undisturbed."""

    def hits(self, name: str) -> bool:
        """Tell whether this kind strikes now."""
        rate = self._rates.get(name)
        if rate is None or self.is_over or self._random.random() >= rate or name in self._without:
            return False
        self.counts[name] += 1
        return True

    def is_on(self, name: str) -> bool:
        """Tell whether this kind may strike in this run at all."""
        return name in self._rates
