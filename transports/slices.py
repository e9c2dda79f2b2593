"""Bytes that two ranks exchange in a hand-over: whole pieces, or the heads that both of them hold.

A piece of a page is [page_size, heads, head_dim]. A subset of its heads is contiguous only within a token, so a page of
a slice has `page_size` contiguous parts per piece, each of which NIXL gets as one strided row over the pool. Nothing is
staged: the same bytes cross the wire as between equal ranks, in smaller parts. Pure arithmetic, no memory access.
"""

from __future__ import annotations

import msgspec

from tidekv.states.errors import InvalidConfig, PeerMismatch
from tidekv.states.handover.head_slices import (
    HeadPartition,
    HeadSlice,
    check_stages,
    head_slices_of,
    partition_of,
    split_like,
    stage_of,
)
from tidekv.states.types import Identity, PoolMemory, Segment
from tidekv.transports.base import Exchange
from tidekv.transports.control import wire

OF_LAYERS = ("layers", "kv_heads", "page_bytes", "piece_bytes", "groups")
"""Fields of an identity that may differ between stages."""


def holding(identity: Identity, *, ranks: int, kv_heads_total: int = 0) -> HeadPartition:
    """Return the partition of KV heads over `ranks` ranks of one stage with this identity. Raises InvalidConfig."""
    return partition_of(ranks=ranks, heads=identity.kv_heads, kind=identity.kind, total=kv_heads_total)


def expected_writers(decode: HeadPartition, *, rank: int, prefill_ranks: int, stages: int = 1) -> tuple[int, ...]:
    """Return the prefill ranks that write to this decode rank: those of its stage that hold heads of its own.

    `decode` is the partition over the ranks of one stage. Raises InvalidConfig if the heads cannot be partitioned over
    the prefill ranks.
    """
    check_stages(ranks=prefill_ranks, stages=stages)
    width = prefill_ranks // stages
    stage, place = divmod(rank, decode.ranks)
    return tuple(stage * width + share.prefill for share in head_slices_of(place, decode, split_like(width, decode)))


def share_between(*, decode: wire.Hello, prefill: wire.Hello) -> HeadSlice | None:
    """Return the heads that this prefill rank writes to this decode rank; None: none.

    Raises PeerMismatch if the heads of the model cannot be partitioned over these ranks.
    """
    try:
        there, here = (_holding_of(hello) for hello in (decode, prefill))
    except InvalidConfig as error:
        raise PeerMismatch(field=f"ranks ({error})", ours=prefill.ranks, theirs=decode.ranks) from error
    (their_stage, their_place), (our_stage, our_place) = _stage_of(decode), _stage_of(prefill)
    if their_stage == our_stage:
        for share in head_slices_of(their_place, there, here):
            if share.prefill == our_place:
                return share
    return None


def exchange_of(share: HeadSlice, *, decode: wire.Hello, prefill: wire.Hello) -> Exchange:
    """Return the bytes of a slice of heads in both pools, which must have been checked.

    Whole pages if both ranks hold exactly this slice.
    """
    there, here = decode.identity.kv_heads, prefill.identity.kv_heads
    if share.count == there == here:
        return Exchange(ours=prefill.memory, theirs=decode.memory)
    page_size = prefill.identity.page_size
    return Exchange(
        ours=heads_of(prefill.memory, page_size=page_size, heads=here, first=share.source, count=share.count),
        theirs=heads_of(decode.memory, page_size=page_size, heads=there, first=share.target, count=share.count),
    )


def in_heads_of(theirs: wire.Hello, ours: wire.Hello) -> tuple[Identity, tuple[int, ...]]:
    """Return the peer's identity and piece sizes, scaled to the number of heads that we hold.

    Unscaled if they cannot be scaled; a comparison with ours then names the difference.
    """
    identity, pieces = theirs.identity, tuple(segment.piece_bytes for segment in theirs.memory.segments)
    if (theirs.stages, ours.stages) != (1, 1) and _stage_of(theirs)[0] != _stage_of(ours)[0]:
        # Another stage holds other layers: only promises are exchanged with it, so its layers are not compared.
        mine, own = ours.identity, tuple(segment.piece_bytes for segment in ours.memory.segments)
        layers = {name: getattr(mine, name) for name in OF_LAYERS}
        return msgspec.structs.replace(identity, **layers), own
    there, here = identity.kv_heads, ours.identity.kv_heads
    sizes = (*identity.piece_bytes, *pieces, identity.page_bytes)
    # Sizes scale by heads only if every size is a multiple of them, and no layer group has a head count of its own.
    scales = there > 0 and not any(size % there for size in sizes) and not getattr(identity, "groups", ())
    if there == here or not scales or total_of(theirs) != total_of(ours):
        return identity, pieces
    scaled = msgspec.structs.replace(
        identity,
        kv_heads=here,
        page_bytes=identity.page_bytes // there * here,
        piece_bytes=tuple(size // there * here for size in identity.piece_bytes),
    )
    return scaled, tuple(size // there * here for size in pieces)


def heads_of(memory: PoolMemory, *, page_size: int, heads: int, first: int, count: int) -> PoolMemory:
    """Return heads [first, first + count) of each token as separate segments: `page_size` of them per piece."""
    segments = []
    for segment in memory.segments:
        token_bytes = segment.piece_bytes // page_size
        head_bytes = token_bytes // heads
        segments += [
            Segment(
                address=segment.address + token * token_bytes + first * head_bytes,
                piece_bytes=count * head_bytes,
                stride_bytes=segment.stride_bytes,
                page_count=segment.page_count,
            )
            for token in range(page_size)
        ]
    return msgspec.structs.replace(memory, segments=tuple(segments))


def total_of(hello: wire.Hello) -> int:
    """Number of KV heads of the sender's model, as far as its ranks determine it."""
    if hello.kv_heads_total or hello.identity.kind == "mla":
        return hello.kv_heads_total or hello.identity.kv_heads
    return hello.identity.kv_heads * hello.ranks // hello.stages


def _holding_of(hello: wire.Hello) -> HeadPartition:
    check_stages(ranks=hello.ranks, stages=hello.stages)
    return holding(hello.identity, ranks=hello.ranks // hello.stages, kv_heads_total=hello.kv_heads_total)


def _stage_of(hello: wire.Hello) -> tuple[int, int]:
    return stage_of(hello.rank, ranks=hello.ranks, stages=hello.stages)
