"""The table of targets is whole, a missing peer is named, and failures are reported; no figure is judged here."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import select
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from rich.console import Console

from benchmarks import plots
from tests.support import warm_python
from tests.support.waits import LIMIT_S

ROOT = Path(__file__).resolve().parent.parent.parent
KINDS = {
    "user": {"run", "planner", "first_rounds", "policies", "modeled", "paper", "sessions"},
    "parts": {"index", "keys", "engine", "transfer", "restore", "storage", "checksums", "cuda", "scaling"},
}


def module(name: str) -> ModuleType:
    return importlib.import_module(f"benchmarks.{name}")


def verdicts(tmp_path: Path, *arguments: str, **environment: str) -> tuple[str, dict[str, dict[str, object]]]:
    """What `python3 dev.py bench GROUP` prints, and its rows by target."""
    file = tmp_path / "all.json"
    done = subprocess.run(
        [warm_python.executable(), "-m", "benchmarks", *arguments, "--json", str(file)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, {row["target"]: row for row in json.loads(file.read_text())["targets"]}


def test_every_target_has_a_bound_and_a_program_or_a_reason() -> None:
    targets, programs = module("target_table").TARGETS, module("measurements").MEASUREMENTS
    assert {group: {target.kind for target in module("groups").targets_of(group)} for group in KINDS} == KINDS
    assert len({target.name for target in targets}) == len(targets)
    for target in targets:
        bounds = [target.at_least is not None, target.at_most is not None, target.is_model]
        assert sum(bounds) == 1, target.name
        program = importlib.util.find_spec(programs[target.measurement].program)
        assert program is not None, target.name
    assert {target.measurement for target in targets} == set(programs)


def test_a_bound_is_kept_at_its_edge_and_broken_beyond() -> None:
    target = partial(module("target_table").Target, asks="", measurement="", figure="")
    least = target(name="a.b", at_least=3)
    most = target(name="a.c", at_most=3, unit="µs")
    assert [least.passes(value) for value in (2.99, 3, 4)] == [False, True, True]
    assert [most.passes(value) for value in (2.99, 3, 4)] == [True, True, False]
    assert (least.asked, most.asked) == ("≥ 3 times", "≤ 3 µs")


def test_ratios_and_times_are_counted_apart() -> None:
    rows = {target.name: target for target in module("target_table").TARGETS}
    groups = module("groups")
    found = [
        groups.Verdict(rows[name], verdict, value, "")
        for name, verdict, value in (
            ("engine.cpu", "short", 500.0),
            ("engine.lag", "pass", 1.0),
            ("engine.journal", "pass", 4.0),
            ("index.evict", "pass", 20.0),
            ("transfer.raw", "short", 90.0),
            ("cuda.copies", "not measured", None),
        )
    ]
    console = Console(record=True, width=200, file=io.StringIO())
    groups.show(found, console)
    told = console.export_text()
    assert "all that were measured: 3 of 5 pass, 60%" in told
    assert "ratios, shares and counts: 2 of 3 pass, 67%" in told
    assert "times, in which this machine's own speed is: 1 of 2 pass, 50%" in told


def test_figures_of_models_are_shown_apart_and_counted_nowhere() -> None:
    rows, groups = {target.name: target for target in module("target_table").TARGETS}, module("groups")
    assert {name for name, target in rows.items() if target.is_model} == {name for name in rows if name[:6] == "paper."}
    outcome = groups.Outcome(figures={"capacity.requests": 0.5, "transfer.least": 99.0})
    found = [groups.judge(rows[name], outcome) for name in ("paper.requests", "transfer.raw")]
    assert [each.verdict for each in found] == ["model", "pass"]
    console = Console(record=True, width=200, file=io.StringIO())
    groups.show(found, console)
    told = console.export_text()
    assert "all that were measured: 1 of 1 pass" in told
    assert "1 model" not in told
    assert "published: 1.29" in told.partition("Model consistency")[2]


def test_targets_of_a_group_are_chosen_by_name_kind_and_measurement() -> None:
    chosen = module("groups").targets_of
    assert [target.name for target in chosen("parts", ["index.lock"])] == ["index.lock"]
    assert {target.kind for target in chosen("parts", ["sglang"])} == {"index", "keys"}
    assert {target.kind for target in chosen("parts", ["scaling"])} == {"scaling"}
    assert len(chosen("user")) + len(chosen("parts")) == len(module("target_table").TARGETS)
    with pytest.raises(SystemExit, match=r"bench parts: there is no target 'paper'; allowed: index, keys"):
        chosen("parts", ["paper", "keys"])


@pytest.mark.slow
def test_a_short_run_measures_what_was_chosen_and_says_what_is_not_measured(tmp_path: Path) -> None:
    said, rows = verdicts(tmp_path, "parts", "--only", "index.memory", "--only", "cuda")
    assert set(rows) == {"index.memory", "cuda.copies", "cuda.compute", "cuda.polling"}
    assert rows["index.memory"]["verdict"] == "pass"
    assert rows["cuda.copies"]["verdict"] == "not measured"
    assert "there was no GPU" in str(rows["cuda.copies"]["words"])
    assert "3 not measured" in said


def test_what_a_group_has_no_time_for_is_not_begun_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = module("groups")
    monkeypatch.setattr(groups, "run", lambda *_: pytest.fail("it was begun"))
    targets = groups.targets_of("user", ["planner"])
    options = groups.Options(peers=Path(), traces=Path())
    outcomes = groups.measure(targets, options, Console(file=io.StringIO()), groups.LEAST_S / 2)
    assert outcomes == {}
    assert [groups.judge(target, None).verdict for target in targets] == ["not measured"] * len(targets)


def test_a_peer_that_the_registry_does_not_have_is_named_as_missing(tmp_path: Path) -> None:
    chosen = ("parts", "index.lock", "--only", "keys.page_64")
    _, rows = verdicts(tmp_path, *chosen, "--peers", str(tmp_path), PIP_NO_INDEX="1")
    assert {row["verdict"] for row in rows.values()} == {"missing"}
    for row in rows.values():
        assert str(row["words"]).startswith("sglang 0.5.23 did not come from the registry: ")
        assert row["measured"] is None


def test_a_recording_that_is_not_there_is_named_as_missing(tmp_path: Path) -> None:
    said, rows = verdicts(tmp_path, "user", "--only", "sessions", "--traces", str(tmp_path))
    assert {row["verdict"] for row in rows.values()} == {"missing"}
    assert "claude-code-sessions.jsonl.gz" in str(rows["sessions.bytes"]["words"])
    assert str(tmp_path) not in str(rows["sessions.bytes"]["words"])  # It is kept with the figures.
    assert "2 missing" in said


def test_a_program_that_fails_or_is_late_keeps_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measurements = module("measurements")
    program = tmp_path / "broken_program.py"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), os.environ["PYTHONPATH"])))
    program.write_text(
        "import json, sys, time\n"
        "found = {'figures': {'a': 1.5}, 'words': {}, 'missing': {'b': 'no such thing'}, 'notes': []}\n"
        "open(sys.argv[-1], 'w').write(json.dumps(found))\n"
        "if 'late' in sys.argv: time.sleep(3600)\n"
        "sys.exit('it broke')\n"
    )
    options = measurements.Options(peers=tmp_path, traces=tmp_path)

    def outcome(budget_s: float, *words: str) -> object:
        measurement = measurements.Measurement(
            program=program.stem, budget_s=budget_s, arguments=lambda _, file: [*words, str(file)]
        )
        return measurements.run(measurement, options)

    broken = outcome(60.0)
    assert broken.figures == {"a": 1.5}  # type: ignore[attr-defined]  # An Outcome, of a module that mypy does not see.
    assert broken.why_not("b.c") == ("missing", "no such thing")  # type: ignore[attr-defined]
    assert broken.why_not("c") == ("failed", "exit code 1: it broke")  # type: ignore[attr-defined]
    late = outcome(5.0, "late")
    assert late.figures == {"a": 1.5}  # type: ignore[attr-defined]
    assert late.why_not("c") == ("failed", "it was not done after 5 s")  # type: ignore[attr-defined]


@pytest.mark.parametrize("is_late", [False, True], ids=["when it measures", "before it is told that this has begun"])
def test_who_ends_the_whole_run_ends_the_program_that_measures(tmp_path: Path, is_late: bool) -> None:
    begun, measuring = tmp_path / "begun", tmp_path / "measuring.py"  # Run as `-m measuring`.
    os.mkfifo(begun)
    measuring.write_text(
        "import os, sys, time\nwith open(sys.argv[-1], 'w') as begun: begun.write(str(os.getpid()))\ntime.sleep(3600)\n"
    )
    program = (
        "import sys, time\n"
        "from benchmarks import groups, measurements\n"
        "begun = sys.argv.pop()\n"
        "class Late(measurements.subprocess.Popen):\n"
        "    def __init__(self, *arguments, **options):\n"
        "        super().__init__(*arguments, **options)\n"
        "        time.sleep(1.0)\n"
        f"if {is_late}: measurements.subprocess.Popen = Late\n"
        "measurements.MEASUREMENTS['memory'] = measurements.Measurement(\n"
        "    program='measuring', budget_s=3600, arguments=lambda _, file: [begun]\n"
        ")\n"
        "groups.main()\n"
    )
    arguments = [sys.executable, "-c", program, "parts", "--only", "memory", str(begun)]
    path = os.pathsep.join((str(tmp_path), os.environ["PYTHONPATH"]))
    told = os.open(begun, os.O_RDONLY | os.O_NONBLOCK)
    with subprocess.Popen(arguments, env={**os.environ, "PYTHONPATH": path}) as whole:
        # Readable when the program has written its process id.
        readable, _, _ = select.select([told], [], [], LIMIT_S)
        if not readable:
            whole.kill()
        assert readable, "the program that measures never began"
        measuring_pid = int(os.read(told, 64))
        os.close(told)
        whole.terminate()
        assert whole.wait() == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(measuring_pid, 0)


def test_a_tree_is_put_to_what_it_must_do_before_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    trees, missing = module("peer_trees"), module("peers").PeerMissing
    for packed in (True, False):
        trees.check_tree(trees.OurTree(16, 16_000, packed=packed))
    forgetful = trees.OurTree(16, 16_000, packed=True)
    monkeypatch.setattr(forgetful, "evict", lambda tokens: None)
    with pytest.raises(missing, match="what is not is"):
        trees.check_tree(forgetful)
    blind = trees.OurTree(16, 16_000, packed=True)
    match = blind.match
    monkeypatch.setattr(blind, "match", lambda prompt: (0, *match(prompt)[1:]))
    with pytest.raises(missing, match="is found whole"):
        trees.check_tree(blind)


def test_our_page_hashes_are_the_documented_chain() -> None:
    trees = module("peer_trees")
    packed = trees.numbers(70, 3).astype("<u4").tobytes()
    from tidekv.backends.keys.chain import page_digests

    assert trees.chain(packed, 16) == [digest.hex() for digest in page_digests(packed, 16)]


def test_empty_modules_stand_in_for_what_is_only_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins = module("peers")._StandIns(("nowhere_at_all",))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, stand_ins])
    found = importlib.import_module("nowhere_at_all.inner")
    monkeypatch.delitem(sys.modules, "nowhere_at_all.inner")
    monkeypatch.delitem(sys.modules, "nowhere_at_all")

    @found.decorate(option=1)
    def function() -> int:
        return 7

    class Child(found.Parent):  # type: ignore[misc,name-defined]
        pass

    assert function() == 7
    assert isinstance(Child().anything, type)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("somewhere_else_at_all")


def test_cost_against_work_is_drawn_beside_n_log_n() -> None:
    points = [(10.0, 1.0), (100.0, 10.0), (1000.0, 100.0)]
    figure = plots.plot_scaling({"index": points, "engine": points})
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["index", "engine"]
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    measured, allowed = lines["measured"], lines["n log n"]
    assert measured.get_ydata().tolist() == [1, 10, 100]
    assert np.allclose(allowed.get_ydata(), [1, 20, 300])


def test_growth_is_compared_with_n_log_n() -> None:
    over = module("figures").over_n_log_n
    assert over((10, 1.0), (1000, 300.0)) == pytest.approx(1)
    assert over((10, 1.0), (1000, 100.0)) < 0.4
    assert over((10, 1.0), (1000, 1e4)) > 30
