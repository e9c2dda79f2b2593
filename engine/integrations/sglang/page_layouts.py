"""Views of the pages of SGLang's host pools in tidekv's order of a page. No bytes are copied here.

A tidekv page is layer 0 K, layer 0 V, layer 1 K, …, each [page_size, heads, head_dim]. SGLang keeps a page in one of
several orders; permuting its axes gives a view that can be copied from and to.
"""

from __future__ import annotations

from typing import Any, Final  # A host pool is SGLang's, which has no types.

import torch

from tidekv.backends.layout import DTYPES, KVLayout
from tidekv.states.errors import InvalidConfig

# Permutation of the axes of one page to [layer, K or V, token, head, element], by layout, after indexing the page.
_MHA_AXES: Final = {
    "layer_first": (1, 0, 2, 3, 4),  # [K or V, layer, token, head, element]
    "page_first": (2, 0, 1, 3, 4),  # [K or V, token, layer, head, element]
    "page_first_direct": (1, 0, 2, 3, 4),  # [K or V, layer, token, head, element]
    "page_head": (3, 0, 2, 1, 4),  # [K or V, head, token, layer, element]
}
_MLA_AXES: Final = {
    "layer_first": (0, 1, 2, 3),  # [layer, token, 1, element]
    "page_first": (1, 0, 2, 3),  # [token, layer, 1, element]
    "page_first_direct": (0, 1, 2, 3),  # [layer, token, 1, element]
}


class HostPages:
    """The pages of one of SGLang's host pools (`MHATokenToKVPoolHost`, `MLATokenToKVPoolHost`)."""

    def __init__(self, pool: Any, *, is_mla: bool) -> None:
        """Raises InvalidConfig if pages of this pool cannot be viewed as tidekv pages."""
        axes = (_MLA_AXES if is_mla else _MHA_AXES).get(pool.layout)
        if axes is None:
            raise InvalidConfig(f"SGLang's host layout {pool.layout!r} cannot be shared; use page_first or layer_first")
        if not is_mla and getattr(pool, "v_head_dim", pool.head_dim) != pool.head_dim:
            raise InvalidConfig("K and V have heads of different length; tidekv's pages have one")
        self._pool = pool
        self._axes = axes
        self._is_mla = is_mla
        self.layout = KVLayout(
            num_layers=int(pool.layer_num),
            num_kv_heads=1 if is_mla else int(pool.head_num),
            head_dim=int(pool.kv_cache_dim if is_mla else pool.head_dim),
            dtype=_dtype_name(pool.dtype),
            page_size=int(pool.page_size),
            kind="mla" if is_mla else "mha",
        )

    def view(self, token_index: int) -> torch.Tensor:
        """Return the page that begins at a token of the pool, in tidekv's order, as a writable view."""
        buffer: torch.Tensor = self._pool.kv_buffer
        size = self.layout.page_size
        if not self._is_mla:
            return self._in_order(self._mha_page(buffer, token_index, size))
        if self._pool.layout == "layer_first":
            return self._in_order(buffer[:, token_index : token_index + size])
        if self._pool.layout == "page_first":
            return self._in_order(buffer[token_index : token_index + size])
        return self._in_order(buffer[token_index // size])

    def flat_view(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a flat page, as of `get_data_page` and `set_from_flat_data_page`, in tidekv's order."""
        shape = self.view(0).permute(*_inverse(self._axes)).shape
        return self._in_order(flat.view(self.layout.torch_dtype).view(shape))

    def _mha_page(self, buffer: torch.Tensor, token_index: int, size: int) -> torch.Tensor:
        if self._pool.layout == "layer_first":
            return buffer[:, :, token_index : token_index + size]
        if self._pool.layout == "page_first":
            return buffer[:, token_index : token_index + size]
        return buffer[:, token_index // size]

    def _in_order(self, page: torch.Tensor) -> torch.Tensor:
        return page.permute(*self._axes)


def _inverse(axes: tuple[int, ...]) -> list[int]:
    return [axes.index(axis) for axis in range(len(axes))]


def _dtype_name(dtype: torch.dtype) -> str:
    for name, known in DTYPES.items():
        if known == dtype:
            return name
    raise InvalidConfig(f"KV of {dtype} cannot be shared; tidekv knows {', '.join(DTYPES)}")
