"""vLLM's KV tensors as a device pool whose pages are vLLM's blocks, without a copy and in vLLM's own order.

The bytes of a block are moved as they are, so both ends must have the same order: `BlockOrder` describes it, and it is
part of the identity that the ends compare before anything is sent, and of the namespace in storage.

A worker may hand its heads over in several parts, each of which has a pool of its own: those of a block are then as the
block of a vLLM worker that has only these heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tidekv.backends.component_pools import ComponentPools
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

    def __str__(self) -> str:
        shape, strides = ("x".join(map(str, sizes)) for sizes in (self.shape, self.strides))
        return f"{self.backend}, {shape} by {strides}"


class RankPools(NamedTuple):
    """The blocks of all groups of one rank, as pools over vLLM's tensors: those of the full KV, and of components
    without host pools. `orders`: of each, in this order; several of a pool whose layers have other heads.
    """

    full: DevicePool
    components: tuple[ComponentPools, ...]
    orders: tuple[BlockOrder, ...]

    def identity(self, model: str) -> str:
        """Return the model's fingerprint, joined with the orders."""
        return f"{model} | vLLM blocks of {'; '.join(map(str, self.orders))}"


def wrap_blocks(
    tensors: Sequence[torch.Tensor],
    *,
    block_size: int,
    num_blocks: int,
    backends: Sequence[str],
    part: int = 0,
    parts: int = 1,
) -> tuple[DevicePool, tuple[BlockOrder, ...]]:
    """Return a pool over the tensors of all layers, and the orders of their blocks. Nothing is copied.

    A page is a block of every layer, or of its heads those of part `part` of `parts`. Layers whose blocks are alike are
    a group of the pool, such as those of the model and those of a draft with other heads. Raises InvalidConfig, which
    names the layer, for tensors whose blocks are not contiguous or cannot be divided.
    """
    alike: dict[tuple[BlockOrder, torch.dtype], list[torch.Tensor]] = {}
    for number, (tensor, backend) in enumerate(zip(tensors, backends, strict=True)):
        row, order = _rows(tensor, number=number, num_blocks=num_blocks, backend=backend, part=part, parts=parts)
        alike.setdefault((order, tensor.dtype), []).append(row)
    full, *others = (_pool_of(rows, block_size=block_size, num_blocks=num_blocks) for rows in alike.values())
    joined = DevicePool.join(full, **{f"layers_{at}": pool for at, pool in enumerate(others, 1)}) if others else full
    return joined, tuple(order for order, _ in alike)


def _pool_of(rows: Sequence[torch.Tensor], *, block_size: int, num_blocks: int) -> DevicePool:
    """Return a pool over layers whose blocks are alike, each [block, elements]."""
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
    return DevicePool.wrap(pages, None, layout)


def wrap_records(tensors: Sequence[torch.Tensor], *, num_blocks: int) -> tuple[DevicePool, BlockOrder]:
    """Return a pool over the states of some layers, in order: a page is one record, the block of every layer, with the
    bytes by which vLLM pads it. Nothing is copied. Raises InvalidConfig, which names the layer.
    """
    rows, orders = [], []
    for number, tensor in enumerate(tensors):
        place = tensor.storage_offset() * tensor.itemsize
        size = tensor.stride(0) * tensor.itemsize
        memory = tensor.untyped_storage()
        if len(tensor) != num_blocks or not tensor[0].is_contiguous() or place + size * num_blocks > memory.nbytes():
            raise InvalidConfig(
                f"states of layer {number} have shape {list(tensor.shape)}, strides {list(tensor.stride())}; expected "
                f"{num_blocks} blocks, each contiguous, in a KV cache layout with layers outside of blocks, such as "
                "LBHNC or LBNHC"
            )
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(memory)
        rows.append(flat.as_strided((num_blocks, 1, 1, size), (size, size, size, 1), place))
        orders.append(BlockOrder(backend=f"states of {tensor.dtype}", shape=tuple(tensor.shape[1:]), strides=(size,)))
        if orders[-1] != orders[0]:
            raise InvalidConfig(f"states of layer {number} are {orders[-1]}, those of layer 0 {orders[0]}")
    layout = KVLayout(
        num_layers=len(rows), num_kv_heads=1, head_dim=rows[0].shape[-1], dtype="uint8", page_size=1, kind="mla"
    )
    return DevicePool.wrap(rows, None, layout), orders[0]


def _rows(
    tensor: torch.Tensor, *, number: int, num_blocks: int, backend: str, part: int, parts: int
) -> tuple[torch.Tensor, BlockOrder]:
    """View a layer as [block, elements in the order of memory], of the heads of one part."""
    if num_blocks < 1 or tensor.dim() < 2 or tensor.shape[0] % num_blocks:
        raise InvalidConfig(f"KV tensor of layer {number} is {list(tensor.shape)}; expected {num_blocks} blocks")
    kernel_blocks = tensor.shape[0] // num_blocks
    block_elements = tensor.numel() // num_blocks
    where = f"shape {list(tensor.shape)}, strides {list(tensor.stride())}"
    held = _heads(tensor, number=number, part=part, parts=parts)
    inner = sorted((stride, size) for size, stride in zip(held.shape[1:], held.stride()[1:], strict=True) if size > 1)
    expected = 1
    for stride, size in inner:
        if stride != expected:
            break
        expected *= size
    if expected * kernel_blocks * parts != block_elements or tensor.stride(0) * kernel_blocks != block_elements:
        raise InvalidConfig(
            f"KV blocks of layer {number} are not contiguous: {where}. Hand-over needs a KV cache layout with one "
            "tensor for each layer, block by block, such as "
            + ("LBHNC or LBNHC" if parts == 1 else f"LBHNC: in {parts} parts, with heads outside of tokens")
        )
    order = BlockOrder(backend=backend, shape=(kernel_blocks, *held.shape[1:]), strides=(expected, *held.stride()[1:]))
    elements = expected * kernel_blocks
    return held.as_strided((num_blocks, elements), (block_elements, 1)), order


def _heads(tensor: torch.Tensor, *, number: int, part: int, parts: int) -> torch.Tensor:
    """Return the heads of one part, [block, head, …]."""
    if parts == 1:
        return tensor
    heads = tensor.shape[1] if tensor.dim() == 4 else 1
    if heads % parts:
        raise InvalidConfig(
            f"KV blocks of layer {number} have {heads} heads on this rank, which cannot be handed over in {parts} parts"
        )
    count = heads // parts
    return tensor[:, part * count : (part + 1) * count]
