"""Set up this checkout and run things in it: `python3 dev.py run`, `python3 dev.py test`.

Needs nothing but python3 and its pip: no make, no ensurepip, no system installs. The first call makes `.venv` and
fills it; later calls start at once, until pyproject.toml changes.
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
MARKER = VENV / "tidekv-installed"

COMMANDS = {
    "run": (["-m", "tidekv", "run"], "serve a workload with a prefill and a decode worker, and compare"),
    "test": (["-m", "pytest"], "run the tests in parallel; --all: slow, thorough too; PATH…: these, in one process"),
    "check": ([], "run the lint and type checks, and look for known holes of dependencies"),
    "coverage": (["-m", "pytest", "--cov", "--cov-report="], "run all tests or PATH…; print what branches they take"),
    "fuzz": (["-m", "tests.fuzz"], "feed damaged frames, handshakes and parameters for a minute; --seconds N: for N"),
    "bench": (["-m", "benchmarks"], "measure: what a user feels, peers in whole, parts; or one benchmark by name"),
    "tidekv": (["-m", "tidekv"], "run any tidekv command"),
    "vllm": (["-m", "benchmarks.vllm_pair"], "serve conversations through real vLLM servers, and compare every token"),
    "sglang": (["-m", "benchmarks.sglang_pair"], "the same through real SGLang servers, beside SGLang's own caches"),
    "docs": (["-m", "mkdocs", "build", "--strict"], "build the pages of docs/ in build/docs; a warning is an error"),
    "setup": ([], "only set up .venv; --newest: with the newest versions, not those of constraints.txt"),
    "constraints": (["-m", "tools.environment"], "write the versions in .venv to constraints.txt"),
}
# A command of these has an environment of its own, .venv-COMMAND unless TIDEKV_TEST_COMMAND_VENV names another. The
# module makes it and prints its Python.
ENVIRONMENTS = {"vllm": "benchmarks.vllm_pair.environment", "sglang": "benchmarks.sglang_pair.environment"}
CHECKS = (
    ["-m", "ruff", "check", "."],
    ["-m", "ruff", "format", "--check", "."],
    ["-m", "mypy"],
    ["-m", "tools.audit"],
)
EXTRAS = {"run": "demo"}
"""What a command needs of pyproject.toml's extras; all others need `dev`."""
CONSTRAINTS = ROOT / "constraints.txt"
WORKERS_MAX = 16
"""Maximum processes of tests at once, each of which imports torch."""
# What is looked at, and how many percent of its branches tests must take.
COVERED = (["--include=*/states/*", "--fail-under=100"], ["--fail-under=90"])


def wanted_marker(extra: str) -> str:
    """What a finished set-up was made from: other requirements or another Python need another set-up."""
    given = (ROOT / "pyproject.toml").read_bytes() + CONSTRAINTS.read_bytes()
    digest = hashlib.sha256(given).hexdigest()
    return f"{digest} {extra} {sys.version_info.major}.{sys.version_info.minor} {ROOT}\n"


def set_up(extra: str = "dev", *, newest: bool = False) -> None:
    """Make and fill .venv for an extra, unless the marker says that it has that or `dev`."""
    from tools import environment  # Not before the version of Python is checked.

    if not newest and MARKER.is_file() and MARKER.read_text() == wanted_marker("dev"):
        return
    versions = [] if newest else ["-c", str(CONSTRAINTS)]
    wanted = wanted_marker(extra)
    environment.fill(VENV, [*versions, "-e", f"{ROOT}[{extra}]"], marker=MARKER, wanted=wanted)


def pytest_arguments(arguments: list[str], *, everything: bool = False) -> list[str]:
    """Return the arguments of pytest for those of `test`.

    Without a path: the tests that are not marked slow or thorough, or all with --all, in two processes per core, since
    many tests wait for other processes. With paths: what they name, in one process. Options of pytest come last and
    win.
    """
    rest = [word for word in arguments if word != "--all"]
    paths = [Path(word.partition("::")[0]).resolve() for word in rest if not word.startswith("-")]
    if any(path.is_relative_to(ROOT / "tests") and path.exists() for path in paths):
        return rest
    workers = min(2 * len(os.sched_getaffinity(0)), WORKERS_MAX)
    tier = [] if everything or "--all" in arguments else ["-m", "not slow and not thorough"]
    return ["-n", str(workers), "--dist", "worksteal", *tier, *rest]


def usage() -> str:
    lines = [f"  {name:10}{text}" for name, (_, text) in COMMANDS.items()]
    return "usage: python3 dev.py COMMAND [ARGUMENTS…]\n\n" + "\n".join(lines)


def main(arguments: list[str]) -> int:
    if sys.version_info < (3, 11):
        sys.exit(f"dev.py: tidekv needs Python 3.11 or newer; this is {sys.version.split()[0]}")
    if not arguments or arguments[0] not in COMMANDS:
        print(usage(), file=sys.stderr)
        if arguments and not arguments[0].startswith("-"):
            print(f"\ndev.py: there is no command {arguments[0]!r}", file=sys.stderr)
        return 0 if arguments[:1] in (["-h"], ["--help"]) else 2
    command, rest = arguments[0], arguments[1:]
    if command in ENVIRONMENTS:
        maker = [sys.executable, "-m", ENVIRONMENTS[command]]
        made = subprocess.run(maker, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
        if made.returncode:
            return made.returncode
        python = made.stdout.split()[-1]
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        os.execv(python, [python, *COMMANDS[command][0], *rest])
    set_up(EXTRAS.get(command, "dev"), newest=command == "setup" and "--newest" in rest)
    if command == "setup":
        return 0
    if command == "check":
        codes = [subprocess.run([PYTHON, *check], cwd=ROOT, check=False).returncode for check in CHECKS]
        return max(codes)
    if command == "coverage":
        tests = [PYTHON, *COMMANDS[command][0], *pytest_arguments(rest, everything=True)]
        codes = [subprocess.run(tests, cwd=ROOT, check=False).returncode]
        for looked_at in COVERED:
            report = [PYTHON, "-m", "coverage", "report", *looked_at]
            codes.append(subprocess.run(report, cwd=ROOT, check=False).returncode)
        return max(codes)
    if command == "test":
        rest = pytest_arguments(rest)
        # Images set it to stay small. Without bytecode each worker and each process that a test starts compiles again.
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.execv(PYTHON, [str(PYTHON), *COMMANDS[command][0], *rest])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
