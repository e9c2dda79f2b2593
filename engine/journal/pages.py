"""Page keys for a journal: keyed digests instead of tokens, so that it tells nobody what users wrote.

Each page's digest is over its tokens alone: the index asks pages for equality and for nothing else. It is keyed twice,
by the secret that Python's own hash (SipHash) draws for each process, and by bytes that are drawn for each run and go
in front; neither is ever written. Without them, nobody can find out by guessing which prompts were served. A proper
keyed hash from hashlib costs five times as much, most of it in the call; it is used where Python's hash is no SipHash.
"""

from __future__ import annotations

import hashlib
import secrets
import sys
from array import array

DIGEST_BYTES = 8
IS_SIPHASH = sys.hash_info.algorithm.startswith("siphash") and sys.hash_info.width == 8 * DIGEST_BYTES
CONVERSATIONS_MAX = 16
"""So many prompts that begin with the same page are remembered: a conversation grows, and is hashed once."""
REMEMBERED_BYTES_MAX = 32 << 20


class PageDigests:
    """Digests of pages whose keys are `key_bytes` wide."""

    def __init__(self, key_bytes: int) -> None:
        self._width = key_bytes
        self._key = secrets.token_bytes(16)
        self._remembered: dict[bytes, list[tuple[bytes, bytes]]] = {}
        """By first page: keys and digests of prompts, the last used one last."""
        self._remembered_bytes = 0

    def of(self, keys: bytes, known: bytes = b"") -> bytes:
        """One digest of DIGEST_BYTES for each page's key. `known` are those of the first pages."""
        if not keys:
            return b""
        prompts = self._remembered.setdefault(keys[: self._width], [])
        at = 0
        if not known:
            for at in range(len(prompts) - 1, -1, -1):
                if keys.startswith(prompts[at][0]):
                    known = prompts[at][1]
                    self._forget(prompts, at)
                    break
        digests = known + self._hash(keys[len(known) // DIGEST_BYTES * self._width :])
        if len(prompts) >= CONVERSATIONS_MAX:
            self._forget(prompts, 0)
        prompts.append((keys, digests))
        self._remembered_bytes += len(keys) + len(digests)
        while self._remembered_bytes > REMEMBERED_BYTES_MAX:
            self._forget_first_page(next(iter(self._remembered)))
        return digests

    def _forget(self, prompts: list[tuple[bytes, bytes]], at: int) -> None:
        keys, digests = prompts.pop(at)
        self._remembered_bytes -= len(keys) + len(digests)

    def _forget_first_page(self, first: bytes) -> None:
        prompts = self._remembered.pop(first)
        while prompts:
            self._forget(prompts, -1)

    def _hash(self, keys: bytes) -> bytes:
        width, key = self._width, self._key
        if not IS_SIPHASH:
            pages = [key + keys[at : at + width] for at in range(0, len(keys), width)]
            return b"".join([hashlib.blake2b(page, digest_size=DIGEST_BYTES).digest() for page in pages])
        return array("q", [hash(key + keys[at : at + width]) for at in range(0, len(keys), width)]).tobytes()
