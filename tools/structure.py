"""Counts of how the code of any checkout is cut: `python3 -m tools.structure [CHECKOUT]`.

It counts lines of Python files, and traces one restore of 64 pages, of which storage has 41. The restore runs the code
of the checkout with the installed packages of this interpreter. `--where` lists the modules that it passes.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BESIDE = ("integrations", "cli", "demo", "synthetic", "doctor", "simulation", "rig")
"""Folders of `engine` that are not the library itself: they use it, or check it."""
PACKAGES = ("src", "states", "backends", "transports", "engine")
PAGE = 16
PAGES = 64
HITS = 41
"""A number that nothing else in the restore has: a value of 41 is the hit count of storage."""
VLLM_FORMS = ("engine/integrations/vllm", "engine/decode", "states/records", "states/request")


def lines_in(root: Path, *folders: str) -> int:
    """Lines of the Python files in these folders."""
    return sum(len(path.read_text().splitlines()) for folder in folders for path in modules_in(root / folder))


def modules_in(folder: Path) -> Iterator[Path]:
    """Python files below a folder, each once: links are not followed."""
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not (Path(place) / name).is_symlink()]
        yield from (Path(place) / name for name in sorted(names) if name.endswith(".py"))


def request_forms(root: Path) -> list[str]:
    """Records with the id of a request, in the folders that a request of vLLM passes at decode."""
    return sorted(
        f"{path.relative_to(root)}:{node.name}"
        for folder in VLLM_FORMS
        for path in modules_in(root / folder)
        if path.name not in ("events.py", "commands.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and "request_id" in fields_of(node)
    )


def fields_of(kind: ast.ClassDef) -> set[str]:
    """Fields that a class declares or that its `__init__` assigns."""
    declared = [node.target for node in kind.body if isinstance(node, ast.AnnAssign)]
    found = {target.id for target in declared if isinstance(target, ast.Name)}
    for node in kind.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            found |= {
                target.attr
                for step in ast.walk(node)
                if isinstance(step, ast.Assign)
                for target in step.targets
                if isinstance(target, ast.Attribute)
            }
    return found


def count_lines(root: Path) -> dict[str, int]:
    """Lines by part of the checkout."""
    wheel = lines_in(root, *PACKAGES)
    beside = lines_in(root, *(f"engine/{name}" for name in BESIDE))
    return {
        "lines of the wheel": wheel,
        "lines of the library alone": wheel - beside,
        "lines of benchmarks": lines_in(root, "benchmarks"),
        "lines of simulation": lines_in(root, "simulation"),
        "lines of tests": lines_in(root, "tests"),
    }


# --- In a process of its own, with the code of the checkout ---


class Trace:
    """Modules of the package that run on the event loop's thread while it is on."""

    def __init__(self, root: Path) -> None:
        self._root = f"{root}{os.sep}"
        self._last = ""
        self._names: dict[str, str] = {}
        self.calls: Counter[str] = Counter()
        """By module."""
        self.changes: Counter[str] = Counter()
        """Calls that come from another module, by the module that is called."""
        self.with_hits: set[str] = set()

    def _module(self, path: str) -> str:
        if path not in self._names:
            real = os.path.realpath(path)
            is_ours = real.startswith(self._root) and f"{os.sep}." not in real[len(self._root) :]
            self._names[path] = real[len(self._root) :] if is_ours else ""
        return self._names[path]

    def note(self, frame: Any, kind: str, value: object) -> None:
        """Take a call or a return."""
        if kind not in ("call", "return"):
            return
        module = self._module(frame.f_code.co_filename)
        if not module.startswith(("states", "backends", "transports", "engine")):
            return
        if kind == "call":
            self.calls[module] += 1
            self.changes[module] += self._last not in ("", module)
            self._last = module
        if kind == "return" and (is_hits(value) or has_hits(frame.f_locals)):
            self.with_hits.add(module)

    def places(self) -> Iterator[str]:
        """Yield a line for each module, those first that the restore changes to most often."""
        yield f"{'changes':>8} {'calls':>8}  hits  module"
        for module, changes in self.changes.most_common():
            mark = "*" if module in self.with_hits else " "
            yield f"{changes:>8} {self.calls[module]:>8}  {mark:>4}  {module}"


def is_hits(value: object) -> bool:
    """Whether a value is the hit count."""
    return type(value) is int and value == HITS


