"""The index is measured in a copy of the package, in the form that was asked for; the checkout stays as it is.

A copy that is really compiled is in `tests/engine/test_compiled.py`.
"""

from __future__ import annotations

import importlib
import io
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console

import tidekv
from tidekv.engine import compiled

BENCHMARKS = Path(__file__).resolve().parent.parent.parent / "benchmarks"
PACKAGE = Path(str(tidekv.__file__)).parent
SUFFIX = ".cpython-3-made-up.so"


@pytest.fixture(autouse=True)
def _benchmarks_only_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def module(name: str) -> ModuleType:
    return importlib.import_module(name)


def told_by(copy: Path) -> list[str]:
    """Form and place of the index that a program imports."""
    program = "from tidekv.engine import compiled; print(compiled.form(), compiled.states_folder().parent)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(copy)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.split()


def built_in_checkout() -> list[Path]:
    return sorted(path for folder in ("states", "backends") for path in (PACKAGE / folder).glob("*.so"))


class Compiler:
    """Makes one file and counts how often; or fails with what it says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, says: str = "") -> None:
        self.runs = 0
        self.says = says
        monkeypatch.setattr(compiled, "build", self)

    def __call__(self, folder: Path, libraries: Path, *, quiet: bool) -> None:
        assert quiet
        if self.says:
            raise subprocess.CalledProcessError(1, ["mypyc"], stderr=self.says)
        self.runs += 1
        (folder / f"index{SUFFIX}").write_text("made of this source")
        (libraries / f"library{SUFFIX}").touch()
        (folder / compiled.DIGEST).write_text(compiled.digest_of(folder))


def test_a_copy_of_the_source_runs_as_source_and_in_its_own_place(tmp_path: Path) -> None:
    module("index_forms").copy_source(tmp_path)
    assert told_by(tmp_path) == ["source", str(tmp_path / "tidekv")]


def test_one_state_of_the_source_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forms, compiler = module("index_forms"), Compiler(monkeypatch)
    before = built_in_checkout()
    for name in ("first", "second"):
        forms.copy_compiled(tmp_path / name, tmp_path / "cache")
        assert (tmp_path / name / "tidekv" / "states" / f"index{SUFFIX}").read_text() == "made of this source"
        assert (tmp_path / name / f"library{SUFFIX}").is_file()
        assert (tmp_path / name / "tidekv" / "states" / compiled.DIGEST).is_file()
    assert compiler.runs == 1
    changed = tmp_path / "changed" / "tidekv"
    forms.copy_source(changed.parent)
    with (changed / "states" / "shapes.py").open("a") as source:
        source.write("# Another comment.\n")
    monkeypatch.setattr(forms, "package_folder", lambda: changed)
    forms.copy_compiled(tmp_path / "third", tmp_path / "cache")
    assert compiler.runs == 2
    assert built_in_checkout() == before


def test_what_was_used_longest_ago_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forms = module("index_forms")
    Compiler(monkeypatch)
    for age in range(6):
        kept = tmp_path / f"{forms.PREFIX}{age}"
        kept.mkdir()
        os.utime(kept, (1000 - age, 1000 - age))
    (tmp_path / "sglang-1").mkdir()
    forms.copy_compiled(tmp_path / "copy", tmp_path)
    left = {path.name for path in tmp_path.iterdir() if path.name.startswith(forms.PREFIX)}
    assert {f"{forms.PREFIX}{age}" for age in range(forms.KEPT)} < left
    assert len(left) == forms.KEPT + 1
    assert (tmp_path / "sglang-1").is_dir()


def test_without_a_compiler_the_source_is_measured_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Compiler(monkeypatch, says="building\nerror: command 'gcc' failed: No such file or directory\n\n")
    said = Console(file=io.StringIO(), width=200)
    with module("all_targets").copies("compiled", tmp_path, said) as (index, source):
        assert told_by(index) == ["source", str(index / "tidekv")]
        assert source is None
    assert said.file.getvalue() == (  # type: ignore[attr-defined]  # It is a StringIO.
        "index, engine and journal are measured from the source, it cannot be compiled here: "
        "error: command 'gcc' failed: No such file or directory\n"
    )


def test_a_measurement_of_what_is_compiled_runs_in_its_copy_and_shortly_from_the_source(tmp_path: Path) -> None:
    measurements = module("measurements")
    program = tmp_path / "program.py"
    program.write_text(
        "import json, os, sys\n"
        "form = os.environ['PYTHONPATH'].split(os.pathsep)[0].rpartition('/')[2]\n"
        "figures = {'a': 2.0 if form == 'fast' else 1.0, **({} if '--short' in sys.argv else {'b': 3})}\n"
        "found = {'figures': figures, 'words': {'a': form}, 'missing': {}, 'notes': []}\n"
        "open(sys.argv[1], 'w').write(json.dumps(found))\n"
    )
    plain = measurements.Measurement(program=str(program), budget_s=60.0, arguments=lambda _, file: [str(file)])
    measurement = measurements.replace(plain, of_compiled=True, from_source=("--short",))
    options = measurements.Options(
        peers=tmp_path, traces=tmp_path, fastest=tmp_path / "fast", source=tmp_path / "plain"
    )
    found = measurements.run(measurement, options)
    assert found.figures == {"a": 2.0, "b": 3}
    assert found.words == {"a": "fast; from the source 1"}
    assert found.notes == ["figures from the source are of shorter runs: --short"]
    alone = measurements.run(measurement, measurements.replace(options, source=None))
    assert alone.words == {"a": "fast"}
