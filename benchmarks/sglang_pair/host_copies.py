"""Copies between SGLang's device pool and its host pool in torch, for those of its kernels that need a GPU.

Names and parameters are those of the kernels, whose place they take.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def transfer_kv_per_layer_direct_pf_lf(
    *,
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Copy one layer of host pages to the device pool, as SGLang's kernel of this name.

    src_ptrs: K and V, [page, layer, token in page, head, element]. dst_ptrs: [token, head, element]. Indices are those
    of tokens; those of a page follow one another.
    """
    pages = src_indices[::page_size] // page_size
    for source, destination in zip(src_ptrs, dst_ptrs, strict=True):
        destination[dst_indices] = source[pages, layer_id].flatten(0, 1)


def transfer_kv_all_layer_direct_lf_pf(
    *,
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy all layers of the device pool to host pages, as SGLang's kernel of this name.

    src_ptrs: K of each layer, then V of each layer. dst_ptrs: K and V. Shapes are as above.
    """
    pages = dst_indices[::page_size] // page_size
    layers = len(src_ptrs) // len(dst_ptrs)
    for number, source in enumerate(src_ptrs):
        host, layer = dst_ptrs[number // layers], number % layers
        host[pages, layer] = source[src_indices].view(len(pages), page_size, *source.shape[1:])
