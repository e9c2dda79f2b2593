"""The compiled form of the prefix index: it is never older than the source, and answers as the source does."""

from __future__ import annotations

import importlib
import os
import random
import subprocess
import sys
from collections import deque
from pathlib import Path

import numpy as np
import pytest

from tidekv.backends import keys
from tidekv.backends.keys import pack_tokens
from tidekv.engine import compiled
from tidekv.engine.journal import native
from tidekv.states import accounts
from tidekv.states.accounts import PageAccount
from tidekv.states.edges import begins_with
from tidekv.states.errors import InvalidRequest
from tidekv.states.index import PrefixIndex, Receipt
from tidekv.states.shapes import page_ids

BENCHMARKS = Path(__file__).resolve().parent.parent.parent / "benchmarks"
STATES = compiled.states_folder()


def test_what_runs_is_what_the_source_says() -> None:
    assert compiled.form() in ("source", "compiled"), "run: python3 dev.py compile, or with --remove"


@pytest.mark.parametrize("changed", ["states/tree.py", "states/native_edges.c", "engine/journal/native_json.h"])
def test_a_change_to_the_source_makes_what_was_compiled_stale(tmp_path: Path, changed: str) -> None:
    folder = tmp_path / "states"
    for name in ("states", "backends", "engine/journal"):
        (tmp_path / name).mkdir(parents=True)
    for name in compiled.MODULES:
        (folder / f"{name}.py").write_text(f"# {name}\n")
    for name in compiled.C_FILES:
        (tmp_path / name).write_text("/* */\n")
    loaded = folder / "index.cpython-311-x86_64-linux-gnu.so"
    assert compiled.form(folder / "index.py") == "source"
    assert compiled.form(loaded) == "stale"
    (folder / compiled.DIGEST).write_text(compiled.digest_of(folder))
    assert compiled.form(loaded) == "compiled"
    (tmp_path / changed).write_text("# another\n")
    assert compiled.form(loaded) == "stale"


def test_removing_leaves_the_source_and_what_is_not_ours(tmp_path: Path) -> None:
    folder, backends, libraries = tmp_path / "states", tmp_path / "backends", tmp_path / "src"
    journal = tmp_path / "engine" / "journal"
    for path in (folder, backends, libraries, journal):
        path.mkdir(parents=True)
        (path / "other.so").touch()
    for name in compiled.NATIVE:
        (tmp_path / f"{name}.cpython-311-x86_64-linux-gnu.so").touch()
    for name in ("index.py", "index.cpython-311-x86_64-linux-gnu.so", compiled.DIGEST):
        (folder / name).touch()
    (libraries / f"{compiled.GROUP}__mypyc.cpython-311-x86_64-linux-gnu.so").touch()
    compiled.remove(folder, libraries)
    assert sorted(path.name for path in folder.iterdir()) == ["index.py", "other.so"]
    assert [path.name for path in backends.iterdir()] == ["other.so"]
    assert [path.name for path in journal.iterdir()] == ["other.so"]
    assert [path.name for path in libraries.iterdir()] == ["other.so"]


def test_a_wrong_option_compiles_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert compiled.main(["--what"]) == 2
    assert "usage" in capsys.readouterr().err


def answers(seed: int, steps: int = 4000) -> list[object]:
    """What an index says to a random mix of calls."""
    source = random.Random(seed)
    device, host = PageAccount("device", 96), PageAccount("host", 64)
    index = PrefixIndex(key_bytes=4, device=device, host=host)
    held: deque[Receipt] = deque()
    told: list[object] = []
    for step in range(steps):
        prompt = b"".join(source.randrange(3).to_bytes(4, "little") for _ in range(source.randrange(1, 40)))
        match = index.match("", prompt)
        lock = index.lock(match.device_node)
        needed = len(prompt) // 4 - match.device_pages
        told.append(index.evict_device(needed - device.free) if needed > device.free else 0)
        while device.free < needed:
            index.unlock(held.popleft())
            index.evict_device(needed - device.free)
        entered = index.insert("", prompt, index.device_path(match.device_node) + device.take(needed))
        device.give_back(entered.duplicates + entered.rejected)
        held.append(index.lock(entered.node))
        index.unlock(lock)
        if len(held) > 4:
            index.unlock(held.popleft())
        for node in index.path(entered.node):
            if node.host is None and node.page_count <= host.free:
                index.give_host(node, host.take(node.page_count))
        told += [match.device_pages, match.host_pages, entered.pages.tolist(), index.host_evictable]
        if host.free < 8:
            told.append(index.evict_host(16))
        if step % 500 == 0:
            index.check()
    told += [(node.edge, node.tick, node.hits, node.guarded) for node in index.nodes()]
    return told


