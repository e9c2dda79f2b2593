"""What SGLang can be told to serve that the transfer backend `tidekv` does not: refused at the start, by name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support import sglang_contract
from tests.support.sglang_contract import PAGE, CommonKVManager, HookRegistry, MetadataBuffers, modules
from tidekv.engine.integrations.sglang.handover.plugin import register
from tidekv.engine.integrations.sglang.handover.pools import KINDS, WINDOWED, wrap_pools
from tidekv.states.errors import InvalidConfig

PAGE_ON_SGLANG = (Path(__file__).parents[2] / "docs" / "sglang.md").read_text()
SIZES = {
    "--pp-size": "pp_size",
    "--attn-cp-size": "attn_cp_size",
    "--dcp-size": "dcp_size",
    "--dp-size": "system_dp_size",
    "--attn-dp-size": "attn_dp_size",
}
"""Options of SGLang, and where its manager has their values."""
BEHIND_THE_TREE = {
    "--enable-hierarchical-cache": "enable_decode_hicache",
    "--enable-unified-cache-external-linker": "enable_unified_cache_external_linker",
    "--enable-hisparse": "enable_hisparse",
}
"""Options of a decode server, and the fields of its scheduler that say so."""
READS = '{"host": "1MB", "engine": {"cache_peers": {"enabled": true, "allow": ["127.0.0.1:*"]}}}'
"""Settings of a prefill server that reads from decode."""
ELSEWHERE = {
    "--enable-hierarchical-cache": "enable_hierarchical_cache",
    "--enable-lmcache": "enable_lmcache",
}
"""Options of a prefill server that reads, and the fields of its scheduler that say so."""
NO_TREE = "--disable-radix-cache"
OPTIMISTIC = "--optimistic-prefill-attempts"
LINKER = "--enable-unified-cache-external-linker"
RADIX = "--disaggregation-decode-enable-radix-cache"
POLICY = "--disaggregation-decode-allocation-policy prefill_complete"
MEMORY_SAVER = "--enable-memory-saver"
SAMPLING_MASK = "SGLANG_ENABLE_DISAGG_SAMPLING_MASK"


@pytest.fixture(autouse=True)
def plugged(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both roles of SGLang with the backend; nothing that is refused has started anything."""
    monkeypatch.setenv("TIDEKV_SGLANG", '{"dials": ["127.0.0.1:*"], "host": "1MB"}')
    with modules():
        register()
        HookRegistry.apply_hooks()
        yield


def start_prefill() -> None:
    sys.modules["sglang.srt.disaggregation.prefill"].PrefillBootstrapQueue()


def start_decode() -> None:
    sys.modules["sglang.srt.disaggregation.decode"].DecodePreallocQueue()


