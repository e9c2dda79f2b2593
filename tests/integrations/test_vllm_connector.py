"""The vLLM connector upon a contract of its base classes: both sides in vLLM's order of calls, and tidekv's own engine.

With vLLM's own classes, scheduler and block manager: test_vllm_engine.py.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial, reduce
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any  # vLLM's objects are not typed here.

import prometheus_client
import pytest
import torch

from tests.support.vllm_contract import (
    BLOCK,
    BLOCKS,
    DIM,
    HEADS,
    LAYERS,
    MODULE,
    CacheHitSource,
    FullAttentionSpec,
    KVConnectorRole,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    Vllm,
    configs_of,
    cpu_attn_reshape_and_cache,
    request_of,
)
from tests.support.vllm_handover import speculative_of
from tidekv import EngineConfig, KVLayout
from tidekv.backends.copies.block_order import PagedBlocks
from tidekv.engine.integrations.vllm.drafts import DRAFTS_WITHOUT_KV
from tidekv.engine.integrations.vllm.handover.settings import HandoverSettings
from tidekv.engine.integrations.vllm.jobs import COUNTS
from tidekv.engine.integrations.vllm.settings import (
    CPU_BACKEND,
    MHA_BACKENDS,
    MLA_BACKENDS,
    ConnectorSettings,
    read_settings,
    read_shared,
)
from tidekv.states.errors import InvalidConfig, InvalidRequest


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return f"file:{tmp_path}/store?capacity=16MB"


PROMPT = [*range(100, 100 + 4 * BLOCK), 1, 2]


@pytest.mark.parametrize("spec", [FullAttentionSpec(), MLAAttentionSpec()])
def test_what_one_vllm_computed_another_loads(connector: ModuleType, uri: str, spec: Any) -> None:
    writer = Vllm(connector, uri, seed=1, spec=spec, backend="TRITON_MLA" if spec.head_size_v == 0 else "TRITON_ATTN")
    assert writer.serve(PROMPT, [7, 3, 11, 2, 5]) == 0
    assert writer.counts == {"lookups": 1, "offer_pages_written": 4}
    writer.close()
    reader = Vllm(connector, uri, seed=2, spec=spec, backend="FLASHMLA" if spec.head_size_v == 0 else "FLASHINFER")
    before = reader.page(5)
    assert reader.serve(PROMPT, [1, 2, 3, 4, 5]) == 4 * BLOCK
    assert [reader.page(block) for block in (1, 2, 3, 4)] == [writer.page(block) for block in (7, 3, 11, 2)]
    assert reader.page(5) == before
    assert reader.counts == {"lookups": 1, "restore_tokens_l3": 4 * BLOCK}
    assert reader.serve(PROMPT, [11, 12, 13, 14, 15]) == 4 * BLOCK
    assert reader.counts["restore_tokens_l2"] == 4 * BLOCK
    reader.close()
    reader.close()


def test_a_page_that_storage_lost_is_recomputed_and_stored_again(connector: ModuleType, uri: str) -> None:
    writer = Vllm(connector, uri, seed=1)
    writer.serve(PROMPT, [0, 1, 2, 3, 4])
    writer.close()
    reader = Vllm(connector, uri, seed=2)
    storage = reader.worker.connector_worker.engine.engine._engine._runtime.storage
    read = storage.get_into

    async def lossy(keys: Sequence[bytes], pages: Any, *, timeout_s: float) -> list[bool]:
        await storage.delete(keys[2:])
        return await read(keys, pages, timeout_s=timeout_s)

    storage.get_into = lossy
    assert reader.serve(PROMPT, [5, 6, 7, 8, 9]) == 4 * BLOCK
    assert reader.invalid == {7, 8}
    assert reader.counts == {
        "lookups": 1,
        "restore_tokens_l3": 2 * BLOCK,
        "restores_partial": 1,
        "offer_pages_written": 2,
    }
    assert [reader.page(block) for block in (5, 6)] == [writer.page(block) for block in (0, 1)]
    storage.get_into = read
    reader.close()


def test_a_request_is_held_until_its_last_pages_are_read(connector: ModuleType, uri: str) -> None:
    vllm = Vllm(connector, uri, seed=1)
    request = request_of(PROMPT[:12])
    vllm.scheduler.on_new_request(request)
    allocated = SimpleNamespace(get_block_ids=lambda: ([0, 1],))
    vllm.scheduler.connector_scheduler._known["r"].answer.result()
    assert vllm.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    vllm.scheduler.update_state_after_alloc(request, allocated, 0)
    vllm.step({"r": 12}, [0, 1])
    # Four drafts were right: that page is full without having been scheduled as such.
    request.all_token_ids += [5, 6, 7, 8, 9]
    request.num_tokens, request.num_computed_tokens = 17, 16
    assert vllm.scheduler.request_finished_all_groups(request, ([0, 1],)) == (True, None)
    sending, _ = vllm.step({}, [])
    vllm.settle()
    later, _ = vllm.step({}, [])
    assert sending ^ later == {"r"}, "reported once"
    assert vllm.step({}, []) == (set(), set())
    assert vllm.counts["offer_pages_written"] == 2
    vllm.close()


def test_only_the_first_of_ranks_with_the_same_latents_writes(connector: ModuleType, uri: str) -> None:
    mla = {"spec": MLAAttentionSpec(), "backend": "FLASHMLA", "tensor_parallel_size": 2}
    second = Vllm(connector, uri, rank=1, **mla)
    second.serve(PROMPT, [0, 1, 2, 3, 4])
    assert second.counts == {"lookups": 1}
    second.close()
    first = Vllm(connector, uri, rank=2, **mla)
    first.serve(PROMPT, [0, 1, 2, 3, 4])
    assert first.counts == {"lookups": 1, "offer_pages_written": 4}
    first.close()


def test_a_rank_that_writes_nothing_reports_its_blocks_as_read(connector: ModuleType, uri: str) -> None:
    """vLLM frees them once every rank has: those of the ranks with the same latents, too."""
    vllm = Vllm(connector, uri, rank=1, spec=MLAAttentionSpec(), backend="FLASHMLA", tensor_parallel_size=2)
    request = request_of(PROMPT[:12])
    vllm.scheduler.on_new_request(request)
    allocated = SimpleNamespace(get_block_ids=lambda: ([0, 1],))
    vllm.scheduler.connector_scheduler._known["r"].answer.result()
    assert vllm.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    vllm.scheduler.update_state_after_alloc(request, allocated, 0)
    vllm.step({"r": 12}, [0, 1])
    request.all_token_ids += [5, 6, 7, 8, 9]
    request.num_tokens, request.num_computed_tokens = 17, 16
    assert vllm.scheduler.request_finished_all_groups(request, ([0, 1],)) == (True, None)
    sending, _ = vllm.step({}, [])
    assert sending == {"r"}
    assert "offer_pages_written" not in vllm.counts
    vllm.close()


def test_slices_of_ranks_are_their_own(connector: ModuleType, uri: str) -> None:
    first = Vllm(connector, uri, tensor_parallel_size=2, rank=0, seed=1)
    assert first.serve(PROMPT, [0, 1, 2, 3, 4]) == 0
    assert first.serve(PROMPT, [5, 6, 7, 8, 9]) == 0, "the other rank has stored nothing"
    second = Vllm(connector, uri, tensor_parallel_size=2, rank=1, seed=2)
    assert second.serve(PROMPT, [0, 1, 2, 3, 4]) == 0
    assert second.counts["offer_pages_written"] == 4
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
        ({"extra": {"uri": "memory:?capacity=1MB"}}, "memory: is local to one process"),
        ({"extra": {"host": "much"}}, "host must be a size"),
        ({"extra": {"load_timeout_s": 0}}, "load_timeout_s must be more than 0"),
        ({"extra": {"threshold_tokens": -1}}, "threshold_tokens must be at least 0"),
        ({"extra": {"page_size": 12}}, "multiple of vLLM's block size, 8, not 12"),
        ({"extra": {"page_size": "16"}}, "Expected `int"),
        ({"kv_load_failure_policy": "fail"}, '"kv_load_failure_policy": "recompute"'),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size 2"),
        ({"decode_context_parallel_size": 2}, "decode_context_parallel_size 2"),
        ({"speculative": SimpleNamespace(method="custom_class")}, "draft custom_class cannot be shared"),
        (
            {"speculative": speculative_of("mtp", use_multi_module_mtp=lambda: True)},
            "mtp with several modules cannot be shared .* set num_speculative_tokens to 1",
        ),
        (
            {"further": [SlidingWindowSpec()]},
            r"in 2 groups \(FullAttentionSpec, SlidingWindowSpec\).* --disable-hybrid-kv-cache-manager",
        ),
        (
            {"spec": UniformTypeKVCacheSpecs({"a": FullAttentionSpec(), "b": FullAttentionSpec(num_kv_heads=1)})},
            "KV of layers with other heads .* the hand-over role",
        ),
        ({"has_kv": False}, r"in 0 groups \(none\)"),
        ({"spec": SlidingWindowSpec()}, "KV of SlidingWindowSpec .*: serve this model without this connector"),
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


@pytest.mark.parametrize("method", DRAFTS_WITHOUT_KV)
def test_ways_to_speculate_without_kv_are_no_obstacle(connector: ModuleType, uri: str, method: str) -> None:
    vllm_config, kv_cache = configs_of(uri, speculative=SimpleNamespace(method=method))
    connector.TidekvConnector(vllm_config, KVConnectorRole.WORKER, kv_cache)


@pytest.mark.parametrize(("method", "pages"), [("eagle", 3), ("mtp", 3), ("draft_model", 4), ("dflash", 4)])
def test_pages_with_a_draft_are_found_for_prompts_for_which_it_was_computed(
    connector: ModuleType, uri: str, method: str, pages: int
) -> None:
    draft = {"speculative": speculative_of(method)}
    writer = Vllm(connector, uri, seed=1, **draft)
    writer.serve(PROMPT, [7, 3, 11, 2, 5])
    writer.close()
    reader = Vllm(connector, uri, seed=2, **draft)
    assert reader.serve(PROMPT, [1, 2, 3, 4, 5]) == 4 * BLOCK
    assert [reader.page(block) for block in (1, 2, 3, 4)] == [writer.page(block) for block in (7, 3, 11, 2)]
    # The token behind the last full page is another one.
    assert reader.serve([*PROMPT[: 4 * BLOCK], 3, 2], [11, 12, 13, 14, 15]) == pages * BLOCK
    reader.close()


def test_vllms_with_other_drafts_share_no_pages(uri: str) -> None:
    drafts = [None, speculative_of("draft_model"), SimpleNamespace(method="suffix")]
    models = [read_shared(*configs_of(uri, extra={"model": None}, speculative=draft)).model for draft in drafts]
    assert models == ["its/name", "its/name with draft_model draft", "its/name"]


@pytest.mark.parametrize(
    ("spec", "backend"),
    [(FullAttentionSpec(), "ROCM_ATTN"), (FullAttentionSpec(), "FLASHMLA"), (MLAAttentionSpec(), "CPU_ATTN")],
)
def test_blocks_in_an_order_that_is_not_known_are_refused(
    connector: ModuleType, uri: str, spec: Any, backend: str
) -> None:
    with pytest.raises(InvalidConfig, match=f"attention backend {backend} cannot be shared"):
        Vllm(connector, uri, spec=spec, backend=backend)


def vec_page(vllm: Vllm, block: int) -> bytes:
    """A page's bytes in tidekv's order, from a block in the order of CPU_ATTN's kernel "vec", element by element."""
    found = []
    for cache in vllm.caches.values():
        heads = [cache[block, head].reshape(-1) for head in range(HEADS)]
        found += [head[at * BLOCK + slot] for slot in range(BLOCK) for head in heads for at in range(DIM)]
        found += [head[(BLOCK + slot) * DIM + at] for slot in range(BLOCK) for head in heads for at in range(DIM)]
    return torch.stack(found).numpy().tobytes()


