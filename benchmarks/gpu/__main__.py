"""Checks and figures of the CUDA paths: `python -m benchmarks.gpu [--out DIR] [--only STEP…]`, in a few minutes.

Each step runs in a process of its own, within its limit, so that a hang or a crash loses that step alone. `DIR` has
results.json, which is replaced after every step, and log.txt with all that the steps printed. With `--device cpu`
the same steps run with stand-ins for the streams of a GPU; the figures mean nothing then. Without a GPU, and without
that option, the program prints one line to that effect and exits.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import faulthandler
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, BinaryIO

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.gpu.report import Report, Setting, write_whole
from benchmarks.gpu.steps import STEPS, Step

NO_GPU = "there was no GPU: the CUDA paths have not run"
ROOT = Path(__file__).resolve().parent.parent.parent
STACKS_S = 2.0
"""Seconds before its limit at which a step that hangs writes its stacks."""
Found = dict[str, Any]  # JSON.


def about(device: torch.device) -> dict[str, str]:
    """Return card, driver, versions, commit and date."""
    found = {"card": "none"}
    if device.type == "cuda":
        found = {"card": torch.cuda.get_device_name(), "driver": driver()}
    found |= {"torch": torch.__version__, "CUDA": str(torch.version.cuda), "python": sys.version.split()[0]}
    spec = importlib.util.find_spec("triton")
    found["triton"] = "none" if spec is None else str(importlib.import_module("triton").__version__)
    found["date"] = datetime.datetime.now(datetime.UTC).date().isoformat()
    found["commit"] = commit()
    return found


def driver() -> str:
    """Return the driver's version if nvidia-smi reports it."""
    if shutil.which("nvidia-smi") is None:
        return "unknown"
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    lines = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.split()
    return lines[0] if lines else "unknown"


def commit() -> str:
    """Return the commit: TIDEKV_COMMIT if it is set, as where a copy of a tree is run, else that of this checkout."""
    if given := os.environ.get("TIDEKV_COMMIT"):
        return given
    if shutil.which("git") is None:
        return "unknown"
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def run_child(step: Step, setting: Setting, path: Path, *, until_s: float) -> int:
    """Run a step in this process, which will be killed at that time of the monotonic clock; returns the exit code."""
    # All stacks are in the log if it hangs, a moment before it is killed.
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(1.0, until_s - time.monotonic() - STACKS_S), exit=True)
    if setting.on_cuda:
        torch.cuda.set_device(setting.device)
    else:
        torch.set_num_threads(1)
    report = Report(about(setting.device), path)
    report.save()
    step.load()(setting, report)
    report.save()
    failed = sum(not passed for _, passed, _ in report.checks)
    sys.stdout.flush()
    return 1 if failed else 0


def run_step(step: Step, chosen: argparse.Namespace, folder: Path, log: BinaryIO) -> Found:
    """Run a step in a process of its own, and return what it found and how it ended."""
    path = folder / f"{step.name}.json"
    work = folder / step.name
    work.mkdir()
    command = [sys.executable, "-m", "benchmarks.gpu", "--child", step.name, "--device", chosen.device]
    limit_s = step.limit_s * chosen.patience
    command += ["--out", str(folder), "--until", str(time.monotonic() + limit_s)]
    command += ["--short"] if chosen.short else []
    log.write(f"\n=== {step.name}: {step.about}\n".encode())
    log.flush()
    began_s = time.perf_counter()
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, cwd=ROOT
    )
    verdict, why = "", ""
    try:
        code = child.wait(limit_s)
        verdict = {0: "passed", 1: "failed"}.get(code, "crashed")
        why = "" if code in (0, 1) else f"signal {-code}" if code < 0 else f"exit code {code}"
        if code == 1 and time.perf_counter() - began_s > limit_s - STACKS_S:
            # faulthandler has written the stacks, and ended the child with the code of a failure.
            verdict, why = "timed out", f"after {limit_s:g} s"
    except subprocess.TimeoutExpired:
        verdict, why = "timed out", f"after {limit_s:g} s"
    finally:
        _end_group(child)
    found: Found = json.loads(path.read_text()) if path.exists() else {}
    failed = [what for what, passed, _ in found.get("checks", ()) if not passed]
    if verdict == "failed":
        why = f"{len(failed)} checks: {failed[0]}" if failed else "see the log"
    shutil.rmtree(work, ignore_errors=True)
    return {"verdict": verdict, "why": why, "seconds": round(time.perf_counter() - began_s, 1), **found}


