"""The programs that produce the figures of the target table: command lines, time limits, and readers of their output.

Each runs in a process of its own, one after the other, so that stand-ins of a peer and failures stay there.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
GROUPS = ("user", "parts")
"""What a user feels; parts of the library beside peers and limits."""
CONVERSATIONS, SESSIONS = "conversation_trace.jsonl.gz", "claude-code-sessions.jsonl.gz"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of measurements."""

    peers: Path
    traces: Path
    plot: Path | None = None


@dataclass
class Outcome:
    """Results of a measurement: figures by name, comments on them, and reasons for missing ones by prefix."""

    figures: dict[str, float] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    failed: str = ""
    not_measured: str = ""
    """Hardware that the measurement lacks."""

    def why_not(self, figure: str) -> tuple[str, str]:
        """Return verdict and reason for a missing figure."""
        if self.not_measured:
            return "not measured", self.not_measured
        for beginning, why in self.missing.items():
            if figure.startswith(beginning):
                return "missing", why
        return "failed", self.failed or "the program did not bring it"


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One program, by the name of its module.

    `arguments` makes its command line; `read` converts its JSON file and output to an outcome.
    """

    program: str
    budget_s: float
    group: str = "parts"
    arguments: Callable[[Options, Path], list[str]] = lambda _, file: ["--json", str(file)]
    read: Callable[[Path, str], Outcome] = lambda file, _: read_figures(file)
    recording: str = ""
    """It can do nothing without this recording."""


def read_figures(file: Path) -> Outcome:
    """Read the file of `figures.Figures`."""
    found = json.loads(file.read_text())
    return Outcome(found["figures"], found["words"], found["missing"], found["notes"])


def read_engine(_: Path, output: str) -> Outcome:
    """Read `engine.py --json` at 256 in flight, and by part."""
    found = json.loads(output[output.index("{") :])
    (few,) = found["figures"]
    parts = ", ".join(f"{name} {us:.0f}" for name, us in {**few["parts_us"], **few["threads_us"]}.items())
    return Outcome(
        {"engine.256": few["engine_us"], "engine.idle": 100 * found["idle_cpu"]},
        {"engine.256": f"to READY {few['restore_us']:.0f}, after {few['finish_us']:.0f}; by part: {parts}"},
    )


def read_storage(file: Path, _: str) -> Outcome:
    """Read `storage.py --json`."""
    asked = [target for target in json.loads(file.read_text())["targets"] if target["what"].startswith("exists")]
    detail = "; ".join(f"{target['what']}: {target['got']}" for target in asked)
    return Outcome({"exists": max(float(target["got"]) for target in asked)}, {"exists": detail})


def read_gpu(file: Path, _: str) -> Outcome:
    """Read `gpu --json`."""
    found = json.loads(file.read_text())
    return Outcome(not_measured=found["why"]) if found["verdict"] == "not measured" else read_figures(file)


def read_journal(_: Path, output: str) -> Outcome:
    """Read the output of `journal.py`: first the load of the engine's other figures, then conversations over NIXL."""
    found = re.findall(r"median ([+-][\d.]+)%", output)
    seen = re.findall(r"seen directly: (.*)", output)
    if not found:
        return Outcome(failed="it printed no median")
    words = [f"seen directly: {seen[0]}"] if seen else []
    words += [f"conversations over NIXL: {grown} %" for grown in found[1:]]
    return Outcome({"journal.grows": float(found[0])}, {"journal.grows": "; ".join(words)})


def _run_over_none(figure: str, field: str, unit: str) -> Callable[[Path, str], Outcome]:
    """Return a reader of `tidekv run --json` for one figure of its workload, with the cache over without."""

    def read(file: Path, _: str) -> Outcome:
        workload = json.loads(file.read_text())["figures"]["workload"]
        on, off = (workload[f"decode cache {which}"][field] for which in ("on", "off"))
        return Outcome({figure: on / off}, {figure: f"{on} {unit} with the cache, {off} {unit} without"})

    return read


def read_first_rounds(file: Path, _: str) -> Outcome:
    """Read `first_rounds --json`."""
    found = json.loads(file.read_text())["figures"]
    return Outcome({"first_rounds": found["over_better"]}, {"first_rounds": found["over_better_in"]})


def _race(peer: str) -> Callable[[Options, Path], list[str]]:
    def arguments(options: Options, file: Path) -> list[str]:
        recording = options.traces / CONVERSATIONS
        trace = ["--trace", str(recording)] if recording.is_file() else []
        return [peer, "--json", str(file), "--peers", str(options.peers), *trace]

    return arguments


def _memory(options: Options, file: Path) -> list[str]:
    recording = options.traces / CONVERSATIONS
    return ["--json", str(file), *(["--trace", str(recording)] if recording.is_file() else [])]


def _scaling(options: Options, file: Path) -> list[str]:
    return ["--json", str(file), *(["--plot", str(options.plot)] if options.plot else [])]


