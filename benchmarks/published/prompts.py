"""Prompts of a modeled world: without tokens, described only by the pages that they share."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from benchmarks.published.setups import PAGE_TOKENS
from tidekv.states.errors import InvalidConfig

KEY_BYTES = 8


@dataclass(frozen=True, slots=True)
class Stretch:
    """The first `tokens` tokens of a text. Two stretches of one text agree up to the end of the shorter one."""

    text: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt: the beginning of one text, followed by that of another.

    If the first ends within a page, the second begins at that page's edge. `known` is the number of tokens that prefill
    may have computed before, and `stored` the number that may be in storage.
    """

    shared: Stretch
    own: Stretch = Stretch(0, 0)
    known: int = 0
    stored: int = 0

    @property
    def tokens(self) -> int:
        """Length of the prompt."""
        return self.shared.tokens + self.own.tokens


def page_names(prompt: Prompt, tokens: int) -> array[int]:
    """Return one number per full page: equal if and only if the pages have equal tokens and equal predecessors."""
    pages = tokens // PAGE_TOKENS
    if not prompt.own.tokens:
        return array("Q", range(prompt.shared.text << 32, (prompt.shared.text << 32) + pages))
    # A page with tokens of both texts is unique.
    shared = prompt.shared.tokens // PAGE_TOKENS
    if pages < shared:
        raise InvalidConfig(f"{tokens} tokens of {prompt} end within its shared part")
    own = prompt.own.text << 32
    names = array("Q", range(prompt.shared.text << 32, (prompt.shared.text << 32) + shared))
    return names + array("Q", range(own + shared, own + pages))