def test_blocks_of_cpu_attention_are_stored_in_our_order(connector: ModuleType, uri: str) -> None:
    writer = Vllm(connector, uri, seed=1, backend="CPU_ATTN")
    writer.serve(PROMPT, [7, 3, 11, 2, 5])
    writer.close()
    on_gpu = Vllm(connector, uri, seed=2)
    assert on_gpu.serve(PROMPT, [1, 2, 3, 4, 5]) == 4 * BLOCK
    pages = [vec_page(writer, block) for block in (7, 3, 11, 2)]
    assert [on_gpu.page(block) for block in (1, 2, 3, 4)] == pages
    on_gpu.close()
    reader = Vllm(connector, uri, seed=3, backend="CPU_ATTN")
    before = vec_page(reader, 5)
    assert reader.serve(PROMPT, [1, 2, 3, 4, 5]) == 4 * BLOCK
    assert [vec_page(reader, block) for block in (1, 2, 3, 4)] == pages
    assert vec_page(reader, 5) == before
    reader.close()


def _lossy(*given: Any) -> None:
    cpu_attn_reshape_and_cache(*given)
    given[3][1, 0, 0, 0] = given[3][1, 0, 0, 1]


def _elsewhere(*given: Any) -> None:
    cpu_attn_reshape_and_cache(*given)
    given[2][0, 0, 0, 0] = 1


