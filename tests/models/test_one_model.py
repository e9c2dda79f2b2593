"""One model, every tier: the tokens are those of `generate()` in one process, and every byte is what prefill made."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import pytest
import torch

from demo.model import ModelShape, build_llama, generate_in_one_process
from tests.support.group_model import CausalModel, GroupModel, ScaledKV, filled
from tests.support.model_pools import ModelPools
from tests.support.prompts import drawn_prompt
from tests.support.thorough import mark_rest, pairs
from tidekv import DevicePool, KVLayout
from tidekv.backends.page_layout import Layout, PageLayout

PAGE_SIZE = 4
VOCABULARY = 64
OUTPUT = 12
SHAPE = ModelShape(
    vocab_size=VOCABULARY, hidden_size=64, mlp_size=128, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16
)
LATENT, ROTARY = 24, 8


@cache
def deepseek(version: int) -> CausalModel:
    """A tiny DeepSeek: latent attention, a dense layer and mixtures of experts."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

    kinds: dict[int, Any] = {2: (DeepseekV2Config, DeepseekV2ForCausalLM), 3: (DeepseekV3Config, DeepseekV3ForCausalLM)}
    config_type, model_type = kinds[version]
    config = config_type(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_shared_experts=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=LATENT,
        q_lora_rank=32,
        qk_rope_head_dim=ROTARY,
        qk_nope_head_dim=16,
        v_head_dim=16,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        experts_implementation="eager",  # The other ones have no float64.
    )
    torch.manual_seed(0)  # Buffers of experts are not parameters.
    return filled(model_type(config))


@cache
def llama() -> CausalModel:
    return build_llama(SHAPE)


FULL = KVLayout(num_layers=3, num_kv_heads=2, head_dim=16, dtype="float64", page_size=PAGE_SIZE)
MLA = KVLayout(num_layers=3, num_kv_heads=1, head_dim=LATENT + ROTARY, dtype="float64", page_size=PAGE_SIZE, kind="mla")
FP8 = PageLayout.of(
    full=KVLayout(num_layers=3, num_kv_heads=2, head_dim=16, dtype="float8_e4m3fn", page_size=PAGE_SIZE),
    scales=KVLayout(num_layers=3, num_kv_heads=2, head_dim=1, dtype="float32", page_size=PAGE_SIZE),
)


def llama_on(pools: ModelPools) -> GroupModel:
    return GroupModel(llama(), pools.plain(), page_size=PAGE_SIZE)


def deepseek_2_on(pools: ModelPools) -> GroupModel:
    return GroupModel(deepseek(2), pools.latent(latent_dim=LATENT), page_size=PAGE_SIZE)


def deepseek_3_on(pools: ModelPools) -> GroupModel:
    return GroupModel(deepseek(3), pools.latent(latent_dim=LATENT), page_size=PAGE_SIZE)


def fp8_llama_on(pools: ModelPools) -> GroupModel:
    return GroupModel(llama(), pools.scaled(dtype=torch.float64), page_size=PAGE_SIZE)


MODELS = {
    "llama": (FULL, llama_on),
    "deepseek_v2": (MLA, deepseek_2_on),
    "deepseek_v3": (MLA, deepseek_3_on),
    "fp8": (FP8, fp8_llama_on),
}


def in_one_process(name: str, greedy: Any, prompt: list[int]) -> list[int]:
    """The reference output: `generate()`; for quantised KV the same model on pages that go nowhere."""
    if name != "fp8":
        model = {"llama": llama, "deepseek_v2": lambda: deepseek(2), "deepseek_v3": lambda: deepseek(3)}[name]()
        return generate_in_one_process(model, prompt, OUTPUT)
    layout, model_on = MODELS[name]
    runner, pages = greedy(model_on(ModelPools.of_one(DevicePool.allocate(layout, 64)))), list(range(64))
    return runner.answer(prompt, runner.prefill(prompt, pages), pages, OUTPUT).output


async def check_every_tier(name: str, make_rig: Any, greedy: Any, **options: Any) -> None:
    layout: Layout
    layout, model_on = MODELS[name]
    prompt = drawn_prompt(25, seed=1)
    wanted = in_one_process(name, greedy, prompt)
    async with make_rig(layout, lambda pools: greedy(model_on(pools)), **options) as rig:
        async with rig.decode() as decode:
            fresh = await decode.ask(prompt, OUTPUT)
            assert fresh.sources["transfer"] == len(prompt)
            assert fresh.answer.output == wanted
            for tier in ("l1", "l2", "l3"):
                asked = await decode.ask_from(tier, prompt, OUTPUT)
                assert asked.answer.output == wanted, tier
                assert torch.equal(asked.page_bytes, fresh.page_bytes), tier
            # The check can fail: without the KV the output differs.
            assert (await decode.ask_from("l2", prompt, OUTPUT, zero="full")).answer.output != wanted
            # What decode wrote itself is restored too: the next turn goes on from prompt and output.
            longer = [*prompt, *wanted, *drawn_prompt(5, seed=2)]
            second = in_one_process(name, greedy, longer)
            for tier in ("l2", "l3"):
                await decode.forget(("l1",) if tier == "l2" else ("l1", "l2"))
                asked = await decode.ask(longer, OUTPUT)
                if name != "fp8":  # Its rounding depends on what was computed in one go: another model, so to speak.
                    assert asked.answer.output == second, tier
                assert asked.sources[tier] >= 36
        async with rig.decode() as restarted:
            asked = await restarted.ask(prompt, OUTPUT)
            assert asked.sources["l3"] == 24
            assert asked.answer.output == wanted
            assert torch.equal(asked.page_bytes, fresh.page_bytes)


@pytest.mark.parametrize(
    ("name", "lent", "ranks"),
    mark_rest(
        itertools.product(MODELS, [False, True], [1, 2]),
        lambda name, *engine: {name, *pairs(*engine), (name, engine[1])},
    ),
)
async def test_tokens_from_every_tier_equal_one_process(
    name: str, lent: bool, ranks: int, make_rig: Any, greedy: Any
) -> None:
    await check_every_tier(name, make_rig, greedy, lent=lent, ranks=ranks)


@pytest.mark.nixl
@pytest.mark.parametrize("name", ["llama", pytest.param("deepseek_v3", marks=pytest.mark.thorough), "fp8"])
async def test_tokens_over_nixl_equal_one_process(name: str, make_rig: Any, greedy: Any) -> None:
    await check_every_tier(name, make_rig, greedy, nixl=True)


def test_dequantised_kv_is_what_was_quantised_as_far_as_eight_bits_go() -> None:
    pool = DevicePool.allocate(FP8, 8)
    kv = ScaledKV(pool.group("full"), pool.group("scales"), dtype=torch.float64)
    slots = torch.tensor([5, 6, 7, 30])
    source = torch.Generator().manual_seed(3)
    first, second = (torch.randn(1, 2, 4, 16, generator=source, dtype=torch.float64) for _ in range(2))
    kv.write(1, slots, first, second)
    for wanted, found in zip((first, second), kv.read(1, slots), strict=True):
        assert (found - wanted).abs().max() < wanted.abs().max() / 16
        assert not torch.equal(found, wanted)
    assert not kv.read(1, torch.tensor([8]))[0].any()
    assert not kv.read(0, slots)[0].any()
