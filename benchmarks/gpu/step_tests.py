"""The tests marked `gpu`; without a GPU those that stand in for them."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.report import Report, Setting

ROOT = Path(__file__).resolve().parent.parent.parent
LIMIT_S = 100.0
ON_THE_CPU = ("tests/backends/test_stream_lane.py", "tests/backends/test_copy_forms.py")
SHORT = ("tests/backends/test_stream_lane.py",)


def run(setting: Setting, report: Report) -> None:
    """Run pytest in a process of its own."""
    if setting.on_cuda:
        files = [
            str(file.relative_to(ROOT))
            for file in sorted((ROOT / "tests").rglob("test_*.py"))
            if "mark.gpu" in file.read_text()
        ]
        chosen = ["-m", "gpu"]
    else:
        files, chosen = list(SHORT if setting.short else ON_THE_CPU), []
    run_pytest(setting, report, files, *chosen, limit_s=LIMIT_S)


def run_pytest(setting: Setting, report: Report, files: Sequence[str], *chosen: str, limit_s: float) -> None:
    """Run these files in a process of its own, and report what failed."""
    results = setting.work / "tests.xml"
    # Only the plugins that the tests need: others of the machine may warn, and a warning is an error here.
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    options = ["-q", "-p", "pytest_asyncio.plugin", "-p", "no:cacheprovider", "--durations=5", f"--junitxml={results}"]
    command = [sys.executable, "-m", "pytest", *options, *chosen, *files]
    done = subprocess.run(command, cwd=ROOT, check=False, timeout=limit_s, env=environment)
    if not results.exists():
        report.check("pytest ran", False, f"it exited with {done.returncode} and wrote no results")
        return
    counts = dict.fromkeys(("passed", "failed", "skipped"), 0)
    for case in ElementTree.parse(results).iter("testcase"):
        bad = [part for part in case if part.tag in ("failure", "error")]
        outcome = "failed" if bad else "skipped" if case.find("skipped") is not None else "passed"
        counts[outcome] += 1
        for part in bad:
            report.check(f"{case.get('classname')}::{case.get('name')}", False, (part.get("message") or "")[:2000])
        if outcome == "skipped" and setting.on_cuda:
            report.note(f"skipped: {case.get('name')}")
    report.check(
        f"pytest of {len(files)} files",
        done.returncode == 0 and counts["passed"] > 0,
        ", ".join(f"{count} {outcome}" for outcome, count in counts.items()),
    )
