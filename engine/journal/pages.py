"""Page keys for a journal: keyed digests instead of tokens, so that it tells nobody what users wrote.

Each page's digest is over its tokens alone: the index asks pages for equality and for nothing else. The key is made for
one run and never written: without it, nobody can find out by guessing which prompts were served.
"""

from __future__ import annotations

import hashlib
import secrets

DIGEST_BYTES = 8
CHUNK_PAGES = 16
"""So many pages are looked up at once: conversations repeat their prompts turn by turn."""
REMEMBERED_BYTES_MAX = 16 << 20


class PageDigests:
    """Digests of pages whose keys are `key_bytes` wide."""

    def __init__(self, key_bytes: int) -> None:
        self._width = key_bytes
        self._key = secrets.token_bytes(32)
        self._remembered: dict[bytes, bytes] = {}
        self._remembered_max = max(1, REMEMBERED_BYTES_MAX // (CHUNK_PAGES * (key_bytes + DIGEST_BYTES) + 200))

    def of(self, keys: bytes) -> bytes:
        """One digest of DIGEST_BYTES for each page's key."""
        remembered = self._remembered
        chunk_bytes = CHUNK_PAGES * self._width
        digests = []
        for at in range(0, len(keys), chunk_bytes):
            chunk = keys[at : at + chunk_bytes]
            known = remembered.get(chunk)
            if known is None:
                known = self._hash(chunk)
                if len(chunk) == chunk_bytes:
                    if len(remembered) >= self._remembered_max:
                        del remembered[next(iter(remembered))]
                    remembered[chunk] = known
            digests.append(known)
        return b"".join(digests)

    def _hash(self, keys: bytes) -> bytes:
        width, key, blake2b = self._width, self._key, hashlib.blake2b
        # The key in front is a sound keyed hash with BLAKE2, and costs a block less than its key parameter.
        return b"".join(
            [
                blake2b(key + keys[at : at + width], digest_size=DIGEST_BYTES).digest()
                for at in range(0, len(keys), width)
            ]
        )
