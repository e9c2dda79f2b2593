"""The KV heads and layers that each rank holds, and the prefill ranks that write them to each decode rank.

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
"""

from __future__ import annotations

import msgspec

from tidekv.states.errors import InvalidConfig


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
