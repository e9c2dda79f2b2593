"""Generated pages under docs/ match the code, and tests that a page names exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from simulation.faults import FAULTS
from tools.faults_page import REQUIRED, faults_page

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"


def collected_of(file: Path) -> set[str]:
    """Names that pytest collects from a test file: functions, and test cases of state machines."""
    body = ast.parse(file.read_text()).body
    functions = (node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    assigned = (
        target.id
        for node in body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    )
    return {name for name in functions if name.startswith("test_")} | {
        name for name in assigned if name.startswith("Test")
    }


def test_the_page_of_faults_is_generated_from_the_code() -> None:
    assert (ROOT / "simulation" / "FAULTS.md").read_text() == faults_page(), (
        "run: python -m tools.faults_page > simulation/FAULTS.md"
    )


def test_every_fault_has_one_required_behavior_and_no_other_has() -> None:
    named = [name for required in REQUIRED.values() for name in required]
    assert sorted(named) == sorted(FAULTS)
    assert len(FAULTS) >= 60
    for required in REQUIRED.values():
        for name, words in required.items():
            assert words.endswith("."), name
            assert "|" not in words, name


def test_every_incident_is_listed_once_and_every_test_that_proves_it_exists() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in (ROOT / "tests" / "scenarios" / "INCIDENTS.md").read_text().splitlines()
        if re.match(r"\| [RS]\d", line)
    ]
    listed = [row[0].strip("| ") for row in rows]
    reports = [f"R{number:02}" for number in range(1, 12)]
    assert sorted(listed) == sorted([*(f"S{number:02}" for number in range(1, 80)), "S73a", "S73b", "S73c", *reports])
    collected: dict[str, set[str]] = {}
    for incident, there, here, proof in rows:
        assert there.endswith(".") and here.endswith("."), incident
        references = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", proof)
        assert len(references) == proof.count("`") // 2, incident
        assert references or "Not built yet" in here, incident
        for file, name in references:
            assert (ROOT / file).is_file(), f"{incident}: {file}"
            assert name in collected.setdefault(file, collected_of(ROOT / file)), f"{incident}: {file}::{name}"


def test_every_cell_of_the_threat_model_names_a_test_that_exists_or_the_reason_why_not() -> None:
    page = (ROOT / "tests" / "THREATS.md").read_text()
    rows = [line.strip("|").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    assert [cell.strip() for cell in rows[0]] == [
        "asset", "stranger", "peer", "client", "writer of the store", "local user",
    ]  # fmt: skip
    assert len(rows) > 8
    collected: dict[str, set[str]] = {}
    for asset, *cells in rows[1:]:
        assert len(cells) == len(rows[0]) - 1, asset
        for cell in cells:
            references = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", cell)
            assert references or re.match(r" *accepted: \w", cell), f"{asset}: {cell}"
            for file, name in references:
                assert (ROOT / file).is_file(), f"{asset}: {file}"
                assert name in collected.setdefault(file, collected_of(ROOT / file)), f"{asset}: {file}::{name}"
