"""Order of K and V within a block of vLLM's CPU attention, asked of vLLM's own kernel.

CPU_ATTN packs a block for the instructions that it uses ("vec", "vec16", "amx", …): K transposed or in tiles, V in rows
or in pairs of tokens. The order depends on processor, dtype, block size and version. It is therefore not assumed: the
kernel that fills the cache writes numbers into a scratch block, and their places are the order.
"""

from __future__ import annotations

from typing import Final

import torch
from vllm import _custom_ops
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from tidekv.states.errors import InvalidConfig

# Values 1 to 8 are exact in every float dtype, and differ from the zeros of an element that was not written.
BASE: Final = 8
DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


def block_order(cache: torch.Tensor) -> torch.Tensor:
    """Return where the kernel puts the elements of one head of a block, for `PagedBlocks`.

    `cache` is a layer's KV tensor, [block, head, token, K and V]; it is not written to. The result has one position for
    each of [token, K or V, element]. Raises InvalidConfig if the order cannot be determined.
    """
    _, heads, tokens, width = cache.shape
    if cache.dtype not in DTYPES:
        raise InvalidConfig(
            f"blocks of attention backend CPU_ATTN with KV of {cache.dtype} cannot be shared; "
            f"those of {', '.join(map(str, DTYPES))} can"
        )
    isa = _get_attn_isa(cache.dtype, tokens, width // 2, "auto")
    if isa == "amx":
        # Linux grants AMX tiles to a process that asks. vLLM's worker asks with its first large matrix product; but if
        # its first prompt was loaded, its first step is a decode step, and the attention kernel ends the process.
        torch.cpu._init_amx()
    # Two blocks, of which the second is written: an order that leaves its block is found.
    scratch = torch.zeros((2, heads, tokens, width), dtype=cache.dtype)
    k_cache, v_cache = scratch.view(2, heads, 2 * tokens, width // 2).chunk(2, dim=2)
    slots = torch.arange(tokens, 2 * tokens, dtype=torch.int64)
    numbers = torch.arange(tokens * width).view(tokens, 2, width // 2)
    found = torch.zeros(heads, tokens * width, dtype=torch.int64)
    power = 1
    while power < tokens * width:
        digits = (numbers // power % BASE + 1).to(cache.dtype)
        k, v = (digits[:, part].unsqueeze(1).expand(-1, heads, -1).contiguous() for part in (0, 1))
        _custom_ops.cpu_attn_reshape_and_cache(k, v, k_cache, v_cache, slots, isa)
        found += (scratch[1].reshape(heads, -1).to(torch.int64) - 1) * power
        power *= BASE
    order = found[0].argsort()
    is_complete = torch.equal(found[0][order], numbers.view(-1))
    if not is_complete or not (found == found[0]).all() or scratch[0].any():
        raise InvalidConfig(
            f"blocks of attention backend CPU_ATTN with isa {isa!r} cannot be shared: {tokens} tokens of "
            f"{width // 2} elements in {cache.dtype} are not stored element by element within their block and head"
        )
    return order
