"""The vLLM connector upon a contract of its base classes: both sides in vLLM's order of calls, and tidekv's own engine.

With vLLM's own classes, scheduler and block manager: test_vllm_engine.py.
"""

from __future__ import annotations

import enum
import importlib
import json
import pickle
import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any  # vLLM's objects are not typed here.

import pytest
import torch

from tidekv import DecodeEngine, DecodeRequest, DevicePool, EngineConfig, HostPool, KVLayout, NixlTransport, PrefillPeer
from tidekv.backends.storage.uri import open_storage
from tidekv.engine.integrations.vllm_jobs import COUNTS
from tidekv.engine.integrations.vllm_settings import MHA_BACKENDS, MLA_BACKENDS, ConnectorSettings, read_settings
from tidekv.engine.workload.synthetic_prefill import SyntheticPrefill
from tidekv.states.errors import InvalidConfig, InvalidRequest

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


@dataclass
class KVConnectorStats:
    data: dict[str, Any] = field(default_factory=dict)


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


CONTRACT: dict[str, dict[str, object]] = {
    f"{V1}.base": {
        "KVConnectorBase_V1": KVConnectorBase_V1,
        "KVConnectorMetadata": KVConnectorMetadata,
        "KVConnectorRole": KVConnectorRole,
    },
    f"{V1}.metrics": {"KVConnectorStats": KVConnectorStats},
    "vllm.v1.metrics.cache_hit_source": {"CacheHitSource": CacheHitSource},
}
MODULE = "tidekv.engine.integrations.vllm"


@pytest.fixture
def connector() -> Iterator[ModuleType]:
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
            if name.partition(".")[0] == "vllm" or name == MODULE:
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
    pass


def configs_of(uri: str, *, spec: Any = None, groups: int = 1, backend: str = "FLASH_ATTN", **changes: Any) -> Any:
    """What vLLM gives a connector: its configuration and that of its KV."""
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
        "pipeline_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "decode_context_parallel_size": 1,
    }
    layer = SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: backend))
    vllm_config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(**{k: changes.pop(k, v) for k, v in transfer.items()}),
        parallel_config=SimpleNamespace(**{k: changes.pop(k, v) for k, v in parallel.items()}),
        speculative_config=changes.pop("speculative", None),
        model_config=SimpleNamespace(model="its/name"),
        compilation_config=SimpleNamespace(static_forward_context=dict.fromkeys(NAMES, layer)),
    )
    assert not changes, changes
    group = SimpleNamespace(layer_names=NAMES, kv_cache_spec=spec or FullAttentionSpec())
    return vllm_config, SimpleNamespace(num_blocks=BLOCKS, kv_cache_groups=[group] * groups)


class Vllm:
    """Both sides and paged tensors, driven in the order in which vLLM calls them. One request at a time."""

    def __init__(self, module: ModuleType, uri: str, *, seed: int = 0, **changes: Any) -> None:
        configs = configs_of(uri, **changes)
        heads, width = configs[1].kv_cache_groups[0].kv_cache_spec.num_kv_heads, 2 * DIM
        if isinstance(configs[1].kv_cache_groups[0].kv_cache_spec, MLAAttentionSpec):
            width = DIM
        shape = (LAYERS, BLOCKS, BLOCK, heads, width)
        stored = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        self.caches = {name: stored[layer].transpose(1, 2) for layer, name in enumerate(NAMES)}
        self.scheduler = module.TidekvConnector(configs[0], KVConnectorRole.SCHEDULER, configs[1])
        self.worker = module.TidekvConnector(configs[0], KVConnectorRole.WORKER, configs[1])
        self.worker.register_kv_caches(dict(reversed(self.caches.items())))
        self.invalid: set[int] = set()
        self.counts: dict[str, int] = {}

    def step(self, scheduled: dict[str, int], blocks: Sequence[int]) -> tuple[set[str], set[str]]:
        """One step of both sides; returns the requests that were read out, and those that were loaded."""
        output = SimpleNamespace(
            num_scheduled_tokens=scheduled,
            kv_connector_block_state=SimpleNamespace(get_block_ids=lambda _: (list(blocks),)),
        )
        # From one process to another.
        self.worker.bind_connector_metadata(pickle.loads(pickle.dumps(self.scheduler.build_connector_meta(output))))
        self.worker.start_load_kv(None)
        for name in NAMES:
            self.worker.wait_for_layer_load(name)
            self.worker.save_kv_layer(name, self.caches[name], None)
        self.worker.wait_for_save()
        sending, loaded = self.worker.get_finished(set())
        invalid = self.worker.get_block_ids_with_load_errors()
        self.worker.clear_connector_metadata()
        self.scheduler.update_connector_output(SimpleNamespace(finished_recving=loaded, invalid_block_ids=invalid))
        self.invalid |= invalid
        for side in (self.worker, self.scheduler):
            stats = side.get_kv_connector_stats()
            for name, count in stats.reduce().items() if stats is not None else ():
                self.counts[name] = self.counts.get(name, 0) + count
        return sending or set(), loaded or set()

    def settle(self) -> None:
        """Wait until the worker has nothing on its way."""
        self.worker._pages._loop.call(_idle(self.worker._pages))

    def serve(self, tokens: Sequence[int], blocks: Sequence[int]) -> int:
        """A prompt from arrival to end, in these blocks; returns how many tokens were loaded for it."""
        request = request_of(tokens)
        self.scheduler.on_new_request(request)
        found, is_async = self.scheduler.get_num_new_matched_tokens(request, 0)
        while found is None:
            self.scheduler._scheduler._known["r"].answer.result()
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
        assert self.scheduler.request_finished(request, list(blocks)) == (False, None)
        self.settle()
        self.step({}, [])
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
        return torch.cat(found).numpy().tobytes()

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()


