"""Layout of one page of KV: its pieces, their order and their sizes. Pure arithmetic, no memory.

A page is `page_size` tokens over all layers. It is the concatenation of its pieces:

    kind "mha"   layer 0 K | layer 0 V | layer 1 K | …     a piece is [page_size, num_kv_heads, head_dim]
    kind "mla"   layer 0   | layer 1   | …                 a piece is [page_size, 1, head_dim], a latent vector a token

Device pools keep each piece in its own tensor (layer first), host pools keep a page in one stretch (page first). A page
that also holds the KV of a draft model, scales, or layers of another shape consists of several groups of layers, each
of which is a `KVLayout`: see `tidekv.backends.page_layout`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final, NamedTuple

import torch

from tidekv.states.errors import InvalidConfig
from tidekv.states.types import Identity
from tidekv.states.validation import short

DTYPES: Final = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "uint8": torch.uint8,
}
KINDS: Final = ("mha", "mla")
# Far above the values of any model.
COUNT_MAX: Final = 65_536
# The group that every page has: the model's own KV.
FULL: Final = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """The shape of the KV of one model on this rank.

    `dtype` is one of DTYPES; `kind` is "mha" (K and V in each layer; also GQA and MQA) or "mla" (one latent tensor in
    each layer; `num_kv_heads` is 1 and `head_dim` the length of the latent vector). Raises InvalidConfig, which names
    the field.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    page_size: int
    kind: str = "mha"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in ("dtype", "kind") and (type(value) is not int or not 1 <= value <= COUNT_MAX):
                raise InvalidConfig(f"layout: {field.name} must be an int from 1 to {COUNT_MAX}, not {short(value)}")
        if self.dtype not in tuple(DTYPES):
            raise InvalidConfig(f"layout: dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}")
        if self.kind not in KINDS:
            raise InvalidConfig(f"layout: kind must be one of {', '.join(KINDS)}, not {short(self.kind)}")
        if self.kind == "mla" and self.num_kv_heads != 1:
            raise InvalidConfig(f"layout: num_kv_heads must be 1 for kind 'mla', not {self.num_kv_heads}")

    @classmethod
    def empty(cls, *, page_size: int) -> KVLayout:
        """The layout of a model without layers of full attention: all its KV is in windows and states.

        Its pages stand for the tokens of a prompt. They have one unused byte for each token, which moves like KV.
        """
        return cls(num_layers=1, num_kv_heads=1, head_dim=1, dtype="uint8", page_size=page_size, kind="mla")

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """The groups of a page: this one, as "full"."""
        return (LayerGroup(FULL, self),)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The element type of the pool's tensors."""
        return DTYPES[self.dtype]

    @property
    def tensors_per_layer(self) -> int:
        """Pieces of one layer in a page: 2 (K, V) or 1 (latent)."""
        return 2 if self.kind == "mha" else 1

    @property
    def piece_count(self) -> int:
        """Pieces of one page over all layers."""
        return self.num_layers * self.tensors_per_layer

    @property
    def piece_shape(self) -> tuple[int, int, int]:
        """Elements of one piece: [page_size, num_kv_heads, head_dim]."""
        return (self.page_size, self.num_kv_heads, self.head_dim)

    @property
    def piece_bytes(self) -> int:
        """Bytes of one piece; all pieces of a layout are equally long."""
        return self.page_size * self.num_kv_heads * self.head_dim * self.torch_dtype.itemsize

    @property
    def pieces(self) -> tuple[int, ...]:
        """Bytes of each piece, in the order of a page's bytes."""
        return (self.piece_bytes,) * self.piece_count

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.piece_bytes * self.piece_count

    def identity(self, model: str) -> Identity:
        """Return the properties that must be equal at both ends before bytes of this layout are exchanged."""
        return Identity(
            model=model,
            kind=self.kind,
            dtype=self.dtype,
            page_size=self.page_size,
            layers=self.num_layers,
            kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            page_bytes=self.page_bytes,
            piece_bytes=self.pieces,
        )


class LayerGroup(NamedTuple):
    """Layers of one shape within a page, by the name that both ends and the storage tier use."""

    name: str
    layout: KVLayout
