"""SGLang's pools of KV as device pools of tidekv, without a copy, and its rows of metadata as bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Final, NamedTuple  # SGLang's pools have no types.

import torch

from tidekv.backends.component_pools import ComponentPools
from tidekv.backends.copies.streams import CudaStream
from tidekv.backends.device.pool import DevicePool
from tidekv.backends.layout import DTYPES, KVLayout
from tidekv.engine.thread.server_streams import ServerStreams, server_streams
from tidekv.states.errors import InvalidConfig, InvalidRequest
from tidekv.transports.aux_values import AUX_BYTES_MAX

KINDS: Final = {"MHATokenToKVPool": "mha", "MLATokenToKVPool": "mla"}
"""Kind of a page layout by SGLang's class of the pool. Subclasses pack a page otherwise, or keep more than it."""
WINDOWED: Final = "SWAKVPool"
"""SGLang's class of two pools: one of the layers with full attention, one of those with sliding windows."""
WINDOW: Final = "window"
"""Name of the windows among the components of both ends."""


class Pools(NamedTuple):
    """The pools of a server: that of the KV of all tokens, and that of sliding windows if the model has any."""

    full: DevicePool
    components: tuple[ComponentPools, ...] = ()


def wrap_pools(pool: Any, sliding_window: int | None) -> Pools:
    """Return device pools over SGLang's buffers. `sliding_window`: tokens that SGLang's scheduler keeps before a place.

    Raises InvalidConfig for pools that are not known.
    """
    if type(pool).__name__ != WINDOWED:
        return Pools(wrap_pool(pool))
    if not sliding_window or int(pool.page_size) < 2:
        raise InvalidConfig(
            f"KV of SGLang's {WINDOWED} is handed over with --page-size 2 or more, and with windows of one size: it "
            f"has pages of {pool.page_size} and windows of {sliding_window} tokens"
        )
    full = wrap_pool(pool.full_kv_pool)
    windows = ComponentPools(
        name=WINDOW,
        kind="window",
        window_tokens=tail_tokens(sliding_window, full.layout.page_size),
        device=wrap_pool(pool.swa_kv_pool),
    )
    return Pools(full, (windows,))


def tail_tokens(sliding_window: int, page_size: int) -> int:
    """Return the tokens before a prompt's end whose windows are handed over: all that SGLang's decode allocates.

    That is one more than a window. SGLang transfers the window only, and its tree would keep the page before that,
    unwritten, as a part of the windows of shorter prompts.
    """
    return max(sliding_window, page_size) + 1


class RequestWindows:
    """Where the windows of a request are. SGLang finds them by the places of its tokens in the pool of full KV."""

    def __init__(self, queue: Any, tail: int) -> None:
        """`tail`: the tokens that `tail_tokens` has returned."""
        self._allocator = queue.scheduler.token_to_kv_pool_allocator
        self._table = queue.scheduler.req_to_token_pool
        self._tail = tail

    def at_end(self, request: Any, tokens: int) -> list[int]:
        """Return the pages of the windows' pool at the end of the request's first `tokens` tokens.

        Raises InvalidRequest if SGLang has given one of them up.
        """
        page_size = self._allocator.page_size
        first = max(0, tokens - self._tail) // page_size * page_size
        slots = self._table.req_to_token[request.kv.req_pool_idx, first:tokens:page_size]
        pages: list[int] = (
            self._allocator.translate_swa_indices_for_transfer(slots).cpu().numpy() // page_size
        ).tolist()
        # Page 0 stands for tokens without a place.
        if 0 in pages:
            raise InvalidRequest(f"SGLang does not have the windows of tokens [{first}, {tokens}) of this prompt")
        return pages


def wrap_pool(pool: Any) -> DevicePool:
    """Return a device pool over SGLang's buffers, in tidekv's own order. Raises InvalidConfig for another pool."""
    kind = KINDS.get(type(pool).__name__)
    if kind is None:
        raise InvalidConfig(
            f"KV of SGLang's {type(pool).__name__} cannot be handed over, that of {', '.join((*KINDS, WINDOWED))} can: "
            "serve this model with another transfer backend"
        )
    keys = list(pool.kv_buffer if kind == "mla" else pool.k_buffer)
    values = None if kind == "mla" else list(pool.v_buffer)
    dtype = next((name for name, known in DTYPES.items() if known == pool.dtype), None)
    shapes = {tuple(buffer.shape) for buffer in (*keys, *(values or ()))}
    (shape, *others) = shapes
    page_size = int(pool.page_size)
    if dtype is None or others or len(shape) != 3 or shape[0] % page_size:
        raise InvalidConfig(
            f"KV of {pool.dtype} in buffers of {', '.join(map(str, sorted(shapes)))} cannot be handed over: each layer "
            f"needs a buffer [tokens, heads, elements], all of one shape, of whole pages of {page_size} tokens"
        )
    layout = KVLayout(
        num_layers=len(keys),
        num_kv_heads=shape[1],
        head_dim=shape[2],
        dtype=dtype,
        page_size=page_size,
        kind=kind,
    )
    # SGLang keeps 8-bit floats as integers.
    return DevicePool.wrap(
        _as_dtype(keys, pool.dtype), None if values is None else _as_dtype(values, pool.dtype), layout
    )


def forward_streams(device: torch.device, queue: Any) -> ServerStreams | None:
    """Return the streams behind which pages of a queue of SGLang may be touched: that of its scheduler's thread, and
    that of the forward, which is the current one only while a batch is enqueued. None for pools in host memory.
    """
    return server_streams(device, lambda: [CudaStream(queue.scheduler.forward_stream)])


def _as_dtype(buffers: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    return [buffer.view(dtype) for buffer in buffers]


class MetadataRows:
    """SGLang's metadata buffers in host memory: a row has a request's first token, counts and log-probabilities.

    `addresses` and `row_bytes` are those of the buffers, in order, as SGLang's `KVArgs` names them. Not for several
    threads at a time.
    """

    def __init__(self, addresses: Sequence[int], row_bytes: Sequence[int]) -> None:
        """Raises InvalidConfig if a row is too large to be sent beside a first token."""
        self._buffers = list(zip(addresses, row_bytes, strict=True))
        self.bytes = sum(row_bytes)
        if self.bytes > AUX_BYTES_MAX - 64:
            raise InvalidConfig(
                f"SGLang's row of metadata has {self.bytes} bytes, {AUX_BYTES_MAX - 64} can be sent: leave out what "
                "widens it, such as SGLANG_ENABLE_DISAGG_SAMPLING_MASK"
            )

    def read(self, row: int) -> bytes:
        """Return the bytes of a row."""
        return b"".join(ctypes.string_at(address + row * size, size) for address, size in self._buffers)

    def write(self, row: int, content: bytes) -> None:
        """Overwrite a row. `content` has `bytes` bytes."""
        assert len(content) == self.bytes, "the caller has compared the lengths"
        start = 0
        for address, size in self._buffers:
            ctypes.memmove(address + row * size, content[start : start + size], size)
            start += size