async def _idle(pages: Any) -> None:
    while len(pages._tasks):
        pages._changed.clear()
        await pages._changed.wait()


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


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return f"file:{tmp_path}/store?capacity=16MB"


PROMPT = [*range(100, 100 + 4 * BLOCK), 1, 2]


@pytest.mark.parametrize("spec", [FullAttentionSpec(), MLAAttentionSpec()])
def test_what_one_vllm_computed_another_loads(connector: ModuleType, uri: str, spec: Any) -> None:
    writer = Vllm(connector, uri, seed=1, spec=spec, backend="TRITON_MLA" if spec.head_size_v == 0 else "TRITON_ATTN")
    assert writer.serve(PROMPT, [7, 3, 11, 2, 5]) == 0
    assert writer.counts == {"lookups": 1, "save_pages_stored": 4}
    writer.close()
    reader = Vllm(connector, uri, seed=2, spec=spec, backend="FLASHMLA" if spec.head_size_v == 0 else "FLASHINFER")
    before = reader.page(5)
    assert reader.serve(PROMPT, [1, 2, 3, 4, 5]) == 4 * BLOCK
    assert [reader.page(block) for block in (1, 2, 3, 4)] == [writer.page(block) for block in (7, 3, 11, 2)]
    assert reader.page(5) == before
    assert reader.counts == {"lookups": 1, "load_pages_storage": 4}
    assert reader.serve(PROMPT, [11, 12, 13, 14, 15]) == 4 * BLOCK
    assert reader.counts["load_pages_host"] == 4
    reader.close()
    reader.close()


def test_a_page_that_storage_lost_is_recomputed_and_stored_again(connector: ModuleType, uri: str) -> None:
    writer = Vllm(connector, uri, seed=1)
    writer.serve(PROMPT, [0, 1, 2, 3, 4])
    writer.close()
    reader = Vllm(connector, uri, seed=2)
    storage = reader.worker._pages._storage
    read = storage.get_into

    async def lossy(keys: Sequence[bytes], pages: Any, *, timeout_s: float) -> list[bool]:
        await storage.delete(keys[2:])
        return await read(keys, pages, timeout_s=timeout_s)

    storage.get_into = lossy
    assert reader.serve(PROMPT, [5, 6, 7, 8, 9]) == 4 * BLOCK
    assert reader.invalid == {7, 8}
    assert reader.counts == {
        "lookups": 1,
        "load_pages_storage": 2,
        "load_pages_missing": 2,
        "save_pages_stored": 2,
    }
    assert [reader.page(block) for block in (5, 6)] == [writer.page(block) for block in (0, 1)]
    storage.get_into = read
    reader.close()


def test_a_request_is_held_until_its_last_pages_are_read(connector: ModuleType, uri: str) -> None:
    vllm = Vllm(connector, uri, seed=1)
    request = request_of(PROMPT[:12])
    vllm.scheduler.on_new_request(request)
    allocated = SimpleNamespace(get_block_ids=lambda: ([0, 1],))
    vllm.scheduler._scheduler._known["r"].answer.result()
    assert vllm.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    vllm.scheduler.update_state_after_alloc(request, allocated, 0)
    vllm.step({"r": 12}, [0, 1])
    # Four drafts were right: that page is full without having been scheduled as such.
    request.all_token_ids += [5, 6, 7, 8, 9]
    request.num_tokens, request.num_computed_tokens = 17, 16
    assert vllm.scheduler.request_finished(request, [0, 1]) == (True, None)
    sending, _ = vllm.step({}, [])
    assert sending == {"r"}
    assert vllm.step({}, []) == (set(), set())
    vllm.settle()
    vllm.step({}, [])
    assert vllm.counts["save_pages_stored"] == 2
    vllm.close()


