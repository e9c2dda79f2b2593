"""Blocks of windows and states in the tables of vLLM's own cache manager: run by a Python that has vLLM for CPUs.

    python -m tests.support.vllm_tables

For prompts of many lengths, at both ends of a hand-over: the blocks that `ComponentBlocks.at_end` names are those in
which vLLM's worker leaves what the end of the handed tokens needs, and from which decode's worker goes on. Prints one
line of JSON: by the mode in which vLLM keeps states and the tokens of a draft, how many prompts were compared.
"""

from __future__ import annotations

import json
from typing import Any  # vLLM's objects are not typed here.

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from tidekv.engine.integrations.vllm.handover.groups import NULL_BLOCK, read_groups

BLOCK, LENGTH_MAX, CHUNK = 8, 512, 24
HASH = get_hash_fn_by_name("sha256")


def manager_of(mode: str, drafted: int) -> tuple[KVCacheManager, Any]:
    """A cache manager with full KV, a window of 20 tokens and states, and its groups as the connector reads them.

    `drafted`: tokens of a draft, for each of which vLLM has a further block of states.
    """
    heads = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 4, "dtype": torch.float32}
    specs = [
        FullAttentionSpec(**heads),
        SlidingWindowSpec(**heads, sliding_window=20),
        MambaSpec(
            block_size=BLOCK if mode == "align" else LENGTH_MAX,
            shapes=((4, 4),),
            dtypes=(torch.float32,),
            page_size_padded=FullAttentionSpec(**heads).page_size_bytes,
            mamba_cache_mode=mode,
            num_speculative_blocks=drafted,
        ),
    ]
    groups = [KVCacheGroupSpec([f"layer.{number}"], spec) for number, spec in enumerate(specs)]
    config = KVCacheConfig(num_blocks=400, kv_cache_tensors=[], kv_cache_groups=groups)
    manager = KVCacheManager(
        config,
        LENGTH_MAX,
        scheduler_block_size=max(spec.block_size for spec in specs),
        hash_block_size=BLOCK,
        enable_caching=mode == "align",
    )
    return manager, read_groups(groups)


def request_of(name: str, tokens: list[int]) -> Request:
    sampling = SamplingParams(max_tokens=10)
    sampling.update_from_generation_config({}, 0)
    hasher = kv_cache_utils.get_request_block_hasher(BLOCK, HASH)
    return Request(name, tokens, sampling, None, block_hasher=hasher)


def compute(manager: KVCacheManager, request: Request, count: int) -> None:
    """Blocks for a step of `count` tokens, and its end."""
    manager.new_step_starts()
    assert manager.allocate_slots(request, count) is not None
    request.num_computed_tokens += count


def check(manager: KVCacheManager, groups: Any, request: Request, tokens: int, *, mode: str) -> None:
    """Compare what `at_end` names with the places where vLLM's worker has it."""
    table = manager.get_block_ids(request.request_id)
    window, state = groups.components
    last = (tokens - 1) // BLOCK if mode == "align" else 0
    assert state.at_end(table, tokens) == (table[state.group][last],), (mode, tokens, table)
    # The token after them sees itself and 19 before it.
    first = max(0, tokens - 19) // BLOCK
    assert window.at_end(table, tokens) == tuple(table[window.group][first : -(-tokens // BLOCK)]), (mode, tokens)
    assert set(groups.at_end(table, tokens)) == {window.name, state.name}, "a block that is needed is not there"


def hand_over(manager: KVCacheManager, groups: Any, name: str, tokens: list[int], *, mode: str) -> None:
    """A prompt at prefill, which leaves its last token, and at decode, where some of its blocks may be cached."""
    prefill, decode = request_of(f"p-{name}", tokens[:-1]), request_of(f"d-{name}", tokens)
    handed = groups.handed_tokens(len(tokens))
    while (left := handed - prefill.num_computed_tokens) > 0:
        # With states of each block a step ends with a block, the last but one before the last token.
        aligned = (handed - 1) // BLOCK * BLOCK - prefill.num_computed_tokens
        compute(manager, prefill, min(left, CHUNK) if aligned <= 0 else min(aligned, CHUNK))
    check(manager, groups, prefill, handed, mode=mode)
    manager.free(prefill)
    manager.new_step_starts()
    found = manager.get_computed_blocks(decode)
    local = found[1]
    assert local <= handed
    blocks = manager.allocate_slots(
        decode,
        0,
        num_new_computed_tokens=local,
        new_computed_blocks=found[0],
        num_external_computed_tokens=handed - local,
        delay_cache_blocks=True,
    )
    assert blocks is not None
    check(manager, groups, decode, handed, mode=mode)
    before = groups.at_end(manager.get_block_ids(decode.request_id), handed)
    manager.cache_blocks(decode, handed)
    decode.num_computed_tokens = handed
    compute(manager, decode, 1)
    table = manager.get_block_ids(decode.request_id)
    state = groups.components[1]
    at = (handed - 1) // BLOCK if mode == "align" else 0
    assert (table[state.group][at],) == before[state.name], "decode goes on from another record"
    written = handed // BLOCK if mode == "align" else 0
    assert table[state.group][written] != NULL_BLOCK, "decode has no place for the record behind the last token"
    manager.free(decode)


def main() -> None:
    """Compare prompts of all lengths up to 100 tokens, each with and without cached blocks."""
    kv_cache_utils.init_none_hash(HASH)
    compared = {}
    for mode, drafted in (("none", 0), ("align", 0), ("none", 3), ("align", 3)):
        manager, groups = manager_of(mode, drafted)
        for length in range(2, 100):
            for again in range(2):
                tokens = [7 * (at % 13) + length for at in range(length)]
                hand_over(manager, groups, f"{length}-{again}", tokens, mode=mode)
        compared[f"{mode}, {drafted} drafted"] = 2 * 98
    print(json.dumps(compared))


if __name__ == "__main__":
    main()
