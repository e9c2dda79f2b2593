"""The arrows between the four folders, held by reading the imports."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("states", "backends", "transports", "engine")
MAY_IMPORT = {
    "states": {"states"},
    "backends": {"backends", "states"},
    "transports": {"transports", "states"},
    "engine": {"engine", "states", "backends", "transports"},
}
IMPURE = {"asyncio", "torch", "threading", "time", "random", "os", "logging", "structlog"}


def files_of(folder: str) -> list[Path]:
    """The modules of a folder. None would mean that this test looks where nothing is any more."""
    found = sorted((ROOT / folder).rglob("*.py"))
    assert len(found) > 5, folder
    return found


def imports_of(source: str) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"a relative import in line {node.lineno} hides where it leads"
            found.add(node.module or "")
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("import_module", "importlib.import_module"):
            # A name that is made while running is nobody's to check.
            found.add(str(ast.literal_eval(node.args[0])))
    return found


def reached(modules: set[str]) -> set[str]:
    """The folders that these imports lead to; a public name of the package leads to the engine."""
    inside = {module.split(".")[1] for module in modules if module.startswith("tidekv.")}
    under_wrong_name = {module.split(".")[0] for module in modules} & set(FOLDERS)
    assert not under_wrong_name, f"{under_wrong_name} exist twice if they are imported without tidekv"
    return {name if name in FOLDERS else "engine" for name in inside}


@pytest.mark.parametrize("folder", FOLDERS)
def test_each_folder_imports_only_what_it_may(folder: str) -> None:
    for path in files_of(folder):
        assert reached(imports_of(path.read_text())) <= MAY_IMPORT[folder], path


def test_states_import_nothing_that_acts() -> None:
    # The one exception: transitions logs each trigger at DEBUG, which the table's file silences once.
    for path in files_of("states"):
        found = {module.split(".")[0] for module in imports_of(path.read_text())} & IMPURE
        assert not found, f"{path} imports {found}"


@pytest.mark.parametrize(
    ("line", "leads_to"),
    [
        ("import tidekv.engine.driver", {"engine"}),
        ("import tidekv.engine.driver as states", {"engine"}),
        ("from tidekv import engine", {"engine"}),
        ("from tidekv import DecodeEngine", {"engine"}),
        ("from tidekv.backends import keys", {"backends"}),
        ("def late():\n    from tidekv.transports.wire import Hello", {"transports"}),
        ("importlib.import_module('tidekv.engine.driver')", {"engine"}),
        ("import asyncio, tidekv", set()),
    ],
)
def test_an_import_is_seen_in_each_of_its_forms(line: str, leads_to: set[str]) -> None:
    assert reached(imports_of(line)) == leads_to


@pytest.mark.parametrize("line", ["from ..engine import driver", "from .. import engine", "import states.core"])
def test_an_import_that_hides_where_it_leads_is_refused(line: str) -> None:
    with pytest.raises(AssertionError, match=r"hides where it leads|exist twice"):
        reached(imports_of(line))


@pytest.mark.parametrize("folder", ["states", "backends", "transports"])
def test_a_folder_loads_only_what_it_may(folder: str) -> None:
    # What the imports say, seen from the other side: an interpreter that has loaded every module of the folder.
    modules = [
        ".".join(("tidekv", *path.relative_to(ROOT).with_suffix("").parts))
        for path in files_of(folder)
        if path.name != "__init__.py"
    ]
    script = (
        "import importlib, sys\n"
        f"for name in {modules}:\n"
        "    try: importlib.import_module(name)\n"
        "    except ModuleNotFoundError as error: assert not str(error.name).startswith('tidekv'), error\n"
        "print(*{name.split('.')[1] for name in sys.modules if name.startswith('tidekv.')})\n"
    )
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert loaded.returncode == 0, loaded.stderr
    assert set(loaded.stdout.split()) - {"states"} == MAY_IMPORT[folder] - {"states"}


def test_package_is_small_files_and_links() -> None:
    package = ROOT / "src" / "tidekv"
    names = {entry.name for entry in package.iterdir()} - {"__pycache__"}
    assert names == {"__init__.py", "__main__.py", "py.typed", *FOLDERS}
    for folder in FOLDERS:
        assert (package / folder).is_symlink()
        assert (package / folder).resolve() == ROOT / folder
