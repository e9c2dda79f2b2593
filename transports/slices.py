"""Which bytes of both pools a hand-over between two ranks pairs up: whole pieces, or the heads that both of them hold.

A piece of a page is [page_size, heads, head_dim]. Some of its heads lie in one stretch within a token only, so that a
page of a slice is `page_size` stretches a piece, each of which NIXL is given as one strided row over the pool. Nothing
is staged: the same bytes cross the wire as between equal ranks, in smaller stretches. Pure arithmetic, no memory.
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
    """How heads lie on so many ranks of this identity, which are those of one stage. Raises InvalidConfig."""
    return partition_of(ranks=ranks, heads=identity.kv_heads, kind=identity.kind, total=kv_heads_total)


def expected_writers(decode: HeadPartition, *, rank: int, prefill_ranks: int, stages: int = 1) -> tuple[int, ...]:
    """The prefill ranks that write to this decode rank: those of its stage that hold heads of its own. `decode` is how
    heads lie on the ranks of one stage. Raises InvalidConfig where heads cannot lie on so many.
    """
    check_stages(ranks=prefill_ranks, stages=stages)
    width = prefill_ranks // stages
    stage, place = divmod(rank, decode.ranks)
    return tuple(stage * width + share.prefill for share in head_slices_of(place, decode, split_like(width, decode)))


def share_between(*, decode: wire.Hello, prefill: wire.Hello) -> HeadSlice | None:
    """The heads that this prefill rank writes to this decode rank; None: none.

    Raises PeerMismatch where the heads of the model cannot lie on such ranks.
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
    """The bytes of a share of heads in both pools, which were judged: whole pages where it is all that both hold."""
    there, here = decode.identity.kv_heads, prefill.identity.kv_heads
    if share.count == there == here:
        return Exchange(ours=prefill.memory, theirs=decode.memory)
    page_size = prefill.identity.page_size
    return Exchange(
        ours=heads_of(prefill.memory, page_size=page_size, heads=here, first=share.source, count=share.count),
        theirs=heads_of(decode.memory, page_size=page_size, heads=there, first=share.target, count=share.count),
    )


def in_heads_of(theirs: wire.Hello, ours: wire.Hello) -> tuple[Identity, tuple[int, ...]]:
    """The peer's identity and the bytes of its pool's pieces, as they were if it held as many heads as we do.

    As they are where that cannot be said, so that comparing them with ours names what differs.
    """
    identity, pieces = theirs.identity, tuple(segment.piece_bytes for segment in theirs.memory.segments)
    if (theirs.stages, ours.stages) != (1, 1) and _stage_of(theirs)[0] != _stage_of(ours)[0]:
        # Another stage has other layers: nothing is exchanged with it but promises.
        mine, own = ours.identity, tuple(segment.piece_bytes for segment in ours.memory.segments)
        layers = {name: getattr(mine, name) for name in OF_LAYERS}
        return msgspec.structs.replace(identity, **layers), own
    there, here = identity.kv_heads, ours.identity.kv_heads
    sizes = (*identity.piece_bytes, *pieces, identity.page_bytes)
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
    """Heads [first, first + count) of each token, as pieces of their own: `page_size` of them for each piece."""
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
    """How many KV heads the speaker's model has, as far as it can be told from the ranks."""
    if hello.kv_heads_total or hello.identity.kind == "mla":
        return hello.kv_heads_total or hello.identity.kv_heads
    return hello.identity.kv_heads * hello.ranks // hello.stages


def _holding_of(hello: wire.Hello) -> HeadPartition:
    check_stages(ranks=hello.ranks, stages=hello.stages)
    return holding(hello.identity, ranks=hello.ranks // hello.stages, kv_heads_total=hello.kv_heads_total)


def _stage_of(hello: wire.Hello) -> tuple[int, int]:
    return stage_of(hello.rank, ranks=hello.ranks, stages=hello.stages)
