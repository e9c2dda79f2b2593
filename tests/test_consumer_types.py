"""Type checkers find a typo in each public name and in each argument of a public call, in a file of a user."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from enum import Enum
from importlib.util import find_spec
from pathlib import Path

import pytest

import tidekv
from tests.support.waits import LIMIT_S

ROOT = Path(__file__).resolve().parent.parent
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
    transport: tidekv.Transport = tidekv.NixlTransport(name="decode-0")
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


def check(checker: str, file: Path) -> dict[int, str]:
    """Return what the checker reports, by line from 1 on."""
    environment = {
        **os.environ,
        "MYPYPATH": f"{ROOT / 'src'}",
        "PYTHONPATH": os.pathsep.join([f"{ROOT / 'src'}", os.environ.get("PYTHONPATH", "")]),
        "MYPY_CACHE_DIR": str(file.parent / "cache"),
    }
    found: dict[int, str] = {}
    if checker == "mypy":
        call = [
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            "--config-file=",
            "--no-error-summary",
            "--hide-error-context",
        ]
        done = subprocess.run(
            [*call, file.name], cwd=file.parent, env=environment, capture_output=True, text=True, timeout=LIMIT_S
        )
        assert done.returncode in (0, 1), done.stdout + done.stderr
        for line in done.stdout.splitlines():
            name, number, kind, message = line.split(":", 3)
            if name == file.name and kind.strip() == "error":
                found[int(number)] = found.get(int(number), "") + message
        return found
    settings = {"extraPaths": [str(ROOT / "src")], "typeCheckingMode": "standard"}
    (file.parent / "pyrightconfig.json").write_text(json.dumps(settings))
    call = [sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable, "--outputjson", file.name]
    done = subprocess.run(call, cwd=file.parent, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    for each in json.loads(done.stdout)["generalDiagnostics"]:
        if each["severity"] == "error":
            number = each["range"]["start"]["line"] + 1
            found[number] = found.get(number, "") + each["message"]
    return found


def misspelt(name: str) -> str:
    """Return the name with a letter lost."""
    return name[:-2] + name[-1]


def calls() -> Iterator[tuple[str, str]]:
    """Yield every public call and each of its arguments."""
    for name in tidekv.__all__:
        value = getattr(tidekv, name)
        if (
            isinstance(value, type)
            and not issubclass(value, Exception | Enum)
            and not getattr(value, "_is_protocol", 0)
        ):
            targets = {f"tidekv.{name}": value}
            for base in value.__mro__:
                if base.__module__.startswith("tidekv"):
                    members = {method for method in vars(base) if not method.startswith("_")}
                    targets |= {
                        f"tidekv.{name}.{method}": getattr(value, method)
                        for method in members
                        if inspect.isroutine(getattr(value, method))
                    }
        elif inspect.isfunction(value):
            targets = {f"tidekv.{name}": value}
        else:
            continue
        for target, function in sorted(targets.items()):
            parameters = inspect.signature(function).parameters.values()
            if any(each.kind is each.VAR_KEYWORD for each in parameters):
                continue  # Takes arguments of any name.
            for each in parameters:
                if each.name != "self" and each.kind is not each.VAR_POSITIONAL:
                    yield target, each.name


@pytest.mark.slow
@pytest.mark.parametrize("checker", ["mypy", "basedpyright"])
def test_a_typo_in_a_name_or_an_argument_is_an_error(checker: str, tmp_path: Path) -> None:
    if find_spec(checker) is None:
        pytest.skip(f"{checker} is not installed")
    file = tmp_path / "consumer.py"
    file.write_text(PROGRAM)
    assert check(checker, file) == {}

    lines, words = ["import tidekv", ""], {}
    for name in tidekv.__all__:
        words[len(lines) + 1] = misspelt(name)
        lines.append(f"tidekv.{misspelt(name)}")
    for target, argument in calls():
        words[len(lines) + 1] = f"{argument}_x"
        lines.append(f"{target}({argument}_x=0)")
    assert len(lines) > 250
    file.write_text("\n".join(lines) + "\n")
    found = check(checker, file)
    missed = {number: lines[number - 1] for number, word in words.items() if word not in found.get(number, "")}
    assert not missed, "\n".join(f"{line}: {found.get(number)}" for number, line in missed.items())
