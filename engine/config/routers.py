"""The routers that KV events are written for, and which of them one stream can serve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from tidekv.states.errors import InvalidConfig

Router: TypeAlias = Literal["dynamo", "dynamo-indexer", "llm-d", "vllm-router"]


def check_routers(routers: Sequence[Router], *, bigrams: bool) -> None:
    """Raise InvalidConfig for routers that no form of the events suits together."""
    named = set(routers)
    if named & {"dynamo", "dynamo-indexer"} and {"llm-d", "vllm-router"} <= named:
        raise InvalidConfig(
            "kv_events.routers names Dynamo, llm-d and vllm-router: Dynamo and llm-d together read salts in a form "
            "whose batches vllm-router drops; leave out one of the three"
        )
    if bigrams and "dynamo" in named and len(named) > 1:
        raise InvalidConfig(
            f"kv_events.routers names dynamo and {', '.join(sorted(named - {'dynamo'}))}: with bigram_keys Dynamo "
            "reads pairs of tokens, which the others refuse; leave out the others"
        )