def has_hits(values: dict[str, object]) -> bool:
    """Whether a local variable is the hit count, or a record with a field that is."""
    for value in list(values.values()):
        if is_hits(value):
            return True
        names = getattr(type(value), "__struct_fields__", ()) or getattr(type(value), "_fields", ())
        if not isinstance(names, tuple):
            continue
        if any(is_hits(getattr(value, name, None)) for name in names):
            return True
    return False


def count_changes(transition: Any, made: list[str]) -> None:
    """Note the changes of a state that the library's class of transitions makes."""
    execute = transition.execute

    def noted(self: Any, *given: Any) -> Any:
        made.append(self.dest)
        return execute(self, *given)

    transition.execute = noted


async def restore_once(trace: Trace, store: str) -> dict[str, int]:
    """Store a prompt's pages, then trace the restore of a longer prompt on another engine."""
    import transitions

    import tidekv  # That of the checkout, whose path the parent has set.
    import tidekv.engine.decode.decode_engine  # Its machine is loaded with it.

    layout = tidekv.KVLayout(num_layers=1, num_kv_heads=1, head_dim=4, dtype="float32", page_size=PAGE)
    changes: list[str] = []

    async def prefill(room: Any) -> None:
        await room.send(range(-(-room.prompt_tokens // PAGE)), start_token=0)
        await room.finish(first_token=7)
        await room.received()

    count_changes(transitions.Transition, changes)
    for name, pages in (("first", HITS), ("second", PAGES)):
        transports = [tidekv.NixlTransport(name=each) for each in (f"p-{name}", f"d-{name}")]
        pools = [tidekv.DevicePool.allocate(layout, num_pages=2 * PAGES) for _ in range(2)]
        host = tidekv.HostPool.allocate(layout, num_pages=2 * PAGES)
        peer = tidekv.PrefillPeer(device=pools[0], transport=transports[0], on_room=prefill)
        engine = tidekv.DecodeEngine(
            # The trace makes the loop slow. Reports of that, and the time stamps they need, are not of the restore.
            tidekv.EngineConfig(loop_stall_report_s=60.0),
            device=pools[1],
            host=host,
            storage=tidekv.open_storage(store),
            transport=transports[1],
        )
        async with peer, engine:
            request = tidekv.DecodeRequest(
                request_id=name, tokens=[*range(pages * PAGE + 1)], prefill=peer.address, send_prompt=True
            )
            changes.clear()
            if name == "second":
                sys.setprofile(trace.note)
            ready = await engine.restore(request)
            sys.setprofile(None)
            found = {"changes of state in a restore": len(changes)}
            sources = dict(ready.sources)
            await engine.finish(ready)
            await engine.wait_settled()
    assert sources["l3"] == HITS * PAGE, f"storage served {sources}"
    return {
        "modules of a restore": len(trace.calls),
        "changes of module in a restore": trace.changes.total(),
        **found,
        "modules that the hit count of storage passes": len(trace.with_hits),
    }


def measure(root: Path, *, where: bool = False) -> dict[str, int]:
    """Counts of a checkout. With `where`, print the modules that its restore passes."""
    paths = os.pathsep.join((str(root / "src"), str(root)))
    with tempfile.TemporaryDirectory() as place:
        run = subprocess.run(
            [sys.executable, str(Path(__file__).resolve()), str(root), "--trace", f"file:{place}?capacity=64MiB"],
            env={**os.environ, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    if run.returncode:
        raise SystemExit(f"the restore of {root} failed:\n{run.stderr}")
    *places, traced = run.stdout.splitlines()
    if where:
        print(*places, "", sep="\n")
    return {**count_lines(root), **json.loads(traced), "forms of a vLLM request": len(request_forms(root))}


def main() -> None:
    """Print the counts of a checkout, or trace its restore."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkout", nargs="?", type=Path, default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--trace", metavar="URI", help="only trace a restore with this storage; JSON is the last line")
    parser.add_argument("--where", action="store_true", help="list the modules that a restore passes")
    options = parser.parse_args()
    root = options.checkout.resolve()
    if options.trace:
        trace = Trace(root)
        counts = asyncio.run(restore_once(trace, options.trace))
        print(*trace.places(), json.dumps(counts), sep="\n")
        return
    for name, count in measure(root, where=options.where).items():
        print(f"{count:>8,}  {name}")


if __name__ == "__main__":
    main()
