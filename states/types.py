"""Value types that states, backends and transports share: page ids, memory layout, identity of a model's pages."""

from __future__ import annotations

from array import array
from typing import Final, TypeAlias

import msgspec

PageIds: TypeAlias = "array[int]"
"""Page ids of one pool, in prompt order: `array("i", …)`, four bytes per page."""


def page_ids(ids: object = ()) -> PageIds:
    """Return page ids from any iterable of ints."""
    return array("i", ids)  # type: ignore[call-overload, no-any-return]  # The stub of array accepts few iterables.


def without(pages: PageIds, others: object) -> PageIds:
    """Return the pages that are not in `others`, in their order."""
    gone = set(others)  # type: ignore[call-overload]  # Page ids, or nothing.
    return page_ids(page for page in pages if page not in gone)


FULL: Final = "full"
"""Name of the full KV where pages of components have the name of their component."""
NO_PAGES: Final = page_ids()
"""Empty page ids. `NO_PAGES[:]` is a new empty array, and cheaper than `page_ids()`."""


class Segment(msgspec.Struct, frozen=True):
    """One piece of every page of a pool: piece `i` of page `p` starts at `address + p * stride_bytes`."""

    address: int
    piece_bytes: int
    stride_bytes: int
    page_count: int


class PoolMemory(msgspec.Struct, frozen=True):
    """The memory of a pool for transports: the pieces of its pages, in the order of a page's bytes.

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
    """One group of layers in every page beside the model's own: a draft model, scales, other layers."""

    name: str
    kind: str
    dtype: str
    layers: int
    kv_heads: int
    head_dim: int


class ComponentIdentity(msgspec.Struct, frozen=True, omit_defaults=True):
    """The properties of a window or state that must agree for its bytes to be interchangeable.

    `groups` has all groups of its layout, "full" included. `page_size` is the tokens per page of a window, or a
    dimension of a state record: the channels, if `channels` are given, whose parts are divided over the ranks.
    """

    name: str
    kind: str
    window_tokens: int
    page_size: int
    piece_bytes: tuple[int, ...]
    groups: tuple[GroupIdentity, ...]
    channels: tuple[int, ...] = ()


class Identity(msgspec.Struct, frozen=True, omit_defaults=True):
    """The properties of pages that must be equal at both ends of a hand-over. A refusal names the field that differs.

    `kind` to `head_dim` describe the group "full"; `groups` has the others, in the order of a page's bytes. Defaults
    are omitted when encoded, so digests of models without groups or components stay the same as in earlier versions.
    `bigram_keys` is the form of page keys: see `tidekv.backends.keys.page_keys`. `components` are sorted by name.
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
