"""One prompt for tests that hand over pages without caring which prompt they are of."""

from __future__ import annotations

from tidekv.states.handover.prompt_digest import PromptDigest, digest_of

PROMPT = digest_of(b"", b"")
DIGEST = PROMPT.digest
OTHER = digest_of(b"\1\0\0\0", b"")

__all__ = ["DIGEST", "OTHER", "PROMPT", "PromptDigest"]
