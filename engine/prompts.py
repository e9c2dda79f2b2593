"""Digests of prompts for embedders: how prefill says which prompt it has computed."""

from __future__ import annotations

from tidekv.backends.keys.chain import Tokens, namespace_seed, pack_tokens
from tidekv.backends.keys.namespaces import join_namespaces
from tidekv.states.handover.prompt_digest import PromptDigest, digest_of
from tidekv.states.validation import PlainText, checked

__all__ = ["PromptDigest", "prompt_digest"]


def prompt_digest(
    tokens: Tokens, *, namespace: str = "", lora_name: str = "", engine_namespace: str = ""
) -> PromptDigest:
    """Return the digest of a prompt, by which prefill asks for the prompt's room and decode promises it.

    `tokens` are the whole prompt, in a form that `DecodeRequest` takes; `namespace` and `lora_name` are those of the
    request, and `engine_namespace` that of the decode workers' `EngineConfig`. Costs about a millisecond for 100,000
    tokens, and may be called on any thread. Raises InvalidRequest.
    """
    joined = join_namespaces(
        checked(engine_namespace, PlainText, "engine_namespace"),
        checked(namespace, PlainText, "namespace"),
        checked(lora_name, PlainText, "lora_name"),
    )
    return digest_of(pack_tokens(tokens), namespace_seed(joined))
