"""docs/journal.md lists what the journal holds."""

from __future__ import annotations

from pathlib import Path

from tools.journal_page import journal_document

PAGE = Path(__file__).resolve().parents[2] / "docs" / "journal.md"


def test_page_is_generated_from_the_types() -> None:
    assert PAGE.read_text() == journal_document(), "python -m tools.journal_page > docs/journal.md"
