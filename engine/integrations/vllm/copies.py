"""Copies between a worker's host pages and its paged KV, in stream order on a GPU.

Saves gather pages in the stream that computed them, so vLLM may reuse the blocks at once: a later write to them is
later in that stream. Loads wait for all work that was in the stream when the load began, because a block's previous
user may still be writing to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tidekv.backends.host.pool import HostPool
from tidekv.engine.integrations.vllm.blocks import PagedBlocks

Wait = Callable[[], int]
"""Waits for a copy; returns how many pages were copied."""


class BlockCopies:
    """Copies whole pages both ways. `read` and `mark` are called on vLLM's thread, `write` on any other one."""

    def __init__(self, blocks: PagedBlocks, host: HostPool) -> None:
        self._blocks = blocks
        self._host = host
        self._on_cuda = blocks.device.type == "cuda"
        if self._on_cuda:
            self._to_host = torch.cuda.Stream(blocks.device)  # type: ignore[no-untyped-call]  # torch has no types for it.
            self._to_device = torch.cuda.Stream(blocks.device)  # type: ignore[no-untyped-call]  # torch has no types for it.

    def read(self, blocks: Sequence[int], pages: Sequence[int]) -> Wait:
        """Start copying the pages that `blocks` form to host pages. The returned call waits for the copy."""
        rows = self._blocks.read(blocks)
        if not self._on_cuda:
            self._host.buffer.index_copy_(0, torch.tensor(pages), rows)
            return pages.__len__
        self._to_host.wait_stream(torch.cuda.current_stream(self._blocks.device))
        with torch.cuda.stream(self._to_host):
            for row, page in zip(rows, pages, strict=True):
                self._host.buffer[page].copy_(row, non_blocking=True)
            rows.record_stream(self._to_host)
            ended = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no types for it.
            ended.record()

        def wait() -> int:
            ended.synchronize()
            return len(pages)

        return wait

    def mark(self) -> torch.cuda.Event | None:
        """Return an event at the current position of the stream, for `write` to wait for."""
        if not self._on_cuda:
            return None
        reached = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no types for it.
        reached.record(torch.cuda.current_stream(self._blocks.device))
        return reached

    def write(self, pages: Sequence[int], blocks: Sequence[int], *, skip: int, after: torch.cuda.Event | None) -> None:
        """Copy host pages to the blocks that they form, without the first `skip`. Returns after the copy."""
        if not self._on_cuda:
            self._blocks.write(self._host.buffer.index_select(0, torch.tensor(pages)), blocks, skip=skip)
            return
        with torch.cuda.device(self._blocks.device), torch.cuda.stream(self._to_device):
            if after is not None:
                self._to_device.wait_event(after)
            shape = (len(pages), self._host.layout.page_bytes)
            rows = torch.empty(shape, dtype=torch.uint8, device=self._blocks.device)
            for row, page in zip(rows, pages, strict=True):
                row.copy_(self._host.buffer[page], non_blocking=True)
            self._blocks.write(rows, blocks, skip=skip)
            self._to_device.synchronize()