def packed_or_refused(seed: int) -> list[object]:
    """What becomes of int64 arrays of all lengths, aligned or not, with now and then a number that is no token."""
    source = np.random.default_rng(seed)
    told: list[object] = []
    for count in (*range(1, 40), *source.integers(40, 40_000, 40)):
        plain = source.integers(0, 2**32, count, dtype=np.int64)
        shifted = np.frombuffer(b"?" + plain.tobytes(), dtype=np.uint8)[1:].view(np.int64)
        wrong = plain.copy()
        wrong[source.integers(0, count)] = source.choice([-1, 2**32, -(2**63), 2**63 - 1])
        told += [pack_tokens(plain), pack_tokens(shifted), pack_tokens(plain[::2])]
        with pytest.raises(InvalidRequest) as refusal:
            pack_tokens(wrong)
        told.append(str(refusal.value))
    return told


def compared(seed: int) -> list[object]:
    """Whether edges are what keys go on with, of all alignments and lengths, alike or different in one byte."""
    source = random.Random(seed)
    told: list[object] = []
    for count in (
        0,
        1,
        63,
        64,
        255,
        8191,
        8192,
        8193,
        8447,
        8448,
        *(source.randrange(8192, 70_000) for _ in range(60)),
    ):
        at = source.randrange(200)
        # Most of them so that the addresses agree by 16, as those of a node and a prompt do.
        shift = source.choice((source.randrange(130), *(at % 16 + 16 * source.randrange(8) for _ in range(3))))
        edge = source.randbytes(count)
        moved = memoryview(bytes(shift) + edge)[shift:]
        keys = source.randbytes(at) + edge + source.randbytes(source.randrange(3) * 100)
        places = [0, count - 1, *(source.randrange(count) for _ in range(20))] if count else []
        told += [begins_with(keys, edge, at), begins_with(keys, moved, at), begins_with(keys, moved, at + 1)]
        told += [begins_with(keys[: at + count], edge, at), begins_with(keys[: at + count - 1], edge, at)]
        told.append(begins_with(keys, edge, len(keys) + 5))
        for place in places:
            wrong = bytearray(keys)
            wrong[at + place] ^= 1 << source.randrange(8)
            told += [begins_with(bytes(wrong), edge, at), begins_with(bytes(wrong), moved, at)]
    return told


def test_edges_are_told_from_what_differs_in_one_bit() -> None:
    told = compared(1)
    assert {True, False} == set(told)
    assert sum(map(bool, told)) < 4 * 70


CHILD = """
import hashlib
import test_compiled as here
answers = here.answers(1) + here.packed_or_refused(1) + here.compared(1) + here.turned(1)
print(hashlib.sha256(repr(answers).encode()).hexdigest(), here.compiled.form(), here.native_form(), sep='; ')
"""


def turned(seed: int) -> list[object]:
    """Lists of pages turned round, of all lengths, and what is said of another list."""
    source = random.Random(seed)
    told: list[object] = []
    for count in (*range(70), 1000, 1001):
        pages = page_ids(source.randrange(-(2**31), 2**31) for _ in range(count))
        plain = pages[::-1]
        accounts._reverse(pages)
        assert pages == plain
        told.append(pages)
    return told


def test_lists_of_pages_are_turned_round() -> None:
    assert len(turned(1)) == 72


def native_form() -> str:
    """Which forms pack arrays, compare keys, turn pages round and write steps in this process."""
    parts = (keys._halved, begins_with, accounts._reverse)
    return ", ".join([*(type(part).__name__ for part in parts), str(native.compiled)])


def told_by(source_root: Path) -> list[str]:
    path = os.pathsep.join((str(source_root), str(Path(__file__).parent)))
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", CHILD], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().split("; ")


@pytest.mark.slow
def test_the_compiled_form_answers_as_the_source_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of the package are compiled and run, as benchmarks do it; this checkout goes on with what it has."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    forms = importlib.import_module("index_forms")
    before = sorted(STATES.glob("*.so"))
    forms.copy_source(tmp_path / "source")
    plain, *found = told_by(tmp_path / "source")
    assert found == ["source", "function, method_descriptor, method_descriptor, None"]
    try:
        forms.copy_compiled(tmp_path / "made", tmp_path / "cache")
    except forms.NotCompiled as error:
        pytest.skip(f"there is no C compiler, or no mypy: {error}")
    forms.copy_compiled(tmp_path / "kept", tmp_path / "cache")
    built = "builtin_function_or_method"
    writer = "<class 'tidekv.engine.journal.native_steps.StepWriter'>"
    for copy in ("made", "kept"):
        assert told_by(tmp_path / copy) == [plain, "compiled", f"{built}, {built}, {built}, {writer}"]
    assert sorted(STATES.glob("*.so")) == before
