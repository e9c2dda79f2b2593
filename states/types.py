"""Plain values that backends and transports share: where pages lie, and what makes two pools interchangeable."""

from __future__ import annotations

from array import array
from typing import Final, TypeAlias

import msgspec

PageIds: TypeAlias = "array[int]"
"""Page ids of one pool, in prompt order: `array("i", …)`, four bytes a page."""


def page_ids(ids: object = ()) -> PageIds:
    """Make page ids from any iterable of ints."""
    return array("i", ids)  # type: ignore[call-overload, no-any-return]  # array's stub wants one of its known iterables.


def without(pages: PageIds, others: object) -> PageIds:
    """The pages that are not among `others`, in their order."""
    gone = set(others)  # type: ignore[call-overload]  # Page ids, or nothing.
    return page_ids(page for page in pages if page not in gone)


NO_PAGES: Final = page_ids()
"""A slice of it is an empty list of one's own, and is made sooner than one by `page_ids`."""


class Segment(msgspec.Struct, frozen=True):
    """One piece of every page of a pool: piece `i` of page `p` starts at `address + p * stride_bytes`."""

    address: int
    piece_bytes: int
    stride_bytes: int
    page_count: int


class PoolMemory(msgspec.Struct, frozen=True):
    """A pool as a transport sees it: the pieces of its pages, in the order in which a page's bytes are counted.

    `kind` is "DRAM" or "VRAM"; `device` is the CUDA ordinal, 0 for DRAM.
    """

    segments: tuple[Segment, ...]
    page_count: int
    kind: str = "DRAM"
    device: int = 0

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all its pieces."""
        return sum(segment.piece_bytes for segment in self.segments)


class GroupIdentity(msgspec.Struct, frozen=True):
    """One group of layers that every page holds beside the model's own: a draft model, scales, other layers."""

    name: str
    kind: str
    dtype: str
    layers: int
    kv_heads: int
    head_dim: int


class ComponentIdentity(msgspec.Struct, frozen=True):
    """A window or state that travels beside the pages, by what makes its bytes interchangeable. `groups` has all groups
    of its layout, "full" included; `page_size` is the tokens of a window's page, and of a record one of its dimensions.
    """

    name: str
    kind: str
    window_tokens: int
    page_size: int
    piece_bytes: tuple[int, ...]
    groups: tuple[GroupIdentity, ...]


class Identity(msgspec.Struct, frozen=True, omit_defaults=True):
    """What must be equal at both ends of a hand-over, field by field; a difference is refused by the field's name.

    `kind` to `head_dim` are of the group "full"; `groups` has the others, in the order in which a page holds them.
    Without any it is left out where this is written, so that digests over it are what they were before there were any.
    `bigram_keys` says how pages are named: see `tidekv.backends.keys.page_keys`. `components` are in the
    order of their names.
    """

    model: str
    kind: str
    dtype: str
    page_size: int
    layers: int
    kv_heads: int
    head_dim: int
    page_bytes: int
    piece_bytes: tuple[int, ...]
    groups: tuple[GroupIdentity, ...] = ()
    bigram_keys: bool = False
    components: tuple[ComponentIdentity, ...] = ()
