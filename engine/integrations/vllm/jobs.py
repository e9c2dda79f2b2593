"""Messages between the two sides of the storage role. Plain values, since they pass between processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tidekv.engine.integrations.vllm.handover.jobs import HANDOVER_COUNTS


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Load of a prompt's pages into vLLM's blocks."""

    request_id: str
    seed: bytes
    """Start of the chain of keys."""
    tokens: bytes = field(repr=False)
    """Tokens of whole pages, from the first one on, as packed little-endian u32."""
    blocks: tuple[int, ...]
    """Blocks from the first one on; the last page may lack some."""
    have_tokens: int
    """Tokens at the beginning, in whole blocks, that are valid and stay as they are."""
    next_token: int | None = None
    """The token behind `tokens`, if pages are named by pairs of tokens."""


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Save of the pages that whole blocks form.

    `is_last`: the request has finished, and vLLM holds its blocks until the connector reports that they were read.
    """

    request_id: str
    seed: bytes
    """As in LoadJob."""
    tokens: bytes = field(repr=False)
    """The request's tokens up to the end of the pages, without those of its earlier saves since it was last started; if
    pages are named by pairs, with the token behind.
    """
    first_page: int
    blocks: tuple[int, ...]
    is_last: bool = False


@dataclass(slots=True)
class StorageJobs:
    """The jobs of one step."""

    loads: list[LoadJob]
    saves: list[SaveJob]
    preempted: list[str] = field(default_factory=list)
    """Requests whose blocks are given to others with this step."""


_OF_ENGINE = ("restore_tokens_l1", "restore_tokens_l2", "restore_tokens_l3", "restores_partial", "restores_failed")
_OF_OFFERS = ("offer_pages_written", "offer_pages_present", "offer_pages_passed", "offer_pages_declined")
COUNTS: Mapping[str, str] = {
    "lookups": "prompts looked up in storage",
    "lookups_late": "prompts scheduled before their look-up had ended",
    **{name: HANDOVER_COUNTS[name] for name in (*_OF_ENGINE, *_OF_OFFERS)},
}
"""Counters of both sides, by name, with their meaning."""
