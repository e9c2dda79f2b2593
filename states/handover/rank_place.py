"""Place of a rank in its instance: what both ends of a hand-over know of how ranks divide heads, layers and tokens."""

from __future__ import annotations

import msgspec


class RankPlace(msgspec.Struct, frozen=True, kw_only=True):
    """One of `ranks` ranks; by default the only one. The Hello of each end carries it to the other."""

    rank: int = 0
    ranks: int = 1
    """Ranks of the instance, counted context by context, and in each of them stage by stage."""
    stages: int = 1
    """Pipeline stages, each with layers of its own."""
    kv_heads_total: int = 0
    """KV heads of the model, needed if there are more ranks than heads. 0: the sum of the heads of all ranks."""
    contexts: int = 1
    """Context-parallel groups of ranks, each with a part of the tokens."""
    stripe_pages: int = 0
    """Pages that a context holds in turns; 0: one run of pages."""


SOLE = RankPlace()
"""A rank without others."""
