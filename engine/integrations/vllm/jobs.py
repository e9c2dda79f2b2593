"""Messages between the two sides of the storage role. Plain values, since they pass between processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Load of pages into vLLM's blocks. `blocks` are those of the pages, without the first `skip`, which are valid.

    `prefix_keys`: those of the prompt's pages before the first one, if the storage engine takes them.
    """

    request_id: str
    keys: tuple[bytes, ...]
    blocks: tuple[int, ...]
    skip: int = 0
    prefix_keys: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Save of the pages that whole blocks form.

    `is_last`: the request has finished, and vLLM holds its blocks until the connector reports that they were read.
    `prefix_keys`: as in LoadJob.
    """

    request_id: str
    keys: tuple[bytes, ...]
    blocks: tuple[int, ...]
    is_last: bool = False
    prefix_keys: tuple[bytes, ...] = ()


@dataclass(slots=True)
class StorageJobs:
    """The jobs of one step."""

    loads: list[LoadJob]
    saves: list[SaveJob]


@dataclass(frozen=True, slots=True)
class LoadEnded:
    """End of a load; nothing writes to its blocks any more. `failed_blocks` hold garbage and must be recomputed."""

    request_id: str
    failed_blocks: tuple[int, ...] = ()


COUNTS: Mapping[str, str] = {
    "lookups": "prompts looked up in storage",
    "lookups_late": "prompts scheduled before their look-up had ended",
    "load_pages_host": "pages loaded from the worker's host memory",
    "load_pages_storage": "pages loaded from storage",
    "load_pages_missing": "pages that storage no longer had, or that were damaged; they are recomputed",
    "load_pages_failed": "pages not loaded because storage or a copy failed; they are recomputed",
    "load_pages_late": "pages not loaded in time; they are recomputed",
    "load_pages_behind": "pages not used because one before them was missing or failed; they are recomputed",
    "save_pages_stored": "pages written to storage",
    "save_pages_present": "pages that storage had already",
    "save_pages_dropped": "pages not written because too many writes were under way",
    "save_pages_failed": "pages not written because storage or a copy failed",
}
"""Counters of both sides, by name, with their meaning."""
