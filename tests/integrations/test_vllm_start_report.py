"""One line in vLLM's log says in which tiers prompts can hit, in both roles."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.vllm_contract import BLOCK, DIM, HEADS, LAYERS, SlidingWindowSpec, Vllm, upon_contract
from tests.support.vllm_handover import HandoverVllm
from tidekv.engine.integrations.vllm.start_report import report_tiers

PAGE_BYTES = LAYERS * HEADS * BLOCK * 2 * DIM * 4


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "hits are possible" in record.getMessage()]


def config_of(*, prefix_caching: bool, **transfer: Any) -> Any:
    roles = {"is_kv_producer": True, "is_kv_consumer": True, **transfer}
    return SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching), kv_transfer_config=SimpleNamespace(**roles)
    )


@pytest.mark.parametrize(
    ("caching", "uri", "no_loads", "line"),
    [
        (
            True,
            "file:/x?capacity=1GB",
            "",
            "hits are possible in L1 (vLLM's prefix caching), L2 (host memory for 64 tokens), L3 (file)",
        ),
        (
            False,
            None,
            "",
            "hits are possible in L2 (host memory for 64 tokens); not in L1: vLLM's prefix caching is off "
            "(--enable-prefix-caching); not in L3: no uri is given",
        ),
        (
            False,
            None,
            "it only sends",
            "no hits are possible; not in L1: vLLM's prefix caching is off (--enable-prefix-caching); not in L2 and "
            "L3: it only sends",
        ),
    ],
)
def test_the_line_names_each_tier_or_why_not(
    caplog: pytest.LogCaptureFixture, caching: bool, uri: str | None, no_loads: str, line: str
) -> None:
    with caplog.at_level(logging.INFO, "tidekv.vllm"):
        report_tiers(config_of(prefix_caching=caching), model="m", l2_tokens=64, uri=uri, no_loads=no_loads)
    (said,) = lines_of(caplog)
    assert said.startswith(line)
    assert "model=m" in said
    assert "role=kv_both" in said


def test_the_storage_role_says_it_once(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with upon_contract() as module, caplog.at_level(logging.INFO, "tidekv.vllm"):
        Vllm(module, f"file:{tmp_path}/store?capacity=16MB").close()
    (said,) = lines_of(caplog)
    tokens = 10**6 // PAGE_BYTES * BLOCK
    assert said.startswith(
        f"hits are possible in L1 (vLLM's prefix caching), L2 (host memory for {tokens} tokens), L3 (file)"
    )


PREFILL_ONLY = "for prompts that name a prefill only"


@pytest.mark.nixl
@pytest.mark.parametrize(
    ("role", "settings", "said_first"),
    [
        ("kv_consumer", {}, f"L2 (host memory for {4 * BLOCK} tokens); not in L3: no uri is given"),
        ("kv_producer", {}, "; not in L2 and L3: a prefill worker only sends; decode has these tiers"),
        (
            "kv_consumer",
            {"further": [SlidingWindowSpec()]},
            f"L2 (host memory for {2 * BLOCK} tokens), the last one {PREFILL_ONLY}; not in L3",
        ),
        ("kv_consumer", {"lookup_timeout_s": 0}, f" tokens), the last one {PREFILL_ONLY}; not in L3"),
    ],
)
def test_the_hand_over_role_says_it_once(
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    role: str,
    settings: dict[str, Any],
    said_first: str,
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    with upon_contract() as module, caplog.at_level(logging.INFO, "tidekv.vllm"):
        HandoverVllm(module, role, host=f"{4 * PAGE_BYTES}B", **{"lookup_timeout_s": 0.5, **settings}).close()
    (said,) = lines_of(caplog)
    assert said_first in said
