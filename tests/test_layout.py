"""The arrows between the four folders, held by reading the imports."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
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
# What users import or start by name; all else in the package must be reachable from here.
ENTRY_POINTS = (
    "tidekv",
    "tidekv.__main__",
    "tidekv.engine.integrations.sglang",
    "tidekv.engine.integrations.vllm",
    "tidekv.engine.simulation.__main__",
    "tidekv.engine.simulation.rig",
)
# Programs that write pages of docs/.
GENERATORS = (
    "tidekv.engine.configuration.document",
    "tidekv.engine.journal.document",
    "tidekv.engine.metrics.dashboard",
    "tidekv.engine.metrics.document",
    "tidekv.engine.policy_document",
    "tidekv.engine.seeing.picture",
    "tidekv.engine.simulation.behavior",
)
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


def names_in(source: str) -> set[str]:
    """Every module that a source may load: imports, and strings that are dotted names, as lazy imports have them."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.update({node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)})
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("tidekv."):
            found.add(node.value)
    return found


def loaded_from(roots: tuple[str, ...], sources: dict[str, str]) -> set[str]:
    """The modules that are loaded, directly or not, by these; a module loads the packages that it is in."""
    loaded: set[str] = set()
    waiting = list(roots)
    while waiting:
        name = waiting.pop()
        if name in sources and name not in loaded:
            loaded.add(name)
            waiting += [name.rpartition(".")[0], *names_in(sources[name])]
    return loaded


def test_every_module_of_the_package_serves_users() -> None:
    """A worker that only tests start belongs into tests/support, a measurement into benchmarks."""
    package = ROOT / "src" / "tidekv"
    files = [*package.glob("*.py"), *(file for folder in FOLDERS for file in files_of(folder))]
    sources = {}
    for file in files:
        parts = file.relative_to(package if file.is_relative_to(package) else ROOT).with_suffix("").parts
        sources[".".join(("tidekv", *(part for part in parts if part != "__init__")))] = file.read_text()
    roots = (*ENTRY_POINTS, *GENERATORS)
    assert set(roots) <= set(sources)
    assert set(sources) - loaded_from(roots, sources) == set()


def test_a_module_that_nothing_loads_is_found() -> None:
    sources = {
        "tidekv": "LATER = {'Engine': 'tidekv.engine.decode'}",
        "tidekv.engine": "",
        "tidekv.engine.decode": "from tidekv.engine import driver",
        "tidekv.engine.driver": "import asyncio",
        "tidekv.engine.worker": "from tidekv.engine import driver",
    }
    assert set(sources) - loaded_from(("tidekv",), sources) == {"tidekv.engine.worker"}


def test_package_is_small_files_and_links() -> None:
    package = ROOT / "src" / "tidekv"
    names = {entry.name for entry in package.iterdir()} - {"__pycache__"}
    assert names == {"__init__.py", "__main__.py", "py.typed", *FOLDERS}
    for folder in FOLDERS:
        assert (package / folder).is_symlink()
        assert (package / folder).resolve() == ROOT / folder


def test_no_extension_module_takes_the_place_of_a_source() -> None:
    # Python imports an extension module in preference to the source beside it, however old the former is.
    suffixes = tuple(EXTENSION_SUFFIXES)
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.name.endswith(suffixes)]
    assert not found, "tidekv runs from its source: delete these files"


def test_no_file_is_over_800_lines() -> None:
    long = {
        str(path): count
        for folder in FOLDERS
        for path in files_of(folder)
        if (count := len(path.read_text().splitlines())) > 800
    }
    assert not long
