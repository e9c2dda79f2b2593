"""The arrows between the four folders, held by reading the imports."""

from __future__ import annotations

import ast
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


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def ours(modules: set[str]) -> set[str]:
    return {module.split(".")[1] for module in modules if module.startswith("tidekv.")} & set(FOLDERS)


@pytest.mark.parametrize("folder", FOLDERS)
def test_each_folder_imports_only_what_it_may(folder: str) -> None:
    for path in sorted((ROOT / folder).rglob("*.py")):
        assert ours(imports_of(path)) <= MAY_IMPORT[folder], path


def test_states_import_nothing_that_acts() -> None:
    # The one exception: transitions logs each trigger at DEBUG, which the table's file silences once.
    for path in sorted((ROOT / "states").rglob("*.py")):
        found = {module.split(".")[0] for module in imports_of(path)} & IMPURE
        assert not found, f"{path} imports {found}"


def test_package_is_small_files_and_links() -> None:
    package = ROOT / "src" / "tidekv"
    names = {entry.name for entry in package.iterdir()} - {"__pycache__"}
    assert names == {"__init__.py", "__main__.py", "py.typed", *FOLDERS}
    for folder in FOLDERS:
        assert (package / folder).is_symlink()
        assert (package / folder).resolve() == ROOT / folder


def test_no_file_is_over_400_lines() -> None:
    long = {
        str(path): count
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if (count := len(path.read_text().splitlines())) > 400
    }
    assert not long
