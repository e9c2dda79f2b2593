"""Digest of a prompt, by which prefill and decode know that they mean the same one.

Ids of requests and rooms are names that others choose: routers count per decode worker, retries use an id again, and a
client may send two prompts under one name. So the name finds a room, and the digest decides whether the room is that of
the prompt which prefill has computed.
"""

from __future__ import annotations

import hmac
from typing import Final

import msgspec

DIGEST_BYTES: Final = 32
PURPOSE: Final = b"tidekv-prompt-2"
"""Keeps these digests apart from all others: increase the number when their input changes."""


class PromptDigest(msgspec.Struct, frozen=True):
    """Length and digest of a prompt. Equal ones are of equal tokens in equal namespaces."""

    prompt_tokens: int
    digest: bytes

    def __repr__(self) -> str:
        return f"PromptDigest({self.prompt_tokens} tokens, {self.digest[:4].hex()}…)"


def digest_of(packed: bytes, seed: bytes) -> PromptDigest:
    """Return the digest of packed tokens, keyed by the seed of their namespace (empty, or 32 bytes)."""
    # Of the tokens and not of the chain of page keys: one call hashes them three times as fast as page by page, and a
    # request that uses no storage has no chain. SHA-256 as there, for which processors have instructions.
    return PromptDigest(len(packed) // 4, hmac.digest(seed + PURPOSE, packed, "sha256"))
