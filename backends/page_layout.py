"""Pages that hold KV of several shapes: groups of layers that share their page ids. Pure arithmetic.

A page id names the page in all groups. "full" comes first; the others mirror it: the KV of a draft model, keys of an
indexer, scales of quantised KV, layers of the same model that have another shape. A page's bytes are those of its
groups, one after another:

full: layer 0 K | layer 0 V | … | draft: layer 0 K | layer 0 V | … | scales: layer 0 K | …

Copies, transfers and storage move whole pages, and a checksum covers all groups of a page at once. So a page without
its draft part cannot exist, nor be served.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from tidekv.backends.layout import FULL, KVLayout, LayerGroup
from tidekv.states.errors import InvalidConfig
from tidekv.states.types import GroupIdentity, Identity

GROUPS_MAX = 64


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Groups of layers that make up a page: `PageLayout.of(full=KVLayout(…), draft=KVLayout(…))`.

    All groups have the same page size, and each its own layers, heads, head_dim, dtype and kind. Names are identifiers,
    and their order is that of the bytes: other names, or another order, is another layout. A single group "full" is the
    same as its KVLayout. Raises InvalidConfig, which names the group.
    """

    groups: tuple[LayerGroup, ...]

    def __post_init__(self) -> None:
        names = [group.name for group in self.groups]
        if not names or names[0] != FULL:
            raise InvalidConfig(f"layout: the first group of a page must be {FULL!r}, not {', '.join(names) or 'none'}")
        if len(names) > GROUPS_MAX:
            raise InvalidConfig(f"layout: a page has at most {GROUPS_MAX} groups, not {len(names)}")
        for name, layout in self.groups:
            if not name.isidentifier() or names.count(name) > 1:
                raise InvalidConfig(f"layout: {name!r} must be an identifier, and the name of one group only")
            if not isinstance(layout, KVLayout):
                raise InvalidConfig(f"layout: group {name!r} must be a KVLayout, not {type(layout).__name__}")
            if layout.page_size != self.page_size:
                raise InvalidConfig(
                    f"layout: group {name!r} has pages of {layout.page_size} tokens, {FULL!r} has {self.page_size}"
                )

    @classmethod
    def of(cls, full: KVLayout, **mirrors: KVLayout) -> PageLayout:
        """Make a layout of the model's own KV and the groups that mirror it, by name. Raises InvalidConfig."""
        return cls((LayerGroup(FULL, full), *(LayerGroup(name, layout) for name, layout in mirrors.items())))

    @property
    def page_size(self) -> int:
        """Tokens of a page, in every group."""
        return self.groups[0].layout.page_size

    @property
    def piece_count(self) -> int:
        """Pieces of one page over all groups."""
        return sum(group.layout.piece_count for group in self.groups)

    @property
    def pieces(self) -> tuple[int, ...]:
        """Bytes of each piece, in the order of a page's bytes."""
        return tuple(piece for group in self.groups for piece in group.layout.pieces)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all groups."""
        return sum(group.layout.page_bytes for group in self.groups)

    def identity(self, model: str) -> Identity:
        """Return the properties that must be equal at both ends before bytes of this layout are exchanged."""
        full = self.groups[0].layout
        return Identity(
            model=model,
            kind=full.kind,
            dtype=full.dtype,
            page_size=full.page_size,
            layers=full.num_layers,
            kv_heads=full.num_kv_heads,
            head_dim=full.head_dim,
            page_bytes=self.page_bytes,
            piece_bytes=self.pieces,
            groups=tuple(group_identity(group) for group in self.groups[1:]),
        )


Layout: TypeAlias = KVLayout | PageLayout
"""The layouts that a pool accepts."""


def group_offsets(layout: Layout) -> Iterator[tuple[LayerGroup, int]]:
    """Yield each group and its offset in a page's bytes."""
    start = 0
    for group in layout.groups:
        yield group, start
        start += group.layout.page_bytes


def same_pages(one: Layout, other: Layout) -> bool:
    """Return whether pages of both have the same bytes: a single group equals its KVLayout."""
    return one.groups == other.groups


def group_identity(group: LayerGroup) -> GroupIdentity:
    """Return what a group of layers is compared by."""
    layout = group.layout
    return GroupIdentity(
        name=group.name,
        kind=layout.kind,
        dtype=layout.dtype,
        layers=layout.num_layers,
        kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
    )
