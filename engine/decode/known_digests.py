"""Cache of recent prompts' page keys, so that an extended prompt hashes only its new pages.

A key names a whole prefix, so prompts with the same namespace and the same first pages share their first keys. Prompts
are looked up by their first page, newest first. What was evicted from the cache is hashed again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tidekv.backends.keys.chain import TOKEN_BYTES

if TYPE_CHECKING:
    from tidekv.backends.keys.page_keys import PageKeys

PROMPTS_MAX = 8
"""Maximum prompts that begin with the same page: turns of one conversation, or users of one system prompt."""
REMEMBERED_BYTES_MAX = 32 << 20
DIGEST_MEMORY_BYTES = 88
"""Memory of one digest, as an object of its own, and of its place in a list."""
PROMPT_MEMORY_BYTES = 192
"""Memory of the objects of one prompt, without its tokens and digests."""
FIRST_PAGE_MEMORY_BYTES = 320
"""Memory of the entry for one first page, without its tokens."""


class Known(NamedTuple):
    """A prompt, and the keys of its first pages."""

    packed: bytes
    digests: list[bytes]

    @property
    def memory_bytes(self) -> int:
        """Memory that it takes."""
        return PROMPT_MEMORY_BYTES + len(self.packed) + DIGEST_MEMORY_BYTES * len(self.digests)


class KnownDigests:
    """The cache of one engine. Used on the loop only."""

    def __init__(self, page_keys: PageKeys) -> None:
        self._page_bytes = TOKEN_BYTES * page_keys.page_size
        # A page that is named by pairs of tokens needs the token behind it.
        self._more_bytes = page_keys.key_bytes - self._page_bytes
        self._prompts: dict[tuple[bytes, bytes], list[Known]] = {}
        """By seed and first page; the most recently used is last, in both."""
        self._bytes = 0

    @property
    def memory_bytes(self) -> int:
        """Memory of the whole cache, estimated from above."""
        return self._bytes

    def __len__(self) -> int:
        return sum(len(prompts) for prompts in self._prompts.values())

    def of(self, seed: bytes, packed: bytes) -> list[bytes]:
        """Return the keys of the first pages of a prompt, as many as are known; the caller owns the list."""
        prompts = self._prompts.get((seed, self._pages(packed, 1)), ())
        longest: list[bytes] = []
        for known in reversed(prompts):
            if len(known.digests) > len(longest):
                shared = self._shared_pages(packed, known)
                if shared > len(longest):
                    longest = known.digests[:shared]
        return longest

    def remember(self, seed: bytes, packed: bytes, digests: list[bytes]) -> None:
        """Add the keys of the first pages of a prompt; they replace those of a prompt that it extends."""
        first = (seed, self._pages(packed, 1))
        if first not in self._prompts:
            self._bytes += FIRST_PAGE_MEMORY_BYTES + len(first[1])
        prompts = self._prompts.pop(first, [])
        self._prompts[first] = prompts
        for at, known in enumerate(prompts):
            if len(known.digests) <= len(digests) and known.digests[-1] == digests[len(known.digests) - 1]:
                self._bytes -= prompts.pop(at).memory_bytes
                break
        if len(prompts) >= PROMPTS_MAX:
            self._bytes -= prompts.pop(0).memory_bytes
        known = Known(packed, list(digests))
        prompts.append(known)
        self._bytes += known.memory_bytes
        while self._bytes > REMEMBERED_BYTES_MAX:
            oldest = next(iter(self._prompts))
            self._bytes -= self._prompts[oldest].pop(0).memory_bytes
            if not self._prompts[oldest]:
                del self._prompts[oldest]
                self._bytes -= FIRST_PAGE_MEMORY_BYTES + len(oldest[1])

    def _pages(self, packed: bytes, count: int) -> bytes:
        """Return the bytes that the keys of the first `count` pages are made of."""
        return packed[: count * self._page_bytes + self._more_bytes]

    def _shared_pages(self, packed: bytes, known: Known) -> int:
        """Count the first pages that a prompt shares with a known one, by bisection: equality costs one memcmp."""
        low, high = 1, min((len(packed) - self._more_bytes) // self._page_bytes, len(known.digests))
        if known.packed.startswith(self._pages(packed, high)):
            return high
        while low < high:
            middle = (low + high + 1) // 2
            if known.packed.startswith(self._pages(packed, middle)):
                low = middle
            else:
                high = middle - 1
        return low
