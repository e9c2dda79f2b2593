"""KV content that can be verified: each byte of a page is a pure function of the page's prefix and of its place.

    byte b of piece i of a page  =  byte b of (pattern[i] XOR key)

`pattern` is fixed for a layout and different in every word of every piece, so a shifted byte, row or piece is detected.
`key` is 64 bits of the digest of the prompt up to and including the page, so a page of another prompt, position or
generation differs in every word. Filling and verifying cost about as much as a copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import Final

import numpy as np
import torch

from tidekv.backends.device.pool import DevicePool
from tidekv.backends.keys.chain import DIGEST_BYTES, TOKEN_BYTES, namespace_seed, page_digests
from tidekv.engine.synthetic.words import Words, mix64, stream64
from tidekv.states.errors import InvalidRequest
from tidekv.states.types import PageIds

WORD_BYTES: Final = 8
# Limits memory: bytes of content generated for one piece of one batch of pages.
BATCH_BYTES: Final = 1 << 20


def prompt_digests(packed: bytes, page_size: int, *, namespace: str = "") -> list[bytes]:
    """Return one digest per page of packed tokens, the last one over a partial page if there is one.

    The digests of full pages are those of the storage tier's page keys. The digest of a partial page covers its tokens:
    when it becomes full its digest changes, and its content must be filled again.
    """
    digests = page_digests(packed, page_size, namespace=namespace)
    tail = packed[len(digests) * page_size * TOKEN_BYTES :]
    if tail:
        previous = digests[-1] if digests else namespace_seed(namespace)
        digests.append(sha256(previous + tail).digest())
    return digests


class SyntheticKV:
    """Fills and verifies pages of one device pool. It holds a pattern of one page's size, and no page."""

    def __init__(self, pool: DevicePool) -> None:
        layout = pool.layout
        self._pool = pool
        self._words = -(-max(layout.pieces) // WORD_BYTES)
        pattern = stream64(np.arange(layout.piece_count, dtype=np.uint64), self._words)
        self._pattern = torch.from_numpy(pattern.view(np.int64)).to(pool.device)
        unit = _widest_unit(pool)
        self._unit = unit
        self._rows = tuple(row.view(unit) for row in pool.rows)

    def fill(self, pages: PageIds | Sequence[int], digests: Sequence[bytes]) -> None:
        """Overwrite each page with the content of its digest, and return with the bytes in place. Pages must be
        distinct.
        """
        for index, keys in self._batches(pages, digests):
            for piece, row in enumerate(self._rows):
                row.index_copy_(0, index, self._content(piece, keys))
        if self._pool.device.type == "cuda":
            # A transfer reads the pages without regard to streams.
            torch.cuda.current_stream(self._pool.device).synchronize()

    def verify(self, pages: PageIds | Sequence[int], digests: Sequence[bytes]) -> list[int]:
        """Compare each page, byte for byte, with the content of its digest.

        Returns the positions in `pages` (not the page ids) of those that differ, in order.
        """
        wrong = []
        for index, keys in self._batches(pages, digests):
            differs = torch.zeros(len(index), dtype=torch.bool, device=index.device)
            for piece, row in enumerate(self._rows):
                differs |= (row.index_select(0, index) != self._content(piece, keys)).any(dim=1)
            wrong.append(differs)
        return torch.cat(wrong).nonzero().flatten().tolist() if wrong else []

    def _content(self, piece: int, keys: torch.Tensor) -> torch.Tensor:
        """Return one piece of each page, shape [len(keys), piece_bytes / unit]."""
        words = torch.bitwise_xor(self._pattern[piece][None, :], keys[:, None])
        return words.view(self._unit)[:, : self._rows[piece].shape[1]]

    def _batches(
        self, pages: PageIds | Sequence[int], digests: Sequence[bytes]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield pages and their keys in batches, after all of them were checked."""
        checked = self._pool.check_pages(pages)
        if len(checked) != len(digests):
            raise InvalidRequest(f"{len(checked)} pages but {len(digests)} digests: each page needs its own")
        index = torch.from_numpy(checked).to(self._pool.device)
        keys = torch.from_numpy(_keys(digests).view(np.int64)).to(self._pool.device)
        batch = max(1, BATCH_BYTES // (self._words * WORD_BYTES))
        for start in range(0, len(checked), batch):
            yield index[start : start + batch], keys[start : start + batch]


def _widest_unit(pool: DevicePool) -> torch.dtype:
    """Choose the widest integer that divides every piece: torch copies and compares bytes one by one."""
    for unit in (torch.int64, torch.int32, torch.int16):
        if all(row.shape[1] % unit.itemsize == 0 and row.storage_offset() % unit.itemsize == 0 for row in pool.rows):
            return unit
    return torch.uint8


def _keys(digests: Sequence[bytes]) -> Words:
    """Fold each digest of 32 bytes to a word that depends on every bit of it."""
    for digest in digests:
        if len(digest) != DIGEST_BYTES:
            raise InvalidRequest(f"a digest has {DIGEST_BYTES} bytes, not {len(digest)}")
    parts = np.frombuffer(b"".join(digests), dtype="<u8").reshape(-1, DIGEST_BYTES // WORD_BYTES)
    keys = np.zeros(len(parts), dtype=np.uint64)
    for column in parts.T:
        keys = mix64(keys ^ column)
    return keys
