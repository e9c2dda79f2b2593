"""This rank, as peers at the other end of a hand-over see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tidekv.states.handover.rank_place import SOLE, RankPlace
from tidekv.states.types import Identity, PoolMemory
from tidekv.transports import base, wire
from tidekv.transports.staging import Staging


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRank:
    """Model, place and pools of the rank that runs here."""

    identity: Identity
    memory: PoolMemory
    component_memory: Mapping[str, PoolMemory] = field(default_factory=dict)
    """The pool of each component of the identity, by name."""
    place: RankPlace = SOLE
    vocabulary: int = 0
    """Number of token ids, beyond which no first token is accepted; 0: not known."""
    hashing: base.Hashing | None = None
    """Computes checksums of pages. Decode with it requires them of prefill; prefill without it refuses such decode
    workers.
    """
    sends: wire.Sends = "computed"
    """What is exchanged: pages that prefill computes, or pages in the host memory of decode workers."""
    cached_place: RankPlace = SOLE
    """Place of the rank whose host memory is exchanged, whose links are those of a single rank; see `wire.Hello`."""
    staging: Staging | None = None
    """The ring through which prefill ranks send slices of heads; None: as short stretches."""
