"""Storage keys of prompts: hashes the pages of each prompt once, for decode requests, puts and prefill workers.

A key names the whole prefix up to the end of its page, so prompts with the same namespace and the same first pages have
the same first keys. `PromptKeys` remembers the keys of recent prompts in bounded memory, and a `Prompt` that extends
one of them hashes its new pages only. What is forgotten is hashed again; keys never depend on what is remembered.

Three components do without it. The KV events name nodes of the prefix tree, in a thread of their own and without the
prompts above them. The journal uses keyed digests of single pages, which do not reveal prompts. The scheduler side of
vLLM runs in another process and keeps the keys of a request for its life, which grows by a page every few steps.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from tidekv.backends.keys.chain import TOKEN_BYTES

if TYPE_CHECKING:
    from tidekv.backends.keys.page_keys import PageKeys

HASH_INLINE_BYTES = 64 * 1024
"""Maximum token bytes hashed on the loop; more would stall it for longer than a thread switch costs."""
PROMPTS_MAX = 8
"""Maximum prompts remembered by one first page: turns of one conversation, users of one system prompt."""
REMEMBERED_BYTES_MAX = 32 << 20
DIGEST_MEMORY_BYTES = 88
"""Memory of one digest, as an object of its own, and of its place in a list."""
PROMPT_MEMORY_BYTES = 192
"""Memory of the objects of one prompt, without its tokens and digests."""
FIRST_PAGE_MEMORY_BYTES = 320
"""Memory of the entry for one first page, without its tokens."""


class Prompt:
    """Packed tokens of one prompt, and the storage keys of its first pages as far as they were needed. `behind`: the
    tokens after them that are known, which with bigrams name a last page that the prompt fills.
    """

    __slots__ = ("_digests", "_owner", "behind", "packed", "seed")

    def __init__(self, owner: PromptKeys, packed: bytes, seed: bytes, behind: bytes = b"") -> None:
        self.packed = packed
        self.behind = behind
        self.seed = seed
        """Start of the chain of keys: see `namespace_seed`."""
        self._owner = owner
        self._digests: list[bytes] = []

    def extend(self, packed: bytes) -> None:
        """Replace the tokens by longer ones that begin with the present ones."""
        self.packed, self.behind = packed, b""

    async def digests(self, first: int, count: int) -> list[bytes]:
        """Return the storage keys of pages [first, first + count), all of which the tokens fill.

        Only pages that neither this prompt nor its owner knows are hashed, in a thread if they are many.
        """
        end, named = first + count, self.packed + self.behind
        if not self._digests:
            self._digests = self._owner.known(self.seed, named)
        start = len(self._digests)
        while (known := len(self._digests)) < end:
            prefix = self._digests[-1] if known else self.seed
            page_keys = self._owner.page_keys
            hash_pages = partial(page_keys.digests, named, first=known, end=end, prefix=prefix)
            is_short = (end - known) * page_keys.key_bytes <= HASH_INLINE_BYTES
            digests = hash_pages() if is_short else await asyncio.to_thread(hash_pages)
            # Another call may have hashed the same pages while this one was in its thread.
            if len(self._digests) == known:
                self._digests += digests
        if len(self._digests) > start:
            self._owner.remember(self.seed, named, self._digests)
        return self._digests[first:end]


class PromptKeys:
    """Keys of the recent prompts of one engine. Use it on one loop only."""

    def __init__(self, page_keys: PageKeys) -> None:
        self.page_keys = page_keys
        self.memory_bytes = 0
        """Upper estimate of the memory of everything that is remembered."""
        self._page_bytes = TOKEN_BYTES * page_keys.page_size
        # With bigrams, the key of a page includes the token after it.
        self._more_bytes = page_keys.key_bytes - self._page_bytes
        self._recent: dict[tuple[bytes, bytes], list[tuple[bytes, list[bytes]]]] = {}
        """Tokens and digests of prompts, by seed and first page; the last used is last, in the dict and in each list.
        """

    def __len__(self) -> int:
        return sum(len(prompts) for prompts in self._recent.values())

    def prompt(self, packed: bytes, seed: bytes, behind: bytes = b"") -> Prompt:
        """Return a prompt with these tokens, whose chain of keys begins with `seed`. `behind`: see Prompt."""
        return Prompt(self, packed, seed, behind)

    def known(self, seed: bytes, packed: bytes) -> list[bytes]:
        """Return the remembered keys of the first pages of a prompt; the caller owns the list."""
        longest: list[bytes] = []
        for tokens, digests in reversed(self._recent.get((seed, self._pages(packed, 1)), ())):
            if len(digests) > len(longest):
                shared = self._shared_pages(packed, tokens, len(digests))
                if shared > len(longest):
                    longest = digests[:shared]
        return longest

    def remember(self, seed: bytes, packed: bytes, digests: list[bytes]) -> None:
        """Remember the keys of the first pages of a prompt, in place of those of a prompt that it extends."""
        first = (seed, self._pages(packed, 1))
        if first not in self._recent:
            self.memory_bytes += FIRST_PAGE_MEMORY_BYTES + len(first[1])
        prompts = self._recent.pop(first, [])
        self._recent[first] = prompts
        for at, (_, known) in enumerate(prompts):
            if len(known) <= len(digests) and known[-1] == digests[len(known) - 1]:
                self._forget(prompts, at)
                break
        if len(prompts) >= PROMPTS_MAX:
            self._forget(prompts, 0)
        prompts.append((packed, list(digests)))
        self.memory_bytes += _memory_bytes(packed, digests)
        while self.memory_bytes > REMEMBERED_BYTES_MAX:
            oldest = next(iter(self._recent))
            self._forget(self._recent[oldest], 0)
            if not self._recent[oldest]:
                del self._recent[oldest]
                self.memory_bytes -= FIRST_PAGE_MEMORY_BYTES + len(oldest[1])

    def _forget(self, prompts: list[tuple[bytes, list[bytes]]], at: int) -> None:
        self.memory_bytes -= _memory_bytes(*prompts.pop(at))

    def _pages(self, packed: bytes, count: int) -> bytes:
        """Return the bytes that the keys of the first `count` pages are computed from."""
        return packed[: count * self._page_bytes + self._more_bytes]

    def _shared_pages(self, packed: bytes, tokens: bytes, count: int) -> int:
        """Return how many first pages of a prompt equal those of another, of whose pages `count` have keys. Both share
        their first page.
        """
        # By bisection, since equality costs one memcmp.
        low, high = 1, min((len(packed) - self._more_bytes) // self._page_bytes, count)
        if tokens.startswith(self._pages(packed, high)):
            return high
        while low < high:
            middle = (low + high + 1) // 2
            if tokens.startswith(self._pages(packed, middle)):
                low = middle
            else:
                high = middle - 1
        return low


def _memory_bytes(packed: bytes, digests: list[bytes]) -> int:
    return PROMPT_MEMORY_BYTES + len(packed) + DIGEST_MEMORY_BYTES * len(digests)