def _end_group(child: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a step: it has a session of its own, which only its own processes are in."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def described_by(steps: dict[str, Found]) -> dict[str, str]:
    """Return card and versions as the first step reported them."""
    return next((found["about"] for found in steps.values() if found.get("about")), {})


def show(steps: dict[str, Found]) -> None:
    """Print rows, failed checks and verdicts."""
    described = described_by(steps)
    title = ", ".join(f"{name} {is_}" for name, is_ in described.items())
    console = Console(width=None if Console().is_terminal else 150)
    rows = Table("step", "what", "measured", "asked", title=title)
    for name, found in steps.items():
        for row in found.get("rows", ()):
            rows.add_row(name, *row)
    if rows.row_count:
        console.print(rows)
    table = Table("step", "verdict", "checks", "seconds", "why")
    for name, found in steps.items():
        checks = found.get("checks", ())
        passed = sum(passed for _, passed, _ in checks)
        table.add_row(name, found["verdict"], f"{passed}/{len(checks)}", str(found["seconds"]), found["why"])
    console.print(table)
    for name, found in steps.items():
        for what, passed, detail in found.get("checks", ()):
            if not passed:
                console.print(f"{name}: {what}: {detail}", markup=False, highlight=False)


def for_targets(steps: dict[str, Found]) -> Found:
    """Return the figures of the target table, as `benchmarks.measurements` reads them."""
    described = described_by(steps)
    merged: Found = {"verdict": "measured", "about": described, "figures": {}, "words": {}, "missing": {}, "rows": []}
    for name, found in steps.items():
        merged["figures"] |= found.get("figures", {})
        merged["words"] |= found.get("words", {})
        merged["rows"] += found.get("rows", [])
        if found["verdict"] not in ("passed", "skipped"):
            merged["missing"][name] = f"{found['verdict']}: {found['why']}"
    return merged | {"notes": [str(described)]}


def main() -> int:
    """Run the steps, print what they found, and return 1 if one did not pass."""
    names = [step.name for step in STEPS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for results.json and log.txt; without it, a temporary one")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="STEP", help=", ".join(names))
    parser.add_argument("--skip", nargs="+", choices=names, default=[], metavar="STEP", help="leave these steps out")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: with stand-ins for streams")
    parser.add_argument("--short", action="store_true", help="little of everything, in seconds")
    parser.add_argument("--budget", type=float, default=3600.0, metavar="S", help="start no step after these seconds")
    parser.add_argument("--patience", type=float, default=1.0, metavar="N", help="multiply limits, on a busy machine")
    parser.add_argument("--json", type=Path, help="write the figures of the target table to this file")
    parser.add_argument("--child", choices=names, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child is not None:
        step = next(step for step in STEPS if step.name == chosen.child)
        device = torch.device("cuda", 0) if chosen.device == "cuda" else torch.device("cpu")
        setting = Setting(device=device, short=chosen.short, work=chosen.out / step.name)
        return run_child(step, setting, chosen.out / f"{step.name}.json", until_s=chosen.until)
    if chosen.device == "cuda" and not torch.cuda.is_available():
        print(f"not measured: {NO_GPU}")
        if chosen.json:
            chosen.json.write_text(json.dumps({"verdict": "not measured", "why": NO_GPU}, indent=1))
        return 0
    with tempfile.TemporaryDirectory(prefix="tidekv-gpu-") as temporary:
        folder = chosen.out or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        steps = run_all(chosen, folder, Path(temporary))
        show(steps)
    if chosen.json:
        chosen.json.write_text(json.dumps(for_targets(steps), indent=1, ensure_ascii=False))
    return 0 if all(found["verdict"] in ("passed", "skipped") for found in steps.values()) else 1


def run_all(chosen: argparse.Namespace, folder: Path, temporary: Path) -> dict[str, Found]:
    """Run the chosen steps in order; results.json is whole after each."""
    steps: dict[str, Found] = {}
    began_s = time.perf_counter()
    scratch = temporary / "steps"
    scratch.mkdir()
    with (folder / "log.txt").open("ab") as log:
        for step in STEPS:
            if step.name not in chosen.only or step.name in chosen.skip:
                continue
            found: Found = {"verdict": "skipped", "why": "", "seconds": 0.0}
            if step.needs_gpu and chosen.device != "cuda":
                found["why"] = "it needs a GPU"
            elif time.perf_counter() - began_s > chosen.budget:
                found |= {"verdict": "not started", "why": f"{chosen.budget:g} s had passed"}
            else:
                found = run_step(step, chosen, scratch, log)
            steps[step.name] = found
            write_whole(folder / "results.json", json.dumps(steps, indent=1, ensure_ascii=False))
            print(f"{step.name}: {found['verdict']} {found['why']} ({found['seconds']} s)", flush=True)
    return steps


if __name__ == "__main__":
    sys.exit(main())
