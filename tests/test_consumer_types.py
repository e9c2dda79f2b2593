"""Type checkers find a typo in each public name, attribute and argument, and each value of a wrong type."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.consumer_file import file_of, lines

ROOT = Path(__file__).resolve().parent.parent
CHECK_S = 1200.0
"""Maximum seconds of a type checker, which reads torch and numpy as well, on a machine that may be busy."""
PROGRAM = '''
import array

import numpy as np
import torch

import tidekv

LAYOUT = tidekv.KVLayout(num_layers=4, num_kv_heads=2, head_dim=32, dtype="float32", page_size=16)


class Prefill:
    """A prefill worker."""

    async def serve(self, room: tidekv.Room) -> None:
        await room.send([0, 1], start_token=0)
        await room.finish(first_token=7, aux={})
        outcome: tidekv.RoomOutcome = await room.received()
        print(outcome, tidekv.RoomOutcome.RECEIVED)


async def serve(storage: tidekv.Storage, prefill: str, ids: list[int]) -> None:
    device = tidekv.DevicePool.allocate(LAYOUT, num_pages=64)
    transport: tidekv.Transport = tidekv.NixlTransport(name="decode-0", dials=["127.0.0.1:*"])
    policy = tidekv.StoragePolicy(prefetch="best_effort")
    options = tidekv.StorageOptions(prefetch=policy.prefetch)
    forms: list[tidekv.Tokens] = [ids, bytes(8), array.array("I", ids), np.array(ids), torch.tensor(ids)]
    async with tidekv.DecodeEngine(
        tidekv.EngineConfig(storage=options), device=device, storage=storage, transport=transport
    ) as engine:
        for tokens in forms:
            ready = await engine.restore(tidekv.DecodeRequest(request_id="r", tokens=tokens, prefill=prefill))
            pages: list[int] = engine.grow(ready)
            kept: int = await engine.finish(ready, [ready.first_token], keep=False)
            print(pages, kept, tidekv.__version__)


def peer(pool: tidekv.DevicePool) -> tidekv.PrefillPeer:
    return tidekv.PrefillPeer(device=pool, transport=tidekv.NixlTransport(name="p"), on_room=Prefill().serve)
'''


def check(checker: str, directory: Path) -> dict[str, dict[int, str]]:
    """Return what the checker reports of the files in a directory, by file and line from 1 on."""
    files = sorted(each.name for each in directory.glob("*.py"))
    environment = {
        **os.environ,
        "MYPYPATH": f"{ROOT / 'src'}",
        "PYTHONPATH": os.pathsep.join([f"{ROOT / 'src'}", os.environ.get("PYTHONPATH", "")]),
        # Kept between runs, since most of the time is torch's and numpy's; the project's own has other options.
        "MYPY_CACHE_DIR": str(ROOT / ".mypy_cache" / "consumers"),
    }
    found: dict[str, dict[int, str]] = {name: {} for name in files}

    def note(name: str, number: int, message: str) -> None:
        found[name][number] = found[name].get(number, "") + message

    python = [sys.executable, "-m", checker]
    if checker == "mypy":
        options = ["--strict", "--config-file=", "--no-error-summary", "--hide-error-context"]
    else:
        settings = {"extraPaths": [str(ROOT / "src")], "typeCheckingMode": "standard"}
        (directory / "pyrightconfig.json").write_text(json.dumps(settings))
        options = ["--pythonpath", sys.executable, "--outputjson"]
    done = subprocess.run(
        [*python, *options, *files], cwd=directory, env=environment, capture_output=True, text=True, timeout=CHECK_S
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    if checker == "mypy":
        for line in done.stdout.splitlines():
            name, number, kind, message = line.split(":", 3)
            if kind.strip() == "error":
                note(name, int(number), message)
    else:
        for each in json.loads(done.stdout)["generalDiagnostics"]:
            if each["severity"] == "error":
                note(Path(each["file"]).name, each["range"]["start"]["line"] + 1, each["message"])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("checker", ["mypy", "basedpyright"])
def test_typos_and_wrong_values_are_errors_and_nothing_else_is(checker: str, tmp_path: Path) -> None:
    if find_spec(checker) is None:
        pytest.skip(f"{checker} is not installed")
    uses = list(lines())
    assert len(uses) > 1000
    wrong, first = file_of([each.wrong for each in uses])
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "right.py").write_text(file_of([each.right for each in uses])[0])
    (tmp_path / "wrong.py").write_text(wrong)
    found = check(checker, tmp_path)
    assert found["program.py"] == {}
    assert found["right.py"] == {}
    said = found["wrong.py"]
    missed = {
        number: each.wrong
        for number, each in enumerate(uses, first)
        # Of an overloaded function basedpyright names no argument.
        if number not in said or (each.word not in said[number] and not said[number].startswith("No overloads for"))
    }
    assert not missed, "\n".join(f"{line}: {found['wrong.py'].get(number)}" for number, line in missed.items())
