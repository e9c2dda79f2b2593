"""Copies between a worker's host pages and its paged KV, in stream order on a GPU.

What is saved is gathered in the stream that computed it, so vLLM may hand its blocks on at once: whatever overwrites
them comes later in that stream. What is loaded waits for the work that the stream had when the load was started: nobody
uses the blocks any more whose last writer may still run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tidekv.backends.host import HostPool
from tidekv.engine.integrations.vllm_blocks import PagedBlocks

Wait = Callable[[], int]
"""Waits for a copy; returns how many pages it had."""


class BlockCopies:
    """Moves whole pages both ways. `read` and `mark` belong to vLLM's thread, `write` to any other one."""

    def __init__(self, blocks: PagedBlocks, host: HostPool) -> None:
        self._blocks = blocks
        self._host = host
        self._on_cuda = blocks.device.type == "cuda"
        if self._on_cuda:
            self._to_host = torch.cuda.Stream(blocks.device)  # type: ignore[no-untyped-call]  # torch has no types for it.
            self._to_device = torch.cuda.Stream(blocks.device)  # type: ignore[no-untyped-call]  # torch has no types for it.

    def read(self, blocks: Sequence[int], pages: Sequence[int]) -> Wait:
        """Start to copy the pages that `blocks` make to host pages; the returned call waits until they are there."""
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
        """Return the point that the current stream has reached, for `write` to wait for."""
        if not self._on_cuda:
            return None
        reached = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no types for it.
        reached.record(torch.cuda.current_stream(self._blocks.device))
        return reached

    def write(self, pages: Sequence[int], blocks: Sequence[int], *, skip: int, after: torch.cuda.Event | None) -> None:
        """Copy host pages to the blocks they make, all but the first `skip`; returns once they are there."""
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
