"""The compiled form of the prefix index: it is never older than the source, and answers as the source does."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import deque
from pathlib import Path

import pytest

import tidekv
from tidekv.engine import compiled
from tidekv.states.accounts import PageAccount
from tidekv.states.index import PrefixIndex, Receipt


def test_what_runs_is_what_the_source_says() -> None:
    assert compiled.form() in ("source", "compiled"), "run: python3 dev.py compile, or with --remove"


def test_a_change_to_the_source_makes_what_was_compiled_stale(tmp_path: Path) -> None:
    for name in compiled.MODULES:
        (tmp_path / f"{name}.py").write_text(f"# {name}\n")
    loaded = tmp_path / "index.cpython-311-x86_64-linux-gnu.so"
    assert compiled.form(tmp_path / "index.py") == "source"
    assert compiled.form(loaded) == "stale"
    (tmp_path / compiled.DIGEST).write_text(compiled.digest_of(tmp_path))
    assert compiled.form(loaded) == "compiled"
    (tmp_path / "tree.py").write_text("# another\n")
    assert compiled.form(loaded) == "stale"


def test_removing_leaves_the_source_and_what_is_not_ours(tmp_path: Path) -> None:
    folder, libraries = tmp_path / "states", tmp_path / "src"
    for path in (folder, libraries):
        path.mkdir()
        (path / "other.so").touch()
    for name in ("index.py", "index.cpython-311-x86_64-linux-gnu.so", compiled.DIGEST):
        (folder / name).touch()
    (libraries / f"{compiled.GROUP}__mypyc.cpython-311-x86_64-linux-gnu.so").touch()
    compiled.remove(folder, libraries)
    assert sorted(path.name for path in folder.iterdir()) == ["index.py", "other.so"]
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


CHILD = """
import hashlib
import test_compiled as here
print(hashlib.sha256(repr(here.answers(1)).encode()).hexdigest(), here.compiled.form())
"""


def told_by(source_root: Path) -> list[str]:
    path = os.pathsep.join((str(source_root), str(Path(__file__).parent)))
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", CHILD], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.slow
def test_the_compiled_form_answers_as_the_source_does(tmp_path: Path) -> None:
    """A package of its own is compiled, so that this checkout goes on with what it has."""
    package = tmp_path / "tidekv"
    package.mkdir()
    there = Path(str(tidekv.__file__)).parent
    for entry in there.iterdir():
        if entry.name not in ("states", "__pycache__"):
            (package / entry.name).symlink_to(entry.resolve())
    (package / "states").mkdir()
    for source in (there / "states").glob("*.py"):
        (package / "states" / source.name).write_bytes(source.read_bytes())
    plain, form = told_by(tmp_path)
    assert form == "source"
    try:
        compiled.build(package / "states", tmp_path)
    except subprocess.CalledProcessError:
        pytest.skip("there is no C compiler, or no mypy")
    assert told_by(tmp_path) == [plain, "compiled"]