def test_only_the_first_of_ranks_with_the_same_latents_writes(connector: ModuleType, uri: str) -> None:
    mla = {"spec": MLAAttentionSpec(), "backend": "FLASHMLA", "tensor_parallel_size": 2}
    second = Vllm(connector, uri, rank=1, **mla)
    second.serve(PROMPT, [0, 1, 2, 3, 4])
    assert second.counts == {"lookups": 1}
    second.close()
    first = Vllm(connector, uri, rank=2, **mla)
    first.serve(PROMPT, [0, 1, 2, 3, 4])
    assert first.counts == {"lookups": 1, "save_pages_stored": 4}
    first.close()


def test_slices_of_ranks_are_their_own(connector: ModuleType, uri: str) -> None:
    first = Vllm(connector, uri, tensor_parallel_size=2, rank=0, seed=1)
    assert first.serve(PROMPT, [0, 1, 2, 3, 4]) == 0
    assert first.serve(PROMPT, [5, 6, 7, 8, 9]) == 0, "the other rank has stored nothing"
    second = Vllm(connector, uri, tensor_parallel_size=2, rank=1, seed=2)
    assert second.serve(PROMPT, [0, 1, 2, 3, 4]) == 0
    assert second.counts["save_pages_stored"] == 4
    assert second.serve(PROMPT, [5, 6, 7, 8, 9]) == 4 * BLOCK
    assert second.page(5) == second.page(0) != first.page(0)
    first.close()
    second.close()


def test_after_a_reset_nothing_old_is_found(connector: ModuleType, uri: str) -> None:
    vllm = Vllm(connector, uri)
    vllm.serve(PROMPT, [0, 1, 2, 3, 4])
    assert vllm.scheduler.reset_cache() is True
    assert vllm.serve(PROMPT, [5, 6, 7, 8, 9]) == 0
    assert vllm.serve(PROMPT, [10, 11, 12, 13, 14]) == 4 * BLOCK
    assert vllm.page(10) == vllm.page(5)
    vllm.close()


def test_hits_of_files_are_of_a_disk(connector: ModuleType, uri: str) -> None:
    made = connector.TidekvConnector(*_configured(uri, KVConnectorRole.WORKER))
    assert made._cache_hit_source is CacheHitSource.DISK
    made = connector.TidekvConnector(*_configured("redis://nowhere:1", KVConnectorRole.WORKER))
    assert made._cache_hit_source is CacheHitSource.EXTERNAL_UNSPECIFIED
    assert made.requires_kv_delivery is False


def _configured(uri: str, role: KVConnectorRole) -> tuple[Any, KVConnectorRole, Any]:
    vllm_config, kv_cache = configs_of(uri)
    return vllm_config, role, kv_cache


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"extra": {"uri": None}}, 'needs "uri"'),
        ({"extra": {"capasity": 1}}, "no option 'capasity'"),
        ({"extra": {"uri": "memory:?capacity=1MB"}}, "memory: is known to one process"),
        ({"extra": {"host": "much"}}, "host must be a size"),
        ({"extra": {"load_timeout_s": 0}}, "load_timeout_s must be more than 0"),
        ({"extra": {"threshold_tokens": -1}}, "threshold_tokens must be at least 0"),
        ({"extra": {"page_size": 12}}, "multiple of vLLM's block size, 8, not 12"),
        ({"extra": {"page_size": "16"}}, "Expected `int"),
        ({"kv_load_failure_policy": "fail"}, '"kv_load_failure_policy": "recompute"'),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size 2"),
        ({"decode_context_parallel_size": 2}, "decode_context_parallel_size 2"),
        ({"speculative": SimpleNamespace(method="eagle")}, r"draft model \(eagle\)"),
        ({"groups": 2}, "several groups"),
        ({"spec": SlidingWindowSpec()}, "KV of SlidingWindowSpec"),
        ({"spec": FullAttentionSpec(num_head_slots=2)}, "num_head_slots 2"),
        ({"spec": FullAttentionSpec(kv_quant_mode=3)}, "quantized as 3"),
        ({"spec": FullAttentionSpec(head_size_v=8)}, "K of 4 and V of 8"),
        ({"spec": FullAttentionSpec(dtype=torch.int32)}, r"torch\.int32"),
    ],
)
def test_what_cannot_be_shared_is_refused_by_name(
    connector: ModuleType, uri: str, changes: dict[str, Any], words: str
) -> None:
    vllm_config, kv_cache = configs_of(uri, **changes)
    with pytest.raises(InvalidConfig, match=words):
        connector.TidekvConnector(vllm_config, KVConnectorRole.SCHEDULER, kv_cache)


