"""A small random model with a tokenizer of one word per token, so that a real server runs without any download."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

ROPE = 64
DRAFT = "draft"
"""Folder of a draft within that of its model."""
DraftKind = Literal["eagle", "draft_model"]
SPECIAL = ("<s>", "</s>", "<pad>", "<unk>")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a Llama, a Gemma 3 with `window`, a Falcon H1 with `has_states`, or a DeepSeek V2 with `latent`.

    `window`: every other layer sees that many tokens only. `has_states`: each layer keeps a state beside its KV.
    `latent`: elements of a token's KV in a layer (MLA), of which ROPE carry its position. `draft`: vLLM's name
    of a draft: of the tokens of "eagle" three of ten are accepted if it has its KV, and one of a hundred if not; those
    of "draft_model", which has other heads, are the model's own. `for_sglang`: with
    `window` a Mellum, whose windows have a pool of their own in SGLang; with `latent` the configuration that it reads.
    """

    layers: int = 4
    hidden: int = 256
    heads: int = 8
    kv_heads: int = 2
    vocabulary: int = 2048
    positions: int = 16_384
    window: int | None = None
    has_states: bool = False
    latent: int | None = None
    draft: DraftKind | None = None
    for_sglang: bool = False

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers, in float32, those of a draft included."""
        if self.latent is not None:
            return self.layers * self.latent * 4
        # A draft model has twice the heads.
        layers = self.layers * {None: 1, "eagle": 2, "draft_model": 3}[self.draft]
        return layers * 2 * self.kv_heads * (self.hidden // self.heads) * 4

    @property
    def name(self) -> str:
        """Name of the model's folder."""
        kind = f"-w{self.window}" if self.window else f"-mla{self.latent}" if self.latent else ""
        kind += ("-states" if self.has_states else "") + (f"-{self.draft}" if self.draft else "")
        kind += "-sglang" if kind and self.for_sglang else ""
        return f"tiny-l{self.layers}-h{self.hidden}-{self.heads}x{self.kv_heads}-v{self.vocabulary}{kind}"


def make_model(folder: Path, shape: ModelShape = ModelShape(), *, seed: int = 7) -> Path:
    """Write the model and its tokenizer under `folder` unless they are there, and return their path."""
    path = folder / shape.name
    if (path / "tokenizer_config.json").exists():
        return path
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        DeepseekV2Config,
        DeepseekV2ForCausalLM,
        FalconH1Config,
        FalconH1ForCausalLM,
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
    )

    torch.manual_seed(seed)
    sizes = {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": 2 * shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": shape.positions,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "tie_word_embeddings": False,
        # With the usual 0.02 the logits are nearly equal, and a greedy choice depends on how a prompt is chunked.
        "initializer_range": 0.1,
    }
    head_dim = shape.hidden // shape.heads
    if shape.latent is not None:
        model = DeepseekV2ForCausalLM(
            DeepseekV2Config(
                **(sizes | {"num_key_value_heads": shape.heads}),
                q_lora_rank=None,
                kv_lora_rank=shape.latent - ROPE,
                qk_rope_head_dim=ROPE,
                qk_nope_head_dim=head_dim,
                v_head_dim=head_dim,
                first_k_dense_replace=shape.layers,  # No layer has experts.
            )
        )
    elif shape.has_states:
        model = FalconH1ForCausalLM(
            FalconH1Config(
                **sizes,
                head_dim=head_dim,
                # A record is smaller than a block of KV of 32 tokens: vLLM makes blocks larger if it is not.
                mamba_d_ssm=128,
                mamba_n_heads=8,
                mamba_d_head=16,
                mamba_n_groups=1,
                mamba_d_state=16,
                mamba_chunk_size=64,
            )
        )
    elif shape.window is None:
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    elif shape.for_sglang:
        from transformers import MellumConfig, MellumForCausalLM

        kinds = ["sliding_attention", "full_attention"] * shape.layers
        model = MellumForCausalLM(
            MellumConfig(
                **sizes,
                head_dim=head_dim,
                sliding_window=shape.window,
                layer_types=kinds[: shape.layers],
                mlp_layer_types=["dense"] * shape.layers,  # No layer has experts.
                num_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=64,
            )
        )
    else:
        kinds = ["sliding_attention", "full_attention"] * shape.layers
        model = Gemma3ForCausalLM(
            Gemma3TextConfig(
                **sizes,
                head_dim=head_dim,
                query_pre_attn_scalar=head_dim,
                sliding_window=shape.window,
                layer_types=kinds[: shape.layers],
            )
        )
    if shape.draft == "eagle":
        _write_eagle(path / DRAFT, model)
    elif shape.draft:
        _write_draft_model(path / DRAFT, model)
    model.to(torch.float32).save_pretrained(path)
    if shape.latent is not None and shape.for_sglang:
        _write_for_sglang(path / "config.json", shape)
    words = [*SPECIAL, *(f"w{number}" for number in range(shape.vocabulary - len(SPECIAL)))]
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    # Written last: its file marks the model as complete.
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(path)
    return path


def _write_eagle(path: Path, model: Any) -> None:
    """Write an EAGLE draft that has the model's own layers, and change the model's embeddings for it.

    An EAGLE draft has no norm before its first layer, so embeddings have a root mean square of one. It makes nothing of
    the model's hidden states: like the model it computes the next token from the tokens and its KV. Only the first
    token of a prompt is missing, since a draft begins with the second one.
    """
    import torch
    from safetensors.torch import save_file

    with torch.no_grad():
        embeddings = model.model.embed_tokens.weight
        embeddings /= embeddings.pow(2).mean(-1, keepdim=True).sqrt()
    hidden = embeddings.shape[1]
    layers = {
        name.removeprefix("model."): weight.float().contiguous()
        for name, weight in model.state_dict().items()
        if name.startswith("model.layers.") and name != "model.layers.0.input_layernorm.weight"
    }
    fully_connected = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], dim=1)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(path)
    save_file({**layers, "fc.weight": fully_connected}, path / "model.safetensors", metadata={"format": "pt"})


def _write_draft_model(path: Path, model: Any) -> None:
    """Write the same model with each KV head twice: it computes the same tokens, with blocks of another size."""
    from copy import deepcopy

    import torch
    from transformers import LlamaForCausalLM

    config = deepcopy(model.config)
    heads, config.num_key_value_heads = config.num_key_value_heads, 2 * config.num_key_value_heads
    draft = LlamaForCausalLM(config)
    weights = model.state_dict()
    for name, weight in weights.items():
        if "k_proj" in name or "v_proj" in name:
            by_head = weight.unflatten(0, (heads, -1))
            weights[name] = torch.repeat_interleave(by_head, 2, dim=0).flatten(0, 1)
    draft.load_state_dict(weights)
    draft.to(torch.float32).save_pretrained(path)


def _write_for_sglang(path: Path, shape: ModelShape) -> None:
    """Name the fields of a DeepSeek as published configurations do: transformers names them otherwise now."""
    written = json.loads(path.read_text())
    written.pop("rope_parameters")
    # Without a GPU SGLang has positions of this kind only.
    positions = {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": shape.positions // 4,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    without_experts = {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "moe_layer_freq": 1,
    }
    path.write_text(json.dumps({**written, "rope_theta": 10000.0, "rope_scaling": positions, **without_experts}))
