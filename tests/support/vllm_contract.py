"""What vLLM 0.33.0 asks of a connector and gives it, and both sides driven in the order in which vLLM calls them.

Tests load it by its path, and get all of its names.
"""

import enum
import importlib
import pickle
import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any  # vLLM's objects are not typed here.

import msgspec
import prometheus_client
import torch

LAYERS, HEADS, DIM, BLOCK, BLOCKS = 3, 2, 4, 8, 20
NAMES = [f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)]
V1 = "vllm.distributed.kv_transfer.kv_connector.v1"


class KVConnectorRole(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class CacheHitSource(enum.StrEnum):
    DISK = "disk"
    EXTERNAL_UNSPECIFIED = "external_unspecified"


class KVConnectorMetadata(ABC):  # noqa: B024  # As vLLM's is.
    pass


class KVConnectorHandshakeMetadata(ABC):  # noqa: B024  # As vLLM's is.
    pass


@dataclass
class KVConnectorStats:
    data: dict[str, Any] = field(default_factory=dict)


class KVConnectorPromMetrics:
    def __init__(self, vllm_config, metric_types, labelnames, per_engine_labelvalues):
        self._counter_cls = metric_types[prometheus_client.Counter]


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVConnectorKVEvents(ABC):
    """Events of one worker; vLLM joins those of all, as `joined_events` does."""

    @abstractmethod
    def add_events(self, events): ...

    @abstractmethod
    def aggregate(self): ...

    @abstractmethod
    def increment_workers(self, count=1): ...

    @abstractmethod
    def get_all_events(self): ...

    @abstractmethod
    def get_number_of_workers(self): ...

    @abstractmethod
    def clear_events(self): ...


def joined_events(of_workers: Sequence[Any]) -> Any:
    """What the scheduler's side gets of the events of all workers, by vLLM's aggregator."""
    joined = None
    for one in of_workers:
        if joined is None:
            joined = one
        elif one:
            assert isinstance(joined, type(one))
            joined.add_events(one.get_all_events())
            joined.increment_workers(1)
    return joined or None


def maybe_convert_block_hash(hash_bytes: bytes) -> int:
    return int.from_bytes(hash_bytes, byteorder="big") & ((1 << 64) - 1)


@dataclass
class KVConnectorTransferResults:
    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


class KVConnectorWorkerMetadata(ABC):
    @abstractmethod
    def aggregate(self, other): ...


class SupportsHMA(ABC):
    @abstractmethod
    def request_finished_all_groups(self, request, block_ids): ...


class KVConnectorBase_V1(ABC):  # noqa: N801  # vLLM's name.
    """What vLLM 0.33.0 asks of a connector and gives it, as its own class declares it."""

    _cache_hit_source = CacheHitSource.EXTERNAL_UNSPECIFIED

    def __init__(self, vllm_config, role, kv_cache_config):
        self._connector_metadata = None
        self._vllm_config, self._role, self._kv_cache_config = vllm_config, role, kv_cache_config

    def bind_connector_metadata(self, connector_metadata):
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self):
        self._connector_metadata = None

    def has_connector_metadata(self):
        return self._connector_metadata is not None

    def _get_connector_metadata(self):
        assert self._connector_metadata is not None
        return self._connector_metadata

    @abstractmethod
    def start_load_kv(self, forward_context, **kwargs): ...

    @abstractmethod
    def wait_for_layer_load(self, layer_name): ...

    @abstractmethod
    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs): ...

    @abstractmethod
    def wait_for_save(self): ...

    @abstractmethod
    def get_num_new_matched_tokens(self, request, num_computed_tokens): ...

    @abstractmethod
    def update_state_after_alloc(self, request, blocks, num_external_tokens): ...

    @abstractmethod
    def build_connector_meta(self, scheduler_output): ...


def cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, isa):
    """Store K and V of tokens, [token, head, element], as the kernel "vec" of CPU_ATTN does: K transposed."""
    heads, tokens, dim = key_cache.shape[1:]
    for at, slot in enumerate(slot_mapping.tolist()):
        block, slot = divmod(slot, tokens)
        key_cache[block].flatten(1).view(heads, dim, tokens)[:, :, slot] = key[at]
        value_cache[block, :, slot] = value[at]