def test_ways_to_speculate_without_kv_are_no_obstacle(connector: ModuleType, uri: str) -> None:
    vllm_config, kv_cache = configs_of(uri, speculative=SimpleNamespace(method="ngram"))
    connector.TidekvConnector(vllm_config, KVConnectorRole.WORKER, kv_cache)


@pytest.mark.parametrize(
    ("spec", "backend"),
    [(FullAttentionSpec(), "CPU_ATTN"), (FullAttentionSpec(), "FLASHMLA"), (MLAAttentionSpec(), "AMX_MLA")],
)
def test_blocks_in_an_order_that_is_not_known_are_refused(
    connector: ModuleType, uri: str, spec: Any, backend: str
) -> None:
    with pytest.raises(InvalidConfig, match=f"attention backend {backend} cannot be shared"):
        Vllm(connector, uri, spec=spec, backend=backend)


def test_calls_for_the_other_side_are_refused(connector: ModuleType, uri: str) -> None:
    worker = connector.TidekvConnector(*_configured(uri, KVConnectorRole.WORKER))
    with pytest.raises(InvalidRequest, match="for the scheduler's"):
        worker.on_new_request(request_of(PROMPT))
    with pytest.raises(InvalidRequest, match="register_kv_caches comes before"):
        worker.get_finished(set())
    assert worker.get_kv_connector_stats() is None
    worker.shutdown()


def test_the_page_about_vllm_has_every_setting_count_and_backend() -> None:
    page = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text()
    for name in ConnectorSettings.__struct_fields__:
        assert f"| `{name}` |" in page
    for name in (*COUNTS, *MHA_BACKENDS, *MLA_BACKENDS):
        assert f"`{name}`" in page
    example = json.loads(page.partition("--kv-transfer-config '")[2].partition("'")[0])
    settings = read_settings(example["kv_connector_extra_config"])
    assert f"`{settings.host!r}`".replace("'", '"') in page
    for number in (settings.lookup_timeout_s, settings.load_timeout_s, settings.save_timeout_s):
        assert f"({number:g})" in page
    assert example["kv_connector_module_path"] == MODULE


def test_counts_are_summed_and_shown(connector: ModuleType) -> None:
    one = connector.TidekvConnector.build_kv_connector_stats({"lookups": 1})
    assert connector.TidekvConnector.build_kv_connector_stats().is_empty()
    both = one.aggregate(connector.TidekvStats(data={"lookups": 2, "load_pages_host": 3, "save_pages_dropped": 0}))
    assert both.reduce() == {"lookups": 3, "load_pages_host": 3}
    both.reset()
    assert both.is_empty()


@pytest.mark.nixl
async def test_a_decode_engine_hits_what_vllm_computed_and_the_reverse(connector: ModuleType, uri: str) -> None:
    layout = KVLayout(num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM, dtype="float32", page_size=BLOCK)
    mine = [*range(500, 500 + 4 * BLOCK), 1, 2]
    writer = Vllm(connector, uri, seed=5)
    writer.serve(PROMPT, [9, 8, 7, 6, 5])
    writer.close()
    prefill_pool = DevicePool.allocate(layout, 32)
    device = DevicePool.allocate(layout, 64)
    engine = DecodeEngine(
        EngineConfig(model="m", prefetch_threshold_tokens=1),
        device=device,
        host=HostPool.allocate(layout, 64),
        storage=open_storage(uri),
        transport=NixlTransport(name="decode-0"),
    )
    peer = PrefillPeer(
        device=prefill_pool,
        transport=NixlTransport("prefill-0"),
        model="m",
        on_room=SyntheticPrefill(prefill_pool, vocabulary=1000).serve,
    )
    async with peer, engine:

        async def restored(request_id: str, tokens: list[int]) -> tuple[dict[str, int], list[bytes]]:
            ready = await engine.restore(
                DecodeRequest(request_id=request_id, tokens=tokens, prefill=peer.address, prompt="send")
            )
            pages = [page.numpy().tobytes() for page in device.read_pages(ready.pages[:4])]
            await engine.finish(ready, [ready.first_token])
            return dict(ready.sources), pages

        sources, pages = await restored("theirs", PROMPT)
        assert sources == {"l1": 0, "l2": 0, "l3": 4 * BLOCK, "transfer": 2}
        assert pages == [writer.page(block) for block in (9, 8, 7, 6)]
        sources, computed = await restored("mine", mine)
        assert sources["l3"] == 0
        await engine.wait_settled()
    reader = Vllm(connector, uri, seed=6)
    assert reader.serve(mine, [15, 14, 13, 12, 11]) == 4 * BLOCK
    assert [reader.page(block) for block in (15, 14, 13, 12)] == computed
    reader.close()
