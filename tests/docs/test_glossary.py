"""The glossary has every state of a request, and no word twice."""

from __future__ import annotations

import re
from pathlib import Path

from tidekv.states.records.stages import State

PAGE = Path(__file__).resolve().parents[2] / "docs" / "glossary.md"


def words() -> list[str]:
    rows = re.findall(r"^- \*\*([^*]+)\*\*:", PAGE.read_text(), re.MULTILINE)
    return [word.strip("` ") for row in rows for word in row.split(",")]


def test_the_states_of_a_request_come_first_in_their_order() -> None:
    assert words()[: len(State)] == [state.name for state in State]


def test_no_word_has_two_lines() -> None:
    assert len(words()) > 50
    assert len(set(words())) == len(words())
