"""Pages over the KV tensors of a host engine that has an order of its own within a block, and their copies.

The host engine, such as vLLM, has one tensor per layer, [block, head, token, element] with any strides; an element row
is K and V of one token and head side by side, or a latent vector. If kernels split blocks into parts, it is
[block · part, head, token of the part, element]. A tidekv page is `blocks_per_page` blocks:

    theirs   layer 0 [blocks, heads, tokens, K | V]          layer 1 …
    tidekv   layer 0 K [page tokens, heads, K] | layer 0 V [page tokens, heads, V] | layer 1 K …

A backend that packs the elements of a block's head in another order has a tensor of the same shape, and `order`: the
position of each of [token, K or V, element] among them. Pages are always in tidekv's order, so that orders never mix
under one key.

A page of a `BlockPool` is named by the last of its blocks, and its blocks are entered before a copy that names it. Some
of them may be left out of copies to the device: those that hold their tokens already, and those behind the end of a
prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy.typing as npt
import torch

from tidekv.backends.copies.streams import Mark, streams_of
from tidekv.backends.device.pool import DevicePool
from tidekv.backends.host.pool import HostPool
from tidekv.backends.layout import KVLayout
from tidekv.backends.memory import PageIndex
from tidekv.states.errors import InvalidConfig, InvalidRequest
from tidekv.states.types import PageIds, PoolMemory

# Bytes are moved as integers, because torch has no scatter for every 8-bit float.
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
ABSENT: Final = -1
"""Stands for a block of a page that is not written."""
CHUNK_BYTES: Final = {"cpu": 4 << 20, "cuda": 64 << 20}
"""Bytes of pages that a copy converts at once: as fit in a processor's cache, or as a GPU has room for."""


