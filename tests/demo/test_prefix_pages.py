"""The prefill worker's pages: none is lost or given twice, and a kept page is found by its whole prefix."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from demo.prefix_pages import PrefixPages, PromptPages
from tests.support.thorough import examples
from tidekv.backends.keys.chain import pack_tokens
from tidekv.states.errors import InvalidRequest

PAGE_SIZE = 2
POOL = 8


class PrefixPagesMachine(RuleBasedStateMachine):
    """Any order of taking and giving back, against the tokens that each page was last computed for."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.pages = PrefixPages(POOL, PAGE_SIZE)
        self.live: dict[int, tuple[tuple[int, ...], PromptPages]] = {}
        self.content: dict[int, tuple[int, ...]] = {}
        self.number = 0

    @rule(target=held, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=POOL * PAGE_SIZE).map(tuple))
    def take(self, tokens: tuple[int, ...]) -> int:
        self.number += 1
        got = self.pages.take(pack_tokens(tokens))
        if got is None:
            return 0
        assert len(got.pages) == -(-len(tokens) // PAGE_SIZE)
        assert got.known * PAGE_SIZE < len(tokens)
        for position, page in enumerate(got.pages):
            if position < got.known:
                assert self.content[page] == tokens[: (position + 1) * PAGE_SIZE]
            else:
                self.content[page] = tokens[: (position + 1) * PAGE_SIZE]
        self.live[self.number] = (tokens, got)
        return self.number

    @rule(number=consumes(held), part=st.floats(0, 1))
    def give_back(self, number: int, part: float) -> None:
        if number:
            _, got = self.live.pop(number)
            computed = max(got.known, round(part * len(got.pages)))
            for page in got.pages[computed:]:
                self.content[page] = ()
            self.pages.give_back(got, computed=computed)

    @rule()
    def forget(self) -> None:
        self.pages.forget()
        assert self.pages.counts()["kept"] == 0

    @invariant()
    def every_page_is_somewhere(self) -> None:
        in_use = {page for _, got in self.live.values() for page in got.pages}
        counts = self.pages.counts()
        assert counts["in_use"] == len(in_use)
        assert sum(counts.values()) == POOL
        fresh = [page for _, got in self.live.values() for page in got.pages[got.known :]]
        assert len(fresh) == len(set(fresh))

    @invariant()
    def a_prompt_fits_whenever_nothing_is_held(self) -> None:
        if not self.live:
            tokens = pack_tokens([5] * POOL * PAGE_SIZE)
            got = self.pages.take(tokens)
            assert got is not None
            for page in got.pages:
                self.content[page] = ()
            self.pages.give_back(got, computed=0)


TestPrefixPages = PrefixPagesMachine.TestCase
TestPrefixPages.settings = examples(120, stateful_step_count=30)


def test_kept_pages_are_dropped_least_recently_used_first() -> None:
    pages = PrefixPages(4, PAGE_SIZE)
    prompts = [pack_tokens([number] * 3) for number in range(3)]

    def known(prompt: bytes) -> int:
        held = pages.take(prompt)
        assert held is not None
        pages.give_back(held, computed=2)
        return held.known

    assert [known(prompt) for prompt in prompts] == [0, 0, 0]
    assert known(prompts[0]) == 1
    assert known(pack_tokens([7] * 5)) == 0  # Needs three of the four pages: two that were kept must go.
    assert known(prompts[0]) == 1
    assert known(prompts[1]) == 0


def test_a_prompt_longer_than_the_pool_is_refused_and_keep_can_be_off() -> None:
    pages = PrefixPages(2, PAGE_SIZE, keep=False)
    with pytest.raises(InvalidRequest, match="a prompt of 5 tokens needs 3 pages; the prefill pool has 2"):
        pages.take(pack_tokens([1] * 5))
    for _ in range(2):
        held = pages.take(pack_tokens([1] * 4))
        assert held is not None
        assert held.known == 0
        pages.give_back(held, computed=2)
