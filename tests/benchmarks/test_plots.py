"""What plots draw is what was measured; pixels are not looked at."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import plots
from benchmarks.__main__ import app as bench
from tests.support import warm_python
from tidekv import InvalidConfig


def test_bandwidth_is_drawn_by_way() -> None:
    figure = plots.plot_bandwidth({"memcpy": 5.0, "L2 → L1": 4.25}, page_bytes=1 << 20, batch_bytes=64 << 20)
    (axes,) = figure.axes
    assert [bar.get_width() for bar in axes.patches] == [5.0, 4.25]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["memcpy", "L2 → L1"]
    assert axes.get_xlabel() == "bandwidth (GB/s)"
    assert "67 MB in pages of 1.05 MB" in axes.get_title(loc="left")


@pytest.mark.parametrize(("suffix", "start"), [("png", b"\x89PNG\r\n\x1a\n"), ("svg", b"<?xml")])
def test_a_plot_is_written_as_its_suffix_says(tmp_path: Path, suffix: str, start: bytes) -> None:
    path = tmp_path / f"plot.{suffix}"
    plots.save_plot(plots.plot_bandwidth({"memcpy": 5.0}, page_bytes=1 << 20, batch_bytes=64 << 20), path)
    assert path.read_bytes().startswith(start)


@pytest.mark.slow
@pytest.mark.nixl
def test_bench_of_tiers_measures_and_draws_every_way(tmp_path: Path) -> None:
    path = tmp_path / "tiers.svg"
    done = subprocess.run(
        [warm_python.executable(), "-m", "benchmarks", "tiers", "--plot", str(path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for way in ("memcpy", "L2 → L1", "L1 → L2", "L3 → L2", "L2 → L3", "prefill → L1"):
        speed = re.search(rf"{way}[^│]*│\s*([\d.]+)", done.stdout)
        assert speed is not None and float(speed[1]) > 0, done.stdout
    assert path.exists()


def test_without_matplotlib_the_extra_is_named_before_anything_runs(tmp_path: Path, monkeypatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name))
    with pytest.raises(InvalidConfig, match=r"pip install 'tidekv\[plot\]'"):
        plots.check_plot(tmp_path / "plot.png")


@pytest.mark.parametrize(("name", "word"), [("plot.pdf", "not 'plot.pdf'"), ("no/plot.png", "there is no such folder")])
def test_file_that_cannot_be_a_plot_is_refused_before_anything_runs(tmp_path: Path, name: str, word: str) -> None:
    with pytest.raises(InvalidConfig, match=word):
        CliRunner().invoke(bench, ["tiers", "--plot", str(tmp_path / name)], catch_exceptions=False)
