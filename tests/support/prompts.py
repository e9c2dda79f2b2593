"""Prompts: one for tests that hand over pages of any prompt, and drawn ones."""

from __future__ import annotations

import torch

from tidekv.states.handover.prompt_digest import PromptDigest, digest_of

PROMPT = digest_of(b"", b"")
DIGEST = PROMPT.digest
OTHER = digest_of(b"\1\0\0\0", b"")

__all__ = ["DIGEST", "OTHER", "PROMPT", "PromptDigest", "drawn_prompt"]


def drawn_prompt(length: int, seed: int, *, vocabulary: int = 64) -> list[int]:
    """Return token ids below `vocabulary`; equal seeds give equal prompts."""
    source = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(0, vocabulary, (length,), generator=source).tolist()
    return tokens
