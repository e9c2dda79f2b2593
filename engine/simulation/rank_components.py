"""Components on one simulated rank: use by its callers, and the state that must be equal on all ranks."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidekv.engine.simulation.rank_callers import RankCaller
    from tidekv.engine.simulation.components import SimulatedTails
    from tidekv.states.core import Core
    from tidekv.states.events import TailLeft


def check_tails(tails: SimulatedTails, caller: RankCaller) -> None:
    """Raise a Violation unless a ready request has every tail at its prompt's end."""
    script = caller.script
    tags = tails.tags_of("", script.tokens, script.request_id)
    tails.check_ready(caller.tails.tables, len(script.tokens), tags, script.request_id)


def leave_tails(tails: SimulatedTails, caller: RankCaller, tokens: bytes, *, rank: int) -> tuple[TailLeft, ...]:
    """Generate up to the end of `tokens`; returns what is left of each tail.

    The callers of all ranks leave the same, except for the rank that the script names in `leaves_no_tail_on`.
    """
    script, live = caller.script, caller.tails
    if not live.tables:
        return ()
    check_tails(tails, caller)
    tags = tails.tags_of("", tokens, script.request_id)
    tails.generate(live, tags, len(script.tokens), len(tokens), f"decoding of {script.request_id}")
    # Seeded by the request, so that all ranks draw the same.
    left = tails.left(live, len(tokens), Random(script.request_id))
    return () if script.leaves_no_tail_on == rank else left


def kept_tails(core: Core) -> tuple[object, ...]:
    """Return the state that must be equal on all ranks: free pages of each pool, and pages of each node."""
    components = core.state.components
    return tuple(
        (tuple(tier.account.free_pages), tuple(tuple(tier.pages_of(node).items()) for node in tier.nodes()))
        for tier in (() if components is None else components.tiers)
    )