MEASUREMENTS: dict[str, Measurement] = {
    "run": Measurement(
        program="tidekv",
        budget_s=120,
        group="user",
        arguments=lambda _, file: ["run", "--no-deployment", "--json", str(file)],
        read=_run_over_none("run.small", "ready_ms_p50", "ms"),
    ),
    "run_trace": Measurement(
        program="tidekv",
        budget_s=240,
        group="user",
        arguments=lambda options, file: [
            "run", "--trace", str(options.traces / SESSIONS), "--requests", "120", "--json", str(file),
        ],
        read=_run_over_none("run.trace", "wall_s", "s"),
        recording=SESSIONS,
    ),
    "planner": Measurement(program="benchmarks.planner", budget_s=120, group="user"),
    "paper": Measurement(program="benchmarks.paper", budget_s=900, group="user"),
    "first_rounds": Measurement(
        program="benchmarks.first_rounds",
        budget_s=300,
        group="user",
        # The whole table is that of `bench first-rounds`.
        arguments=lambda _, file: ["--lengths", "1024", "4096", "--at-once", "4", "--json", str(file)],
        read=read_first_rounds,
    ),
    "policies": Measurement(
        program="benchmarks.policies",
        budget_s=300,
        group="user",
        # All ratios are those of `bench policies`.
        arguments=lambda _, file: [
            "--ratios", "0.0625", "1", "16", "--in-flight", "4", "--rounds", "1", "--json", str(file),
        ],
    ),
    "sglang": Measurement(program="benchmarks.index_race", budget_s=300, arguments=_race("sglang")),
    "vllm": Measurement(program="benchmarks.index_race", budget_s=300, arguments=_race("vllm")),
    "memory": Measurement(program="benchmarks.index_memory", budget_s=120, arguments=_memory),
    "storage": Measurement(
        program="benchmarks.storage",
        budget_s=120,
        arguments=lambda _, file: [
            "--page-kib", "64", "--rounds", "1", "--kinds", "write", "read", "--engines", "", "--json", str(file),
        ],
        read=read_storage,
    ),
    "storage_hits": Measurement(
        program="benchmarks.storage_hits",
        budget_s=240,
        arguments=lambda options, file: [str(options.traces / SESSIONS), "--json", str(file)],
        recording=SESSIONS,
    ),
    "engine": Measurement(
        program="benchmarks.engine",
        budget_s=240,
        arguments=lambda _, file: ["--in-flight", "256", "--requests", "1536", "--json"],
        read=read_engine,
    ),
    "engine_growth": Measurement(
        program="benchmarks.engine_growth",
        budget_s=800,
        # All rounds are those of `python -m benchmarks.engine_growth`.
        arguments=lambda _, file: ["--rounds", "1", "--json", str(file)],
    ),
    "request_memory": Measurement(program="benchmarks.request_memory", budget_s=60),
    "latency": Measurement(program="benchmarks.latency", budget_s=120),
    "journal": Measurement(
        program="benchmarks.journal",
        budget_s=480,
        arguments=lambda _, file: ["--pairs", "5", "--conversation-pairs", "1"],
        read=read_journal,
    ),
    "transfer": Measurement(program="benchmarks.transfer", budget_s=240),
    "restore": Measurement(program="benchmarks.restore", budget_s=300),
    "checksums": Measurement(program="benchmarks.checksums", budget_s=240),
    "gpu": Measurement(program="benchmarks.gpu", budget_s=600, read=read_gpu),
    "sessions": Measurement(
        program="benchmarks.sessions",
        budget_s=1200,
        group="user",
        arguments=lambda options, file: [str(options.traces / SESSIONS), "--requests", "60", "--json", str(file)],
        recording=SESSIONS,
    ),
    "scaling": Measurement(program="benchmarks.scaling", budget_s=300, arguments=_scaling),
}  # fmt: skip


@contextmanager
def ends_held() -> Iterator[set[signal.Signals]]:
    """Block terminating signals until a process started within can be ended by its id; yields those blocked before."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield {signal.Signals(number) for number in before}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run(measurement: Measurement, options: Options, limit_s: float = float("inf")) -> Outcome:
    """Run a measurement for at most `limit_s`; never raises for failures of its program."""
    if measurement.recording and not (options.traces / measurement.recording).is_file():
        return Outcome(missing={"": f"there is no {measurement.recording} in the folder of recordings (--traces)"})
    with tempfile.TemporaryDirectory(prefix="tidekv-bench-") as folder:
        file = Path(folder) / "figures.json"
        command = [sys.executable, "-W", "ignore", "-m", measurement.program]
        process: subprocess.Popen[str] | None = None
        failed = ""
        budget_s = min(measurement.budget_s, limit_s)
        try:
            with ends_held() as before:
                process = subprocess.Popen(
                    [*command, *measurement.arguments(options, file)],
                    stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
                    preexec_fn=partial(signal.pthread_sigmask, signal.SIG_SETMASK, before),
                )  # fmt: skip
            output, errors = process.communicate(timeout=budget_s)
            if process.returncode:
                lines = [line for line in errors.strip().splitlines() if line.strip()]
                failed = f"exit code {process.returncode}: {lines[-1].strip() if lines else 'no output'}"
        except BaseException as error:
            if process is None:
                raise
            # The whole session, which includes its children.
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            failed = f"it was not done after {budget_s:.0f} s"
        try:
            outcome = measurement.read(file, output)
        except (OSError, ValueError, KeyError) as error:
            outcome = Outcome(failed=failed or f"what it wrote cannot be read: {error!r}")
        outcome.failed = outcome.failed or failed
        return outcome
