"""Device pages that the embedder lends to one request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidekv.states.types import page_ids

if TYPE_CHECKING:
    from collections.abc import Iterable


class Loan:
    """Device pages that the embedder lends to one request until its outcome, and what they hold so far.

    The first `held` pages hold the prompt from the start. They are not lent: other requests may have them too.
    """

    __slots__ = ("_sources", "lent", "pages")

    SOURCES = ("", "l1", "l2", "l3", "transfer")

    def __init__(self, pages: Iterable[int], *, held: int) -> None:
        self.pages = page_ids(pages)
        """One page for each page of the prompt."""
        self.lent = self.pages[held:]
        """Those that may be written to."""
        self._sources = bytearray(len(self.pages))
        """By page, the place of its source in SOURCES; 0 until the page is in place."""
        self.note(0, held, "l1")

    def note(self, first: int, count: int, source: str) -> None:
        """Note that pages [first, first + count) of the prompt are in place."""
        self._sources[first : first + count] = bytes([self.SOURCES.index(source)]) * count

    @property
    def good(self) -> int:
        """Number of leading pages that are in place."""
        end = self._sources.find(0)
        return len(self.pages) if end < 0 else end

    def forget_rest(self) -> None:
        """Forget what is in place after the first missing page: it is about to be written again."""
        good = self.good
        self._sources[good:] = bytes(len(self.pages) - good)

    def sources(self, *, prompt_tokens: int, page_size: int) -> dict[str, int]:
        """Return the tokens of the good pages by source; their sum is the number of good tokens."""
        good = self._sources[: self.good]
        tokens = {name: good.count(number) * page_size for number, name in enumerate(self.SOURCES) if number}
        if good:
            # The last page of the prompt may be partial.
            tokens[self.SOURCES[good[-1]]] -= max(len(good) * page_size - prompt_tokens, 0)
        return tokens
