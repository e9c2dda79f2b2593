"""Engines of other packages, found by entry point, and options from text and files."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tidekv.backends.storage import open_storage
from tidekv.states.errors import InvalidConfig

MODULE = """
from tidekv.backends.storage.memory import open_memory


def open_attic(*, authority, path, options):
    made = open_memory(authority="", path="", options=options)
    made.uri = f"attic://{authority}{path}"
    return made


def open_nothing():
    raise AssertionError("never called")
"""

ENTRY_POINTS = """
[tidekv.storage]
attic = {module}:open_attic
file = {module}:open_nothing
torn = {module}:not_there
gone = {module}_that_is_gone:open_attic
"""


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package with engines that looks installed to the interpreter."""
    module = "attic_for_tidekv"
    (tmp_path / f"{module}.py").write_text(MODULE)
    metadata = tmp_path / "attic_for_tidekv-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: attic-for-tidekv\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS.format(module=module))
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield module
    sys.modules.pop(module, None)


def test_an_engine_of_another_package_is_opened_by_its_scheme(distribution: str) -> None:
    assert distribution not in sys.modules, "nothing is loaded before it is asked for"
    with pytest.raises(InvalidConfig, match="allowed: attic, file, gone, memory"):
        open_storage("elsewhere:")
    assert distribution not in sys.modules
    engine = open_storage("attic://host/shelf?capacity=1MB", {})
    assert engine.uri == "attic://host/shelf"
    assert engine.statistics().capacity_bytes == 1_000_000
    with pytest.raises(InvalidConfig, match="no option 'shelves'"):
        open_storage("attic://host?shelves=3")


def test_engines_of_our_own_cannot_be_replaced(distribution: str) -> None:
    assert open_storage("file:/tmp/x").uri.startswith("file:/tmp/x")


@pytest.mark.parametrize("scheme", ["torn", "gone"])
def test_a_package_that_cannot_be_loaded_is_named(distribution: str, scheme: str) -> None:
    with pytest.raises(InvalidConfig, match=f"storage engine '{scheme}' .* cannot be loaded"):
        open_storage(f"{scheme}:")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("options.json", '{"capacity": "2MB"}'),
        ("options.toml", 'capacity = "2MB"'),
        ("options.yaml", "capacity: 2MB"),
        ("options.yml", '{"capacity": 2000000}'),
    ],
)
def test_options_are_read_from_files(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    assert open_storage("memory:", f"@{tmp_path / name}").statistics().capacity_bytes == 2_000_000


def test_options_are_read_from_text() -> None:
    assert open_storage("memory:", '{"capacity": 4096}').statistics().capacity_bytes == 4096
    with pytest.raises(InvalidConfig, match="given twice"):
        open_storage("memory:?capacity=1MB", '{"capacity": 4096}')
    with pytest.raises(InvalidConfig, match="no option 'size'; allowed: capacity"):
        open_storage("memory:", '{"size": 4096}')


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.json", '{"password": "s3cret"', r"is not valid JSON: .* \(at line 1, column 22\)$"),
        ("a.json", '["password", "s3cret"]', "must be a table"),
        ("a.conf", "password: s3cret", r"column 1\); files that end in \.toml, \.yaml or \.yml are read as such$"),
        ("a.toml", 'password = "s3cret', "is not valid TOML"),
        ("a.yaml", 'password: "s3cret', r"is not valid YAML: .* \(at line 1, column \d+\)$"),
        ("a.yaml", "- s3cret", "must be a table"),
        ("a.yaml", "1: s3cret", "must be a table"),
    ],
)
def test_files_that_cannot_be_read_are_named_and_their_secrets_are_not(
    tmp_path: Path, name: str, content: str, words: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(InvalidConfig, match=words) as caught:
        open_storage("memory:", f"@{tmp_path / name}")
    assert "s3cret" not in str(caught.value)
    assert name in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"nowhere\.json cannot be read"):
        open_storage("memory:", f"@{tmp_path / 'nowhere.json'}")
