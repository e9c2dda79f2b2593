"""The GPU benchmark without a GPU: it reports that, and its parts run on the CPU, on meaningless figures."""

from __future__ import annotations

import asyncio
import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tidekv.backends.copies.pieces import PieceShape


@pytest.fixture
def gpu() -> ModuleType:
    return importlib.import_module("benchmarks.gpu.__main__")


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens without CUDA")
def test_without_a_gpu_it_says_so_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--json", str(file)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "not measured: there was no GPU: the CUDA paths have not run\n"
    assert json.loads(file.read_text())["verdict"] == "not measured"
    read = importlib.import_module("benchmarks.measurements").read_gpu(file, done.stdout)
    assert read.why_not("gpu.copies") == ("not measured", "there was no GPU: the CUDA paths have not run")


def no_bytes(*tensors: torch.Tensor, pairs: range, pieces: range, shape: PieceShape, to_rows: bool) -> None:
    """A kernel that moves nothing, at any speed."""


def test_its_parts_run_and_bring_the_figures_that_targets_ask_for(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rig_module = importlib.import_module("benchmarks.gpu.rig")
    shape = rig_module.Shape
    small = tuple(shape("tiny", page_size, layers=2, kv_heads=1) for page_size in (4, 1))
    for module in (gpu, rig_module):
        monkeypatch.setattr(module, "SHAPES", small)
    monkeypatch.setattr(rig_module, "SMALL", shape("tiny", 1, layers=1, kv_heads=1))
    rig = rig_module.Rig(
        device=torch.device("cpu"), total_bytes=1 << 16, rounds=1, hidden=16, context=4, steps=2, load_s=0.05,
        find_launch=lambda: no_bytes,
    )  # fmt: skip
    report = gpu.Report({"card": "none"})
    gpu.measure_speeds(rig, report)
    asyncio.run(gpu.measure_load(rig, report))
    targets = importlib.import_module("benchmarks.target_table").TARGETS
    asked = [target for target in targets if target.measurement == "gpu"]
    assert {target.figure for target in asked} == set(report.figures) == set(report.words)
    report.print()
    said = capsys.readouterr().out
    for word in ("one pinned copy to device", "kernel copies to host, tiny, page 4", "async is as fast", "layer 0"):
        assert word in said
    # Of both forms the one that is chosen is asked for, in each shape and way.
    assert sum(asked == "≥ 90 %" for _, _, asked in report.rows) == 4