CONTRACT: dict[str, dict[str, object]] = {
    f"{V1}.base": {
        "KVConnectorBase_V1": KVConnectorBase_V1,
        "KVConnectorHandshakeMetadata": KVConnectorHandshakeMetadata,
        "KVConnectorMetadata": KVConnectorMetadata,
        "KVConnectorRole": KVConnectorRole,
        "KVConnectorTransferResults": KVConnectorTransferResults,
        "KVConnectorWorkerMetadata": KVConnectorWorkerMetadata,
        "SupportsHMA": SupportsHMA,
    },
    f"{V1}.metrics": {
        "KVConnectorPromMetrics": KVConnectorPromMetrics,
        "KVConnectorStats": KVConnectorStats,
    },
    "vllm.distributed.kv_events": {
        "AllBlocksCleared": AllBlocksCleared,
        "BlockRemoved": BlockRemoved,
        "BlockStored": BlockStored,
        "KVConnectorKVEvents": KVConnectorKVEvents,
    },
    "vllm.v1.core.kv_cache_utils": {"maybe_convert_block_hash": maybe_convert_block_hash},
    "vllm.v1.metrics.cache_hit_source": {"CacheHitSource": CacheHitSource},
    "vllm._custom_ops": {"cpu_attn_reshape_and_cache": cpu_attn_reshape_and_cache},
    "vllm.v1.attention.backends.cpu_attn": {"_get_attn_isa": lambda dtype, block_size, head_size, kv_dtype: "vec"},
}
MODULE = "tidekv.engine.integrations.vllm.connector"
TOGGLED_MODULE = "benchmarks.vllm_pair.toggled_connector"
USES_VLLM = (MODULE, TOGGLED_MODULE, "tidekv.engine.integrations.vllm.cpu_attn")


@contextmanager
def upon_contract() -> Iterator[ModuleType]:
    """The module under test, upon the contract."""
    before = dict(sys.modules)
    for module, members in CONTRACT.items():
        parts = module.split(".")
        for count in range(1, len(parts) + 1):
            name = ".".join(parts[:count])
            sys.modules[name] = sys.modules.get(name) or types.ModuleType(name)
        vars(sys.modules[module]).update(members)
    try:
        yield importlib.import_module(MODULE)
    finally:
        for name in set(sys.modules) - set(before):
            if name.partition(".")[0] == "vllm" or name in USES_VLLM:
                del sys.modules[name]


@dataclass
class FullAttentionSpec:
    """vLLM's description of a layer's blocks."""

    block_size: int = BLOCK
    num_kv_heads: int = HEADS
    head_size: int = DIM
    head_size_v: int = DIM
    dtype: torch.dtype = torch.float32
    kv_quant_mode: int = 0
    num_head_slots: int | None = None
    state_content_bytes: int | None = None
    page_size_padded: int | None = None
    tokens_per_state: int = 1


@dataclass
class MLAAttentionSpec(FullAttentionSpec):
    num_kv_heads: int = 1
    head_size_v: int = 0


@dataclass
class SlidingWindowSpec(FullAttentionSpec):
    sliding_window: int = 2 * BLOCK + 1


@dataclass
class UniformTypeKVCacheSpecs:
    """That of a group whose layers differ, such as those of a model and of a draft with other heads."""

    kv_cache_specs: dict[str, Any]
    block_size: int = BLOCK


@dataclass
class MambaSpec:
    block_size: int = BLOCK


def names_of(group: int) -> list[str]:
    """Names of the layers of a group of blocks."""
    return [f"model.layers.{len(NAMES) * group + layer}.self_attn.attn" for layer in range(LAYERS)]


def configs_of(
    uri: str,
    *,
    spec: Any = None,
    further: Sequence[Any] = (),
    has_kv: bool = True,
    backend: str = "FLASH_ATTN",
    **changes: Any,
) -> Any:
    """What vLLM gives a connector: its configuration and that of its KV. `further`: descriptions of groups of blocks
    behind the first one.
    """
    extra = {"uri": uri, "model": "m", "host": "1MB", **changes.pop("extra", {})}
    transfer = {
        "kv_connector_extra_config": {name: value for name, value in extra.items() if value is not None},
        "kv_load_failure_policy": "recompute",
        "is_kv_consumer": True,
        "is_kv_producer": True,
    }
    parallel = {
        "rank": 0,
        "tensor_parallel_size": 1,
        "data_parallel_size": 1,
        "data_parallel_index": 0,
        "pipeline_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "decode_context_parallel_size": 1,
    }
    layer = SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: backend))
    vllm_config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(**{k: changes.pop(k, v) for k, v in transfer.items()}),
        parallel_config=SimpleNamespace(**{k: changes.pop(k, v) for k, v in parallel.items()}),
        speculative_config=changes.pop("speculative", None),
        kv_events_config=changes.pop("kv_events", None),
        cache_config=SimpleNamespace(enable_prefix_caching=changes.pop("prefix_caching", True)),
        model_config=SimpleNamespace(model="its/name"),
        compilation_config=SimpleNamespace(
            static_forward_context={name: layer for group in range(1 + len(further)) for name in names_of(group)}
        ),
    )
    assert not changes, changes
    groups = [
        SimpleNamespace(layer_names=names_of(number), kv_cache_spec=each)
        for number, each in enumerate((spec or FullAttentionSpec(), *further) if has_kv else ())
    ]
    return vllm_config, SimpleNamespace(num_blocks=BLOCKS, kv_cache_groups=groups)


