"""A file of figures that a program has measured, with what it needs to be believed: command, commit, date, machine."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tidekv.states.errors import InvalidRequest, cause_of

FILES: Final = ("--json", "--answers", "--journals")
"""Options that do not matter to figures: where they, right answers and journals of failures are written."""


def about(program: str = "tidekv") -> dict[str, object]:
    """Return the command of this process (the arguments of `program`), the commit of its checkout, the date, and the
    machine with its load.
    """
    return {
        "command": shlex.join([*program.split(), *_arguments()]),
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        # Of the last fifteen minutes: what else ran beside the measurement.
        "load": round(os.getloadavg()[2], 1),
    }


def _arguments() -> list[str]:
    """Return this process's arguments without FILES."""
    words = [word for word in sys.argv[1:] if not word.startswith(tuple(f"{name}=" for name in FILES))]
    for name in FILES:
        if name in words:
            at = words.index(name)
            del words[at : at + 2]
    return words


def _commit() -> str:
    """Return the commit of the checkout that this module is in, with "+" for changed files; "" outside of one."""
    folder = Path(__file__).resolve().parent
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--exclude=*", "--abbrev=12"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=10.0,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.strip()


def write_artefact(path: Path, figures: Mapping[str, object], program: str = "tidekv") -> None:
    """Write figures with what they are about. Raises InvalidRequest if the file cannot be written."""
    try:
        path.write_text(json.dumps({"about": about(program), "figures": figures}, indent=1) + "\n")
    except OSError as error:
        raise InvalidRequest(f"{str(path)!r} cannot be written: {cause_of(error)}") from error
