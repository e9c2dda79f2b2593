"""Real models on pages of several groups: the cache of each layer of a `transformers` model, in the tensors of a pool.

    PlainKV     K and V of each head                         kind "mha": Llama and others with MHA, GQA or MQA
    LatentKV    the compressed latent and the rotary key     kind "mla": DeepSeek V2 and V3, as one vector per token
    ScaledKV    K and V as bytes of 8 bits, with one scale   two groups: "full" in float8, "scales" in float32
                per token and head

One request at a time, tokens in order: for tests and examples, and as a demonstration of groups for embedders.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import torch

from demo.model import cache_argument
from tidekv.backends.device.pool import PoolGroup
from tidekv.states.errors import InvalidConfig

CausalModel: TypeAlias = Any
"""Causal model of `transformers`; the package is optional and is not type-checked."""


class LayerKV(Protocol):
    """Storage of the KV of a model's layers. Each layer caches two tensors [1, heads, tokens, dim]."""

    @property
    def layer_count(self) -> int:
        """Number of layers that can be stored."""

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy the cache of a layer at these slots, which are token numbers in the pool."""

    def write(self, layer: int, slots: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> None:
        """Overwrite these slots of a layer."""


class PlainKV:
    """K and V of each head, unchanged."""

    def __init__(self, group: PoolGroup) -> None:
        if group.layout.kind != "mha":
            raise InvalidConfig(f"group {group.name!r} is of kind {group.layout.kind!r}, not 'mha'")
        self.layer_count = group.layout.num_layers
        self._k, self._v = ([tensor.flatten(0, 1) for tensor in part] for part in (group.k, group.v))

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `LayerKV`."""
        return _by_head(self._k[layer][slots]), _by_head(self._v[layer][slots])

    def write(self, layer: int, slots: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> None:
        """See `LayerKV`."""
        self._k[layer][slots] = _by_token(first)
        self._v[layer][slots] = _by_token(second)


class LatentKV:
    """The latent vector, followed by the rotary key that all heads share."""

    def __init__(self, group: PoolGroup, *, latent_dim: int) -> None:
        if group.layout.kind != "mla" or group.layout.head_dim <= latent_dim:
            raise InvalidConfig(f"group {group.name!r} must be of kind 'mla', and longer than the latent, {latent_dim}")
        self.layer_count = group.layout.num_layers
        self._latent_dim = latent_dim
        self._rows = [tensor.flatten(0, 1) for tensor in group.k]

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `LayerKV`."""
        both = _by_head(self._rows[layer][slots])
        return both[..., : self._latent_dim], both[..., self._latent_dim :]

    def write(self, layer: int, slots: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> None:
        """See `LayerKV`."""
        self._rows[layer][slots] = _by_token(torch.cat([first, second], dim=-1))


class ScaledKV:
    """K and V in float8. Each vector of a head is divided by a scale, stored in another group with head_dim 1."""

    def __init__(self, full: PoolGroup, scales: PoolGroup, *, dtype: torch.dtype) -> None:
        if scales.layout.head_dim != 1 or len(full.tensors) != len(scales.tensors):
            raise InvalidConfig(f"group {scales.name!r} must have the layers of {full.name!r}, and head_dim 1")
        self.layer_count = full.layout.num_layers
        self._dtype = dtype
        self._max = torch.finfo(full.layout.torch_dtype).max
        self._pairs = [
            (data.flatten(0, 1), scale.flatten(0, 1)) for data, scale in zip(full.tensors, scales.tensors, strict=True)
        ]

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `LayerKV`."""
        k, v = (self._dequantized(*pair, slots) for pair in self._pairs[2 * layer : 2 * layer + 2])
        return k, v

    def write(self, layer: int, slots: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> None:
        """See `LayerKV`."""
        for (data, scales), values in zip(self._pairs[2 * layer : 2 * layer + 2], (first, second), strict=True):
            vectors = _by_token(values).float()
            scale = vectors.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / self._max
            # As bytes, because some versions of torch cannot scatter float8.
            data.view(torch.uint8)[slots] = (vectors / scale).to(data.dtype).view(torch.uint8)
            scales[slots] = scale

    def _dequantized(self, data: torch.Tensor, scales: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        numbers = data.view(torch.uint8)[slots].view(data.dtype).float()
        return _by_head((numbers * scales[slots]).to(self._dtype))


class GroupModel:
    """Runs a causal model of `transformers` with its KV in pages. It owns neither the pages nor the model.

    Page ids are in prompt order. Positions before `start` are not computed, and nothing beyond the last token is read.
    """

    def __init__(self, model: CausalModel, kv: LayerKV, *, page_size: int) -> None:
        """Raises InvalidConfig if the number of layers of the model and of the pages differ."""
        if model.config.num_hidden_layers != kv.layer_count:
            raise InvalidConfig(f"the model has {model.config.num_hidden_layers} layers, its pages {kv.layer_count}")
        self.model = model
        self.kv = kv
        self._page_size = page_size

    def forward(self, tokens: Sequence[int], start: int, pages: Sequence[int]) -> torch.Tensor:
        """Compute positions [start, start + len(tokens)) and write their KV; returns the logits [len(tokens), vocab].

        The KV of [0, start) must be in `pages`.
        """
        from transformers import DynamicCache

        end = start + len(tokens)
        slots = self._slots(pages, end)
        cache = DynamicCache()
        if start:
            for layer in range(self.kv.layer_count):
                cache.update(*self.kv.read(layer, slots[:start]), layer)
        with torch.inference_mode():
            out = self.model(
                input_ids=torch.tensor([list(tokens)]),
                position_ids=torch.arange(start, end)[None],
                use_cache=True,
                **{cache_argument(self.model): cache},
            )
        for layer in range(self.kv.layer_count):
            kept = cache.layers[layer]
            self.kv.write(layer, slots[start:], kept.keys[:, :, start:], kept.values[:, :, start:])
        logits: torch.Tensor = out.logits[0]
        return logits

    def _slots(self, pages: Sequence[int], end: int) -> torch.Tensor:
        """Return the pool's token numbers of positions [0, end)."""
        positions = torch.arange(end)
        starts = torch.tensor(list(pages)) * self._page_size
        return starts[positions // self._page_size] + positions % self._page_size


def choices(logits: torch.Tensor) -> list[int]:
    """Return the greedy token of each row; the first of several equal ones, as generate() does."""
    best: list[int] = logits.argmax(dim=-1).tolist()
    return best


def _by_head(rows: torch.Tensor) -> torch.Tensor:
    """Convert [tokens, heads, dim] to the shape of a cache, [1, heads, tokens, dim]."""
    return rows.transpose(0, 1)[None]


def _by_token(states: torch.Tensor) -> torch.Tensor:
    """Convert [1, heads, tokens, dim] to the shape of pages, [tokens, heads, dim]."""
    return states[0].transpose(0, 1)


def filled(model: CausalModel, *, embedding_std: float = 1.0) -> CausalModel:
    """Random weights, wide enough that the next token depends on all of the prompt."""
    source = torch.Generator().manual_seed(7)
    for name, weight in sorted(model.named_parameters()):
        if weight.dim() > 1:
            std = embedding_std if "embed_tokens" in name else 0.2
            weight.data.copy_(torch.randn(weight.shape, generator=source, dtype=torch.float64) * std)
    return model.double().eval().requires_grad_(False)
