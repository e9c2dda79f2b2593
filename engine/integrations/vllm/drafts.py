"""vLLM's drafts: which keep KV in the blocks of the full KV, and which tokens that of a position depends on.

The layers of a draft are in the group of the full KV. A draft of the EAGLE family computes its KV of a position from
the *next* token, too: what a block has behind its last token depends on the block after it. Blocks are then named by
pairs of tokens: one is found only for a prompt that goes on as the prompt did for which it was computed. vLLM, whose
own names do not tell, computes the last block of each hit again.
"""

from __future__ import annotations

from typing import Any, Final  # vLLM's configuration is not typed here: tests and type checks go without vLLM.

from tidekv.states.errors import InvalidConfig

DRAFTS_WITHOUT_KV: Final = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")
"""vLLM's names of the ways to speculate that keep no KV."""
DRAFTS: Final = ("draft_model", "dflash", "dspark")
"""Drafts whose KV of a position depends on the tokens up to it, as that of the model does."""
NEXT_TOKEN_DRAFTS: Final = ("eagle", "eagle3", "mtp")
"""Drafts whose KV of a position depends on the token after it, too."""


def depends_on_next_token(speculative: Any) -> bool:
    """Whether blocks are to be named by pairs of tokens. `speculative`: vLLM's configuration of a draft; None without.

    Raises InvalidConfig, which names the draft, for one whose KV cannot leave vLLM or enter it.
    """
    if speculative is None or speculative.method in (*DRAFTS_WITHOUT_KV, *DRAFTS):
        return False
    method = speculative.method
    if method not in NEXT_TOKEN_DRAFTS:
        known = ", ".join((*NEXT_TOKEN_DRAFTS, *DRAFTS, *DRAFTS_WITHOUT_KV))
        raise InvalidConfig(f"KV of the draft {method} cannot be shared or handed over, that of {known} can")
    if speculative.use_multi_module_mtp():
        raise InvalidConfig(
            f"KV of the draft {method} with several modules cannot be shared or handed over: it depends on several "
            "tokens behind a position; set num_speculative_tokens to 1"
        )
    return True


def model_of(vllm_config: Any) -> str:
    """Return vLLM's name of the model, with that of a draft that keeps KV beside the model's."""
    model, speculative = str(vllm_config.model_config.model), vllm_config.speculative_config
    if speculative is None or speculative.method in DRAFTS_WITHOUT_KV:
        return model
    return f"{model} with {speculative.method} {speculative.draft_model_config.model}"