def _by_head(*given: Any) -> None:
    cpu_attn_reshape_and_cache(*given)
    given[3][1, 1] = given[3][1, 1].flip(0)


@pytest.mark.parametrize("kernel", [_lossy, _elsewhere, _by_head])
def test_an_order_of_cpu_attention_that_is_no_order_is_refused(
    connector: ModuleType, uri: str, monkeypatch: pytest.MonkeyPatch, kernel: Callable[..., None]
) -> None:
    monkeypatch.setattr(sys.modules["vllm._custom_ops"], "cpu_attn_reshape_and_cache", kernel)
    with pytest.raises(InvalidConfig, match="isa 'vec' cannot be shared: 8 tokens of 4 elements"):
        Vllm(connector, uri, backend="CPU_ATTN")


@pytest.mark.parametrize(("isa", "asks"), [("vec", 0), ("amx", 1)])
def test_a_worker_asks_for_amx_tiles_before_its_first_step(
    connector: ModuleType, uri: str, monkeypatch: pytest.MonkeyPatch, isa: str, asks: int
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: asked.append(True))
    monkeypatch.setattr(sys.modules["vllm.v1.attention.backends.cpu_attn"], "_get_attn_isa", lambda *_: isa)
    Vllm(connector, uri, backend="CPU_ATTN").close()
    assert len(asked) == asks


