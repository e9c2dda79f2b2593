"""Copies between host pages and the KV tensors of a host engine that has an order of its own within a block.

The host engine, such as vLLM, has one tensor per layer, [block, head, token, element] with any strides; an element row
is K and V of one token and head side by side, or a latent vector. If kernels split blocks into parts, it is
[block · part, head, token of the part, element]. A tidekv page is `blocks_per_page` blocks:

    theirs   layer 0 [blocks, heads, tokens, K | V]          layer 1 …
    tidekv   layer 0 K [page tokens, heads, K] | layer 0 V [page tokens, heads, V] | layer 1 K …

A backend that packs the elements of a block's head in another order has a tensor of the same shape, and `order`: the
position of each of [token, K or V, element] among them. Pages are always in tidekv's order, so that orders never mix
under one key.

On a GPU, copies to the host gather pages in the stream that computed them, so the host engine may reuse the blocks at
once: a later write to them is later in that stream. Copies to blocks wait for all work that was in the stream when
`mark` was called, because a block's previous user may still be writing to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import torch

from tidekv.backends.copies.streams import Mark, Streams, streams_of
from tidekv.backends.host.pool import HostPool
from tidekv.backends.layout import KVLayout
from tidekv.states.errors import InvalidConfig

# Bytes are moved as integers, because torch has no scatter for every 8-bit float.
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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

    def empty_pages(self, blocks: int) -> torch.Tensor:
        """Return memory on the device for the pages that so many blocks form: uint8 [pages, page_bytes]."""
        shape = (blocks // self.blocks_per_page, self.layout.page_bytes)
        return torch.empty(shape, dtype=torch.uint8, device=self.device)

    def read(self, blocks: Sequence[int], into: torch.Tensor | None = None) -> torch.Tensor:
        """Return the bytes of whole pages, uint8 [pages, page_bytes] on the device; in `into`, if that is given.

        `blocks` are those of the pages.
        """
        index = self._index(blocks)
        page_bytes = self.empty_pages(len(blocks)) if into is None else into
        pages = len(page_bytes)
        found = page_bytes.view(self._element).view(pages, *self._page_shape())
        for number, layer in enumerate(self._layers):
            # From [page, block, head, part, token, K or V, element]
            # to   [page, K or V, block, part, token, head, element].
            rows = self._content(layer.index_select(0, index).view(pages, self.blocks_per_page, *layer.shape[1:]))
            found[:, number].copy_(rows.permute(0, 5, 1, 3, 4, 2, 6))
        return page_bytes

    def write(self, page_bytes: torch.Tensor, blocks: Sequence[int], *, skip: int = 0) -> None:
        """Overwrite blocks with whole pages, uint8 [pages, page_bytes] on the device.

        `blocks` are the blocks of the pages in order, without the first `skip`; some at the end may be missing, too.
        """
        index = self._index(blocks)
        pages = page_bytes.view(self._element).view(len(page_bytes), *self._page_shape())
        for number, layer in enumerate(self._layers):
            # The reverse of `read`: [page, block, head, part, token, K or V, element], then the axes of the layer.
            rows = pages[:, number].permute(0, 2, 5, 3, 4, 1, 6).flatten(0, 1)[skip : skip + len(blocks)]
            if layer.dim() == 5:
                rows = rows.permute(0, 2, 1, 3, 4, 5)
            else:
                rows = rows.flatten(2, 3)
            if self._order_back is not None:
                rows = rows.flatten(-3).index_select(-1, self._order_back)
            layer.index_copy_(0, index, rows.reshape(len(blocks), *layer.shape[1:]))

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


Wait = Callable[[], int]
"""Waits for a copy; returns how many pages were copied."""


class BlockCopies:
    """Copies whole pages both ways. The thread of the model calls `read` and `mark`, any other one `write`."""

    def __init__(self, blocks: PagedBlocks, host: HostPool, streams: Streams | None = None) -> None:
        """`streams`: those of the blocks' device."""
        self._blocks = blocks
        self._host = host
        self._streams = streams or streams_of(blocks.device)
        self._to_host, self._to_device = self._streams.make(), self._streams.make()
        self._gathered: list[tuple[Mark, torch.Tensor]] = []
        """Pages on their way to the host: their memory must not be used again before."""

    def read(self, blocks: Sequence[int], pages: Sequence[int]) -> Wait:
        """Start copying the pages that `blocks` form to host pages. The returned call waits for the copy."""
        self._gathered = [(mark, rows) for mark, rows in self._gathered if not mark.is_reached()]
        computing = self._streams.current()
        rows = self._blocks.empty_pages(len(blocks))
        computing.run(lambda: self._gather(blocks, rows))
        self._to_host.follow(computing.mark())
        self._to_host.run(partial(self._take, rows, pages))
        ended = self._to_host.mark()
        self._gathered.append((ended, rows))

        def wait() -> int:
            ended.wait()
            return len(pages)

        return wait

    def mark(self) -> Mark:
        """Return a mark at the current position of the stream, for `write` to wait for."""
        return self._streams.current().mark()

    def write(self, pages: Sequence[int], blocks: Sequence[int], *, skip: int, after: Mark) -> None:
        """Copy host pages to the blocks that they form, without the first `skip`. Returns after the copy."""
        self._to_device.follow(after)
        self._to_device.run(partial(self._bring, pages, blocks, skip))
        self._to_device.mark().wait()

    def _gather(self, blocks: Sequence[int], rows: torch.Tensor) -> None:
        self._blocks.read(blocks, rows)

    def _take(self, rows: torch.Tensor, pages: Sequence[int]) -> None:
        if self._host.pinned:
            for row, page in zip(rows, pages, strict=True):
                self._host.buffer[page].copy_(row, non_blocking=True)
        else:
            self._host.buffer.index_copy_(0, torch.tensor(pages), rows)

    def _bring(self, pages: Sequence[int], blocks: Sequence[int], skip: int) -> None:
        if self._host.pinned:
            rows = self._blocks.empty_pages(len(pages) * self._blocks.blocks_per_page)
            for row, page in zip(rows, pages, strict=True):
                row.copy_(self._host.buffer[page], non_blocking=True)
        else:
            rows = self._host.buffer.index_select(0, torch.tensor(pages))
        self._blocks.write(rows, blocks, skip=skip)
