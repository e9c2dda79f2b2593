"""The pages under docs/ say what the code does: drawn ones are compared, and tests that a page names are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tidekv.engine.simulation.behavior import REQUIRED, faults_page
from tidekv.engine.simulation.faults import FAULTS

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"


def tests_of(file: Path) -> set[str]:
    """The names of a test file that pytest collects, methods of state machines' test cases left out."""
    return {
        node.name
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    } | {
        target.id
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id.startswith("Test")
    }


def test_the_page_of_faults_is_drawn_from_the_code() -> None:
    assert (DOCS / "faults.md").read_text() == faults_page(), (
        "run: python -m tidekv.engine.simulation.behavior > docs/faults.md"
    )


def test_every_fault_has_one_required_behavior_and_no_other_has() -> None:
    named = [name for required in REQUIRED.values() for name in required]
    assert sorted(named) == sorted(FAULTS)
    assert len(FAULTS) >= 60
    for required in REQUIRED.values():
        for name, words in required.items():
            assert words.endswith("."), name
            assert "|" not in words, name
