"""What the two sides of a vLLM connector tell each other. Plain values: they go from one process to another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Bring pages into vLLM's blocks: `blocks` are those of the pages, without the first `skip`, which vLLM has."""

    request_id: str
    keys: tuple[bytes, ...]
    blocks: tuple[int, ...]
    skip: int = 0


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Keep the pages that whole blocks make. `is_last`: the request has finished, and vLLM holds its blocks until it is
    told that they were read.
    """

    request_id: str
    keys: tuple[bytes, ...]
    blocks: tuple[int, ...]
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class LoadEnded:
    """A load has ended, and nothing writes to its blocks any more. `failed_blocks` hold garbage: recompute them."""

    request_id: str
    failed_blocks: tuple[int, ...] = ()


COUNTS: Mapping[str, str] = {
    "lookups": "prompts that storage was asked for",
    "lookups_late": "prompts that were scheduled without its answer",
    "load_pages_host": "pages loaded that the worker's host memory had",
    "load_pages_storage": "pages loaded that storage had",
    "load_pages_missing": "pages that storage did not have any more, or not whole; they are recomputed",
    "load_pages_late": "pages not loaded in time; they are recomputed",
    "load_pages_failed": "pages not loaded because storage or a copy failed; they are recomputed",
    "save_pages_stored": "pages written to storage",
    "save_pages_present": "pages that storage had already",
    "save_pages_dropped": "pages not written because too many were on their way",
    "save_pages_failed": "pages not written because storage or a copy failed",
}
"""What is counted on either side, by name, and what it means."""
