"""Pages of a small prefill worker: those of prompts being served, and those kept of earlier prompts.

A kept page is found by the digest of the prompt up to and including it. It is computed once, read by any number of
prompts that begin with it, and dropped in least-recently-used order when a new prompt needs its place.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from tidekv.backends.keys.chain import TOKEN_BYTES, page_digests
from tidekv.states.errors import InvalidRequest


@dataclass(frozen=True, slots=True, eq=False)
class PromptPages:
    """Pages of a prompt, one for each page of it, the first `known` of which are computed already."""

    pages: Sequence[int]
    known: int
    digests: Sequence[bytes]


class PrefixPages:
    """Allocates pages to prompts. `keep=False` keeps nothing, so that every prompt is computed again."""

    def __init__(self, num_pages: int, page_size: int, *, keep: bool = True) -> None:
        self._page_size = page_size
        self._num_pages = num_pages
        self._keep = keep
        self._free = list(range(num_pages - 1, -1, -1))
        self._kept: OrderedDict[bytes, int] = OrderedDict()
        self._readers: dict[bytes, int] = {}

    def take(self, packed: bytes) -> PromptPages | None:
        """Take pages for a prompt. None if there are too few now; raises InvalidRequest if there can never be enough.

        The page of the last token never counts as known: its computation gives the first token of the answer.
        """
        tokens = len(packed) // TOKEN_BYTES
        total = -(-tokens // self._page_size)
        if total > self._num_pages:
            raise InvalidRequest(
                f"a prompt of {tokens} tokens needs {total} pages; the prefill pool has {self._num_pages}"
            )
        digests = page_digests(packed, self._page_size)
        known = 0
        while known < (tokens - 1) // self._page_size and digests[known] in self._kept:
            known += 1
        read = digests[:known]
        droppable = len(self._kept) - len(self._readers) - sum(digest not in self._readers for digest in read)
        if len(self._free) + droppable < total - known:
            return None
        for digest in read:
            self._readers[digest] = self._readers.get(digest, 0) + 1
            self._kept.move_to_end(digest)
        self._drop(total - known - len(self._free))
        fresh = [self._free.pop() for _ in range(total - known)]
        return PromptPages([*(self._kept[digest] for digest in read), *fresh], known, digests)

    def give_back(self, held: PromptPages, *, computed: int) -> None:
        """Give pages back; the full ones among the first `computed` are kept for later prompts. They must be unused."""
        for position, page in enumerate(held.pages):
            if position < held.known:
                digest = held.digests[position]
                self._readers[digest] -= 1
                if not self._readers[digest]:
                    del self._readers[digest]
            elif self._is_worth_keeping(held, position, computed):
                self._kept[held.digests[position]] = page
            else:
                self._free.append(page)

    def forget(self) -> None:
        """Drop every kept page that no prompt uses."""
        self._drop(len(self._kept) - len(self._readers))

    def counts(self) -> dict[str, int]:
        """Count pages by state: free, kept (and unused), in use."""
        kept = len(self._kept) - len(self._readers)
        return {"free": len(self._free), "kept": kept, "in_use": self._num_pages - len(self._free) - kept}

    def _is_worth_keeping(self, held: PromptPages, position: int, computed: int) -> bool:
        full = position < min(computed, len(held.digests))
        return self._keep and full and held.digests[position] not in self._kept

    def _drop(self, count: int) -> None:
        if count <= 0:
            return
        unread = (digest for digest in list(self._kept) if digest not in self._readers)
        for digest, _ in zip(unread, range(count), strict=False):
            self._free.append(self._kept.pop(digest))