@pytest.mark.parametrize("start", [start_prefill, start_decode])
@pytest.mark.parametrize("option", SIZES)
def test_other_kinds_of_parallelism_than_that_of_tensors(
    option: str, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CommonKVManager, SIZES[option], 2)
    with pytest.raises(InvalidConfig, match=f"{option} must be 1, not 2"):
        start()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"state_types": ["mamba"]}, "mamba"),
        ({"state_types": ["swa", "dsa"]}, "keeps dsa beside"),
        ({"num_draft_entries": 1}, "draft model"),
        ({"aux_item_lens": [1 << 20] * 3}, SAMPLING_MASK),
    ],
)
@pytest.mark.parametrize("start", [start_prefill, start_decode])
def test_models_and_rows_of_metadata_that_are_not_handed_over(
    more: dict[str, Any], words: str, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv_args = MetadataBuffers.kv_args

    def wider(buffers: MetadataBuffers, pool: Any) -> SimpleNamespace:
        return SimpleNamespace(**{**vars(kv_args(buffers, pool)), **more})

    monkeypatch.setattr(MetadataBuffers, "kv_args", wider)
    with pytest.raises(InvalidConfig, match=words):
        start()


@pytest.mark.parametrize("start", [start_prefill, start_decode])
def test_a_memory_saver(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sglang_contract.SERVER_ARGS, "enable_memory_saver", True)
    with pytest.raises(InvalidConfig, match=MEMORY_SAVER):
        start()


@pytest.mark.parametrize("start", [start_prefill, start_decode])
def test_pages_that_decode_allocates_late(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CommonKVManager, "defer_decode_allocation", True)
    with pytest.raises(InvalidConfig, match=f"{POLICY.partition(' ')[0]} must be early"):
        start()


@pytest.mark.parametrize("option", BEHIND_THE_TREE)
def test_another_cache_behind_decodes_tree(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sglang_contract.SCHEDULER, BEHIND_THE_TREE[option], True)
    with pytest.raises(InvalidConfig, match=f"leave out {option}"):
        start_decode()


def test_decode_without_a_tree() -> None:
    queue: Any = sys.modules["sglang.srt.disaggregation.decode"].DecodePreallocQueue

    class ChunkQueue(queue):  # type: ignore[misc]  # A class of the contract.
        """A queue that has a list of chunks in place of its tree."""

        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, SimpleNamespace() if name == "tree_cache" else value)

    with pytest.raises(InvalidConfig, match=f"{RADIX}.*it has SimpleNamespace"):
        ChunkQueue()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A prefill server that reads from decode."""
    monkeypatch.setenv("TIDEKV_SGLANG", READS)
    return monkeypatch


@pytest.mark.parametrize("option", ELSEWHERE)
def test_reads_into_a_tree_whose_pages_may_be_elsewhere(option: str, reads: pytest.MonkeyPatch) -> None:
    reads.setitem(sglang_contract.SCHEDULER, ELSEWHERE[option], True)
    with pytest.raises(InvalidConfig, match=f"cache_peers.enabled at prefill: leave out {option}"):
        start_prefill()


@pytest.mark.parametrize(
    ("option", "field", "value"),
    [(NO_TREE, "disable", True), (LINKER, "linker", object())],
)
def test_reads_into_a_tree_that_takes_none(option: str, field: str, value: object, reads: pytest.MonkeyPatch) -> None:
    tree = sys.modules["sglang.srt.mem_cache.unified_radix_cache"].UnifiedRadixCache
    reads.setattr(tree, field, value, raising=False)
    with pytest.raises(InvalidConfig, match=f"leave out {option}"):
        start_prefill()


@pytest.mark.parametrize("name", ["insert", "path_device_indices"])
def test_reads_into_a_tree_that_is_not_known(name: str, reads: pytest.MonkeyPatch) -> None:
    reads.delattr(sys.modules["sglang.srt.mem_cache.unified_radix_cache"].UnifiedRadixCache, name)
    with pytest.raises(InvalidConfig, match=f"no UnifiedRadixCache.{name}"):
        start_prefill()


def test_reads_that_sglang_would_not_wait_for(reads: pytest.MonkeyPatch) -> None:
    reads.setitem(sglang_contract.SERVER_ARGS, "optimistic_prefill_attempts", 1)
    with pytest.raises(InvalidConfig, match=f"leave out {OPTIMISTIC}"):
        start_prefill()


def test_reads_of_several_ranks_and_of_windows(reads: pytest.MonkeyPatch) -> None:
    queue = sys.modules["sglang.srt.disaggregation.prefill"].PrefillBootstrapQueue
    with pytest.raises(InvalidConfig, match="--tp-size 1 only"):
        queue(ranks=2)
    with pytest.raises(InvalidConfig, match="without sliding windows"):
        queue(windows=True)


def test_reads_from_places_that_are_not_named(reads: pytest.MonkeyPatch) -> None:
    reads.setenv("TIDEKV_SGLANG", '{"host": "1MB", "engine": {"cache_peers": {"enabled": true}}}')
    with pytest.raises(InvalidConfig, match=r"needs engine\.cache_peers\.allow"):
        start_prefill()


@pytest.mark.parametrize("name", [*ELSEWHERE, NO_TREE, OPTIMISTIC, LINKER])
def test_the_page_on_sglang_says_what_reads_exclude(name: str) -> None:
    _, _, section = PAGE_ON_SGLANG.partition("### Prefill that reads from decode")
    text, _, _ = section.partition("\n### ")
    assert f"`{name}`" in text


def pool_named(name: str, **more: Any) -> Any:
    buffers = [torch.zeros((4 * PAGE, 2, 8)) for _ in range(2)]
    given = {"page_size": PAGE, "dtype": torch.float32, "k_buffer": buffers, "v_buffer": buffers}
    return type(name, (), {**given, **more})()


@pytest.mark.parametrize("name", ["MHATokenToKVPoolFP4", "PageInterleaveMLATokenToKVPool", "DSATokenToKVPool"])
def test_kv_of_other_pools(name: str) -> None:
    with pytest.raises(InvalidConfig, match=f"{name} cannot be handed over"):
        wrap_pools(pool_named(name), None)


@pytest.mark.parametrize(("page_size", "window"), [(1, 8), (PAGE, None)])
def test_windows_in_pages_of_one_token_or_of_several_sizes(page_size: int, window: int | None) -> None:
    with pytest.raises(InvalidConfig, match="--page-size 2 or more, and with windows of one size"):
        wrap_pools(pool_named(WINDOWED, page_size=page_size), window)


@pytest.mark.parametrize(
    "name",
    [
        *SIZES,
        *BEHIND_THE_TREE,
        *KINDS,
        *(WINDOWED, RADIX, POLICY, MEMORY_SAVER, SAMPLING_MASK, "--page-size 1", "--tp-size"),
    ],
)
def test_the_page_on_sglang_says_so(name: str) -> None:
    _, _, section = PAGE_ON_SGLANG.partition("### What is served")
    table, _, _ = section.partition("\n### ")
    assert f"`{name}`" in table
