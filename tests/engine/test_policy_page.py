"""docs/storage.md has the core's constants."""

from __future__ import annotations

from pathlib import Path

from tools.policy_page import with_policies

PAGE = Path(__file__).parents[2] / "docs" / "storage.md"


def test_the_page_has_the_policies_as_they_are() -> None:
    page = PAGE.read_text()
    assert with_policies(page) == page, "run: python -m tools.policy_page docs/storage.md"
    assert page.count("## Policies") == 1