class PagedBlocks:
    """KV tensors of all layers of one worker. Calls move whole batches, in the current stream of the caller."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        *,
        layout: KVLayout,
        block_size: int,
        num_blocks: int,
        order: torch.Tensor | None = None,
    ) -> None:
        """`tensors` are in the order of the layers, belong to the worker, and are used in place.

        `order`: positions of [token, K or V, element] within a head of a kernel's block; None for this very order.
        Raises InvalidConfig, which names the first tensor that does not fit the layout.
        """
        self.layout = layout
        self.num_blocks = num_blocks
        self.blocks_per_page = layout.page_size // block_size
        self.device = tensors[0].device
        self._block_size = block_size
        element = _INTEGERS[layout.torch_dtype.itemsize]
        self._element = element
        self._layers = [self._whole_blocks(number, tensor).view(element) for number, tensor in enumerate(tensors)]
        elements = self._layers[0].shape[-2] * self._layers[0].shape[-1]
        if order is not None and order.numel() != elements:
            raise InvalidConfig(f"order of {order.numel()} positions for {elements} elements of a head of a block")
        self._order = order
        self._order_back = None if order is None else order.argsort()

    def read(self, blocks: Sequence[int]) -> torch.Tensor:
        """Return the bytes of the pages that `blocks` form, uint8 [pages, page_bytes] on the device."""
        index, pages = self._index(blocks), len(blocks) // self.blocks_per_page
        page_bytes = torch.empty((pages, self.layout.page_bytes), dtype=torch.uint8, device=self.device)
        found = page_bytes.view(self._element).view(pages, *self._page_shape())
        for number, layer in enumerate(self._layers):
            # From [page, block, head, part, token, K or V, element]
            # to   [page, K or V, block, part, token, head, element].
            rows = self._content(layer.index_select(0, index).view(pages, self.blocks_per_page, *layer.shape[1:]))
            found[:, number].copy_(rows.permute(0, 5, 1, 3, 4, 2, 6))
        return page_bytes

    def write(self, page_bytes: torch.Tensor, blocks: Sequence[int]) -> None:
        """Overwrite the blocks of whole pages, uint8 [pages, page_bytes] on the device; none for `ABSENT`."""
        present = [at for at, block in enumerate(blocks) if block != ABSENT]
        index = self._index([blocks[at] for at in present])
        chosen = None if len(present) == len(blocks) else self._index(present)
        pages = page_bytes.view(self._element).view(len(page_bytes), *self._page_shape())
        for number, layer in enumerate(self._layers):
            # The reverse of `read`: [page, block, head, part, token, K or V, element], then the axes of the layer.
            rows = pages[:, number].permute(0, 2, 5, 3, 4, 1, 6).flatten(0, 1)
            if chosen is not None:
                rows = rows.index_select(0, chosen)
            if layer.dim() == 5:
                rows = rows.permute(0, 2, 1, 3, 4, 5)
            else:
                rows = rows.flatten(2, 3)
            if self._order_back is not None:
                rows = rows.flatten(-3).index_select(-1, self._order_back)
            layer.index_copy_(0, index, rows.reshape(len(present), *layer.shape[1:]))

    def _whole_blocks(self, number: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return the layer as [block, head, token, element] or [block, part, head, token, element]."""
        layout, parts = self.layout, tensor.shape[0] // self.num_blocks if self.num_blocks else 0
        expected = (layout.num_kv_heads, self._block_size // max(parts, 1), layout.tensors_per_layer * layout.head_dim)
        if (
            tensor.dim() != 4
            or parts < 1
            or tensor.shape[0] != parts * self.num_blocks
            or self._block_size % parts
            or tuple(tensor.shape[1:]) != expected
            or tensor.dtype.itemsize != layout.torch_dtype.itemsize
            or tensor.device != self.device
        ):
            raise InvalidConfig(
                f"KV tensor of layer {number} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}; "
                f"expected {self.num_blocks} blocks of {self._block_size} tokens with {layout} on {self.device}"
            )
        return tensor if parts == 1 else tensor.view(self.num_blocks, parts, *tensor.shape[1:])

    def _content(self, rows: torch.Tensor) -> torch.Tensor:
        """Reshape blocks of a layer to [page, block, head, part, token, K or V, element]."""
        shape = (*rows.shape[:-1], self.layout.tensors_per_layer, self.layout.head_dim)
        if self._order is not None:
            rows = rows.flatten(-2).index_select(-1, self._order)
        rows = rows.view(shape)
        return rows.transpose(2, 3) if rows.dim() == 7 else rows.unsqueeze(3)

    def _page_shape(self) -> tuple[int, ...]:
        """Return the shape [layer, K or V, block, part, token, head, element]."""
        layout, layer = self.layout, self._layers[0]
        parts = layer.shape[1] if layer.dim() == 5 else 1
        tokens = (parts, self._block_size // parts, layout.num_kv_heads)
        return (layout.num_layers, layout.tensors_per_layer, self.blocks_per_page, *tokens, layout.head_dim)

    def _index(self, blocks: Sequence[int]) -> torch.Tensor:
        index = torch.tensor(blocks, dtype=torch.int64)
        if self.device.type == "cuda":
            # From pageable memory the driver would first wait, on this thread, for all earlier work of the stream.
            index = index.pin_memory()
        return index.to(self.device, non_blocking=True)


class BlockPool(DevicePool):
    """The blocks as pages of the layout, for the copies of an engine to which they are lent. It has no rows: no other
    process can write to its pages.
    """

    def __init__(self, blocks: PagedBlocks) -> None:
        self.blocks = blocks
        self.layout, self.num_pages, self.device = blocks.layout, blocks.num_blocks, blocks.device
        self.groups, self.rows, self.k, self.v = (), (), (), ()
        self.memory = PoolMemory(segments=(), page_count=self.num_pages)
        self._entered: dict[int, tuple[tuple[int, ...], int]] = {}
        """By page, its blocks, and how many calls use them."""

    def enter(self, blocks: Sequence[int]) -> list[int]:
        """Enter the pages that `blocks` form, some of which may be `ABSENT`; returns their names. `leave` removes them.

        Raises InvalidRequest, having changed nothing, if a page of that name is entered with other blocks.
        """
        per_page = self.blocks.blocks_per_page
        formed = [tuple(blocks[at : at + per_page]) for at in range(0, len(blocks), per_page)]
        pages = [next(block for block in page[::-1] if block != ABSENT) for page in formed]
        for name, page in zip(pages, formed, strict=True):
            if self._entered.get(name, (page, 0))[0] != page:
                raise InvalidRequest(f"block {name} is used as the end of another page")
        for name, page in zip(pages, formed, strict=True):
            self._entered[name] = page, self._entered.get(name, (page, 0))[1] + 1
        return pages

    def leave(self, pages: Sequence[int]) -> None:
        """Remove pages that `enter` has returned, once."""
        for name in pages:
            page, uses = self._entered.pop(name)
            if uses > 1:
                self._entered[name] = page, uses - 1

    def blocks_of(self, pages: PageIndex) -> list[int]:
        """Return the blocks of pages that are entered, in order."""
        return [block for page in pages.tolist() for block in self._entered[page][0]]

    def read_pages(self, pages: PageIds | npt.ArrayLike) -> torch.Tensor:
        """See `DevicePool.read_pages`."""
        return self.blocks.read(self.blocks_of(self.check_pages(pages)))

    def write_pages(self, pages: PageIds | npt.ArrayLike, page_bytes: torch.Tensor) -> None:
        """See `DevicePool.write_pages`."""
        self.blocks.write(page_bytes, self.blocks_of(self.check_pages(pages)))


class BlockMover:
    """Moves pages between a `BlockPool` and a host pool, in the current stream. On a GPU it returns before that."""

    def __init__(self, device: BlockPool, host: HostPool) -> None:
        self._device = device
        self._host = host
        self._chunk = max(1, CHUNK_BYTES[device.device.type] // host.layout.page_bytes)

    def to_device(self, host_pages: PageIndex, device_pages: PageIndex) -> None:
        """Copy host pages to device pages, pairwise."""
        for first in range(0, len(host_pages), self._chunk):
            sources, targets = host_pages[first : first + self._chunk], device_pages[first : first + self._chunk]
            if self._host.pinned:
                rows = torch.empty(
                    (len(sources), self._host.layout.page_bytes), dtype=torch.uint8, device=self._device.device
                )
                for row, page in zip(rows, sources.tolist(), strict=True):
                    row.copy_(self._host.buffer[page], non_blocking=True)
            else:
                rows = self._host.buffer.index_select(0, torch.from_numpy(sources))
            self._device.write_pages(targets, rows)

    def to_device_by_layer(
        self, host_pages: PageIndex, device_pages: PageIndex, on_layer: Callable[[Mark], None]
    ) -> None:
        """As `to_device`; all layers are marked at the end."""
        self.to_device(host_pages, device_pages)
        for _ in range(self._host.layout.groups[0].layout.num_layers):
            on_layer(streams_of(self._device.device).current().mark())

    def to_host(self, device_pages: PageIndex, host_pages: PageIndex) -> None:
        """Copy device pages to host pages, pairwise."""
        for first in range(0, len(host_pages), self._chunk):
            rows = self._device.read_pages(device_pages[first : first + self._chunk])
            targets = host_pages[first : first + self._chunk]
            if self._host.pinned:
                for row, page in zip(rows, targets.tolist(), strict=True):
                    self._host.buffer[page].copy_(row, non_blocking=True)
            else:
                self._host.buffer.index_copy_(0, torch.from_numpy(targets), rows)
