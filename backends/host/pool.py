"""The host pool (L2): whole pages in one stretch of host memory, ready for copies, for NIXL and for direct file I/O."""

from __future__ import annotations

import weakref
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from tidekv.backends.host.pool_file import PoolFile
from tidekv.backends.keys.chain import TOKEN_BYTES
from tidekv.backends.memory import PageIndex, allocate_host_bytes, check_page_count, page_index
from tidekv.backends.page_layout import Layout, group_offsets
from tidekv.states.errors import InvalidConfig, InvalidRequest, OutOfMemory
from tidekv.states.types import PageIds, PoolMemory, Segment
from tidekv.states.validation import unknown


class HostPool:
    """`num_pages` pages of a layout in host memory, page first. Make one with `allocate`.

    `buffer` is the memory as a tensor, `array` as a numpy array: uint8 [num_pages, page_bytes] both, pieces in layout
    order. Page 0 starts at a multiple of 4096; so do the others if page_bytes is one. The pool has no page table and
    does not know the owners of its pages. `file` is that of a lasting pool, which an engine finds its pages in after a
    restart.
    """

    def __init__(self, *, layout: Layout, buffer: torch.Tensor, pinned: bool) -> None:
        self.layout = layout
        self.num_pages = buffer.shape[0]
        self.buffer = buffer
        self.array: npt.NDArray[np.uint8] = buffer.numpy()
        self._page_bytes = layout.page_bytes
        # A slice of this costs half of a view of a numpy row, and pages are requested one by one.
        self._bytes = self.array.reshape(-1).data
        self.pinned = pinned
        self.file: PoolFile | None = None
        self.memory = PoolMemory(
            segments=(
                Segment(
                    address=buffer.data_ptr(),
                    piece_bytes=self._page_bytes,
                    stride_bytes=self._page_bytes,
                    page_count=self.num_pages,
                ),
            ),
            page_count=self.num_pages,
        )

    @classmethod
    def allocate(
        cls, layout: Layout, num_pages: int, pin: bool | None = None, *, path: str | Path | None = None
    ) -> HostPool:
        """Allocate a zeroed, resident pool. `pin` locks it for DMA; None pins if there is a CUDA device.

        With `path` the pool is lasting: its pages are in this file, on a tmpfs such as /dev/shm, on hugetlbfs or on a
        local disk, and an engine with the same model finds them again after a restart. One process at a time has the
        file, until it ends or calls `close`. On a tmpfs it is sparse: memory is taken when a page is first written.

        Raises InvalidConfig for a wrong count, if pinning is not possible, or for a file that is in use or is no pool;
        OutOfMemory if there is not enough.
        """
        check_page_count(num_pages, what="host pool")
        cuda = torch.cuda.is_available()
        if pin and not cuda:
            raise InvalidConfig("host pool: pin=True needs a CUDA device, and torch sees none; leave pin out")
        pinned = cuda if pin is None else pin
        if path is None:
            buffer = allocate_host_bytes(num_pages * layout.page_bytes, what="host pool")
            pool = cls(layout=layout, buffer=buffer.view(num_pages, layout.page_bytes), pinned=pinned)
        else:
            # A key of pairs of tokens has one token more than the page.
            key_bytes_max = TOKEN_BYTES * (layout.page_size + 1)
            file = PoolFile.open(
                Path(path), page_count=num_pages, page_bytes=layout.page_bytes, key_bytes_max=key_bytes_max
            )
            pool = cls(layout=layout, buffer=torch.from_numpy(file.pages), pinned=pinned)
            pool.file = file
        if pinned:
            _pin(pool)
        return pool

    def close(self) -> None:
        """Release the file of a lasting pool, for another process or pool. Nothing may use this pool any more."""
        if self.file is not None:
            self.file.close()
            self.file = None

    def check_pages(self, pages: PageIds | npt.ArrayLike) -> PageIndex:
        """Return the page ids as an index array; InvalidRequest names the first that is not a page of this pool."""
        return page_index(pages, num_pages=self.num_pages, what="host pool")

    def group(self, name: str) -> torch.Tensor:
        """Return one group's bytes of all pages, in place: uint8 [num_pages, bytes of the group].

        The pool keeps ownership of the memory. Raises InvalidConfig, which lists the groups.
        """
        for group, start in group_offsets(self.layout):
            if group.name == name:
                return self.buffer[:, start : start + group.layout.page_bytes]
        names = [group.name for group in self.layout.groups]
        raise InvalidConfig(f"host pool: {unknown(name, names, 'group')}")

    def page(self, page: int) -> memoryview:
        """Return the bytes of one page, in place and writable."""
        if not 0 <= page < self.num_pages:
            raise InvalidRequest(f"host pool has pages 0 to {self.num_pages - 1}; page {page} is not one")
        start = page * self._page_bytes
        return self._bytes[start : start + self._page_bytes]

    def read_pages(self, pages: PageIds | npt.ArrayLike) -> torch.Tensor:
        """Return copies of the pages' bytes: uint8 [n, page_bytes], pieces in layout order."""
        return self.buffer.index_select(0, torch.from_numpy(self.check_pages(pages)))

    def write_pages(self, pages: PageIds | npt.ArrayLike, page_bytes: torch.Tensor) -> None:
        """Overwrite pages with `page_bytes`, uint8 [n, page_bytes] as `read_pages` returns them."""
        index = torch.from_numpy(self.check_pages(pages))
        expected = (len(index), self._page_bytes)
        if page_bytes.dtype != torch.uint8 or tuple(page_bytes.shape) != expected:
            raise InvalidRequest(
                f"host pool: page bytes must be uint8 {list(expected)}, not {page_bytes.dtype} {list(page_bytes.shape)}"
            )
        self.buffer.index_copy_(0, index, page_bytes.cpu())


def _pin(pool: HostPool) -> None:
    """Lock the pool's memory for DMA, for as long as the pool lives.

    Registered in place: torch's own pinned allocator rounds each allocation up to a power of two.
    """
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch has no types for it.
    address, size_bytes = pool.buffer.data_ptr(), pool.buffer.nbytes
    status = int(runtime.cudaHostRegister(address, size_bytes, 0))
    if status != 0:
        raise OutOfMemory(
            f"host pool: {size_bytes} bytes could not be pinned (CUDA error {status}); "
            "raise the limit of locked memory, or pass pin=False"
        )
    # At exit the process releases everything, and CUDA may be gone before this would run.
    weakref.finalize(pool, runtime.cudaHostUnregister, address).atexit = False
