"""Messages of vLLM's KV events, as bytes.

A batch is an array: [time, events, data-parallel rank]. Its events are maps with the name of the kind under "type", as
vLLM and SGLang write them. A page is named by its hash only: the first eight bytes of its storage key, unsigned. Within
a server that has an event stream of its own, its blocks keep the hashes that this stream gives them (`server_names`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, Literal, TypeAlias

import msgspec

Medium: TypeAlias = Literal["GPU", "CPU", "STORAGE"]
BlockHash: TypeAlias = int | bytes
"""tidekv's own hashes are numbers. A server may be set to publish whole digests."""
HASH_BYTES: Final = 8
BATCH_EVENTS_MAX: Final = 4096
"""Maximum events of a batch. vllm-router refuses more, and batches of more than 16 MiB."""
BATCH_BYTES_MAX: Final = 256 * 1024
"""Maximum bytes of a batch, but for one event of a single page. Queues of sockets count batches: with this limit their
bound is one in bytes."""
_FRAME_BYTES: Final = 64
"""More than a batch has around its events."""


class BlockStored(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Consecutive pages that are in a medium now; `token_ids` are their tokens, `block_size` for each page, or pairs.

    `extra_keys` has one entry per page: None, or for a prompt's first page the salt. `cache_salt` is sent only to
    routers that read it. The last three fields are of workers that publish components, and of salted pages.
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int] | list[tuple[int, int]]
    block_size: int
    lora_id: int | None
    medium: Medium
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    cache_salt: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Pages that are no longer in a medium."""

    block_hashes: list[BlockHash]
    medium: Medium
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """The cache is empty in every medium."""


KVEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


def hash_of(digest: bytes) -> int:
    """Return the published hash of a page from its storage key: unsigned, since vllm-router reads no other."""
    return int.from_bytes(digest[:HASH_BYTES], "big")


def packed(events: Iterable[KVEvent | msgspec.Raw], *, at_s: float, rank: int) -> bytes:
    """Return one batch as a payload. `at_s` is wall-clock time in seconds."""
    return msgspec.msgpack.encode([at_s, list(events), rank])


def packed_parts(events: Iterable[KVEvent], *, at_s: float, rank: int) -> Iterator[bytes]:
    """Yield the events in order, as payloads of at most BATCH_EVENTS_MAX events and BATCH_BYTES_MAX bytes each.

    An event that is too long for a batch becomes several. No event gives no payload.
    """
    part: list[msgspec.Raw] = []
    size = _FRAME_BYTES
    for raw in _encoded(events):
        if part and (len(part) == BATCH_EVENTS_MAX or size + len(raw) > BATCH_BYTES_MAX):
            yield packed(part, at_s=at_s, rank=rank)
            part, size = [], _FRAME_BYTES
        part.append(msgspec.Raw(raw))
        size += len(raw)
    if part:
        yield packed(part, at_s=at_s, rank=rank)


def _encoded(events: Iterable[KVEvent]) -> Iterator[bytes]:
    encoder = msgspec.msgpack.Encoder()
    for event in events:
        # By halves, so that what is encoded in vain is as long as what is sent, at most a few times.
        waiting: list[KVEvent] = [event]
        while waiting:
            one = waiting.pop()
            raw = encoder.encode(one)
            pages = 1 if isinstance(one, AllBlocksCleared) else len(one.block_hashes)
            if pages == 1 or len(raw) <= BATCH_BYTES_MAX - _FRAME_BYTES:
                yield raw
            else:
                first, rest = _split(one, pages // 2)
                waiting += [rest, first]


def _split(event: KVEvent, middle: int) -> tuple[KVEvent, KVEvent]:
    """Return the event of the pages before the middle, and that of the others, whose parent is the last one before."""
    assert not isinstance(event, AllBlocksCleared), "it names no pages"
    end = len(event.block_hashes)
    if isinstance(event, BlockRemoved):
        hashes = event.block_hashes
        return (
            msgspec.structs.replace(event, block_hashes=hashes[:middle]),
            msgspec.structs.replace(event, block_hashes=hashes[middle:]),
        )
    return stored_part(event, 0, middle), stored_part(event, middle, end)


def stored_part(event: BlockStored, first: int, end: int) -> BlockStored:
    """Return the event of these blocks, whose parent is the last one before them."""
    size, keys = event.block_size, event.extra_keys
    return msgspec.structs.replace(
        event,
        block_hashes=event.block_hashes[first:end],
        parent_block_hash=event.block_hashes[first - 1] if first else event.parent_block_hash,
        token_ids=event.token_ids[first * size : end * size],
        extra_keys=keys and keys[first:end],
    )
