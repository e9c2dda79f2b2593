"""Blocks that vLLM's own CPU kernel fills, read and written as pages: run by a Python that has vLLM for CPUs.

    python -m tests.support.vllm_cpu_attn

Prints one line of JSON: by form of the kernel, how many blocks were compared.
"""

from __future__ import annotations

import json
from unittest.mock import patch

import torch
from vllm import _custom_ops

from tidekv.backends.copies.block_order import PagedBlocks
from tidekv.backends.layout import DTYPES, KVLayout
from tidekv.engine.integrations.vllm import cpu_attn

# The forms of x86, with a block size and a head size that each accepts.
FORMS = [
    ("vec", "float32", 32, 32),
    ("vec", "bfloat16", 64, 128),
    ("vec", "float16", 32, 64),
    ("vec16", "float32", 48, 80),
    ("vec16", "bfloat16", 16, 80),
    ("amx", "bfloat16", 32, 32),
    ("amx", "bfloat16", 128, 64),
]
HEADS, BLOCKS, LAYERS = 3, 5, 2


def compare(isa: str, dtype: str, tokens: int, dim: int) -> int:
    """Fill blocks by the kernel, and compare pages with what was written; returns the number of blocks."""
    layout = KVLayout(num_layers=LAYERS, num_kv_heads=HEADS, head_dim=dim, dtype=dtype, page_size=tokens)
    shape = (BLOCKS, HEADS, tokens, 2 * dim)
    caches = [torch.zeros(shape, dtype=DTYPES[dtype]) for _ in range(LAYERS)]
    rows = torch.randn(LAYERS, 2, BLOCKS * tokens, HEADS, dim).to(DTYPES[dtype])
    for cache, (keys, values) in zip(caches, rows, strict=True):
        k_cache, v_cache = cache.view(BLOCKS, HEADS, 2 * tokens, dim).chunk(2, dim=2)
        _custom_ops.cpu_attn_reshape_and_cache(keys, values, k_cache, v_cache, torch.arange(BLOCKS * tokens), isa)
    with patch.object(cpu_attn, "_get_attn_isa", lambda *_: isa):
        order = cpu_attn.block_order(caches[0])
    blocks = PagedBlocks(caches, layout=layout, block_size=tokens, num_blocks=BLOCKS, order=order)
    pages = blocks.read(list(range(BLOCKS)))
    expected = rows.view(LAYERS, 2, BLOCKS, tokens, HEADS, dim).permute(2, 0, 1, 3, 4, 5).reshape(BLOCKS, -1)
    assert torch.equal(pages.view(DTYPES[dtype]), expected), f"{isa} {dtype}: pages are in another order"
    before = [cache.clone() for cache in caches]
    for cache in caches:
        cache.zero_()
    blocks.write(pages, list(range(BLOCKS)))
    assert all(map(torch.equal, caches, before)), f"{isa} {dtype}: blocks are in another order"
    return BLOCKS


def compare_latents(tokens: int, rank: int = 512, rope: int = 64) -> int:
    """Fill blocks of latent vectors by the kernel of AMX_MLA, and compare pages; returns the number of blocks."""
    width = rank + rope
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=width, dtype="bfloat16", page_size=tokens, kind="mla")
    cache = torch.zeros(BLOCKS, 1, tokens, width, dtype=torch.bfloat16)
    rows = torch.randn(BLOCKS * tokens, width).to(torch.bfloat16)
    latents, keys = rows[:, :rank].contiguous(), rows[:, rank:].contiguous()
    _custom_ops.amx_mla_concat_and_cache(latents, keys, cache.squeeze(1), torch.arange(BLOCKS * tokens))
    blocks = PagedBlocks([cache], layout=layout, block_size=tokens, num_blocks=BLOCKS)
    pages = blocks.read(list(range(BLOCKS)))
    assert torch.equal(pages.view(torch.bfloat16), rows.view(BLOCKS, -1)), "amx_mla: pages are in another order"
    return BLOCKS


def main() -> None:
    """Compare all forms that this processor has."""
    has_amx = torch.cpu._is_amx_tile_supported()
    compared = {f"{form[0]} {form[1]} {form[2]}": compare(*form) for form in FORMS if has_amx or form[0] != "amx"}
    if has_amx:
        compared |= {f"amx_mla bfloat16 {tokens}": compare_latents(tokens) for tokens in (32, 64)}
    print(json.dumps(compared))


if __name__ == "__main__":
    main()
