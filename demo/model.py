"""A small real transformer whose KV lives in the pages of a pool.

The model is a Llama of the `transformers` package with random weights from a fixed seed, created locally without a
download. `PagedModel` runs its prefill and its decode steps on a page table, so the generated tokens depend on every
byte that a tier or a transfer delivered. The pages hold the same as transformers' own cache: keys after the rotary
embedding, and values.

`transformers` is imported only when a model is built: the engine itself does not need it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from inspect import signature
from typing import Any, Protocol, TypeAlias

import torch

from tidekv.states.errors import InvalidConfig, InvalidRequest

Llama: TypeAlias = Any
"""A `transformers.LlamaForCausalLM`; the package is optional and is not type-checked."""


class PagedKV(Protocol):
    """Requirements on a pool: per layer, K and V of shape [num_pages, page_size, kv_heads, head_dim]."""

    @property
    def k(self) -> Sequence[torch.Tensor]:
        """The keys, one tensor per layer."""

    @property
    def v(self) -> Sequence[torch.Tensor]:
        """The values, one tensor per layer."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a small Llama, its dtype, and the seed of its weights.

    The defaults give about 0.7 million parameters and 4 KiB of KV per token. In float64 two orders of summation differ
    by 1e-15 of a logit, far below the gap between the two best tokens, so greedy tokens do not depend on chunks and
    batches.
    """

    vocab_size: int = 512
    hidden_size: int = 128
    mlp_size: int = 256
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    context_tokens: int = 8192
    dtype: str = "float64"
    # Large enough that attention is selective: with the usual 0.02 the next token hardly depends on the prompt.
    weight_std: float = 0.2
    seed: int = 20_250_401

    @property
    def fingerprint(self) -> str:
        """Name that differs if the KV would differ. Both ends of a hand-over compare it."""
        sizes = (self.vocab_size, self.hidden_size, self.mlp_size, self.num_layers, self.num_heads, self.num_kv_heads)
        return f"llama-{'-'.join(map(str, sizes))}x{self.head_dim}-{self.dtype}-std{self.weight_std}-seed{self.seed}"


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """The greedy next token, and the margin of its logit over the second best: the tolerance for rounding."""

    token: int
    margin: float


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """One request's part of a batch: the token at `position`, and pages that hold at least [0, position]."""

    token: int
    position: int
    pages: Sequence[int]


def check_installed() -> None:
    """Raise InvalidConfig if transformers is not installed, so that a job fails before it starts anything."""
    if find_spec("transformers") is None:
        raise InvalidConfig("the small model needs the package transformers: pip install 'tidekv[demo]'")


def build_llama(shape: ModelShape, device: str | torch.device = "cpu") -> Llama:
    """Build the model on a device. Equal shapes give equal weights in every process with that kind of device.

    Raises InvalidConfig without transformers.
    """
    check_installed()
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.mlp_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.context_tokens,
        tie_word_embeddings=False,
        # No token ends a generation: the workload determines the number of tokens.
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        attn_implementation="sdpa",
    )
    # Built where it runs: on a GPU a large model takes a second, on one core a minute.
    with torch.device(device):
        model = LlamaForCausalLM(config).to(getattr(torch, shape.dtype)).eval().requires_grad_(False)
    source = torch.Generator(device).manual_seed(shape.seed)
    for name, weight in sorted(model.named_parameters()):
        # Own generator: the weights depend neither on torch's global seed nor on the initialization of transformers.
        if weight.dim() > 1:
            std = 1.0 if "embed_tokens" in name else shape.weight_std
            weight.copy_(torch.randn(weight.shape, generator=source, dtype=torch.float64, device=device) * std)
    return model


def cache_argument(model: Any) -> str:  # Any: `transformers` is optional and is not type-checked.
    """Return the name of the cache among the arguments of a `transformers` model: `cache` from 5.24 on."""
    return _cache_argument(type(model).forward)


@cache
def _cache_argument(forward: Callable[..., object]) -> str:
    names = signature(forward).parameters
    return next(name for name in ("cache", "past_key_values", "cache_params") if name in names)


