"""Place of a rank in its instance: what both ends of a hand-over know of how ranks divide heads, layers and tokens."""

from __future__ import annotations

import msgspec

from tidekv.states.validation import Count, PositiveCount


class RankPlace(msgspec.Struct, frozen=True, kw_only=True):
    """One of `ranks` ranks; by default the only one. The Hello of each end carries it to the other."""

    rank: Count = 0
    ranks: PositiveCount = 1
    """Ranks of the instance, counted context by context, and in each of them stage by stage."""
    stages: PositiveCount = 1
    """Pipeline stages, each with layers of its own. If the other end has another number, all stages of each end must
    have equally many layers.
    """
    kv_heads_total: Count = 0
    """KV heads of the model, needed if there are more ranks than heads. 0: the sum of the heads of all ranks."""
    contexts: PositiveCount = 1
    """Context-parallel groups of prefill ranks, each with all stages: each rank holds, and sends, a part of a prompt's
    pages.
    """
    stripe_pages: Count = 0
    """Pages that a context holds in turns; 0: one run of pages (`room.held`)."""


SOLE = RankPlace()
"""A rank without others."""
