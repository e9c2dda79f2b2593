"""What both ends derive from a request of SGLang: its tokens, its namespace, the digest of its prompt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any  # SGLang's requests have no types.
from uuid import uuid4

import msgspec
import numpy as np

from tidekv.backends.keys.chain import namespace_seed, pack_tokens
from tidekv.states.handover.prompt_digest import PromptDigest, digest_of

if TYPE_CHECKING:
    # The plugin imports this module in all of SGLang's processes.
    from tidekv.engine.integrations.sglang.handover.ranks import Ranks


def packed_prompt(request: Any) -> bytes:
    """Return the tokens that prefill computes, as packed little-endian u32. Raises InvalidRequest.

    A request that prefill computes again after a retraction has its output among them.
    """
    tokens = _as_array(request.origin_input_ids)
    if getattr(request, "pd_rebootstrap_in_progress", False):
        tokens = np.concatenate((tokens, _as_array(request.output_ids)))
    return pack_tokens(tokens)


def packed_tokens(request: Any, count: int) -> bytes:
    """Return the first `count` tokens of prompt and output."""
    return pack_tokens(_as_array(request.full_untruncated_fill_ids[:count]))


def _as_array(tokens: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.asarray(tokens, dtype=np.int64)


def namespace_of(request: Any, reset_salt: str = "") -> str:
    """Return the namespace of a request's pages on this server: its key, which has the adapter, and its salt."""
    parts = [request.extra_key or "", request.cache_salt or "", reset_salt]
    return json.dumps(parts) if any(parts) else ""


class PageNamespaces:
    """The namespaces of pages on one server, which other weights change."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._salt = ""

    def of(self, request: Any) -> str:
        """Return the namespace of a request's pages now."""
        return namespace_of(request, self._salt)

    def rename(self, weight_version: str | None) -> None:
        """Name pages otherwise from now on: other weights give other KV for the same tokens. On all ranks alike."""
        self._salt = self._ranks.share(uuid4().hex) if weight_version is None else f"weights {weight_version}"


def rename_before_flush(updater: Any, received: Any, *more: Any, **named: Any) -> None:
    """Name pages otherwise. Runs before SGLang's `flush_cache_after_weight_update`, unless that keeps the cache."""
    names = getattr(updater.scheduler, "tidekv_names", None)
    if names is not None and received.flush_cache:
        names.rename(received.weight_version)


def digest_of_prompt(request: Any, packed: bytes) -> PromptDigest:
    """Return the digest by which both ends name a prompt.

    SGLang ends a request's key with the number of its adapter, which each server draws for itself, so that is left out.
    """
    key, adapter = request.extra_key or "", request.lora_id or ""
    parts = [key.removesuffix(adapter), request.cache_salt or ""]
    return digest_of(packed, namespace_seed(json.dumps(parts) if any(parts) else ""))


def hints_of(request: Any) -> dict[str, object] | None:
    """Return the KV hints of a request as a map; None for none, and in versions of SGLang that have none."""
    envelope = getattr(request, "kv_hints", None)
    return None if envelope is None else msgspec.to_builtins(envelope)


def can_recompute(request: Any) -> bool:
    """Whether SGLang's request for a retracted prompt, which has tokens and sampling only, gives the same first token
    and its row.
    """
    named = ("return_logprob", "grammar", "multimodal_inputs", "lora_id", "custom_logit_processor", "input_embeds")
    return not any(getattr(request, name, None) for name in named)
