"""The connector whose calls do nothing in every other group of steps, upon a contract of vLLM's base classes."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks.vllm_pair.variants import STEP_TIMES
from tests.support.vllm_contract import BLOCK, TOGGLED_MODULE, upon_contract
from tests.support.vllm_handover import HandoverVllm, request_of

PROMPT = [*range(100, 100 + 4 * BLOCK), 1, 2]


@pytest.fixture
def toggled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.setenv(STEP_TIMES, str(tmp_path))
    monkeypatch.setenv("UCX_TLS", "tcp")
    with upon_contract():
        yield importlib.import_module(TOGGLED_MODULE)


def add_steps(toggled: ModuleType, pairs: Any, count: int, *, missing: int | None = None) -> None:
    """Steps of 3 s with the calls and 2 s without; the first ones of a group take longer, since vLLM is ahead."""
    now_s = 0.0
    for step in range(count):
        metadata = toggled.ToggledMetadata(None, group=step // toggled.GROUP)
        if step != missing:
            pairs.add(metadata, now_s)
        now_s += 50.0 if step % toggled.GROUP < toggled.SKIPPED else 2.0 if metadata.is_off else 3.0


def test_groups_are_compared_in_pairs_whatever_their_order(
    toggled: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toggled, "WRITE_PAIRS", 2)
    assert [toggled.ToggledMetadata(None, group=group).is_off for group in range(5)] == [
        False,
        True,
        True,
        False,
        False,
    ]
    add_steps(toggled, toggled.StepPairs(), 4 * toggled.GROUP + 1)
    (file,) = tmp_path.glob("*.json")
    assert json.loads(file.read_text()) == [[3, 2], [3, 2]]


def test_a_group_that_lacks_a_step_is_not_compared(
    toggled: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toggled, "WRITE_PAIRS", 1)
    for missing in (toggled.GROUP, 2 * toggled.GROUP - 1):
        add_steps(toggled, toggled.StepPairs(), 2 * toggled.GROUP + 1, missing=missing)
    assert not list(tmp_path.iterdir())


@pytest.mark.nixl
def test_every_other_group_calls_nothing_and_what_waits_for_the_next_is_handed_over(
    toggled: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = HandoverVllm(toggled, "kv_producer"), HandoverVllm(toggled, "kv_consumer", seed=1)
    called_off: list[bool] = []

    def noted(call: Any) -> Any:
        return lambda *given: (called_off.append(decode.worker._is_off), call(*given))[1]

    for name in ("before_forward", "start_loads", "after_forward", "is_transferring", "take_counts"):
        monkeypatch.setattr(decode.worker.connector_worker, name, noted(getattr(decode.worker.connector_worker, name)))
    try:
        prefill.add(request_of("p", PROMPT, {"do_remote_decode": True}), [7, 3, 11, 2, 5])
        prefill.compute("p", chunk=12)
        _, params = prefill.finish("p")
        for _ in range(toggled.GROUP):
            decode.step()
        # From here on, two groups call nothing.
        assert decode.add(request_of("d", PROMPT, params), [12, 13, 14, 15, 16]) == len(PROMPT)
        for _ in range(2 * toggled.GROUP):
            decode.step()
            assert decode.worker._is_off
        called = len(called_off)
        decode.step_until(lambda: decode.loaded)
        assert decode.holds("d", PROMPT)
    finally:
        decode.close()
        prefill.close()
    assert toggled.GROUP <= called < len(called_off)
    assert not any(called_off)
