"""Page keys of a journal: keyed digests instead of tokens, so that a journal does not reveal prompts. Namespaces too.

Each page's digest is over its tokens only: the index compares pages for equality and needs nothing else. The key is the
secret that Python draws for its own hash (SipHash) at the start of a process. It is not written anywhere, and without
it no guess at a prompt can be verified. If Python's hash is not SipHash, or `PYTHONHASHSEED` sets its secret, BLAKE2b
under a secret of the run is used, at several times the cost.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import struct
import sys
from collections.abc import Callable
from typing import NamedTuple

DIGEST_BYTES = 8
IS_SECRET = (
    sys.hash_info.algorithm.startswith("siphash")
    and sys.hash_info.width == 8 * DIGEST_BYTES
    and bool(sys.flags.hash_randomization)
    and (bool(sys.flags.ignore_environment) or os.environ.get("PYTHONHASHSEED", "") in ("", "random"))
)
"""Whether Python's hash of bytes is keyed by a secret."""
CONVERSATIONS_MAX = 16
"""Maximum prompts remembered by one first page: a growing conversation is hashed once."""
REMEMBERED_BYTES_MAX = 32 << 20
BLOCK_PAGES = 1024
"""Pages hashed between two pauses: half a millisecond."""
GROUP_PAGES = 64
"""Pages hashed by one call."""


class PageCodecs(NamedTuple):
    """Codecs for a number of pages: one cuts them out of a prompt at an offset, one packs their hashes."""

    cut: Callable[[bytes, int], tuple[bytes, ...]]
    join: Callable[..., bytes]


class PageDigests:
    """Digests of pages with keys of `key_bytes` bytes."""

    def __init__(self, key_bytes: int, breathe: Callable[[], None] | None = None) -> None:
        """`breathe` is called between every BLOCK_PAGES pages of one prompt that have to be hashed."""
        self._width = key_bytes
        self._breathe = breathe
        self._key = secrets.token_bytes(16)
        self._groups: dict[int, PageCodecs] = {}
        self._remembered: dict[bytes, list[tuple[bytes, bytes]]] = {}
        """By first page: keys and digests of prompts, the last used one last."""
        self._remembered_bytes = 0
        self.hashed = 0
        """Number of pages hashed so far."""

    def of(self, keys: bytes, known: bytes = b"") -> bytes:
        """Return one digest of DIGEST_BYTES for each page's key. `known` are those of the first pages."""
        if not keys:
            return b""
        first_page = keys[: self._width]
        prompts = self._remembered.get(first_page)
        found = -1
        if prompts:
            if known:
                # Usually it continues the most recently used prompt of these.
                found = len(prompts) - 1 if prompts[-1][1] is known else -1
            else:
                for at in range(len(prompts) - 1, -1, -1):
                    if keys.startswith(prompts[at][0]):
                        known, found = prompts[at][1], at
                        break
        first = len(known) // DIGEST_BYTES * self._width
        digests = known
        if len(keys) > first:
            digests += self._hash(keys, first)
            self.hashed += (len(keys) - first) // self._width
        if prompts is None:
            prompts = self._remembered[first_page] = []
        self._remember(prompts, found, keys, digests)
        return digests

    def of_rest(self, rest: bytes) -> bytes:
        """Return the digest of the tokens behind the last full page; nothing if there are none."""
        if not rest or not IS_SECRET:
            return rest and hashlib.blake2b(rest, digest_size=DIGEST_BYTES, key=self._key).digest()
        return struct.pack("<q", hash(rest))

    def of_namespace(self, namespace: str) -> str:
        """Return a digest that stands for a namespace; nothing for the one without a name. The name itself, in which
        a vLLM request's `cache_salt` is, would let a reader of the journal ask for what is cached there.
        """
        text = namespace.encode(errors="surrogatepass")
        return namespace and hashlib.blake2b(text, digest_size=DIGEST_BYTES, key=self._key).hexdigest()

    def _remember(self, prompts: list[tuple[bytes, bytes]], found: int, keys: bytes, digests: bytes) -> None:
        """Append a prompt to the others with the same first page, and remove number `found` (-1: none)."""
        if found >= 0:
            self._forget(prompts, found)
        elif len(prompts) >= CONVERSATIONS_MAX:
            self._forget(prompts, 0)
        prompts.append((keys, digests))
        self._remembered_bytes += len(keys) + len(digests)
        while self._remembered_bytes > REMEMBERED_BYTES_MAX:
            self._forget_first_page(next(iter(self._remembered)))

    def _forget(self, prompts: list[tuple[bytes, bytes]], at: int) -> None:
        keys, digests = prompts.pop(at)
        self._remembered_bytes -= len(keys) + len(digests)

    def _forget_first_page(self, first: bytes) -> None:
        prompts = self._remembered.pop(first)
        while prompts:
            self._forget(prompts, -1)

    def _hash(self, keys: bytes, first: int) -> bytes:
        """Return digests of the pages from byte `first` on."""
        block_bytes = BLOCK_PAGES * self._width
        if len(keys) - first <= block_bytes:
            return self._hash_block(keys, first, len(keys))
        blocks = []
        for at in range(first, len(keys), block_bytes):
            blocks.append(self._hash_block(keys, at, min(at + block_bytes, len(keys))))
            if self._breathe is not None:
                self._breathe()
        return b"".join(blocks)

    def _hash_block(self, keys: bytes, first: int, end: int) -> bytes:
        width = self._width
        if not IS_SECRET:
            key = self._key
            pages = [keys[at : at + width] for at in range(first, end, width)]
            return b"".join([hashlib.blake2b(page, digest_size=DIGEST_BYTES, key=key).digest() for page in pages])
        whole = GROUP_PAGES * width
        if end - first <= whole:
            return self._hash_group(keys, first, (end - first) // width)
        return b"".join([self._hash_group(keys, at, min(whole, end - at) // width) for at in range(first, end, whole)])

    def _hash_group(self, keys: bytes, first: int, count: int) -> bytes:
        group = self._groups.get(count)
        if group is None:
            group = self._groups[count] = self._group(count)
        # One call each to cut, hash and join: a loop over pages, even in C, costs as much as the hashes.
        return group.join(*map(hash, group.cut(keys, first)))

    def _group(self, count: int) -> PageCodecs:
        return PageCodecs(struct.Struct(f"{self._width}s" * count).unpack_from, struct.Struct(f"<{count}q").pack)