def greedy(logits: torch.Tensor) -> TokenChoice:
    """Choose the best token of logits of shape [vocab_size]; the first of several equal ones, as generate() does."""
    best = int(torch.argmax(logits))
    two = torch.topk(logits, 2).values
    return TokenChoice(token=best, margin=float(two[0] - two[1]))


def generate_in_one_process(model: Llama, prompt: Sequence[int], output_tokens: int) -> list[int]:
    """Generate greedily with transformers' own generate() and cache: the reference for every other way."""
    ids = torch.tensor([list(prompt)], dtype=torch.long, device=model.device)
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=output_tokens,
            min_new_tokens=output_tokens,
            pad_token_id=0,
        )
    return [int(token) for token in out[0, len(prompt) :]]


class PagedModel:
    """Runs a Llama on KV that lies in the pages of a pool. It owns neither the pages nor the model.

    Page ids are in prompt order: position `p` is in slot `p % page_size` of page `pages[p // page_size]`. Nothing
    beyond the requested position is read, so pages may hold garbage there.
    """

    def __init__(self, model: Llama, pool: PagedKV) -> None:
        """Check that the pool's tensors fit the model. Raises InvalidConfig, which names the first difference."""
        self.model = model
        self.pool = pool
        self.page_size = int(pool.k[0].shape[1])
        config = model.config
        ours = (config.num_hidden_layers, config.num_key_value_heads, config.head_dim, model.dtype)
        for name, tensors in (("k", pool.k), ("v", pool.v)):
            theirs = (len(tensors), *tensors[0].shape[2:], tensors[0].dtype)
            if ours != theirs:
                raise InvalidConfig(
                    f"the pool's {name} has (layers, kv_heads, head_dim, dtype) {theirs}, the model {ours}"
                )

    def prefill_chunk(
        self,
        tokens: Sequence[int],
        start: int,
        pages: Sequence[int],
        *,
        wait_layer: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """Compute positions [start, start + len(tokens)), whose prefix is in `pages`, and write their KV there.

        `wait_layer` is called before the prefix of each layer is read, and blocks until it is in place. Returns the
        logits after the last of them, shape [vocab_size].
        """
        if not tokens:
            raise InvalidRequest("a prefill chunk has no tokens: it needs at least one position to compute")
        end = start + len(tokens)
        self._check_pages(pages, end)
        # transformers reads the length of the prefix from the first layer; the others can follow.
        cache = self._cache([])
        hooks = []
        for layer, block in enumerate(self.model.model.layers):
            read = partial(self._read_layer, cache, layer, pages, start, wait_layer)
            if layer:
                hooks.append(block.register_forward_pre_hook(lambda *_, read=read: read()))
            else:
                read()
        ids = torch.tensor([list(tokens)], dtype=torch.long, device=self.pool.k[0].device)
        positions = torch.arange(start, end, device=ids.device)[None]
        try:
            with torch.inference_mode():
                out = self.model(
                    input_ids=ids,
                    position_ids=positions,
                    use_cache=True,
                    logits_to_keep=1,
                    **{cache_argument(self.model): cache},
                )
        finally:
            for hook in hooks:
                hook.remove()
        for layer in range(len(self.pool.k)):
            kept = cache.layers[layer]
            self._scatter(layer, pages, start, kept.keys[0, :, start:end], kept.values[0, :, start:end])
        logits: torch.Tensor = out.logits[0, -1]
        return logits

    def decode_step(
        self, token: int, position: int, pages: Sequence[int], *, wait_layer: Callable[[int], None] | None = None
    ) -> torch.Tensor:
        """Compute the token at `position` and write its KV; returns the next token's logits, shape [vocab_size].

        `wait_layer` is that of `prefill_chunk`.
        """
        return self.prefill_chunk([token], position, pages, wait_layer=wait_layer)

    def _read_layer(
        self, cache: Any, layer: int, pages: Sequence[int], end: int, wait_layer: Callable[[int], None] | None
    ) -> None:  # Any: a transformers.DynamicCache.
        if wait_layer is not None:
            wait_layer(layer)
        cache.update(*self._gather(layer, pages, end), layer)

    def decode_batch(self, steps: Sequence[DecodeStep]) -> torch.Tensor:
        """Compute one token for each request and write its KV; returns logits of shape [len(steps), vocab_size].

        What a shorter request has behind its end is zero, and the mask hides it. No two steps may share the page that
        they write.
        """
        if not steps:
            raise InvalidRequest("a decode batch has no steps")
        for step in steps:
            self._check_pages(step.pages, step.position + 1)
        longest = max(step.position for step in steps)
        device = self.pool.k[0].device
        positions = torch.tensor([[step.position] for step in steps], device=device)
        columns = torch.arange(longest + 1, device=device)
        # Shorter tables go on with a page of their own.
        page_count = -(-longest // self.page_size)
        tables = [[*step.pages[:page_count], *[step.pages[0]] * (page_count - len(step.pages))] for step in steps]
        table = torch.tensor(tables, dtype=torch.long, device=device)
        behind = (columns[:longest] >= positions)[:, None, :, None]
        cache = self._cache([self._gather_batch(layer, table, behind) for layer in range(len(self.pool.k))])
        # The new token's own key is appended after the padding, in the last column.
        mask = (columns < positions) | (columns == longest)
        with torch.inference_mode():
            out = self.model(
                input_ids=torch.tensor([[step.token] for step in steps], device=device),
                attention_mask=mask[:, None, None, :],
                position_ids=positions,
                use_cache=True,
                **{cache_argument(self.model): cache},
            )
        page = torch.tensor([step.pages[step.position // self.page_size] for step in steps], device=device)
        slot = positions[:, 0] % self.page_size
        for layer in range(len(self.pool.k)):
            kept = cache.layers[layer]
            self.pool.k[layer][page, slot] = kept.keys[:, :, longest]
            self.pool.v[layer][page, slot] = kept.values[:, :, longest]
        logits: torch.Tensor = out.logits[:, -1]
        return logits

    def _check_pages(self, pages: Sequence[int], tokens: int) -> None:
        """Raise InvalidRequest if a page table is too short for `tokens` positions or names a page outside the pool."""
        if len(pages) * self.page_size < tokens:
            raise InvalidRequest(f"{len(pages)} pages of {self.page_size} tokens cannot hold {tokens} positions")
        num_pages = int(self.pool.k[0].shape[0])
        wrong = [page for page in pages if not 0 <= page < num_pages]
        if wrong:
            raise InvalidRequest(f"page {wrong[0]} is not in the pool of {num_pages} pages")

    def _cache(self, layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Any:  # A transformers.DynamicCache.
        """Put K and V of shape [batch, kv_heads, tokens, head_dim] into transformers' own cache."""
        from transformers import DynamicCache

        cache = DynamicCache()
        for layer, (keys, values) in enumerate(layers):
            cache.update(keys, values, layer)
        return cache

    def _gather(self, layer: int, pages: Sequence[int], end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy K and V of positions [0, end) out of the pages, each of shape [1, kv_heads, end, head_dim]."""
        used = list(pages[: -(-end // self.page_size)])
        index = torch.tensor(used, dtype=torch.long, device=self.pool.k[layer].device)
        k, v = (
            tensor[index].flatten(0, 1)[:end].transpose(0, 1)[None]
            for tensor in (self.pool.k[layer], self.pool.v[layer])
        )
        return k, v

    def _gather_batch(self, layer: int, table: torch.Tensor, behind: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy K and V of the pages of `table`, [batch, pages], each to [batch, kv_heads, longest, head_dim].

        `behind`, [batch, 1, longest, 1], is true behind a request's end. Zeros replace what is there: a masked weight
        of zero times a NaN would still be NaN.
        """
        longest = behind.shape[2]
        k, v = (
            tensor[table].flatten(1, 2)[:, :longest].transpose(1, 2).masked_fill(behind, 0)
            for tensor in (self.pool.k[layer], self.pool.v[layer])
        )
        return k, v

    def _scatter(self, layer: int, pages: Sequence[int], start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write K and V of shape [kv_heads, tokens, head_dim] to the slots of positions [start, start + tokens)."""
        positions = range(start, start + int(keys.shape[1]))
        device = keys.device
        page = torch.tensor([pages[position // self.page_size] for position in positions], device=device)
        slot = torch.tensor([position % self.page_size for position in positions], device=device)
        self.pool.k[layer][page, slot] = keys.transpose(0, 1)
        self.pool.v[layer][page, slot] = values.transpose(0, 1)
