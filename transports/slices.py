"""Bytes that two ranks exchange in a hand-over: the layers and the heads that both of them hold.

A page is a row of pieces, group of layers by group of layers; a piece of a page is [page_size, heads, head_dim]. Two
ranks have in common, in each group, the layers of their stages and in each of those layers the heads of their slices. A
subset of the heads is contiguous only within a token: such a `Cut` has one row for each token, and whole pieces have
one row.

With tensor parallelism each rank holds a slice of the heads of every token. The two instances may have different
numbers of ranks: either several prefill ranks write to one decode rank, each a part of its heads, or one prefill rank
writes to several decode ranks, each a part of what it holds. With more ranks than heads, and always for latent (MLA)
KV, several ranks hold copies of the same heads. Then one copy writes: the one at the decode rank's place among the
ranks, so that copies take part evenly, and a rank that writes other heads to it is preferred.

With pipeline stages each stage holds different layers, of all heads. Ranks are numbered stage by stage, and the rules
above hold between any two stages that have layers in common. Instances with as many stages pair them one to one,
whatever layers each holds; with different numbers of stages the layers are divided evenly over those of each end.

    prefill, 2 ranks of 4 heads     | 0 1 2 3 | 4 5 6 7 |
    decode, 4 ranks of 2 heads      | 0 1 | 2 3 | 4 5 | 6 7 |        prefill 0 writes its second half to rank 1

A record of a recurrent state is cut by its channels, of which each rank holds some of each part (see
`ComponentPools.channels`). Pure arithmetic, no memory access.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import msgspec

from tidekv.states.errors import InvalidConfig, PeerMismatch
from tidekv.states.types import Identity, PoolMemory, Segment
from tidekv.transports import wire
from tidekv.transports.base import Exchange


class Holder(Protocol):
    """The properties of a rank that decide which layers and heads it holds: those of a Hello, or of a rank that has
    stored pages.
    """

    @property
    def rank(self) -> int: ...

    @property
    def ranks(self) -> int: ...

    @property
    def stages(self) -> int: ...

    @property
    def contexts(self) -> int: ...

    @property
    def kv_heads_total(self) -> int: ...

    @property
    def identity(self) -> Identity: ...


class HeadSlice(msgspec.Struct, frozen=True):
    """The heads that one prefill rank writes to one decode rank: `count` heads, in each token of each piece."""

    prefill: int
    """Number of the prefill rank."""
    source: int
    """The first of the heads, counted within those of the prefill rank."""
    target: int
    """The first of the heads, counted within those of the decode rank."""
    count: int


class HeadPartition(msgspec.Struct, frozen=True):
    """Distribution of a model's heads over the ranks of an instance: each holds `heads` of `total`, in rank order.

    Raises InvalidConfig if the ranks do not hold every head, or not equally often.
    """

    ranks: int
    heads: int
    total: int

    def __post_init__(self) -> None:
        sound = min(self.ranks, self.heads, self.total) > 0 and self.total % self.heads == 0
        if not sound or self.ranks % (self.total // self.heads):
            raise InvalidConfig(
                f"{self.ranks} ranks of {self.heads} KV heads each cannot hold the {self.total} heads of a model, all "
                "equally often"
            )

    @property
    def copies(self) -> int:
        """Number of ranks that hold the same heads."""
        return self.ranks * self.heads // self.total

    def first(self, rank: int) -> int:
        """The first head of a rank."""
        return rank // self.copies * self.heads


def partition_of(*, ranks: int, heads: int, kind: str, total: int = 0) -> HeadPartition:
    """The distribution of heads over ranks.

    `total` is the number of the model's heads. 0: the heads of all ranks together or, for MLA, the one latent vector
    that every rank holds. Raises InvalidConfig.
    """
    return HeadPartition(ranks=ranks, heads=heads, total=total or (heads if kind == "mla" else ranks * heads))


def head_slices_of(rank: int, decode: HeadPartition, prefill: HeadPartition) -> list[HeadSlice]:
    """The slices written to a decode rank, in the order of its heads. Both sides hold the heads of one model."""
    first = decode.first(rank)
    end = first + decode.heads
    # The prefill rank at the same place, if both instances are drawn equally long.
    opposite = rank * prefill.ranks // decode.ranks
    slices = []
    for start in range(first // prefill.heads * prefill.heads, end, prefill.heads):
        low, high = max(first, start), min(end, start + prefill.heads)
        copies = range(start // prefill.heads * prefill.copies, (start // prefill.heads + 1) * prefill.copies)
        writer = min(max(opposite, copies[0]), copies[-1])
        slices.append(HeadSlice(prefill=writer, source=low - start, target=low - first, count=high - low))
    return slices


def stage_of(rank: int, *, ranks: int, stages: int) -> tuple[int, int]:
    """The pipeline stage of a rank, and its number within the stage."""
    return divmod(rank, ranks // stages)


def check_stages(*, ranks: int, stages: int) -> None:
    """Raise InvalidConfig unless the ranks divide evenly into the stages."""
    if stages < 1 or ranks % stages:
        raise InvalidConfig(f"{ranks} ranks cannot make up {stages} pipeline stages of as many ranks each")


class LayerSlice(msgspec.Struct, frozen=True):
    """The layers that two stages have in common: `count` layers, counted within those of each stage."""

    source: int
    """The first of the layers at the prefill stage."""
    target: int
    """The first of the layers at the decode stage."""
    count: int


class StageLayers(msgspec.Struct, frozen=True):
    """The layers of one pipeline stage: `layers` of them, in stage `stage` of `stages`."""

    stage: int
    stages: int
    layers: int


def layer_slice_of(decode: StageLayers, prefill: StageLayers) -> LayerSlice | None:
    """The layers that a prefill stage writes to a decode stage; None: none.

    With different numbers of stages each end has equal numbers of layers in all its stages, which the caller checks.
    """
    if decode.stages == prefill.stages:
        return LayerSlice(0, 0, decode.layers) if decode.stage == prefill.stage else None
    here, there = prefill.stage * prefill.layers, decode.stage * decode.layers
    low, high = max(here, there), min(here + prefill.layers, there + decode.layers)
    return LayerSlice(low - here, low - there, high - low) if low < high else None


class Cut(NamedTuple):
    """What two pieces of a page have in common: `rows` rows of `row_bytes`, at equal distances in each piece."""

    ours: int
    """Number of the piece in our page."""
    theirs: int
    """Number of the piece in the peer's page."""
    rows: int
    row_bytes: int
    our_start: int
    """First byte in our piece."""
    our_step: int
    """Bytes from row to row in our piece."""
    their_start: int
    their_step: int


