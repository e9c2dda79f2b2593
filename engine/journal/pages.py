"""Page keys for a journal: keyed digests instead of tokens, so that it tells nobody what users wrote.

Each page's digest is over its tokens alone: the index asks pages for equality and for nothing else. It is keyed by the
secret that Python draws for its own hash (SipHash) when a process starts, and that nobody writes anywhere. Without it,
nobody can find out by guessing which prompts were served. Where that hash is no SipHash, or its secret was given from
outside, a keyed hash of hashlib is used under a secret of the run: it costs several times as much.

A prompt that was hashed is remembered by its length and a fingerprint of its keys, not by the keys: those would be read
from far away whenever they are compared, and would hold memory that the engine has just used and could use again.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import struct
import sys
from collections.abc import Callable
from typing import NamedTuple

from xxhash import xxh3_128_digest

DIGEST_BYTES = 8
IS_SECRET = (
    sys.hash_info.algorithm.startswith("siphash")
    and sys.hash_info.width == 8 * DIGEST_BYTES
    and bool(sys.flags.hash_randomization)
    and (bool(sys.flags.ignore_environment) or os.environ.get("PYTHONHASHSEED", "") in ("", "random"))
)
"""Whether Python's hash of bytes is keyed by a secret."""
CONVERSATIONS_MAX = 16
"""So many prompts that begin with the same page are remembered: a conversation grows, and is hashed once."""
REMEMBERED_BYTES_MAX = 8 << 20
"""Some ten thousand prompts of a hundred pages."""
PROMPT_BYTES = 400
"""What a prompt takes beside its digests."""
BLOCK_PAGES = 1024
"""Half a millisecond's work."""
GROUP_PAGES = 64
"""So many pages are hashed by one call."""


SEED = secrets.randbits(64)
"""Of fingerprints, so that nobody can make two prompts that have the same."""


def fingerprint(keys: bytes | memoryview) -> bytes:
    """Tells keys from all others. It stays in this process."""
    return xxh3_128_digest(keys, SEED)


class Prompt(NamedTuple):
    """A prompt whose pages were hashed."""

    keys_bytes: int
    fingerprint: bytes
    written: bytes
    """The digests of its pages, which a journal has in place of its keys."""

    def begins(self, keys: bytes) -> bool:
        """Whether keys begin with those of this prompt."""
        size = self.keys_bytes
        if len(keys) == size:
            return fingerprint(keys) == self.fingerprint
        return len(keys) > size and fingerprint(memoryview(keys)[:size]) == self.fingerprint


class Group(NamedTuple):
    """How so many pages are cut out of a prompt, from a byte on, and their hashes made to bytes."""

    cut: Callable[[bytes, int], tuple[bytes, ...]]
    join: Callable[..., bytes]


class PageDigests:
    """Digests of pages whose keys are `key_bytes` wide."""

    def __init__(self, key_bytes: int, breathe: Callable[[], None] | None = None) -> None:
        """`breathe` is called between every BLOCK_PAGES pages of one prompt that have to be hashed."""
        self._width = key_bytes
        self._breathe = breathe
        self._key = secrets.token_bytes(16)
        self._groups: dict[int, Group] = {}
        self._remembered: dict[bytes, list[Prompt]] = {}
        """By the fingerprint of the first page; the prompt last used is the last one."""
        self._remembered_bytes = 0
        self.hashed = 0
        """Pages that were hashed so far."""

    def of(self, keys: bytes, known: Prompt | None = None, *, pages_max: int = sys.maxsize) -> Prompt | None:
        """Digests of DIGEST_BYTES for each page's key. `known` is a prompt of this object that the keys begin with.

        None, and nothing is done, where more than `pages_max` pages would have to be hashed.
        """
        if known is not None and known.keys_bytes == len(keys):
            return known
        width = self._width
        first_page = fingerprint(keys[:width])
        prompts = self._remembered.get(first_page)
        found = -1
        if prompts:
            if known is not None:
                # Mostly it goes on from the prompt that was asked for last of these.
                found = len(prompts) - 1 if prompts[-1] is known else -1
            else:
                for at in range(len(prompts) - 1, -1, -1):
                    if prompts[at].begins(keys):
                        known, found = prompts[at], at
                        break
        first, digests = (0, b"") if known is None else (known.keys_bytes, known.written)
        new_bytes = len(keys) - first
        if new_bytes > pages_max * width:
            return None
        if known is None or new_bytes:
            if new_bytes:
                digests += self._hash(keys, first)
                self.hashed += new_bytes // width
            known = Prompt(len(keys), fingerprint(keys), digests)
        if keys:
            if prompts is None:
                prompts = self._remembered[first_page] = []
            self._remember(prompts, found, known)
        return known

    def _remember(self, prompts: list[Prompt], found: int, prompt: Prompt) -> None:
        """Put a prompt behind the others that begin with its first page, in place of number `found` (-1: of none)."""
        if found >= 0:
            self._forget(prompts, found)
        elif len(prompts) >= CONVERSATIONS_MAX:
            self._forget(prompts, 0)
        prompts.append(prompt)
        self._remembered_bytes += len(prompt.written) + PROMPT_BYTES
        while self._remembered_bytes > REMEMBERED_BYTES_MAX:
            self._forget_first_page(next(iter(self._remembered)))

    def _forget(self, prompts: list[Prompt], at: int) -> None:
        self._remembered_bytes -= len(prompts.pop(at).written) + PROMPT_BYTES

    def _forget_first_page(self, first: bytes) -> None:
        prompts = self._remembered.pop(first)
        while prompts:
            self._forget(prompts, -1)

    def _hash(self, keys: bytes, first: int) -> bytes:
        """Digests of the pages from byte `first` on."""
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
        # Cut, hashed and joined by one call each: a loop, even one in C over single pages, costs as much as the hashes.
        return group.join(*map(hash, group.cut(keys, first)))

    def _group(self, count: int) -> Group:
        return Group(struct.Struct(f"{self._width}s" * count).unpack_from, struct.Struct(f"<{count}q").pack)