def test_an_order_of_another_block_is_refused() -> None:
    layout = KVLayout(num_layers=1, num_kv_heads=HEADS, head_dim=DIM, dtype="float32", page_size=BLOCK)
    tensors = [torch.zeros(2, HEADS, BLOCK, 2 * DIM)]
    with pytest.raises(InvalidConfig, match="order of 8 positions for 64 elements"):
        PagedBlocks(tensors, layout=layout, block_size=BLOCK, num_blocks=2, order=torch.arange(8))


def test_calls_for_the_other_side_are_refused(connector: ModuleType, uri: str) -> None:
    worker = connector.TidekvConnector(*_configured(uri, KVConnectorRole.WORKER))
    with pytest.raises(InvalidRequest, match="only the scheduler's"):
        worker.on_new_request(request_of(PROMPT))
    with pytest.raises(InvalidRequest, match="register_kv_caches must precede"):
        worker.get_finished(set())
    assert worker.get_kv_connector_stats() is None
    worker.shutdown()


def test_vllm_leaves_out_the_calls_per_layer(connector: ModuleType, uri: str) -> None:
    """vLLM asks for metadata before each layer, and makes no calls for the layer without any."""
    worker = connector.TidekvConnector(*_configured(uri, KVConnectorRole.WORKER))
    worker.bind_connector_metadata(connector.TidekvMetadata(None))
    assert not worker.has_connector_metadata()
    worker.shutdown()


def test_the_page_about_vllm_has_every_setting_count_and_backend() -> None:
    page = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text()
    for name in ConnectorSettings.__struct_fields__:
        assert f"| `{name}` |" in page
    for name in (*COUNTS, *MHA_BACKENDS, CPU_BACKEND, *MLA_BACKENDS):
        assert f"`{name}`" in page
    example = json.loads(page.partition("--kv-transfer-config '")[2].partition("'")[0])
    settings = read_settings(example["kv_connector_extra_config"])
    assert f"`{settings.host!r}`".replace("'", '"') in page
    for number in (settings.lookup_timeout_s, settings.load_timeout_s, settings.save_timeout_s):
        assert f"({number:g})" in page
    assert example["kv_connector_module_path"] == MODULE


def test_options_that_stand_for_those_of_other_connectors_exist() -> None:
    page = (Path(__file__).parents[2] / "docs" / "vllm-options.md").read_text()
    rows = [line.split(" | ")[1] for line in page.splitlines() if line.startswith("| `")]
    assert len(rows) > 20
    handover = {name for row in rows for name in re.findall(r"`handover\.(\w+)`", row)}
    assert {"listen", "host", "lease_s"} <= handover <= set(HandoverSettings.__struct_fields__)
    storage = {name for row in rows for name in re.findall(r"storage role: `(\w+)`", row)}
    assert {"host", "threshold_tokens"} <= storage <= set(ConnectorSettings.__struct_fields__)
    engine = [name for row in rows for name in re.findall(r"`engine\.([\w.]+)`, in `handover.engine`", row)]
    assert len(engine) == 1
    assert all(reduce(getattr, name.split("."), EngineConfig()) for name in engine)


