"""Pairs of whole servers, SGLang's and vLLM's, with and without tidekv: `bench peers --sglang DIR --vllm DIR`.

`dev.py sglang` and `dev.py vllm` serve the same conversations and write a file each; this prints one table of both. All
pairs of an engine run at once and serve by turns, so that other load on the machine meets each of them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from rich.console import Console
from rich.table import Table

from tidekv.states.errors import InvalidConfig
from tools.figures_page import RESULTS, peers_table_rows

ROOT: Final = Path(__file__).resolve().parents[1]
CONVERSATIONS: Final = ("--conversations=6", "--turns=4", "--tokens=1000:2200", "--output=16", "--alternate")
LIMIT_S: Final = 280.0
"""Maximum seconds of an engine's pairs, their start included."""
END_S: Final = 60.0
"""Seconds in which the servers of a run past its limit are to end."""


class Peer(NamedTuple):
    """A serving engine: the command that serves its pairs, and the pairs."""

    command: str
    pairs: tuple[str, ...]


PEERS: Final = {
    "sglang": Peer("sglang", ("--cache=none", "--cache=l2", "--cache=tidekv-l2")),
    "vllm": Peer("vllm", ("--connector=nixl-quiet", "--connector=tidekv")),
}


def python_of(peer: str, folder: Path | None) -> Path | None:
    """Return the Python of a peer's environment: `folder`, or what `dev.py` has made here; None if there is neither.

    Raises InvalidConfig if the folder has no Python.
    """
    python = (folder or ROOT / f".venv-{peer}") / "bin" / "python"
    if python.is_file():
        return python
    if folder is not None:
        raise InvalidConfig(f"--{peer} {folder}: there is no bin/python; `python3 dev.py {peer}` makes .venv-{peer}")
    return None


def serve(peer: str, python: Path, file: Path) -> str:
    """Serve the conversations with the pairs of a peer and write their figures to `file`; return an error, or ""."""
    command = [str(python), "-m", f"benchmarks.{peer}_pair", "conversations", *PEERS[peer].pairs, *CONVERSATIONS]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    with subprocess.Popen([*command, "--json", str(file)], cwd=ROOT, env=environment) as process:
        try:
            code = process.wait(LIMIT_S)
        except BaseException as error:
            # It ends its servers, which are process groups of their own.
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return f"not done after {LIMIT_S:g} s"
    return f"exit code {code}: an answer is wrong or lost, or a server failed" if code else ""


def print_peers(folder: Path = RESULTS, console: Console | None = None) -> None:
    """Print one table of the files in `folder`; a peer without a file is left out."""
    reports = {peer: json.loads(path.read_text()) for peer in PEERS if (path := folder / f"{peer}.json").is_file()}
    titles, rows = peers_table_rows(reports)
    table = Table("", *titles, title="Pairs of servers: prefill and decode")
    for cells in rows:
        table.add_row(*cells)
    console = console or Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    for peer, report in reports.items():
        about = report["about"]
        console.print(f"{peer}: {about['date']}, commit {about['commit']}, {about['machine']}", highlight=False)


def compare_peers(folders: Mapping[str, Path | None], into: Path) -> int:
    """Serve with each peer that has an environment, and print the table of `into`. Returns 1 if one has failed."""
    pythons = {peer: python_of(peer, folder) for peer, folder in folders.items()}
    failed = 0
    for peer, python in pythons.items():
        if python is None:
            print(f"{peer} is not measured: give --{peer} DIR, or make .venv-{peer} with `python3 dev.py {peer}`")
        elif error := serve(peer, python, into / f"{peer}.json"):
            failed = 1
            print(f"{peer}: {error}", file=sys.stderr)
    print_peers(into)
    return failed