class SlicedGroup(NamedTuple):
    """One group of layers in a page, and its pieces: `pieces[0]` is the first, with all of layer 0 before layer 1."""

    name: str
    kind: str
    heads: int
    layers: int
    pieces: range


def groups_of(identity: Identity) -> list[SlicedGroup]:
    """Return the groups of an identity, "full" first. Raises PeerMismatch if the layers do not make up its pieces."""
    count = len(identity.piece_bytes)
    if not identity.groups:
        return [SlicedGroup("full", identity.kind, identity.kv_heads, identity.layers, range(count))]
    groups, end = [], 0
    for name, kind, heads, layers in (
        ("full", identity.kind, identity.kv_heads, identity.layers),
        *((group.name, group.kind, group.kv_heads, group.layers) for group in identity.groups),
    ):
        start, end = end, end + layers * (1 if kind == "mla" else 2)
        groups.append(SlicedGroup(name, kind, heads, layers, range(start, end)))
    if end != count:
        raise PeerMismatch(field="pieces of a page", ours=f"{end}, as many as its layers have", theirs=count)
    return groups


def partition(holder: Holder, *, kind: str, heads: int) -> HeadPartition:
    """Return the partition of the heads of a group, of which this rank holds `heads`, over the ranks of a stage.

    A group with as many heads as the pages is distributed as they are; `kv_heads_total` counts the heads of the pages.
    Raises InvalidConfig.
    """
    check_stages(ranks=holder.ranks // holder.contexts, stages=holder.stages)
    is_like_pages = (kind, heads) == (holder.identity.kind, holder.identity.kv_heads)
    total = holder.kv_heads_total if is_like_pages else 0
    return partition_of(ranks=width_of(holder), heads=heads, kind=kind, total=total)


def width_of(holder: Holder) -> int:
    """Return the number of tensor-parallel ranks of each stage."""
    return holder.ranks // (holder.stages * holder.contexts)


def total_of(holder: Holder) -> int:
    """Return the KV heads of the holder's model; if it does not state them, the sum of those of its ranks."""
    if holder.kv_heads_total or holder.identity.kind == "mla":
        return holder.kv_heads_total or holder.identity.kv_heads
    return holder.identity.kv_heads * width_of(holder)


def cuts_of(*, decode: Holder, prefill: Holder, pages: tuple[Identity, Identity] | None = None) -> Iterator[Cut]:
    """Yield what a prefill rank writes to a decode rank of each page; nothing if they have nothing in common.

    "Ours" is the prefill rank. `pages` are the identities of the pages, decode's and prefill's, if they are not those
    of the holders. Both ends must have been checked. Raises PeerMismatch if the heads cannot be partitioned over these
    ranks.
    """
    there, here = pages or (decode.identity, prefill.identity)
    for theirs, ours in zip(groups_of(there), groups_of(here), strict=True):
        layers = layer_slice_of(_layers_of(decode, theirs.layers), _layers_of(prefill, ours.layers))
        share = None if layers is None else _share_between(decode, prefill, theirs, ours)
        if layers is None or share is None:
            continue
        whole = layers.count == theirs.layers == ours.layers
        for our_piece, their_piece in zip(
            _pieces_of(ours, layers.source, layers.count, whole=whole),
            _pieces_of(theirs, layers.target, layers.count, whole=whole),
            strict=True,
        ):
            token_bytes = (
                here.piece_bytes[our_piece] // here.page_size,
                there.piece_bytes[their_piece] // here.page_size,
            )
            yield _joined(our_piece, their_piece, share, (ours.heads, theirs.heads), token_bytes, rows=here.page_size)


def record_cuts_of(
    *,
    decode: Holder,
    prefill: Holder,
    records: tuple[Identity, Identity],
    channels: tuple[tuple[int, ...], ...],
) -> Iterator[Cut]:
    """Yield what a prefill rank writes to a decode rank of each record of a state.

    `records` and `channels` are decode's and prefill's. Without channels a record is whole: it goes from rank to rank.
    A part with as many channels at both ends, which have different numbers of ranks, is a copy on every rank.
    """
    there, here = records
    (_, their_place), (_, our_place) = _place_of(decode), _place_of(prefill)
    widths = width_of(decode), width_of(prefill)
    shares = [] if widths[0] == widths[1] else _shared_channels(channels, widths, (their_place, our_place))
    for theirs, ours in zip(groups_of(there), groups_of(here), strict=True):
        layers = layer_slice_of(_layers_of(decode, theirs.layers), _layers_of(prefill, ours.layers))
        if layers is None:
            continue
        whole = layers.count == theirs.layers == ours.layers
        pairs = zip(
            _pieces_of(ours, layers.source, layers.count, whole=whole),
            _pieces_of(theirs, layers.target, layers.count, whole=whole),
            strict=True,
        )
        for our_piece, their_piece in pairs:
            if widths[0] == widths[1]:
                if their_place == our_place:
                    size = here.piece_bytes[our_piece]
                    yield Cut(our_piece, their_piece, 1, size, 0, size, 0, size)
                continue
            channel_bytes = here.piece_bytes[our_piece] // here.page_size
            for share in shares:
                size, ours_at, theirs_at = (
                    number * channel_bytes for number in (share.count, share.source, share.target)
                )
                yield Cut(our_piece, their_piece, 1, size, ours_at, size, theirs_at, size)


def _shared_channels(
    channels: tuple[tuple[int, ...], ...], widths: tuple[int, int], places: tuple[int, int]
) -> list[HeadSlice]:
    """Return the channels of a record that two ranks of instances of different widths exchange; decode's come first."""
    found = []
    there_start = here_start = 0
    for there_count, here_count in zip(*channels, strict=True):
        kind = "mla" if there_count == here_count else "mha"
        of_decode, of_prefill = (
            HeadPartition(ranks=width, heads=count, total=count if kind == "mla" else width * count)
            for width, count in zip(widths, (there_count, here_count), strict=True)
        )
        found += [
            HeadSlice(share.prefill, here_start + share.source, there_start + share.target, share.count)
            for share in head_slices_of(places[0], of_decode, of_prefill)
            if share.prefill == places[1]
        ]
        there_start, here_start = there_start + there_count, here_start + here_count
    return found


def exchange_of(cuts: list[Cut], *, ours: PoolMemory, theirs: PoolMemory) -> Exchange:
    """Return the bytes of these cuts in both pools. Whole pools if the cuts are whole pages."""
    sizes = [tuple(segment.piece_bytes for segment in memory.segments) for memory in (ours, theirs)]
    pieces = range(len(sizes[0]))
    if sizes[0] == sizes[1] and [(cut.ours, cut.theirs, cut.rows, cut.row_bytes) for cut in cuts] == [
        (piece, piece, 1, sizes[0][piece]) for piece in pieces
    ]:
        return Exchange(ours=ours, theirs=theirs)
    return Exchange(
        ours=_rows_of(ours, [(cut.ours, cut.our_start, cut.our_step, cut.row_bytes, cut.rows) for cut in cuts]),
        theirs=_rows_of(
            theirs, [(cut.theirs, cut.their_start, cut.their_step, cut.row_bytes, cut.rows) for cut in cuts]
        ),
    )


def pieces_of(memory: PoolMemory, pieces: tuple[int, ...]) -> PoolMemory:
    """Return a pool whose pages are one segment each as a pool of their pieces, which have these sizes."""
    (page,) = memory.segments
    starts = itertools.accumulate(pieces, initial=page.address)
    segments = tuple(
        msgspec.structs.replace(page, address=start, piece_bytes=size)
        for start, size in zip(starts, pieces, strict=False)
    )
    return msgspec.structs.replace(memory, segments=segments)


def as_held_by(
    ours: wire.Hello, theirs: wire.Hello, *, pages: tuple[Identity, Identity], channels: bool = False
) -> tuple[Identity, tuple[int, ...]]:
    """Return the peer's identity and piece sizes as they were if it held our heads and our layers.

    `pages` are our identity of the pages and theirs; their memory is that of `theirs`. What cannot be converted is
    returned as it is; a comparison with ours then names the difference. With `channels` the channels of records, which
    are compared by the caller, are converted instead of heads.
    """
    mine, identity = pages
    own = tuple(segment.piece_bytes for segment in ours.memory.segments)
    found = tuple(segment.piece_bytes for segment in theirs.memory.segments)
    is_other_stage = ours.stages == theirs.stages and _place_of(theirs)[0] != _place_of(ours)[0]
    names = [group.name for group in mine.groups] == [group.name for group in identity.groups]
    try:
        our_groups, their_groups = groups_of(mine), groups_of(identity)
    except PeerMismatch:
        return identity, found
    if is_other_stage:
        # It holds other layers: only promises are exchanged with it, so its layers are not compared.
        layers = {name: getattr(mine, name) for name in ("layers", "kv_heads", "page_bytes", "piece_bytes", "groups")}
        return msgspec.structs.replace(
            identity, page_size=mine.page_size if channels else identity.page_size, **layers
        ), own
    if not names:
        return identity, found
    converted: list[int] = []
    heads: list[int] = []
    layer_counts: list[int] = []
    for our_group, their_group in zip(our_groups, their_groups, strict=True):
        group_heads, group_layers = their_group.heads, their_group.layers
        if not channels and _have_same_heads(ours, theirs, our_group, their_group):
            group_heads = our_group.heads
        layers_differ = ours.stages != theirs.stages
        if layers_differ and our_group.layers * ours.stages == their_group.layers * theirs.stages:
            group_layers = our_group.layers
        scale = (mine.page_size, identity.page_size) if channels else (group_heads, their_group.heads)
        sizes = [identity.piece_bytes[piece] for piece in their_group.pieces]
        if any(size % scale[1] for size in sizes):
            return identity, found
        sizes = [size // scale[1] * scale[0] for size in sizes]
        if layers_differ and group_layers == our_group.layers:
            sizes = _sizes_of_layers(ours, theirs, our_group, their_group, sizes, mine)
        converted += sizes
        heads.append(group_heads)
        layer_counts.append(group_layers)
    groups = tuple(
        msgspec.structs.replace(group, kv_heads=heads[at], layers=layer_counts[at])
        for at, group in enumerate(identity.groups, start=1)
    )
    result = msgspec.structs.replace(
        identity,
        kv_heads=heads[0],
        layers=layer_counts[0],
        page_size=mine.page_size if channels else identity.page_size,
        groups=groups,
        page_bytes=sum(converted),
        piece_bytes=tuple(converted),
    )
    # Memory that is not as its identity says is not converted, so that the comparison names it.
    return result, result.piece_bytes if found == identity.piece_bytes else found


def _have_same_heads(ours: wire.Hello, theirs: wire.Hello, our_group: SlicedGroup, their_group: SlicedGroup) -> bool:
    """Whether a group has as many heads at both ends, over all ranks of a stage."""
    try:
        totals = {
            partition(hello, kind=group.kind, heads=group.heads).total
            for hello, group in ((ours, our_group), (theirs, their_group))
        }
    except InvalidConfig:
        return False
    return len(totals) == 1 and our_group.kind == their_group.kind


def _sizes_of_layers(
    ours: wire.Hello,
    theirs: wire.Hello,
    our_group: SlicedGroup,
    their_group: SlicedGroup,
    sizes: list[int],
    mine: Identity,
) -> list[int]:
    """Return the sizes of the peer's pieces at the layers that both stages have, and our own at our other layers."""
    own = [mine.piece_bytes[piece] for piece in our_group.pieces]
    layers = layer_slice_of(_layers_of(ours, our_group.layers), _layers_of(theirs, their_group.layers))
    if layers is None:
        return own
    step = len(own) // our_group.layers
    start, source, count = layers.target * step, layers.source * step, layers.count * step
    return own[:start] + sizes[source : source + count] + own[start + count :]


def _share_between(decode: Holder, prefill: Holder, theirs: SlicedGroup, ours: SlicedGroup) -> HeadSlice | None:
    """Return the heads of a group that this prefill rank writes to this decode rank; None: none.

    Raises PeerMismatch.
    """
    try:
        there = partition(decode, kind=theirs.kind, heads=theirs.heads)
        here = partition(prefill, kind=ours.kind, heads=ours.heads)
    except InvalidConfig as error:
        raise PeerMismatch(field=f"ranks ({error})", ours=prefill.ranks, theirs=decode.ranks) from error
    (_, their_place), (_, our_place) = _place_of(decode), _place_of(prefill)
    for share in head_slices_of(their_place, there, here):
        if share.prefill == our_place:
            return share
    return None


def _joined(
    our_piece: int,
    their_piece: int,
    share: HeadSlice,
    heads: tuple[int, int],
    token_bytes: tuple[int, int],
    *,
    rows: int,
) -> Cut:
    """Return the cut of a slice of the heads; one row if both pieces are exactly this slice."""
    ours, theirs = token_bytes
    head_bytes = ours // heads[0]
    row_bytes = share.count * head_bytes
    if row_bytes == ours == theirs:
        rows, row_bytes, ours, theirs = 1, rows * row_bytes, rows * ours, rows * theirs
    return Cut(
        our_piece, their_piece, rows, row_bytes, share.source * head_bytes, ours, share.target * head_bytes, theirs
    )


def _pieces_of(group: SlicedGroup, first: int, count: int, *, whole: bool) -> range:
    """Return the pieces of layers [first, first + count) of a group."""
    if whole:
        return group.pieces
    step = len(group.pieces) // group.layers
    return group.pieces[first * step : (first + count) * step]


def _rows_of(memory: PoolMemory, rows: list[tuple[int, int, int, int, int]]) -> PoolMemory:
    """Return rows of pieces as segments of their own: (piece, first byte, bytes from row to row, bytes, rows) each."""
    segments = [
        Segment(
            address=memory.segments[piece].address + start + row * step,
            piece_bytes=size,
            stride_bytes=memory.segments[piece].stride_bytes,
            page_count=memory.segments[piece].page_count,
        )
        for piece, start, step, size, count in rows
        for row in range(count)
    ]
    return msgspec.structs.replace(memory, segments=tuple(segments))


def _layers_of(holder: Holder, layers: int) -> StageLayers:
    return StageLayers(stage=_place_of(holder)[0], stages=holder.stages, layers=layers)


def _place_of(holder: Holder) -> tuple[int, int]:
    """The stage of a rank, and its number there. The ranks of all contexts hold the same layers and heads."""
    ranks = holder.ranks // holder.contexts
    return stage_of(holder.rank % ranks, ranks=ranks, stages=holder.stages)
