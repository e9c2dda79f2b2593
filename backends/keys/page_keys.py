"""Keys of the full pages of a prompt, for the core and for storage: from their tokens, or from pairs of tokens.

A draft model of the EAGLE family computes its KV at a position from the target's hidden state there and from the *next*
token. So the draft part of a page depends on one token more than the page has, and two prompts that diverge right
behind a page must not share it. With `bigrams` a page's key therefore includes the token after it:

    tokens        0 1 2 3 | 4 5 6 7 | 8 …          page_size 4
    the core      0 1 2 3 4   4 5 6 7 8            width page_size + 1: page and next token
    storage       (0 1)(1 2)(2 3)(3 4) | …         SHA-256 over pairs, as SGLang's HiCache does for EAGLE

A page whose next token is unknown has no key yet. Of a prompt of n tokens (n - 1) // page_size pages have one, so the
page that ends with the prompt is always sent by prefill: its draft KV depends on the first token of the answer.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from tidekv.backends.keys.chain import TOKEN_BYTES, page_digests


class PageKeys:
    """Makes keys of pages from packed tokens, and tokens from keys. Holds no prompt."""

    __slots__ = ("bigrams", "key_bytes", "page_size")

    def __init__(self, page_size: int, *, bigrams: bool = False) -> None:
        self.page_size: Final = page_size
        self.bigrams: Final = bigrams
        self.key_bytes: Final = TOKEN_BYTES * (page_size + (1 if bigrams else 0))

    def count(self, known_tokens: int, kept_tokens: int | None = None) -> int:
        """Return how many full pages have a key if this many tokens are known; of the first `kept_tokens`, if given."""
        named = max(known_tokens - 1, 0) if self.bigrams else known_tokens
        return (named if kept_tokens is None else min(named, kept_tokens)) // self.page_size

    def of(self, packed: bytes, kept_tokens: int | None = None) -> bytes:
        """Return the core's keys of these pages, in order, `key_bytes` each."""
        count, width = self.count(len(packed) // TOKEN_BYTES, kept_tokens), TOKEN_BYTES * self.page_size
        if not self.bigrams:
            return packed[: count * width]
        if not count:
            return b""
        ids = np.frombuffer(packed, "<u4", count=count * self.page_size + 1)
        windows = np.lib.stride_tricks.sliding_window_view(ids, self.page_size + 1)
        return windows[:: self.page_size].tobytes()

    def tokens_of(self, keys: bytes) -> bytes:
        """Return the packed tokens of consecutive keys of the core."""
        if not self.bigrams or not keys:
            return keys
        ids = np.frombuffer(keys, "<u4").reshape(-1, self.page_size + 1)
        return ids[:, :-1].tobytes() + ids[-1, -1:].tobytes()

    def digests(self, packed: bytes, *, first: int = 0, end: int | None = None, prefix: bytes = b"") -> list[bytes]:
        """Return the storage keys of pages [first, end) of packed tokens, or of all that have one. `prefix` is the
        digest of page `first - 1`, or the seed of the prompt's namespace.
        """
        width = TOKEN_BYTES * self.page_size
        stop = len(packed) if end is None else end * width + (TOKEN_BYTES if self.bigrams else 0)
        return page_digests(packed[first * width : stop], self.page_size, prefix=prefix, bigrams=self.bigrams)
