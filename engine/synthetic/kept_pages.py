"""Pages of a synthetic prefill worker: those of prompts being served, and those kept of earlier prompts.

Kept pages are found by the prefix index, as in a prefill worker with a prefix cache. The cost of a prompt grows with
its new part only, so a measurement of decode does not measure the bookkeeping of prefill.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

from tidekv.backends.keys.chain import TOKEN_BYTES, namespace_seed, page_digests
from tidekv.states.errors import InvalidRequest
from tidekv.states.pages.page_pool import PagePool
from tidekv.states.prefix.index import PrefixIndex, Receipt
from tidekv.states.types import PageIds


@dataclass(frozen=True, slots=True, eq=False)
class HeldPages:
    """Pages of a prompt, one for each page of it, the first `known` of which have their content already.

    `digests` are those of the pages after them, the last one over a partial page if there is one.
    """

    pages: PageIds
    known: int
    digests: Sequence[bytes]
    keys: bytes
    receipt: Receipt


class KeptPages:
    """Allocates pages to prompts. `keep=False` keeps nothing, so that every prompt is computed again."""

    def __init__(self, num_pages: int, page_size: int, *, namespace: str = "", keep: bool = True) -> None:
        self._page_size = page_size
        self._seed = namespace_seed(namespace)
        self._keep = keep
        self._pool = PagePool("prefill", num_pages)
        nothing = PagePool("prefill host", 0)
        self._index = PrefixIndex(key_bytes=page_size * TOKEN_BYTES, device=self._pool, host=nothing)
        self._digests = [b""] * num_pages

    def take(self, packed: bytes) -> HeldPages | None:
        """Take pages for a prompt. None if there are too few now; raises InvalidRequest if there can never be enough.

        The page of the last token never counts as known: its computation gives the first token of the answer.
        """
        tokens, width = len(packed) // TOKEN_BYTES, self._page_size * TOKEN_BYTES
        total = -(-tokens // self._page_size)
        if total > self._pool.total:
            raise InvalidRequest(
                f"a prompt of {tokens} tokens needs {total} pages; the prefill pool has {self._pool.total}"
            )
        match = self._index.match("", packed[: (tokens - 1) // self._page_size * width])
        receipt = self._index.lock(match.device_node)
        known = match.device_pages
        short = total - known - self._pool.free
        if short > 0 and self._index.evict_device(short) < short:
            self._index.unlock(receipt)
            return None
        pages = self._index.device_path(match.device_node)
        prefix = self._digests[pages[-1]] if known else self._seed
        pages += self._pool.take(total - known)
        digests = page_digests(packed[known * width :], self._page_size, prefix=prefix)
        for page, digest in zip(pages[known:], digests, strict=False):
            self._digests[page] = digest
        if tail := packed[(known + len(digests)) * width :]:
            digests.append(sha256((digests[-1] if digests else prefix) + tail).digest())
        return HeldPages(pages, known, digests, packed[: tokens // self._page_size * width], receipt)

    def digest_at(self, held: HeldPages, position: int) -> bytes:
        """Return the digest of a held prompt up to and including its page at `position`."""
        known = held.known
        return self._digests[held.pages[position]] if position < known else held.digests[position - known]

    def give_back(self, held: HeldPages, *, computed: int) -> None:
        """Give pages back; the full ones among the first `computed` are kept for later prompts. They must be unused."""
        width = self._page_size * TOKEN_BYTES
        kept = max(held.known, min(computed, len(held.keys) // width)) if self._keep else 0
        if kept > held.known:
            entered = self._index.insert("", held.keys[: kept * width], held.pages[:kept])
            self._pool.give_back(entered.duplicates + entered.rejected)
        self._pool.give_back(held.pages[kept:])
        self._index.unlock(held.receipt)

    def forget(self) -> None:
        """Drop every kept page that no prompt uses."""
        self._index.flush("device")

    def counts(self) -> dict[str, int]:
        """Count pages by state: free, kept (and unused), in use."""
        free, kept = self._pool.free, self._index.device_evictable
        return {"free": free, "kept": kept, "in_use": self._pool.total - free - kept}
