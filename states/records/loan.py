"""Device pages that the embedder lends to one request until its outcome, by group, and what they hold so far.

The full KV is one group, each component another. A group needs the pages at the positions that the end of the prompt
needs: all of the full KV, the trailing pages of a window, the record of a state.

    positions       0   1   2   3   4   5   6      the embedder holds [0, held) of every group: these are not lent
    full            h   h   .   .   .   .   .
    window (3)                      .   .   .      restored: the leading positions that are in place
    state                                   .

A prefix is in place if a computation can continue at its end: at the end of what the embedder holds, at the end of the
prompt, or where the pages of all windows before it are in place, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidekv.states.types import FULL, PageIds, page_ids

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tidekv.states.component_specs import Component

SOURCES = ("", "l1", "l2", "l3", "transfer", "peer")


class LentGroup:
    """The lent pages of one group, at positions [first, first + len(pages)) of the prompt.

    The first `held` pages hold the prompt from the start. They are not lent: other requests may have them too.
    """

    __slots__ = ("_sources", "first", "lent", "pages")

    def __init__(self, pages: Iterable[int], *, held: int, first: int = 0) -> None:
        self.first = first
        self.pages = page_ids(pages)
        self.lent = self.pages[held:]
        """Those that may be written to."""
        self._sources = bytearray(len(self.pages))
        """By page, the place of its source in SOURCES; 0 until the page is in place."""
        self.note(first, min(held, len(self.pages)), "l1")

    def note(self, first: int, count: int, source: str) -> None:
        """Note that the pages at positions [first, first + count) are in place."""
        at = first - self.first
        self._sources[at : at + count] = bytes([SOURCES.index(source)]) * count

    @property
    def restored(self) -> int:
        """End of the leading positions that are in place."""
        end = self._sources.find(0)
        return self.first + (len(self.pages) if end < 0 else end)

    @property
    def end(self) -> int:
        """End of the prompt's pages."""
        return self.first + len(self.pages)

    def in_place(self) -> dict[int, int]:
        """The leading pages that are in place, by position."""
        return dict(zip(range(self.first, self.restored), self.pages, strict=False))

    def has(self, first: int, end: int) -> bool:
        """Whether all pages at positions [first, end) are in place."""
        at = first - self.first
        return at >= 0 and 0 not in self._sources[at : end - self.first]

    def forget_rest(self) -> None:
        """Forget what is in place after the first missing page: it is about to be written again."""
        restored = self.restored - self.first
        self._sources[restored:] = bytes(len(self.pages) - restored)

    def counts(self, end: int) -> dict[str, int]:
        """Return the number of pages before position `end` by source; of peers, if there are any."""
        part = self._sources[: end - self.first]
        counts = {name: part.count(number) for number, name in enumerate(SOURCES) if number}
        if not counts["peer"]:
            del counts["peer"]
        return counts

    def source_of(self, position: int) -> str:
        """Return the source of the page at a position; "" if it is not in place."""
        return SOURCES[self._sources[position - self.first]]


class Loan:
    """All lent pages of one request. Compared by identity."""

    __slots__ = ("components", "full", "held", "lent", "trailing_pages")

    def __init__(
        self,
        full: Sequence[int],
        component_pages: Mapping[str, Sequence[int]],
        components: Sequence[Component],
        *,
        held: int,
        page_size: int,
    ) -> None:
        """`component_pages` has, for each component, its pages at the last positions of the prompt."""
        self.held = held
        """Leading pages of the prompt that the embedder holds of every group."""
        self.full = LentGroup(full, held=held)
        self.components: dict[str, LentGroup] = {}
        for component in components:
            pages = component_pages[component.name]
            first = len(full) - len(pages)
            self.components[component.name] = LentGroup(pages, first=first, held=max(held - first, 0))
        self.trailing_pages = {component.name: component.trailing_pages(page_size) for component in components}
        self.lent: dict[str, PageIds] = {
            FULL: self.full.lent,
            **{name: pages.lent for name, pages in self.components.items()},
        }
        """By group, the pages that may be written to."""

    def forget_rest(self) -> None:
        """Forget, in every group, what is in place after the first missing page."""
        self.full.forget_rest()
        for pages in self.components.values():
            pages.forget_rest()

    @property
    def restored(self) -> int:
        """Number of leading pages of the prompt that are in place, up to an end at which every group can continue."""
        end = self.full.restored
        while end > self.held and not all(self._serves(name, end) for name in self.components):
            end -= 1
        return end

    def _serves(self, name: str, end: int) -> bool:
        """Whether a component can continue at `end`, which is beyond what the embedder holds."""
        pages = self.components[name]
        if end == pages.end:
            return pages.restored == end
        return pages.has(max(end - self.trailing_pages[name], self.held), end)

    def sources(self, *, prompt_tokens: int, page_size: int) -> dict[str, int]:
        """Return the tokens of the restored pages by source; their sum is the number of restored tokens."""
        restored = self.restored
        tokens = {name: count * page_size for name, count in self.full.counts(restored).items()}
        if restored:
            # The last page of the prompt may be partial.
            tokens[self.full.source_of(restored - 1)] -= max(restored * page_size - prompt_tokens, 0)
        return tokens
