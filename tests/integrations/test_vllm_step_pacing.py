"""Turns of the connector's threads beside vLLM's step loop: the switch interval, and sleeps in empty steps."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.vllm_contract import BLOCK, Vllm, request_of, upon_contract
from tidekv.engine.integrations import step_pacing
from tidekv.engine.integrations.step_pacing import SWITCH_S, StepPacing

LIMIT_S = 60.0


@pytest.fixture(autouse=True)
def interval() -> Iterator[float]:
    """The interpreter's default, whatever ran before; what was set is restored whatever a test does."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    yield sys.getswitchinterval()
    sys.setswitchinterval(before)


@pytest.fixture
def sleeps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr(step_pacing, "time", SimpleNamespace(sleep=found.append))
    return found


def test_the_interval_is_short_while_a_transfer_is_under_way(interval: float, sleeps: list[float]) -> None:
    pacing = StepPacing()
    pacing.after_step(is_empty=True, is_transferring=False)
    assert sys.getswitchinterval() == interval
    for _ in range(2):
        pacing.after_step(is_empty=False, is_transferring=True)
        assert sys.getswitchinterval() == pytest.approx(SWITCH_S, rel=0.01)
    assert sleeps == [], "a step that computes is not delayed"
    pacing.after_step(is_empty=True, is_transferring=True)
    assert len(sleeps) == 1
    pacing.after_step(is_empty=True, is_transferring=False)
    assert sys.getswitchinterval() == interval
    assert len(sleeps) == 1, "an idle step is not delayed"


def test_a_shorter_interval_is_kept(sleeps: list[float]) -> None:
    sys.setswitchinterval(0.0001)
    before = sys.getswitchinterval()
    pacing = StepPacing()
    pacing.after_step(is_empty=False, is_transferring=True)
    assert sys.getswitchinterval() == before
    pacing.close()
    assert sys.getswitchinterval() == before


def test_the_end_restores_the_interval_however_often(sleeps: list[float]) -> None:
    sys.setswitchinterval(0.0003025)  # One that getting and setting would shrink.
    before = sys.getswitchinterval()
    for _ in range(50):
        pacing = StepPacing()
        pacing.after_step(is_empty=False, is_transferring=True)
        assert sys.getswitchinterval() < before
        pacing.close()
        pacing.close()
    assert sys.getswitchinterval() == before


def test_the_interval_is_restored_by_the_last_of_several_workers(interval: float, sleeps: list[float]) -> None:
    first, second = StepPacing(), StepPacing()
    first.after_step(is_empty=False, is_transferring=True)
    second.after_step(is_empty=False, is_transferring=True)
    first.close()
    assert sys.getswitchinterval() == pytest.approx(SWITCH_S, rel=0.01)
    second.after_step(is_empty=False, is_transferring=False)
    assert sys.getswitchinterval() == interval
    second.close()
    assert sys.getswitchinterval() == interval


def test_a_worker_paces_its_steps_until_its_load_has_ended(
    tmp_path: Path, interval: float, sleeps: list[float]
) -> None:
    prompt = [*range(100, 100 + 2 * BLOCK), 1]
    gate = threading.Event()
    with ExitStack() as stack:
        module = stack.enter_context(upon_contract())
        vllm = Vllm(module, f"file:{tmp_path}/store?capacity=16MB")
        stack.callback(vllm.close)
        stack.callback(gate.set)  # A thread that waited on would keep the interpreter from its end.
        vllm.serve(prompt, [0, 1, 2])
        vllm.settle()  # Its pages may be on their way to storage yet.
        vllm.step({}, [])
        assert sys.getswitchinterval() == interval
        sleeps.clear()
        mover = vllm.worker.connector_worker.engine.engine._engine._runtime.copier._mover
        write = mover.to_device

        def held(*given: object) -> None:
            assert gate.wait(LIMIT_S), "the test did not go on"
            write(*given)

        mover.to_device = held
        request = request_of(prompt)
        vllm.scheduler.on_new_request(request)
        vllm.scheduler.connector_scheduler._known["r"].answer.result(LIMIT_S)
        assert vllm.scheduler.get_num_new_matched_tokens(request, 0) == (2 * BLOCK, True)
        vllm.scheduler.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: ([3, 4, 5],)), 2 * BLOCK)
        vllm.step({}, [])
        assert sys.getswitchinterval() == pytest.approx(SWITCH_S, rel=0.01)
        assert len(sleeps) == 1
        vllm.step({"another": 1}, [])
        assert len(sleeps) == 1
        gate.set()
        vllm.settle()
        _, loaded = vllm.step({}, [])
        assert loaded == {"r"}
        assert sys.getswitchinterval() == interval
        assert len(sleeps) == 1
