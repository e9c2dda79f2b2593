"""Real models with sliding windows and recurrent state: everything that a `transformers` model caches, in pools.

    full attention       K and V of every token        the full pool, by page; without such layers it holds nothing
    sliding attention    K and V of the last tokens    a window's pool, by page
    linear attention     its state after a token       a state's pool: one record holds all layers

One request at a time, tokens in order: for tests and examples, and as a demonstration of components for embedders. The
first tokens of a prompt are computed at once, further ones one by one, as `generate()` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, TypeAlias

import torch

from demo.model import cache_argument
from tests.support.group_model import CausalModel, LayerKV
from tests.support.model_pools import ModelPools
from tidekv.backends.layout import KVLayout
from tidekv.backends.page_layout import PageLayout
from tidekv.states.errors import InvalidConfig

CacheLayer: TypeAlias = Any
"""Cache layer of `transformers`; the package is optional and is not type-checked."""
DTYPES = {torch.float64: "float64", torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
CONVOLUTION = "convolution"
RECORD_GROUPS = ("full", CONVOLUTION)
"""Groups of a record: the recurrent state, and the state of the convolution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLayouts:
    """Layouts of a model's pools. None if the model has no such layers."""

    full: KVLayout
    window: KVLayout | None
    window_tokens: int
    """Number of tokens before a position that are needed to continue there."""
    state: PageLayout | None


@dataclass(slots=True)
class Held:
    """Location of the cache of one request.

    `pages` are those of the full pool, `window` those of the window's pool from position `window_first` on, and
    `record` is the record of the state's pool.
    """

    pages: Sequence[int]
    window_first: int = 0
    window: Sequence[int] = ()
    record: int = 0


def layouts_of(model: CausalModel, page_size: int, ranks: int = 1) -> ModelLayouts:
    """Determine the layouts of each rank from the cache of one token.

    Raises InvalidConfig if layers of one kind differ in shape.
    """
    cache = _cache_of_one_token(model)
    full: list[tuple[torch.Size, torch.dtype]] = []
    window: list[tuple[torch.Size, torch.dtype]] = []
    states: list[tuple[torch.Tensor, torch.Tensor]] = []
    sliding = 0
    for layer in cache.layers:
        if _is_sliding(layer):
            window.append((layer.keys.shape, layer.keys.dtype))
            sliding = layer.sliding_window
        elif _has_keys(layer):
            full.append((layer.keys.shape, layer.keys.dtype))
        if _has_state(layer):
            states.append((layer.recurrent_states[0], layer.conv_states[0]))
    state = None
    if states:
        recurrent, convolution = ([pair[at] for pair in states] for at in (0, 1))
        state = PageLayout.of(
            full=_record_layout(recurrent, ranks), **{CONVOLUTION: _record_layout(convolution, ranks)}
        )
    return ModelLayouts(
        full=_kv_layout(full, page_size, ranks) if full else KVLayout.empty(page_size=page_size),
        window=_kv_layout(window, page_size, ranks) if window else None,
        # Without the token itself, which is part of the window of its layers.
        window_tokens=max(sliding - 1, 0),
        state=state,
    )


