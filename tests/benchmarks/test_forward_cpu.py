"""The CPU time of forward passes is counted in the process that has them, and taken out of its scheduler's."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.servers import forward_cpu
from benchmarks.servers.model_server import HTTP, SCHEDULER
from benchmarks.servers.program import Program
from benchmarks.vllm_pair.server import ServerOptions
from benchmarks.vllm_pair.variants import VARIANTS

OPTIONS = ServerOptions(model=Path("model"), kv_bytes=1 << 20, max_model_len=1024)
BUSY_S = 0.05


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(forward_cpu.FOLDER, str(tmp_path / "decode-0-forward"))
    forward_cpu._kept.cache_clear()
    yield tmp_path
    forward_cpu._kept.cache_clear()


def busy(answer: str, *, fails: bool = False) -> str:
    ends_s = time.process_time() + BUSY_S
    while time.process_time() < ends_s:
        pass
    if fails:
        raise ValueError(answer)
    return answer


def test_passes_add_up_also_those_that_raise(folder: Path) -> None:
    assert forward_cpu.spent_s(folder / "decode-0-forward") == 0.0
    started_s = time.process_time()
    assert forward_cpu.count(busy, "tokens") == "tokens"
    with pytest.raises(ValueError, match="no memory"):
        forward_cpu.count(busy, "no memory", fails=True)
    assert 2 * BUSY_S <= forward_cpu.spent_s(folder / "decode-0-forward") <= time.process_time() - started_s


def test_a_method_is_wrapped_once(folder: Path) -> None:
    class Runner:
        def step(self) -> str:
            return busy("tokens")

    forward_cpu._wrap(Runner, "step")
    first = Runner.step
    forward_cpu._wrap(Runner, "step")
    assert Runner.step is first
    assert Runner().step() == "tokens"
    assert forward_cpu.spent_s(folder / "decode-0-forward") >= BUSY_S


def test_forward_passes_are_a_part_of_their_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Program, "cpu_s", lambda server: {SCHEDULER: 3.0, HTTP: 1.0})
    server = VARIANTS["tidekv"].server("decode", 0, options=OPTIONS, folder=folder, storage="memory:")
    assert server.cpu_s() == {SCHEDULER: 3.0, HTTP: 1.0}
    forward_cpu.count(busy, "tokens")
    spent = server.cpu_s()
    assert spent["forward passes"] == forward_cpu.spent_s(server.forward_folder) >= BUSY_S
    assert spent[SCHEDULER] == 3.0 - spent["forward passes"]
    assert sum(spent.values()) == pytest.approx(4.0)


def test_a_server_of_vllm_loads_the_plugin_and_knows_its_folder(folder: Path) -> None:
    server = VARIANTS["nixl-quiet"].server("decode", 0, options=OPTIONS, folder=folder, storage="memory:")
    environment = server.environment()
    assert environment[forward_cpu.FOLDER] == str(server.forward_folder)
    points = (folder / "plugins" / "tidekv_benchmark-1.dist-info" / "entry_points.txt").read_text()
    assert "forward_cpu = benchmarks.servers.forward_cpu:register" in points
    assert "quiet_nixl = " in points
    assert str(folder / "plugins") in environment["PYTHONPATH"].split(":")
    assert (server.part_of("VLLM::EngineCore"), server.part_of("python vllm serve")) == (SCHEDULER, HTTP)
