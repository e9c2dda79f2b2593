"""Prompts of a modeled world: no tokens, only which pages they have in common."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from tidekv.engine.published.setups import PAGE_TOKENS
from tidekv.states.errors import InvalidConfig

KEY_BYTES = 8


@dataclass(frozen=True, slots=True)
class Stretch:
    """The first `tokens` tokens of a made-up text: two stretches of one text agree as far as the shorter one goes."""

    text: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt: the beginning of one text, then that of another, from a page's edge on if the first ends within it.

    `known` is how much of it prefill may have computed before, and `stored` how much of it may be in storage besides.
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
    """One number a full page: equal where the pages have equal tokens and stand behind equal ones."""
    pages = tokens // PAGE_TOKENS
    if not prompt.own.tokens:
        return array("Q", range(prompt.shared.text << 32, (prompt.shared.text << 32) + pages))
    # A page with tokens of both texts is like no other's.
    shared = prompt.shared.tokens // PAGE_TOKENS
    if pages < shared:
        raise InvalidConfig(f"{tokens} tokens of {prompt} end within what it shares")
    own = prompt.own.text << 32
    names = array("Q", range(prompt.shared.text << 32, (prompt.shared.text << 32) + shared))
    return names + array("Q", range(own + shared, own + pages))