class Vllm:
    """Both sides and paged tensors, driven in the order in which vLLM calls them. One request at a time."""

    def __init__(self, module: ModuleType, uri: str, *, seed: int = 0, device: str = "cpu", **changes: Any) -> None:
        configs = configs_of(uri, **changes)
        heads, width = configs[1].kv_cache_groups[0].kv_cache_spec.num_kv_heads, 2 * DIM
        if isinstance(configs[1].kv_cache_groups[0].kv_cache_spec, MLAAttentionSpec):
            width = DIM
        shape = (LAYERS, BLOCKS, BLOCK, heads, width)
        stored = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)
        self.caches = {name: stored[layer].transpose(1, 2) for layer, name in enumerate(NAMES)}
        self.scheduler = module.TidekvConnector(configs[0], KVConnectorRole.SCHEDULER, configs[1])
        self.worker = module.TidekvConnector(configs[0], KVConnectorRole.WORKER, configs[1])
        try:
            self.worker.register_kv_caches(dict(reversed(self.caches.items())))
        except BaseException:
            # The scheduler's side has opened storage, and its caller gets no object to close.
            self.close()
            raise
        self.preempted: set[str] = set()
        """Requests that vLLM preempts with the next step."""
        self.invalid: set[int] = set()
        self.counts: dict[str, int] = {}

    def step(self, scheduled: dict[str, int], blocks: Sequence[int]) -> tuple[set[str], set[str]]:
        """One step of both sides; returns the requests that were read out, and those that were loaded."""
        output = SimpleNamespace(
            num_scheduled_tokens=scheduled,
            kv_connector_block_state=SimpleNamespace(get_block_ids=lambda _: (list(blocks),)),
            preempted_req_ids=self.preempted,
        )
        self.preempted = set()
        # From one process to another.
        metadata = pickle.loads(pickle.dumps(self.scheduler.build_connector_meta(output)))
        self.worker.handle_preemptions(metadata)
        self.worker.bind_connector_metadata(metadata)
        self.worker.start_load_kv(None)
        for name in NAMES:
            if self.worker.has_connector_metadata():
                self.worker.wait_for_layer_load(name)
                self.worker.save_kv_layer(name, self.caches[name], None)
        self.worker.wait_for_save()
        results = self.worker.get_transfer_results(set())
        sending, loaded = results.finished_sending, results.finished_recving
        assert not results.failed_recving
        invalid = self.worker.get_block_ids_with_load_errors()
        self.worker.clear_connector_metadata()
        self.scheduler.update_connector_output(
            SimpleNamespace(finished_recving=loaded, invalid_block_ids=invalid, kv_cache_events=None)
        )
        self.invalid |= invalid
        for side in (self.worker, self.scheduler):
            stats = side.get_kv_connector_stats()
            for name, count in stats.reduce().items() if stats is not None else ():
                self.counts[name] = self.counts.get(name, 0) + count
        return sending or set(), loaded or set()

    def settle(self) -> None:
        """Wait until the worker has nothing on its way."""
        settle(self.worker.connector_worker.engine)

    def serve(self, tokens: Sequence[int], blocks: Sequence[int]) -> int:
        """A prompt from arrival to end, in these blocks; returns how many tokens were loaded for it."""
        request = request_of(tokens)
        self.scheduler.on_new_request(request)
        found, is_async = self.scheduler.get_num_new_matched_tokens(request, 0)
        while found is None:
            self.scheduler.connector_scheduler._known["r"].answer.result()
            found, is_async = self.scheduler.get_num_new_matched_tokens(request, 0)
        assert is_async is bool(found)
        allocated = SimpleNamespace(get_block_ids=lambda: (list(blocks),))
        self.scheduler.update_state_after_alloc(request, allocated, found)
        loaded: set[str] = set()
        if found:
            _, loaded = self.step({}, [])
            self.settle()
            _, later = self.step({}, [])
            assert loaded ^ later == {"r"}, "told once"
            first_bad = next((at for at, block in enumerate(blocks) if block in self.invalid), len(blocks))
            request.num_computed_tokens = min(found, first_bad * BLOCK)
        count = len(tokens) - request.num_computed_tokens
        sending, _ = self.step({"r": count}, blocks)
        request.num_computed_tokens += count
        assert not sending
        held, params = self.scheduler.request_finished_all_groups(request, (list(blocks),))
        assert params is None
        self.settle()
        sending, _ = self.step({}, [])
        assert sending == ({"r"} if held else set()), "what a step has filled was read by now"
        return found

    def page(self, block: int) -> bytes:
        """A page's bytes in tidekv's order, element by element."""
        parts = 1 if next(iter(self.caches.values())).shape[-1] == DIM else 2
        found = [
            cache[block, head, slot, part * DIM : (part + 1) * DIM]
            for cache in self.caches.values()
            for part in range(parts)
            for slot in range(BLOCK)
            for head in range(cache.shape[1])
        ]
        return torch.cat(found).cpu().numpy().tobytes()

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()


def settle(worker: Any) -> None:
    """Wait until the engine of a worker of the storage role has nothing on its way."""
    worker.engine.wait_settled()


def request_of(tokens: Sequence[int]) -> Any:
    return SimpleNamespace(
        request_id="r",
        prompt_token_ids=list(tokens),
        all_token_ids=list(tokens),
        num_tokens=len(tokens),
        num_computed_tokens=0,
        prompt_embeds=None,
        mm_features=[],
        resumable=False,
        lora_request=None,
        cache_salt=None,
        skip_reading_prefix_cache=False,
    )
