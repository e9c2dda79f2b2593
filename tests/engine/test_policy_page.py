"""docs/storage.md documents every policy with its current default."""

from __future__ import annotations

from pathlib import Path

from tidekv.states.storage_policy import POLICY_FIELDS
from tools.policy_page import ROWS, with_policies

PAGE = Path(__file__).parents[2] / "docs" / "storage.md"


def test_the_page_has_the_policies_as_they_are() -> None:
    page = PAGE.read_text()
    assert with_policies(page) == page, "run: python -m tools.policy_page docs/storage.md"
    assert page.count("## Policies") == 1


def test_every_policy_has_a_row_and_every_row_a_policy() -> None:
    assert set(ROWS) == set(POLICY_FIELDS)
