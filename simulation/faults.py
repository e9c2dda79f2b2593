"""Kinds of faults by name, and how often each strikes in one run.

Each run draws from its seed which of the chosen kinds are enabled, and the rate of each ("swarm testing"). A run with
every kind enabled would never reach states that need one kind to be rare.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping
from random import Random
from typing import Literal

from tidekv.states.errors import InvalidConfig
from tidekv.states.validation import unknown

FAULTS: dict[str, str] = {
    # Storage.
    "query_fails": "storage answers a query with an error",
    "query_raises": "starting a query raises",
    "query_is_slow": "the answer takes longer than its request waits for it",
    "query_is_late": "the answer comes after its deadline",
    "query_is_stuck": "the answer comes long after its request has ended",
    "query_promises_too_much": "storage reports pages that it does not have",
    "query_promises_too_little": "storage reports fewer pages than it has",
    "query_is_nonsense": "the number in the answer is negative, or larger than the number of pages in question",
    "fetch_fails": "a read ends with an error",
    "fetch_raises": "starting a read raises",
    "fetch_is_short": "a read brings fewer pages than storage has",
    "fetch_is_corrupt": "a page read does not match its checksum",
    "fetch_is_late": "a read ends after its deadline",
    "fetch_is_stuck": "a read ends long after its request has ended",
    "fetch_reports_nonsense": "a read reports more pages than it was to bring",
    "page_is_lost": "storage loses pages between the answer and the read",
    "storage_forgets": "storage evicts pages",
    "store_fails": "a put ends with an error",
    "store_raises": "starting a put raises",
    "store_is_partial": "a put stores only the first pages",
    "store_is_late": "a put ends after its deadline",
    "store_is_stuck": "a put ends long after its request has ended",
    "probe_fails": "the probe of failed storage fails, too",
    "policy_changes": "the storage policies change",
    "storage_is_detached": "the storage engine is detached and attached again while requests run",
    # Copies on this machine.
    "copy_in_fails": "a copy to the device ends with an error; its destination holds garbage",
    "copy_in_raises": "starting a copy to the device raises",
    "copy_in_is_late": "a copy to the device ends after its deadline",
    "copy_in_is_stuck": "a copy to the device writes long after its request has ended",
    "copy_out_fails": "a copy to the host ends with an error",
    "copy_out_raises": "starting a copy to the host raises",
    "copy_out_is_late": "a copy to the host ends after its deadline",
    "component_copy_fails": "a copy of a component's pages ends with an error",
    "component_copy_raises": "starting a copy of a component's pages raises",
    "component_copy_is_late": "a copy of a component's pages ends after its deadline",
    "component_copy_is_stuck": "a copy of a component's pages writes long after its request has ended",
    "outcome_repeats": "an outcome is delivered twice",
    # Prefill.
    "connect_fails": "prefill cannot be reached when the promise is sent",
    "promise_is_slow": "the promise takes long to reach prefill",
    "room_is_refused": "prefill refuses the promise",
    "extend_is_refused": "prefill refuses an extend, by which decode requests promised pages after all",
    "room_fails": "prefill gives a room up; writes of it may be in flight",
    "room_fails_settled": "prefill gives a room up, and reports that no write of it is in flight",
    "write_is_slow": "a remote write takes long",
    "component_write_is_slow": "a remote write of a component's pages takes long",
    "aux_is_slow": "the first token takes long",
    "drain_is_slow": "the message that no write is in flight takes long",
    "peer_crashes": "prefill dies; writes in flight arrive or not; it comes back under another epoch",
    "peer_is_partitioned": "prefill is unreachable for a while, and continues to write",
    "frame_repeats": "a frame is delivered twice",
    "frame_is_foreign": "a frame of an unknown room",
    "frame_is_of_old_generation": "a frame of an earlier generation",
    "frame_of_wrong_rank": "a frame of a rank that the room does not have",
    "frame_of_wrong_span": "a frame of a span that was not requested",
    "chunk_skips_pages": "a chunk that does not begin at the cursor",
    # Callers.
    "abort": "a caller aborts at a random moment",
    "abort_at_once": "a caller aborts in the instant of the arrival",
    "abort_when_ready": "a caller aborts in the instant in which its request becomes ready",
    "abort_of_nothing": "a caller aborts a request that has ended, or never existed",
    "deadline": "a caller's deadline is short",
    "flush": "the caches are flushed while requests run",
    "retract": "a ready request is retracted and resumed",
    "retracted_is_dropped": "a retracted request is not resumed",
    "output_is_dropped": "a caller keeps none of the generated tokens",
    "pages_are_not_offered": "an embedder that lends its device pages offers none of those of a request",
    "component_is_not_left": "a caller leaves nothing of one of its components",
    "no_cache": "a request must leave nothing in the cache",
    "recompute_fails": "the caller's recomputation of pages that no prefill can send fails, too",
    "recompute_raises": "starting a recomputation raises",
    "recompute_is_slow": "a recomputation takes long, and continues after its request has ended",
    "id_returns": "an id is used again while the room of its former request is draining",
    "clock_is_late": "the core gets the time later than it requested",
    # Memory and wires, with checksums of pages.
    "host_page_is_flipped": "a bit of a page in host memory flips",
    "sent_page_is_flipped": "a bit of a page flips on its way from prefill",
    # Ourselves.
    "rule_raises": "a rule of the core raises somewhere in its middle",
    # Behind the others, which are drawn in order: their rates stay what they were.
    "peer_is_silent": "prefill takes promises and answers aborts, but sends nothing until it is restarted",
    "component_tier_is_lost": "host memory and storage deliver nothing of one component any more",
    "same_id_elsewhere": "another decode worker has a room of the same id, for another prompt, at the same prefill",
    "all_is_stored": "what storage lacks is to be stored, as before the end of a worker, while requests run",
    # Other decode workers, in runs that have some.
    "neighbour_fails": "a read from another decode worker ends with an error",
    "neighbour_raises": "starting a read from another decode worker raises",
    "neighbour_is_late": "another decode worker is stopped because it is late, and still writes for a while",
    "neighbour_is_stuck": "another decode worker falls silent, and may write long after the request has ended",
    "neighbour_lies": "a page from another decode worker does not match its checksum",
    "neighbour_reports_nonsense": "a read from another decode worker reports more pages than it was to bring",
    "neighbour_misses_a_rank": "a rank of another decode worker never asks its counterpart, which the others did",
    "neighbour_asks_otherwise": "a rank of another decode worker asks for another prompt than the others",
    "neighbour_refuses": "another decode worker takes none of the prompts that are handed over to it",
    "neighbour_is_full": "another decode worker has room for a part of a prompt that is handed over to it",
    "neighbour_takes_nonsense": "another decode worker has taken more pages of a prompt than it was offered",
    "neighbour_takes_nothing": "another decode worker does not answer to a prompt that is handed over to it",
    "neighbour_raises_at_offer": "offering a prompt to another decode worker raises",
    "share_fails": "a read by another decode worker ends with an error",
    "share_raises": "starting a read by another decode worker raises",
    "share_is_stuck": "another decode worker reads for very long",
    # Ranks, in runs that have several.
    "rank_lags": "a frame, a vote, a call or an operation of one rank is late",
    "rank_dies": "the process of one rank ends, and restarts",
    "rank_misses_a_call": "the caller of one rank never submits a request",
    "rank_leaves_otherwise": "the caller of one rank leaves nothing of components when its request ends",
    "rank_holds_more": "with lent pages, the cache of one rank's host engine holds one page more of a prompt",
}
"""Kinds of faults by name, with a description."""
OF_LENDING = frozenset({"pages_are_not_offered"})
"""Kinds that strike only if device pages are lent. Other runs do not depend on whether they are chosen."""
OF_NEIGHBOURS = frozenset(name for name in FAULTS if name.startswith(("neighbour_", "share_")))
"""Kinds that strike only in runs with other decode workers, which draw them from a random source of their own."""
OF_RANKS_OF_NEIGHBOURS = frozenset({"neighbour_misses_a_rank", "neighbour_asks_otherwise"})
"""Those of them that strike only in runs on several ranks."""
OF_RANKS = frozenset(name for name in FAULTS if name.startswith("rank_"))
"""Kinds that strike only in runs on several ranks. Every other kind strikes on one of the ranks alone there, but for
those of calls, which the callers of all ranks make.
"""
RARE = OF_RANKS - {"rank_lags"}
RARELY = 0.2
"""These end requests, a death all of them: at the rates of the other kinds the rest would hardly be exercised."""

ALWAYS = frozenset({"all_is_stored", "same_id_elsewhere"})
"""Kinds that strike at every opportunity of a run that has them; nothing is drawn for them."""

Chosen = Literal["all", "none"] | Iterable[str] | Mapping[str, float]
"""All kinds, none, or some by name; a mapping has the rate of each."""


class Faults:
    """The faults of one run. `hits` decides whether one strikes now, and counts it."""

    def __init__(
        self,
        random: Random,
        chosen: Chosen,
        without: Collection[str] = (),
        *,
        absent: Collection[str] = (),
    ) -> None:
        """`without` names kinds that are drawn like all others but never strike, so the run is otherwise the same.
        `absent` are kinds that the run cannot have.
        """
        names = list(FAULTS) if chosen == "all" else [] if chosen == "none" else sorted(chosen)
        for name in (*names, *without):
            if name not in FAULTS:
                raise unknown(name, FAULTS, "fault", InvalidConfig)
        names = [name for name in names if name not in absent]
        self._random = random
        self._without = frozenset(without)
        self.counts: dict[str, int] = dict.fromkeys(names, 0)
        share = random.choice((0.1, 0.3, 0.6, 1.0)) if chosen == "all" else 1.0
        drawn = [name for name in names if name not in ALWAYS]
        self._rates = {name: random.choice((0.002, 0.01, 0.05, 0.2)) for name in drawn if random.random() < share}
        if given := isinstance(chosen, Mapping):
            self._rates = {name: chosen[name] for name in drawn}
        self._rates |= {name: self._rates[name] * RARELY for name in RARE if name in self._rates and not given}
        self._rates |= {name: 1.0 for name in names if name in ALWAYS}
        self.is_over = False
        """Set once the remaining requests must end undisturbed."""

    def of_rank(self, random: Random, ranks: int) -> Faults:
        """The same kinds for one of the ranks, which draws them for itself; together they have the same rates."""
        ours = copy.copy(self)
        ours._random = random
        ours._rates = {name: rate if rate == 1.0 else rate / ranks for name, rate in self._rates.items()}
        return ours

    def hits(self, name: str) -> bool:
        """Decide whether this kind strikes now, and count it."""
        rate = self._rates.get(name)
        if rate is None or self.is_over or (rate < 1.0 and self._random.random() >= rate) or name in self._without:
            return False
        self.counts[name] += 1
        return True

    def rate(self, name: str) -> float:
        """How often this kind strikes, for draws from another source; 0 if it does not."""
        return 0.0 if self.is_over or name in self._without else self._rates.get(name, 0.0)

    def is_on(self, name: str) -> bool:
        """Whether this kind may strike in this run."""
        return name in self._rates
