"""KV that identifies each head: the content of a page is a function of its prompt and of the head within the model.

Ranks hold slices of the heads. With the prompt known, every byte of every slice can be checked at both ends of a
hand-over, for any number of ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from tidekv.states.types import PageIds, page_ids

if TYPE_CHECKING:
    import numpy.typing as npt

    from tidekv.backends.device.pool import DevicePool
    from tidekv.backends.layout import KVLayout


class HeadPages:
    """Fills and checks the pages of one rank's pool, which holds the heads from `first` on of a model's `total`."""

    def __init__(self, pool: DevicePool, layout: KVLayout, *, first: int, total: int) -> None:
        self._pool = pool
        self._layout = layout
        self._first = first
        self._total = total

    def fill(self, pages: PageIds, digests: Sequence[bytes]) -> None:
        """Overwrite each page with the content of this rank's heads."""
        self._pool.write_pages(pages, torch.from_numpy(np.stack([self._bytes_of(digest) for digest in digests])))

    def wrong(self, pages: PageIds, digests: Sequence[bytes]) -> list[int]:
        """Compare byte for byte; returns the positions of the pages that differ."""
        found = self._pool.read_pages(page_ids(pages)).cpu().numpy()
        return [at for at, digest in enumerate(digests) if not np.array_equal(found[at], self._bytes_of(digest))]

    def _bytes_of(self, digest: bytes) -> npt.NDArray[np.uint8]:
        layout = self._layout
        head_bytes = layout.head_dim * layout.torch_dtype.itemsize
        shape = (layout.piece_count, layout.page_size, self._total, head_bytes)
        stream = hashlib.shake_128(digest).digest(int(np.prod(shape)))
        whole = np.frombuffer(stream, np.uint8).reshape(shape)
        return whole[:, :, self._first : self._first + layout.num_kv_heads].reshape(-1)
