"""The GPU checks without a GPU: they report that, and every step runs to its end on stand-ins."""

from __future__ import annotations

import importlib
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import warm_python

STEPS = importlib.import_module("benchmarks.gpu.steps").STEPS
SHORT = ["-m", "benchmarks.gpu", "--device", "cpu", "--short", "--patience", "10"]
# Tests that this suite has already, and steps whose figures have a test of their own.
ELSEWHERE = {"tests", "copies", "load", "pinning", "turns_32k"}
# They import transformers, or repeat another benchmark, and take as long as all others together.
LOADED_ONLY = {"model", "nixl", "turns_4k"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens without CUDA")
def test_without_a_gpu_it_says_so_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    done = subprocess.run(
        [warm_python.executable(), "-m", "benchmarks.gpu", "--json", str(file)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "not measured: there was no GPU: the CUDA paths have not run\n"
    assert json.loads(file.read_text())["verdict"] == "not measured"
    read = importlib.import_module("benchmarks.measurements").read_gpu(file, done.stdout)
    assert read.why_not("gpu.copies") == ("not measured", "there was no GPU: the CUDA paths have not run")


@pytest.mark.parametrize("step", [step.name for step in STEPS if step.name not in ELSEWHERE | LOADED_ONLY])
def test_each_step_passes_on_stand_ins(step: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [warm_python.executable(), *SHORT, "--only", step, "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    log = (tmp_path / "log.txt").read_text()
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + log[-4000:]
    found = json.loads((tmp_path / "results.json").read_text())[step]
    assert found["verdict"] in ("passed", "skipped")
    assert all(passed for _, passed, _ in found.get("checks", ()))


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_each_step_can_be_loaded(step: Any) -> None:
    assert callable(step.load())


def test_the_steps_bring_the_figures_that_targets_ask_for(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    subprocess.run(
        [warm_python.executable(), *SHORT, "--only", "copies", "load", "--json", str(file)],
        capture_output=True,
        check=True,
    )
    targets = importlib.import_module("benchmarks.target_table").TARGETS
    asked = {target.figure for target in targets if target.measurement == "gpu"}
    found = json.loads(file.read_text())
    assert asked == set(found["figures"]) == set(found["words"])
    said = "\n".join(row[0] for row in found["rows"])
    for word in ("one pinned copy to device", "async copies to host, tiny, page 4", "async is as fast", "layer 0"):
        assert word in said
    # Of both forms the one that is chosen is asked for, in each shape and way.
    assert sum(asked == "≥ 90 %" for _, _, asked in found["rows"]) == 4
