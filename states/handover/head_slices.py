"""Which KV heads a rank holds, and which ranks of a prefill instance write them to which ranks of a decode instance.

With tensor parallelism each rank holds a slice of the heads of each token. The two ends may have different numbers of
ranks: then a decode rank is written by several prefill ranks, each a part of its heads, or a prefill rank writes to
several decode ranks, each a part of what it has. With more ranks than heads, and of latent (MLA) KV always, ranks hold
copies of the same heads: one of the copies writes, and which one follows from the decode rank, so that all take turns.

With pipeline stages each stage holds other layers, of all heads: ranks are counted stage by stage, both ends have the
same stages, and all of this is so within each of them.

    prefill, 2 ranks of 4 heads     | 0 1 2 3 | 4 5 6 7 |
    decode, 4 ranks of 2 heads      | 0 1 | 2 3 | 4 5 | 6 7 |        rank 1 is written the second half of prefill 0
"""

from __future__ import annotations

import msgspec

from tidekv.states.errors import InvalidConfig


class HeadSlice(msgspec.Struct, frozen=True):
    """What one prefill rank writes to one decode rank: `count` heads, in each token of each piece."""

    prefill: int
    """The number of the prefill rank."""
    source: int
    """The first of these heads, counted in what the prefill rank holds."""
    target: int
    """The first of them, counted in what the decode rank holds."""
    count: int


class HeadPartition(msgspec.Struct, frozen=True):
    """How the heads of a model lie on the ranks of an instance: each holds `heads` of `total`, in the order of ranks.

    Raises InvalidConfig where the ranks do not hold every head, or not equally often.
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
        """How many ranks hold the same heads."""
        return self.ranks * self.heads // self.total

    def first(self, rank: int) -> int:
        """The first head that a rank holds."""
        return rank // self.copies * self.heads


def partition_of(*, ranks: int, heads: int, kind: str, total: int = 0) -> HeadPartition:
    """How heads lie on ranks. `total` is how many the model has; 0: as many as all ranks together, or the one latent
    vector that every rank holds. Raises InvalidConfig.
    """
    return HeadPartition(ranks=ranks, heads=heads, total=total or (heads if kind == "mla" else ranks * heads))


def head_slices_of(rank: int, decode: HeadPartition, prefill: HeadPartition) -> list[HeadSlice]:
    """Who writes to a decode rank, in the order of its heads. Both ends hold the heads of one model."""
    first = decode.first(rank)
    end = first + decode.heads
    slices = []
    for start in range(first // prefill.heads * prefill.heads, end, prefill.heads):
        low, high = max(first, start), min(end, start + prefill.heads)
        writer = start // prefill.heads * prefill.copies + rank % prefill.copies
        slices.append(HeadSlice(prefill=writer, source=low - start, target=low - first, count=high - low))
    return slices


def stage_of(rank: int, *, ranks: int, stages: int) -> tuple[int, int]:
    """Which pipeline stage a rank belongs to, and which rank of that stage it is."""
    return divmod(rank, ranks // stages)


def check_stages(*, ranks: int, stages: int) -> None:
    """Raise InvalidConfig unless so many ranks make up so many stages."""
    if stages < 1 or ranks % stages:
        raise InvalidConfig(f"{ranks} ranks cannot make up {stages} pipeline stages of as many ranks each")


def split_like(ranks: int, decode: HeadPartition) -> HeadPartition:
    """How the heads that decode holds lie on so many prefill ranks: as many on each as there can be without copies,
    or one, with copies. Raises InvalidConfig.
    """
    return HeadPartition(ranks=ranks, heads=max(1, decode.total // ranks), total=decode.total)
