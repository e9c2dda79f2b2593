"""Label of a namespace: what its pages are of, kept beside them for `tidekv store ls`.

The namespace is a digest of these properties, from which they cannot be read. Nothing but tools reads a label, so a
store without one works as well.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tidekv.backends.storage.base import Labels, Storage
from tidekv.states.errors import StorageFailed
from tidekv.states.types import Identity

LABEL_BYTES_MAX = 4096
"""Maximum bytes of a label that is read."""


class Label(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a namespace has pages of. Sizes are those of one rank."""

    model: str
    dtype: str
    kind: str
    page_size: int
    layers: int
    kv_heads: int
    head_dim: int
    rank: int = 0
    ranks: int = 1
    component: str = ""
    """Name of the window or state whose pages these are; empty for the full KV."""

    @property
    def layout(self) -> str:
        """The layout in a few words."""
        rank = "" if self.ranks == 1 else f", rank {self.rank} of {self.ranks}"
        component = "" if not self.component else f", component {self.component}"
        shape = f"{self.kind}, {self.layers} layers, {self.kv_heads} x {self.head_dim}"
        return f"{shape}, pages of {self.page_size} tokens{rank}{component}"


def label_of(identity: Identity, component: str = "", *, rank: int = 0, ranks: int = 1) -> Label:
    """Return the label of the pages of an identity, or of those of one of its components."""
    return Label(
        model=identity.model,
        dtype=identity.dtype,
        kind=identity.kind,
        page_size=identity.page_size,
        layers=identity.layers,
        kv_heads=identity.kv_heads,
        head_dim=identity.head_dim,
        rank=rank,
        ranks=ranks,
        component=component,
    )


async def set_label(storage: Storage, label: Label, *, warn: Callable[..., object]) -> None:
    """Store the label of an engine's namespace unless it has one, if the engine keeps labels.

    A failure is passed to `warn`, a method of a structlog logger, and is no error: nothing but tools reads the label.
    """
    if not isinstance(storage, Labels):
        return
    try:
        await storage.set_label(msgspec.json.encode(label))
    except StorageFailed as failed:
        warn("storage has no label of what it holds", storage=storage.uri, cause=str(failed))


def read_label(text: bytes) -> Label | None:
    """Return a stored label; None if there is none that this version can read."""
    try:
        return msgspec.json.decode(text, type=Label) if len(text) <= LABEL_BYTES_MAX else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
