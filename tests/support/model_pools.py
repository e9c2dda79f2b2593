"""The pools of a model on tensor-parallel ranks, or on one, as one place for the cache of its layers.

Each rank has its heads of K and V, a copy of latent KV, and its share of each record of a state. The model itself runs
once, and reads what all ranks hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from tests.support.group_model import LatentKV, LayerKV, PlainKV, ScaledKV
from tidekv.backends.device.pool import DevicePool
from tidekv.backends.layout import KVLayout
from tidekv.backends.page_layout import Layout, PageLayout

OTHER_PAGES = 11
"""How far apart the pages are that two neighbouring ranks lend for one page of the prompt."""


@dataclass(frozen=True, slots=True)
class Places:
    """Which page of each rank is behind a page id of the model.

    Engines that own their device pages use the same ones on all ranks. With `differ`, each rank lends others.
    """

    ranks: int = 1
    differ: bool = False

    def pages(self, rank: int, pages: Sequence[int], pool: DevicePool) -> list[int]:
        """Return the pages of a rank."""
        return [(page + self._step(rank)) % pool.num_pages for page in pages]

    def slots(self, rank: int, slots: torch.Tensor, pool: DevicePool) -> torch.Tensor:
        """Return the token numbers in the pool of a rank."""
        size = pool.layout.page_size
        return (slots + self._step(rank) * size) % (pool.num_pages * size)

    def _step(self, rank: int) -> int:
        return OTHER_PAGES * rank if self.differ else 0


def layout_of_rank(layout: Layout, ranks: int) -> Layout:
    """Return the layout of one of several ranks: its heads, or all of a latent vector."""
    if isinstance(layout, KVLayout):
        return layout if layout.kind == "mla" else replace(layout, num_kv_heads=layout.num_kv_heads // ranks)
    return PageLayout.of(**{name: _of_rank(group, ranks) for name, group in layout.groups})


def _of_rank(layout: KVLayout, ranks: int) -> KVLayout:
    part = layout_of_rank(layout, ranks)
    assert isinstance(part, KVLayout)
    return part


class KVOfRanks:
    """The KV of a model's layers in the pools of ranks; with the pool of one of them, its part is kept."""

    def __init__(self, pools: ModelPools, of_pool: Callable[[DevicePool], LayerKV], *, copies: bool = False) -> None:
        self._pools = pools
        self._copies = copies
        self._parts = {rank: of_pool(pool) for rank, pool in pools.by_rank.items()}
        self.layer_count = next(iter(self._parts.values())).layer_count

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `LayerKV`. All ranks must have a pool."""
        parts = [part.read(layer, self._pools.slots(rank, slots)) for rank, part in self._parts.items()]
        if self._copies:
            for one, other in ((parts[0], other) for other in parts[1:]):
                assert all(map(torch.equal, one, other)), "a rank has another copy"
            return parts[0]
        assert len(parts) == self._pools.places.ranks
        return torch.cat([first for first, _ in parts], dim=1), torch.cat([second for _, second in parts], dim=1)

    def write(self, layer: int, slots: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> None:
        """See `LayerKV`."""
        for rank, part in self._parts.items():
            ours = [self._heads_of(rank, tensor) for tensor in (first, second)]
            part.write(layer, self._pools.slots(rank, slots), ours[0], ours[1])

    def _heads_of(self, rank: int, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self._copies else tensor.chunk(self._pools.places.ranks, dim=1)[rank]


class ModelPools:
    """Device pools by rank, for one model."""

    def __init__(self, by_rank: Mapping[int, DevicePool], places: Places) -> None:
        self.by_rank = by_rank
        self.places = places

    @classmethod
    def of_one(cls, pool: DevicePool) -> ModelPools:
        """A model on a single rank."""
        return cls({0: pool}, Places())

    @property
    def page_size(self) -> int:
        """Tokens of a page; of records one of their dimensions."""
        return next(iter(self.by_rank.values())).layout.page_size

    def plain(self, group: str = "full") -> LayerKV:
        """K and V of each head in a group of layers."""
        return KVOfRanks(self, lambda pool: PlainKV(pool.group(group)))

    def latent(self, *, latent_dim: int) -> LayerKV:
        """Latent vectors with rotary keys."""
        return KVOfRanks(self, lambda pool: LatentKV(pool.group("full"), latent_dim=latent_dim), copies=True)

    def scaled(self, *, dtype: torch.dtype) -> LayerKV:
        """K and V in float8, with the scales of each head in a group of their own."""
        return KVOfRanks(self, lambda pool: ScaledKV(pool.group("full"), pool.group("scales"), dtype=dtype))

    def slots(self, rank: int, slots: torch.Tensor) -> torch.Tensor:
        """Return the token numbers of a rank's pool."""
        return self.places.slots(rank, slots, self.by_rank[rank])

    def pages_of(self, rank: int, pages: Sequence[int]) -> list[int]:
        """Return the pages of a rank."""
        return self.places.pages(rank, pages, self.by_rank[rank])

    # --- Whole pages ---

    def read_pages(self, pages: Sequence[int]) -> torch.Tensor:
        """Copy the bytes of pages, [pages, bytes of all ranks]."""
        parts = [pool.read_pages(self.pages_of(rank, pages)) for rank, pool in self.by_rank.items()]
        return torch.cat(parts, dim=1)

    def write_pages(self, pages: Sequence[int], contents: torch.Tensor) -> None:
        """Overwrite pages with what `read_pages` has returned."""
        for (rank, pool), part in zip(self.by_rank.items(), contents.chunk(len(self.by_rank), dim=1), strict=True):
            pool.write_pages(self.pages_of(rank, pages), part)

    def zero(self, pages: Sequence[int], group: str = "") -> None:
        """Lose what pages hold, in one group of layers or in all."""
        for rank, pool in self.by_rank.items():
            for row in pool.group(group).rows if group else pool.rows:
                row[self.pages_of(rank, pages)] = 0

    # --- Records ---

    def read_record(self, group: str, layer: int, record: int) -> torch.Tensor:
        """Return all elements of a layer in a record, which the ranks divide in rank order."""
        parts = [
            pool.group(group).k[layer].flatten(1)[self.pages_of(rank, [record])[0]]
            for rank, pool in self.by_rank.items()
        ]
        return torch.cat(parts)

    def write_record(self, group: str, layer: int, record: int, elements: torch.Tensor) -> None:
        """Overwrite a layer of a record."""
        parts = elements.chunk(self.places.ranks)
        for rank, pool in self.by_rank.items():
            pool.group(group).k[layer].flatten(1)[self.pages_of(rank, [record])[0]] = parts[rank]
