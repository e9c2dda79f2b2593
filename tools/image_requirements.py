"""Versions and hashes of what the image installs: `python3 -m tools.image_requirements` writes deploy/requirements.txt.

Torch and the packages of its CUDA builds are left out: which build fits depends on the machine, and each has an index
and a hash of its own. Needs pip and its package index.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any  # Of pip's report, which is JSON.

from tools.environment import pip

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
TARGET = ROOT / "deploy" / "requirements.txt"
EXTRAS = ("demo", "yaml")
PYTHON, PLATFORMS = "3.11", ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
OF_TORCH = re.compile(r"torch|triton|nvidia-.*|cuda-.*")
HEADER = f"""\
# What the image installs beside torch and tidekv, for Python {PYTHON} on Linux x86_64, written by
# `python3 -m tools.image_requirements`. Torch, triton and the CUDA packages are not in it: see deploy/Dockerfile.
"""


def wanted() -> list[str]:
    """Return the direct requirements of the image."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    found = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    return [*found, *(each for extra in EXTRAS for each in extras[extra])]


def lines_of(report: Any) -> list[str]:
    """Return the lines of pip's report: name, version and hash of each package that is not torch's own."""
    found = []
    for each in report["install"]:
        name = re.sub(r"[-_.]+", "-", each["metadata"]["name"]).lower()
        if not OF_TORCH.fullmatch(name):
            digest = each["download_info"]["archive_info"]["hashes"]["sha256"]
            found.append(f"{name}=={each['metadata']['version']} --hash=sha256:{digest}\n")
    return sorted(found)


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        report, constraints = Path(directory) / "report.json", Path(directory) / "constraints.txt"
        # The versions that the tests passed with. The build of torch is not the index's business.
        constraints.write_text(re.sub(r"\+\w+$", "", CONSTRAINTS.read_text(), flags=re.MULTILINE))
        platforms = [f"--platform={each}" for each in PLATFORMS]
        pip(
            Path(sys.executable),
            [
                *(
                    "install",
                    "--dry-run",
                    "--quiet",
                    "--ignore-installed",
                    "--only-binary=:all:",
                    "--target",
                    directory,
                ),
                *(f"--python-version={PYTHON}", *platforms, "--report", str(report), "--constraint", str(constraints)),
                *wanted(),
            ],
        )
        TARGET.write_text(HEADER + "".join(lines_of(json.loads(report.read_text()))))


if __name__ == "__main__":
    main()
