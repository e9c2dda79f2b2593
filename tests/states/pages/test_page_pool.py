"""Page accounts: every page in one condition, wrong changes refused by name and without effect."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tidekv.states.errors import BrokenInvariant, CapacityError, InvalidConfig
from tidekv.states.pages.page_pool import PagePool, PageState
from tidekv.states.types import page_ids

FREE, OWNED, CACHED, DRAINING = PageState
CHANGES = {
    "give_back": (OWNED, FREE),
    "to_cache": (OWNED, CACHED),
    "from_cache": (CACHED, FREE),
    "own_cached": (CACHED, OWNED),
    "drain": (OWNED, DRAINING),
    "drain_cached": (CACHED, DRAINING),
    "settle": (DRAINING, FREE),
}


def counters(account: PagePool) -> tuple[int, int, int, int]:
    return account.free, account.owned, account.cached, account.draining


class Accounts(RuleBasedStateMachine):
    """Any mix of changes gives what a list of conditions and a plain stack give."""

    def __init__(self) -> None:
        super().__init__()
        # More pages than the loop's limit, so that both ways of changing many pages are taken.
        self.account = PagePool("device", 300)
        self.model = [FREE] * 300
        self.stack = list(range(299, -1, -1))

    @rule(count=st.one_of(st.integers(0, 12), st.integers(0, 310)))
    def take(self, count: int) -> None:
        if count > len(self.stack):
            with pytest.raises(CapacityError):
                self.account.take(count)
            return
        expected = [self.stack.pop() for _ in range(count)]
        assert self.account.take(count).tolist() == expected
        for page in expected:
            self.model[page] = OWNED

    @rule(change=st.sampled_from(sorted(CHANGES)), share=st.floats(0, 1), order=st.randoms(use_true_random=False))
    def change(self, change: str, share: float, order: Any) -> None:
        source, target = CHANGES[change]
        there = [page for page, condition in enumerate(self.model) if condition is source]
        pages = there[: int(len(there) * share)]
        if order.random() < 0.5:
            order.shuffle(pages)
        getattr(self.account, change)(page_ids(pages))
        for page in pages:
            self.model[page] = target
        if target is FREE:
            self.stack.extend(reversed(pages))

    @rule(
        change=st.sampled_from(sorted(CHANGES)),
        fault=st.sampled_from(["wrong", "repeated", "negative", "beyond"]),
        share=st.floats(0, 1),
        order=st.randoms(use_true_random=False),
    )
    def wrong_change(self, change: str, fault: str, share: float, order: Any) -> None:
        source, _ = CHANGES[change]
        there = [page for page, condition in enumerate(self.model) if condition is source]
        others = [page for page, condition in enumerate(self.model) if condition is not source]
        pages = there[: int(len(there) * share)]
        bad = {"wrong": others[:1], "repeated": pages[:1], "negative": [-1], "beyond": [300]}[fault]
        if not bad:
            return
        pages.insert(order.randint(0, len(pages)), bad[0])
        before = counters(self.account)
        with pytest.raises(BrokenInvariant, match=rf"'device'.* {bad[0]} "):
            getattr(self.account, change)(page_ids(pages))
        assert counters(self.account) == before

    @invariant()
    def agrees_with_model(self) -> None:
        self.account.check()
        assert counters(self.account) == tuple(self.model.count(condition) for condition in PageState)
        assert [self.account.condition(page) for page in range(300)] == self.model
        assert sum(counters(self.account)) == self.account.total


TestAccounts = Accounts.TestCase
TestAccounts.settings = settings(max_examples=40, stateful_step_count=30)


def test_fresh_pool_hands_out_ascending_pages() -> None:
    account = PagePool("device", 1000)
    assert account.take(3).tolist() == [0, 1, 2]
    assert account.take(500).tolist() == list(range(3, 503))


def test_last_batch_given_back_is_taken_first_in_its_order() -> None:
    account = PagePool("device", 10)
    account.take(6)
    account.give_back(page_ids([4, 5]))
    account.give_back(page_ids([1, 0]))
    assert account.take(5).tolist() == [1, 0, 4, 5, 6]


def test_short_pool_refuses_and_says_what_it_has() -> None:
    account = PagePool("host", 4)
    account.drain(account.take(1))
    with pytest.raises(CapacityError, match=r"'host': 4 pages requested, 3 free \(0 owned, 0 cached, 1 draining, 4 in"):
        account.take(4)
    assert account.take(3).tolist() == [1, 2, 3]
    with pytest.raises(BrokenInvariant):
        account.take(-1)


@pytest.mark.parametrize("count", [2, 200])
def test_double_free_names_pool_page_and_condition(count: int) -> None:
    account = PagePool("device", 256)
    pages = account.take(count)
    account.give_back(pages)
    with pytest.raises(BrokenInvariant, match="'device': page 0 is free; it cannot go from owned to free"):
        account.give_back(pages)
    account.check()


@pytest.mark.parametrize("count", [3, 200])
def test_more_pages_than_there_are_cannot_be_given_back(count: int) -> None:
    account = PagePool("device", count)
    pages = account.take(count)
    with pytest.raises(BrokenInvariant, match="page 0 is named twice"):
        account.give_back(pages + pages[:1])
    assert account.owned == count
    account.check()


@pytest.mark.parametrize("count", [3, 200])
def test_page_named_twice_is_refused_and_nothing_changes(count: int) -> None:
    account = PagePool("device", 256)
    pages = account.take(count)
    twice = pages[::-1]
    twice.append(pages[0])
    with pytest.raises(BrokenInvariant, match="page 0 is named twice"):
        account.to_cache(twice)
    assert account.holds(pages, OWNED)
    assert not account.holds(twice, OWNED)
    account.check()


@pytest.mark.parametrize("count", [3, 200])
def test_negative_ids_do_not_count_from_the_end(count: int) -> None:
    account = PagePool("device", count)
    pages = account.take(count)
    pages[-1] = -1
    with pytest.raises(BrokenInvariant, match="page -1 is out of range"):
        account.give_back(pages)
    account.check()
    assert account.owned == count


def test_nothing_is_a_legal_amount() -> None:
    account = PagePool("none", 0)
    assert account.take(0) == page_ids()
    account.give_back(page_ids())
    account.check()
    assert counters(account) == (0, 0, 0, 0)


def test_impossible_pools_and_pages_are_refused() -> None:
    with pytest.raises(InvalidConfig, match="'device' cannot have -1 pages"):
        PagePool("device", -1)
    with pytest.raises(BrokenInvariant, match="page 7 is out of range"):
        PagePool("device", 7).condition(7)


def test_check_sees_a_wrong_counter_and_a_wrong_free_list() -> None:
    account = PagePool("device", 8)
    account.take(2)
    account._counts[0] += 1
    with pytest.raises(BrokenInvariant, match="counted"):
        account.check()
    account._counts[0] -= 1
    account._free[0] = 3
    with pytest.raises(BrokenInvariant, match="free list"):
        account.check()
