"""Known holes of the installed packages, as part of `python3 dev.py check`: `python -m tools.audit`.

pip-audit asks the advisory database of the package registry. Where it is not reached, a line says so and the check
passes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

COMMAND = (
    sys.executable,
    "-m",
    "pip_audit",
    "--skip-editable",
    "--progress-spinner=off",
    "--timeout=15",
    "--format=json",
)
LIMIT_S = 300.0
ACCEPTED: dict[str, str] = {}
"""Advisories that do not concern this project, by id, with the reason."""


def holes(report: Any) -> list[str]:
    """Return a line for each hole in pip-audit's report that is not accepted."""
    lines = []
    for package in report["dependencies"]:
        for hole in package.get("vulns", ()):
            if not {hole["id"], *hole["aliases"]} & ACCEPTED.keys():
                mended = ", ".join(hole["fix_versions"]) or "no version"
                lines.append(f"{package['name']} {package['version']}: {hole['id']}, mended in {mended}")
    return lines


def main(command: Sequence[str] = COMMAND, *, limit_s: float = LIMIT_S) -> int:
    """Print known holes and return the exit code: 1 if there is one, 0 also where they cannot be asked for."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
        found = holes(json.loads(done.stdout))
    except subprocess.TimeoutExpired:
        return skip(f"no answer within {limit_s:g} s")
    except ValueError:
        # Without a connection pip-audit prints no report; its last line has the reason.
        return skip(" ".join(done.stderr.split("\n")[-2:]).strip()[-300:] or f"exit code {done.returncode}")
    for line in found:
        print(f"audit: {line}")
    if not found:
        print("audit: no known holes")
    return int(bool(found))


def skip(reason: str) -> int:
    """Say why nothing was asked, and return the exit code of a check that passes."""
    print(f"audit: skipped, the advisory database is not reached: {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
