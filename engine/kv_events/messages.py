"""Messages of vLLM's KV events, as bytes.

A batch is an array: [time, events, data-parallel rank]. Its events are maps with the name of the kind under "type", as
vLLM and SGLang write them. A page is named by its hash only: the first eight bytes of its storage key, signed, which is
the hash that SGLang publishes for the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Final, Literal, TypeAlias

import msgspec

Medium: TypeAlias = Literal["GPU", "CPU", "STORAGE"]
HASH_BYTES: Final = 8


class BlockStored(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Consecutive pages that are in a medium now; `token_ids` are their tokens, `block_size` for each page.

    `extra_keys` has one entry per page: the parts of its hash besides tokens, here a digest of the namespace. None
    means none. The last three fields are of workers that publish components: 0 and "full_attention" for the full KV.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: Medium
    lora_name: str | None
    extra_keys: list[tuple[str] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Pages that are no longer in a medium."""

    block_hashes: list[int]
    medium: Medium
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """The cache is empty in every medium."""


KVEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


def hash_of(digest: bytes) -> int:
    """Return the published hash of a page from its storage key."""
    return int.from_bytes(digest[:HASH_BYTES], "big", signed=True)


def name_of(namespace: str) -> str:
    """Return the published name of a namespace: a digest, 32 characters."""
    return sha256(b"tidekv KV events of " + namespace.encode()).hexdigest()[:32]


def packed(events: Sequence[KVEvent], *, at_s: float, rank: int) -> bytes:
    """Return one batch as a payload. `at_s` is wall-clock time in seconds."""
    return msgspec.msgpack.encode([at_s, events, rank])
