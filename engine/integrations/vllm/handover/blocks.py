"""vLLM's KV tensors as a device pool whose pages are vLLM's blocks, without a copy and in vLLM's own order.

The bytes of a block are moved as they are, so both ends must have the same order: `BlockOrder` describes it, and it is
part of the identity that the ends compare before anything is sent, and of the namespace in storage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tidekv.backends.device.pool import DevicePool
from tidekv.backends.layout import DTYPES, KVLayout
from tidekv.states.errors import InvalidConfig


@dataclass(frozen=True, slots=True)
class BlockOrder:
    """Order of the elements in a block: equal orders mean that the same bytes are the same KV.

    `backend` is the attention backend with its form, `shape` and `strides` those of one block of a layer, in elements.
    """

    backend: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def identity(self, model: str) -> str:
        """Return the model's fingerprint, joined with this order."""
        shape, strides = ("x".join(map(str, sizes)) for sizes in (self.shape, self.strides))
        return f"{model} | vLLM blocks of {self.backend}, {shape} by {strides}"


def wrap_blocks(
    tensors: Sequence[torch.Tensor], *, block_size: int, num_blocks: int, backend: str
) -> tuple[DevicePool, BlockOrder]:
    """Return a pool over the tensors of all layers, in order, and the order of a block. Nothing is copied.

    A page is a block of every layer. Raises InvalidConfig, which names the layer, for tensors that differ or whose
    blocks are not contiguous.
    """
    rows, orders = [], []
    for number, tensor in enumerate(tensors):
        row, order = _rows(tensor, number=number, num_blocks=num_blocks, backend=backend)
        rows.append(row)
        orders.append(order)
        if order != orders[0] or tensor.dtype != tensors[0].dtype:
            raise InvalidConfig(
                f"KV blocks of layer {number} are {order}, those of layer 0 {orders[0]}: they must be equal"
            )
    dtype = next((name for name, known in DTYPES.items() if known == rows[0].dtype), None)
    elements = rows[0].shape[1]
    if dtype is None or elements % block_size:
        raise InvalidConfig(
            f"KV blocks of {elements} elements of {rows[0].dtype} for {block_size} tokens cannot be handed over"
        )
    # One opaque vector for each token: only the whole block has a meaning.
    layout = KVLayout(
        num_layers=len(rows),
        num_kv_heads=1,
        head_dim=elements // block_size,
        dtype=dtype,
        page_size=block_size,
        kind="mla",
    )
    pages = [row.view(num_blocks, block_size, 1, elements // block_size) for row in rows]
    return DevicePool.wrap(pages, None, layout), orders[0]


def _rows(tensor: torch.Tensor, *, number: int, num_blocks: int, backend: str) -> tuple[torch.Tensor, BlockOrder]:
    """View a layer as [block, elements in the order of memory]."""
    if num_blocks < 1 or tensor.dim() < 2 or tensor.shape[0] % num_blocks:
        raise InvalidConfig(f"KV tensor of layer {number} is {list(tensor.shape)}; expected {num_blocks} blocks")
    parts = tensor.shape[0] // num_blocks
    elements = tensor.numel() // num_blocks
    inner = sorted(
        (stride, size) for size, stride in zip(tensor.shape[1:], tensor.stride()[1:], strict=True) if size > 1
    )
    expected = 1
    for stride, size in inner:
        if stride != expected:
            break
        expected *= size
    if expected * parts != elements or tensor.stride(0) != expected:
        raise InvalidConfig(
            f"KV blocks of layer {number} are not contiguous: shape {list(tensor.shape)}, strides "
            f"{list(tensor.stride())}. Hand-over needs a KV cache layout with one tensor for each layer, block by "
            "block, such as LBHNC or LBNHC"
        )
    order = BlockOrder(backend=backend, shape=(parts, *tensor.shape[1:]), strides=tuple(tensor.stride()))
    return tensor.as_strided((num_blocks, elements), (elements, 1)), order
