"""Plugins of SGLang for servers of a comparison: on a machine without a GPU, quiet, and watched.

SGLang loads them by the entry points that `server` writes, in each of its processes. They change nothing of what SGLang
computes, keeps, sends and reports to clients.
"""

from __future__ import annotations

import importlib
import os
import time
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final  # SGLang's objects, which have no types.

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from benchmarks.servers import forward_cpu, quiet_nixl
from benchmarks.sglang_pair.host_copies import transfer_kv_all_layer_direct_lf_pf, transfer_kv_per_layer_direct_pf_lf
from benchmarks.sglang_pair.names import HANG, HANG_POLL_S, REPORT

IDLE_S: Final = 0.0002
"""Pause of a scheduler that has nothing to compute. Without it, it takes the interpreter lock from its own threads."""
_ATTENTION: Final = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
_DECODE: Final = "sglang.srt.disaggregation.decode.DecodePreallocQueue"
_FILE: Final = "sglang.srt.mem_cache.hicache_storage.HiCacheFile"
_RUNNER: Final = "sglang.srt.model_executor.model_runner.ModelRunner"
_HOST: Final = "sglang.srt.mem_cache.pool_host"


def run_on_cpu() -> None:
    """Let host pools and NIXL work where device memory is ordinary memory."""

    @cache
    def prepare() -> None:
        import nixl._api as api

        base = importlib.import_module(f"{_HOST}.base")
        # Of every host pool: nothing here can lock pages for CUDA.
        base.HostKVCache.pin_memory = property(lambda pool: False, lambda pool, value: None)
        for name in ("mha", "mla"):
            module = importlib.import_module(f"{_HOST}.{name}")
            for copy in (transfer_kv_per_layer_direct_pf_lf, transfer_kv_all_layer_direct_lf_pf):
                setattr(module, copy.__name__, copy)
        api.nixlBind = _HostMemoryBinding(api.nixlBind)

    def before(*args: Any, **kwargs: Any) -> None:
        prepare()

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.__init__", before, HookType.BEFORE)


def run_latent_on_cpu() -> None:
    """Let models with latent attention compute from latents, as on a GPU: SGLang does not offer it for torch."""
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods import AttnForwardMethod

    AttentionBackendRegistry.register("torch_native", lambda attention, batch: AttnForwardMethod.MLA)


def run_windows_on_cpu() -> None:
    """Let layers with windows read the pool of windows by its own places: SGLang's attention in torch takes those of
    the pool of full KV, which are others once something was freed or transferred.
    """

    def around(original: Any, backend: Any, q: Any, k: Any, v: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        pool, rows = backend.token_to_kv_pool, backend.req_to_token_pool
        if not backend.use_sliding_window_kv_pool or not pool.layers_mapping[layer.layer_id][1]:
            return original(backend, q, k, v, layer, *args, **kwargs)
        backend.req_to_token_pool = SimpleNamespace(req_to_token=_WindowRows(rows.req_to_token, pool))
        try:
            return original(backend, q, k, v, layer, *args, **kwargs)
        finally:
            backend.req_to_token_pool = rows

    for name in ("forward_extend", "forward_decode"):
        HookRegistry.register(f"{_ATTENTION}.{name}", around, HookType.AROUND)


class _WindowRows:
    """The places of tokens in the pool of windows, by request and token."""

    def __init__(self, rows: Any, pool: Any) -> None:
        self._rows, self._pool = rows, pool

    def __getitem__(self, at: Any) -> Any:
        return self._pool.translate_loc_from_full_to_swa(self._rows[at])


def be_quiet() -> None:
    """Let the threads of a waiting scheduler, and other processes, run: see `quiet_nixl`."""

    def before(*args: Any, **kwargs: Any) -> None:
        quiet_nixl.register()

    def pause(*args: Any, **kwargs: Any) -> None:
        time.sleep(IDLE_S)

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.__init__", before, HookType.BEFORE)
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.on_idle", pause, HookType.AFTER)


def count_forward_passes() -> None:
    """Count the CPU time of forward passes and of sampling."""
    for name in ("forward", "sample"):
        HookRegistry.register(f"{_RUNNER}.{name}", forward_cpu.count, HookType.AROUND)


def watch() -> None:
    """Report tokens that decode had by tier as it asked prefill, and pages that requests hold."""
    promised: dict[int, list[int]] = {}

    def ask(result: Any, queue: Any, decode_req: Any, *args: Any, **kwargs: Any) -> None:
        match = decode_req.prefix_match
        names = ("l1_prefix_len", "l2_host_hit_length", "l3_storage_hit_length")
        tiers = [int(getattr(match, name, 0) or 0) for name in names]
        sums = promised.setdefault(len(decode_req.req.origin_input_ids), [0, 0, 0, 0])
        sums[:] = [kept + more for kept, more in zip(sums, [1, *tiers], strict=True)]

    def report(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        tree, allocator = scheduler.tree_cache, scheduler.token_to_kv_pool_allocator
        if hasattr(allocator, "full_available_size"):  # With a pool of windows beside it.
            held = allocator.size_full - allocator.full_available_size() - tree.full_evictable_size()
            held += allocator.size_swa - allocator.swa_available_size() - tree.swa_evictable_size()
        else:
            held = allocator.size - allocator.available_size() - tree.evictable_size()
        # Keys of JSON are text.
        asked = {str(tokens): sums for tokens, sums in promised.items()}
        result.internal_state[REPORT] = {"held": held, "size": allocator.size, "promised": asked}

    HookRegistry.register(f"{_DECODE}._send_kv_metadata", ask, HookType.AFTER)
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.get_internal_state", report, HookType.AFTER)


def hang_on_request() -> None:
    """Let calls of SGLang's file storage wait while the file that HANG names exists."""
    file = Path(os.environ[HANG])

    def wait(*args: Any, **kwargs: Any) -> None:
        while file.exists():
            time.sleep(HANG_POLL_S)

    for name in ("get", "set", "exists"):
        HookRegistry.register(f"{_FILE}.{name}", wait, HookType.BEFORE)


class _HostMemoryBinding:
    """NIXL's binding, for which device memory is ordinary memory."""

    def __init__(self, binding: Any) -> None:  # A compiled module.
        self._binding = binding
        self.VRAM_SEG = binding.DRAM_SEG

    def __getattr__(self, name: str) -> Any:  # Whatever the module has.
        return getattr(self._binding, name)
