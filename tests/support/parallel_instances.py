"""Models on tensor-parallel ranks and pipeline stages, with KV that identifies each byte within the whole model.

The content of a page or record is a function of its prompt, pool, group, layer, head (or channel) and token. So every
byte of every rank's pool can be checked at both ends of a hand-over, whatever the layout of either end.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from tidekv.backends.component_pools import ComponentPools
from tidekv.backends.device.pool import DevicePool
from tidekv.backends.layout import FULL, KVLayout
from tidekv.backends.page_layout import Layout, PageLayout
from tidekv.states.types import page_ids

PAGE_SIZE = 4
HEAD_DIM = 8
POOL_PAGES = 32


@dataclass(frozen=True)
class Group:
    """One group of layers of a model: `heads` KV heads in all, or copies of one latent vector (kind "mla")."""

    heads: int = 4
    layers: int = 4
    kind: str = "mha"
    dtype: str = "float16"
    head_dim: int = HEAD_DIM


@dataclass(frozen=True)
class State:
    """A recurrent state: a record of so many layers, whose channels have parts that ranks divide or copy.

    `divided` and `copied` are the channels of one divided part (of the whole model), and of one that all ranks hold.
    `named` is false if the ranks do not tell the parts: then the record is indivisible.
    """

    layers: int = 4
    divided: int = 8
    copied: int = 2
    named: bool = True


@dataclass(frozen=True)
class Model:
    """A model: groups of layers in every page, "full" first; windows, and a state."""

    groups: dict[str, Group]
    window: dict[str, Group] = field(default_factory=dict)
    state: State | None = None
    kv_heads_total: int = 0


@dataclass(frozen=True)
class Place:
    """The place of a rank: `tp` ranks in each of `pp` stages, counted stage by stage."""

    tp: int
    pp: int
    rank: int

    @property
    def number(self) -> int:
        return self.rank % self.tp

    @property
    def stage(self) -> int:
        return self.rank // self.tp

    def heads(self, group: Group) -> range:
        """The heads of a group that this rank holds."""
        if group.kind == "mla":
            return range(1)
        count = max(1, group.heads // self.tp)
        copies = self.tp * count // group.heads
        return range(self.number // copies * count, (self.number // copies + 1) * count)

    def layers(self, layers: int) -> range:
        """The layers that this stage holds."""
        return range(self.stage * layers // self.pp, (self.stage + 1) * layers // self.pp)

    def channels(self, state: State) -> list[int]:
        """The channels of the whole record that this rank holds: its run of the divided part, and all copied ones."""
        count = state.divided // self.tp
        return [
            *range(self.number * count, (self.number + 1) * count),
            *range(state.divided, state.divided + state.copied),
        ]


def layout_of(groups: dict[str, Group], place: Place) -> Layout:
    """The layout of one rank's pages."""
    layouts = {
        name: KVLayout(
            num_layers=len(place.layers(group.layers)),
            num_kv_heads=len(place.heads(group)),
            head_dim=group.head_dim,
            dtype=group.dtype,
            page_size=PAGE_SIZE,
            kind=group.kind,
        )
        for name, group in groups.items()
    }
    return PageLayout.of(**layouts) if len(layouts) > 1 else layouts[FULL]


class RankPools:
    """The pools of one rank: its pages, and its window and state."""

    def __init__(self, model: Model, place: Place) -> None:
        self._model = model
        self._place = place
        self.device = DevicePool.allocate(layout_of(model.groups, place), POOL_PAGES)
        self.components: list[ComponentPools] = []
        if model.window:
            window = DevicePool.allocate(layout_of(model.window, place), POOL_PAGES)
            self.components.append(ComponentPools(name="window", kind="window", window_tokens=6, device=window))
        if model.state is not None:
            state = model.state
            layout = KVLayout(
                num_layers=len(place.layers(state.layers)),
                num_kv_heads=1,
                head_dim=HEAD_DIM,
                dtype="float32",
                page_size=len(place.channels(state)),
                kind="mla",
            )
            parts = state.divided // place.tp, state.copied
            self.components.append(
                ComponentPools(
                    name="state",
                    kind="state",
                    device=DevicePool.allocate(layout, POOL_PAGES),
                    channels=parts if state.named else (),
                )
            )

    def pool(self, name: str) -> DevicePool:
        """The pool of the pages ("full") or of a component."""
        return next((pools.device for pools in self.components if pools.name == name), self.device)

    def fill(self, name: str, pages: list[int], digests: list[bytes]) -> None:
        """Write the content of these pages of the prompt."""
        rows = np.stack([self.content(name, digest) for digest in digests])
        self.pool(name).write_pages(page_ids(pages), torch.from_numpy(rows))

    def wrong(self, name: str, pages: list[int], digests: list[bytes]) -> list[int]:
        """Compare byte for byte; returns the positions of the pages that differ."""
        found = self.pool(name).read_pages(page_ids(pages)).numpy()
        return [at for at, digest in enumerate(digests) if not np.array_equal(found[at], self.content(name, digest))]

    def content(self, name: str, digest: bytes) -> npt.NDArray[np.uint8]:
        """The bytes of one page of this rank: those of the whole model, cut to its layers and heads or channels."""
        if name == "state":
            state = self._model.state
            assert state is not None
            whole = _noise(digest, name, (state.layers, state.divided + state.copied, 4 * HEAD_DIM))
            return whole[self._place.layers(state.layers)][:, self._place.channels(state)].reshape(-1)
        parts = []
        for group_name, group in (self._model.window if name == "window" else self._model.groups).items():
            layout = dict(self.pool(name).layout.groups)[group_name]
            size = group.head_dim * layout.torch_dtype.itemsize
            heads = 1 if group.kind == "mla" else group.heads
            shape = (group.layers, layout.tensors_per_layer, PAGE_SIZE, heads, size)
            whole = _noise(digest, f"{name} {group_name}", shape)
            layers, held = self._place.layers(group.layers), self._place.heads(group)
            parts.append(whole[layers.start : layers.stop, :, :, held.start : held.stop].reshape(-1))
        return np.concatenate(parts)


def _noise(digest: bytes, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    stream = hashlib.shake_128(digest + name.encode()).digest(int(np.prod(shape)))
    return np.frombuffer(stream, np.uint8).reshape(shape)