class ComponentModel:
    """Runs a causal model of `transformers` with its cache in pools. It owns neither the pools nor the model.

    Pages beyond the last token and pages that a window has left behind are never read.
    """

    def __init__(
        self,
        model: CausalModel,
        *,
        full: ModelPools,
        window: ModelPools | None = None,
        state: ModelPools | None = None,
    ) -> None:
        self.model = model
        self.full_pools = full
        self._page_size = full.page_size
        self._window = None if window is None else window.plain()
        self._state = state
        layers = _cache_of_one_token(model).layers
        has_full = any(_has_keys(layer) and not _is_sliding(layer) for layer in layers)
        self._full: LayerKV | None = full.plain() if has_full else None
        self._state_shapes = [[tensor.shape for tensor in _states(layer)] for layer in layers if _has_state(layer)]

    def forward(self, tokens: Sequence[int], start: int, held: Held) -> torch.Tensor:
        """Compute positions [start, start + len(tokens)) and write their cache; returns logits [len(tokens), vocab].

        The cache of [0, start) must be in `held`. Positions for which the window has no page are not kept in it.
        """
        end = start + len(tokens)
        cache = _new_cache(self.model)
        self._read(cache, start, held)
        with torch.inference_mode():
            out = _run(self.model, tokens, start, cache)
        self._write(cache, start, end, held)
        logits: torch.Tensor = out.logits[0]
        return logits

    def _read(self, cache: CacheLayer, start: int, held: Held) -> None:
        if not start:
            return
        full = window = state = 0
        for layer in cache.layers:
            if _is_sliding(layer):
                assert self._window is not None
                first = max(0, start - layer.sliding_window + 1)
                keys, values = self._window.read(window, self._in_window(held, first, start))
                layer.lazy_initialization(keys, values)
                layer.keys, layer.values, layer.cumulative_length = keys, values, start
                window += 1
            elif _has_keys(layer):
                assert self._full is not None
                layer.update(*self._full.read(full, self._slots(held.pages, 0, 0, start)))
                full += 1
            if _has_state(layer):
                self._read_state(layer, state, held.record)
                state += 1

    def _write(self, cache: CacheLayer, start: int, end: int, held: Held) -> None:
        full = window = state = 0
        for layer in cache.layers:
            if _is_sliding(layer):
                assert self._window is not None
                first = max(start, end - layer.sliding_window + 1, held.window_first * self._page_size)
                keys, values = (tensor[:, :, first - end :] for tensor in (layer.keys, layer.values))
                self._window.write(window, self._in_window(held, first, end), keys, values)
                window += 1
            elif _has_keys(layer):
                keys, values = layer.keys[:, :, start:], layer.values[:, :, start:]
                assert self._full is not None
                self._full.write(full, self._slots(held.pages, 0, start, end), keys, values)
                full += 1
            if _has_state(layer):
                assert self._state is not None
                for group, tensor in zip(RECORD_GROUPS, _states(layer), strict=True):
                    self._state.write_record(group, state, held.record, tensor.flatten())
                state += 1

    def _read_state(self, layer: CacheLayer, number: int, record: int) -> None:
        assert self._state is not None
        recurrent, convolution = (self._state.read_record(group, number, record) for group in RECORD_GROUPS)
        recurrent, convolution = map(torch.Tensor.view, (recurrent, convolution), self._state_shapes[number])
        layer.lazy_initialization(conv_states=convolution)
        layer.lazy_initialization(recurrent_states=recurrent)
        layer.conv_states[0].copy_(convolution)
        layer.recurrent_states[0].copy_(recurrent)
        layer.has_previous_state[0] = True

    def _in_window(self, held: Held, start: int, end: int) -> torch.Tensor:
        return self._slots(held.window, held.window_first, start, end)

    def _slots(self, pages: Sequence[int], first: int, start: int, end: int) -> torch.Tensor:
        """Return the pool's token numbers of positions [start, end); `pages` begin at page `first`."""
        positions = torch.arange(start, end)
        starts = torch.tensor(list(pages), dtype=torch.long) * self._page_size
        return starts[positions // self._page_size - first] + positions % self._page_size


def _new_cache(model: CausalModel) -> CacheLayer:
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def _cache_of_one_token(model: CausalModel) -> CacheLayer:
    cache = _new_cache(model)
    with torch.inference_mode():
        _run(model, [0], 0, cache)
    return cache


def _run(model: CausalModel, tokens: Sequence[int], start: int, cache: CacheLayer) -> Any:  # Any: as CacheLayer.
    """Compute tokens from position `start` on with a cache; returns the model's output."""
    ids = torch.tensor([list(tokens)])
    positions = torch.arange(start, start + len(tokens))[None]
    # Models without attention have no positions.
    given = {"position_ids": positions} if "position_ids" in signature(model.forward).parameters else {}
    return model(input_ids=ids, use_cache=True, **given, **{cache_argument(model): cache})


def _is_sliding(layer: CacheLayer) -> bool:
    return bool(getattr(layer, "is_sliding", False))


def _has_keys(layer: CacheLayer) -> bool:
    return hasattr(layer, "keys")


def _has_state(layer: CacheLayer) -> bool:
    return hasattr(layer, "recurrent_states")


def _states(layer: CacheLayer) -> tuple[torch.Tensor, torch.Tensor]:
    return layer.recurrent_states[0], layer.conv_states[0]


def _kv_layout(layers: Sequence[tuple[torch.Size, torch.dtype]], page_size: int, ranks: int) -> KVLayout:
    """Return the layout for layers given by shape [1, heads, tokens, dim] and dtype."""
    if len(set(layers)) != 1:
        raise InvalidConfig(f"layers of one kind must exist and be equal in shape and dtype, not {layers}")
    (_, heads, _, head_dim), dtype = layers[0]
    return KVLayout(
        num_layers=len(layers),
        num_kv_heads=heads // ranks,
        head_dim=head_dim,
        dtype=DTYPES[dtype],
        page_size=page_size,
    )


def _record_layout(states: Sequence[torch.Tensor], ranks: int) -> KVLayout:
    """Return a layout with one vector per layer: only the size of a record matters here."""
    if len({(state.shape, state.dtype) for state in states}) != 1:
        raise InvalidConfig(f"the states of all layers must have one shape, not {[state.shape for state in states]}")
    return KVLayout(
        num_layers=len(states),
        num_kv_heads=1,
        head_dim=states[0].numel() // ranks,
        dtype=DTYPES[states[0].dtype],
        page_size=1,
        kind="mla",
    )
