"""The line in vLLM's log that says, at its start, in which tiers prompts can hit, and why not in others.

A configuration that cannot work at all is refused instead, by name.
"""

from __future__ import annotations

from typing import Any  # vLLM's configuration is not typed here: tests and type checks go without vLLM.

from tidekv.backends.storage.uri import split_uri
from tidekv.engine.log import engine_log

LOG = engine_log("tidekv.vllm")


def report_tiers(
    vllm_config: Any, *, model: str, l2_tokens: int, uri: str | None, no_loads: str = "", limits: str = ""
) -> None:
    """Log the line. `l2_tokens`: capacity of host memory. `uri`: None without storage. `no_loads`: why this worker
    loads nothing from these two; empty if it does. `limits`: for which prompts these two cannot hit; empty if for all.
    """
    possible, not_possible = [], []
    if vllm_config.cache_config.enable_prefix_caching:
        possible.append("L1 (vLLM's prefix caching)")
    else:
        not_possible.append("L1: vLLM's prefix caching is off (--enable-prefix-caching)")
    if no_loads:
        not_possible.append(f"L2 and L3: {no_loads}")
    else:
        possible.append(f"L2 (host memory for {l2_tokens} tokens)")
        if uri is None:
            not_possible.append("L3: no uri is given")
        else:
            possible.append(f"L3 ({split_uri(uri).scheme})")
    line = f"hits are possible in {', '.join(possible)}" if possible else "no hits are possible"
    if limits and not no_loads:
        line += f", the last {'two' if uri is not None else 'one'} {limits}"
    if not_possible:
        line += f"; not in {'; not in '.join(not_possible)}"
    role = vllm_config.kv_transfer_config
    LOG.info(line, model=model, role="kv_both" if role.is_kv_producer and role.is_kv_consumer else _one_way(role))


def _one_way(transfer: Any) -> str:
    return "kv_producer" if transfer.is_kv_producer else "kv_consumer"
