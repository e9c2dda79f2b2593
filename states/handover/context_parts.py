"""The pages of a prompt that each context-parallel prefill rank holds.

With context parallelism the ranks of a prefill instance divide the tokens of a prompt: `contexts` groups of ranks hold
a part of its pages each, and decode is written by all of them. The part follows from the number of a page and of the
prompt's pages, so both ends know it without a message:

    stripe_pages=2      0 0 1 1 0 0 1 1 0 0 1      stripes of that many pages, in turns
    stripe_pages=0      0 0 0 0 0 0 1 1 1 1 1      one run each, of as many pages as possible in the first ones

Windows and states have a page for a position of the prompt, and are divided as the pages are: the record of a state at
the end of a prompt is held with the prompt's last page.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from tidekv.states.errors import InvalidConfig
from tidekv.states.handover.rank_place import RankPlace


class ContextPart(msgspec.Struct, frozen=True):
    """The part of one of `contexts` groups of ranks; by default one that holds every page."""

    context: int = 0
    contexts: int = 1
    stripe_pages: int = 0
    """Pages of a stripe; 0: one run of pages for each context."""

    def holds(self, page: int, page_count: int) -> bool:
        """Whether it has page number `page` of a prompt of `page_count` pages."""
        if self.contexts == 1:
            return True
        if self.stripe_pages:
            return page // self.stripe_pages % self.contexts == self.context
        # The first `longer` contexts have a page more than the others.
        pages, longer = divmod(page_count, self.contexts)
        first = self.context * pages + min(self.context, longer)
        return first <= page < first + pages + (self.context < longer)

    def held(self, pages: Iterable[int], page_count: int) -> list[int]:
        """Those of these page numbers that it has, in the same order."""
        return [page for page in pages if self.holds(page, page_count)]


EVERY_PAGE = ContextPart()


def part_of(place: RankPlace) -> ContextPart:
    """The part of a rank; ranks are counted context by context. Raises InvalidConfig unless they divide evenly."""
    ranks, contexts, stripe_pages = place.ranks, place.contexts, place.stripe_pages
    if contexts < 1 or ranks % contexts or stripe_pages < 0:
        raise InvalidConfig(
            f"{ranks} ranks cannot make up {contexts} context-parallel parts of as many ranks each, in stripes of"
            f" {stripe_pages} pages"
        )
    if contexts == 1:
        return EVERY_PAGE
    return ContextPart(place.rank // (ranks // contexts), contexts, stripe_pages)