def test_counts_are_summed_and_shown(connector: ModuleType) -> None:
    one = connector.TidekvConnector.build_kv_connector_stats({"lookups": 1})
    assert connector.TidekvConnector.build_kv_connector_stats().is_empty()
    both = one.aggregate(connector.TidekvStats(data={"lookups": 2, "restore_tokens_l2": 3, "offer_pages_declined": 0}))
    assert both.reduce() == {"lookups": 3, "restore_tokens_l2": 3}
    both.reset()
    assert both.is_empty()


def test_counts_are_prometheus_counters_of_vllm(connector: ModuleType) -> None:
    registry = prometheus_client.CollectorRegistry()
    types = {prometheus_client.Counter: partial(prometheus_client.Counter, registry=registry)}
    metrics = connector.TidekvConnector.build_prom_metrics(None, types, ["model_name", "engine"], {0: ["m", "0"]})
    metrics.observe({"lookups": 2, "restore_tokens_l2": 3})
    metrics.observe({"lookups": 1})
    page = prometheus_client.generate_latest(registry).decode()
    assert 'vllm:tidekv_lookups_total{engine="0",model_name="m"} 3.0' in page
    assert 'vllm:tidekv_restore_tokens_l2_total{engine="0",model_name="m"} 3.0' in page
    assert all(f"vllm:tidekv_{name}_total" in page for name in COUNTS)


@pytest.mark.nixl
async def test_a_decode_engine_hits_what_vllm_computed_and_the_reverse(
    connector: ModuleType, uri: str, engine_on: Callable[..., AbstractAsyncContextManager[Callable[..., Any]]]
) -> None:
    layout = KVLayout(num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM, dtype="float32", page_size=BLOCK)
    mine = [*range(500, 500 + 4 * BLOCK), 1, 2]
    writer = Vllm(connector, uri, seed=5)
    writer.serve(PROMPT, [9, 8, 7, 6, 5])
    writer.close()
    async with engine_on(uri, layout) as restored:
        sources, pages = await restored(PROMPT)
        assert sources == {"l1": 0, "l2": 0, "l3": 4 * BLOCK, "transfer": 2}
        assert pages == [writer.page(block) for block in (9, 8, 7, 6)]
        sources, computed = await restored(mine)
        assert sources["l3"] == 0
    reader = Vllm(connector, uri, seed=6)
    assert reader.serve(mine, [15, 14, 13, 12, 11]) == 4 * BLOCK
    assert [reader.page(block) for block in (15, 14, 13, 12)] == computed
    reader.close()


@pytest.mark.parametrize("pages", [1, 2, 7, 8, 9, 16])
@pytest.mark.parametrize("rest", [0, 1])
def test_a_prompt_that_ends_with_a_page_is_restored_from_a_full_hit_as_it_was_computed(
    connector: ModuleType, uri: str, pages: int, rest: int
) -> None:
    """LMCache #5151: prompts of a whole number of chunks, all of them hit, were restored with the wrong context.

    Host memory has room for a few pages, so a load goes in several batches.
    """
    page = 2 * BLOCK * 2 * DIM * HEADS * LAYERS * 4
    tokens = [7 * number % 911 for number in range(pages * BLOCK + rest)]
    blocks = list(range(-(-len(tokens) // BLOCK)))
    writer = Vllm(connector, uri, seed=1)
    writer.serve(tokens, blocks)
    writer.close()
    reader = Vllm(connector, uri, seed=2, extra={"host": 4 * page})
    # vLLM computes the last token itself: a page that ends with the prompt is not asked for.
    usable = pages if rest else pages - 1
    others = [BLOCKS - 1 - block for block in blocks]
    before = reader.page(others[-1])
    assert reader.serve(tokens, others) == usable * BLOCK
    assert [reader.page(block) for block in others[:usable]] == [writer.page(block) for block in blocks[:usable]]
    assert reader.page(others[-1]) == before
    assert not reader.invalid
    reader.close()
