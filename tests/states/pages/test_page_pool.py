"""Page pools: every page in one condition, wrong changes refused by name and without effect."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.support.thorough import examples
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


def counters(pool: PagePool) -> tuple[int, int, int, int]:
    return pool.free, pool.owned, pool.cached, pool.draining


class Pools(RuleBasedStateMachine):
    """Any mix of changes gives what a list of conditions and a plain stack give."""

    def __init__(self) -> None:
        super().__init__()
        # More pages than the loop's limit, so that both ways of changing many pages are taken.
        self.pool = PagePool("device", 300)
        self.model = [FREE] * 300
        self.stack = list(range(299, -1, -1))

    @rule(count=st.one_of(st.integers(0, 12), st.integers(0, 310)))
    def take(self, count: int) -> None:
        if count > len(self.stack):
            with pytest.raises(CapacityError):
                self.pool.take(count)
            return
        expected = [self.stack.pop() for _ in range(count)]
        assert self.pool.take(count).tolist() == expected
        for page in expected:
            self.model[page] = OWNED

    @rule(change=st.sampled_from(sorted(CHANGES)), share=st.floats(0, 1), order=st.randoms(use_true_random=False))
    def change(self, change: str, share: float, order: Any) -> None:
        source, target = CHANGES[change]
        there = [page for page, condition in enumerate(self.model) if condition is source]
        pages = there[: int(len(there) * share)]
        if order.random() < 0.5:
            order.shuffle(pages)
        getattr(self.pool, change)(page_ids(pages))
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
        before = counters(self.pool)
        with pytest.raises(BrokenInvariant, match=rf"'device'.* {bad[0]} "):
            getattr(self.pool, change)(page_ids(pages))
        assert counters(self.pool) == before

    @invariant()
    def agrees_with_model(self) -> None:
        self.pool.check()
        assert counters(self.pool) == tuple(self.model.count(condition) for condition in PageState)
        assert [self.pool.condition(page) for page in range(300)] == self.model
        assert sum(counters(self.pool)) == self.pool.total


TestPools = Pools.TestCase
TestPools.settings = examples(40, stateful_step_count=30)


def test_fresh_pool_hands_out_ascending_pages() -> None:
    pool = PagePool("device", 1000)
    assert pool.take(3).tolist() == [0, 1, 2]
    assert pool.take(500).tolist() == list(range(3, 503))


def test_last_batch_given_back_is_taken_first_in_its_order() -> None:
    pool = PagePool("device", 10)
    pool.take(6)
    pool.give_back(page_ids([4, 5]))
    pool.give_back(page_ids([1, 0]))
    assert pool.take(5).tolist() == [1, 0, 4, 5, 6]


def test_short_pool_refuses_and_says_what_it_has() -> None:
    pool = PagePool("host", 4)
    pool.drain(pool.take(1))
    with pytest.raises(CapacityError, match=r"'host': 4 pages requested, 3 free \(0 owned, 0 cached, 1 draining, 4 in"):
        pool.take(4)
    assert pool.take(3).tolist() == [1, 2, 3]
    with pytest.raises(BrokenInvariant):
        pool.take(-1)


@pytest.mark.parametrize("count", [2, 200])
def test_double_free_names_pool_page_and_condition(count: int) -> None:
    pool = PagePool("device", 256)
    pages = pool.take(count)
    pool.give_back(pages)
    with pytest.raises(BrokenInvariant, match="'device': page 0 is free; it cannot go from owned to free"):
        pool.give_back(pages)
    pool.check()


@pytest.mark.parametrize("count", [3, 200])
def test_more_pages_than_there_are_cannot_be_given_back(count: int) -> None:
    pool = PagePool("device", count)
    pages = pool.take(count)
    with pytest.raises(BrokenInvariant, match="page 0 is named twice"):
        pool.give_back(pages + pages[:1])
    assert pool.owned == count
    pool.check()


@pytest.mark.parametrize("count", [3, 200])
def test_page_named_twice_is_refused_and_nothing_changes(count: int) -> None:
    pool = PagePool("device", 256)
    pages = pool.take(count)
    twice = pages[::-1]
    twice.append(pages[0])
    with pytest.raises(BrokenInvariant, match="page 0 is named twice"):
        pool.to_cache(twice)
    assert pool.holds(pages, OWNED)
    assert not pool.holds(twice, OWNED)
    pool.check()


@pytest.mark.parametrize("count", [3, 200])
def test_negative_ids_do_not_count_from_the_end(count: int) -> None:
    pool = PagePool("device", count)
    pages = pool.take(count)
    pages[-1] = -1
    with pytest.raises(BrokenInvariant, match="page -1 is out of range"):
        pool.give_back(pages)
    pool.check()
    assert pool.owned == count


def test_nothing_is_a_legal_amount() -> None:
    pool = PagePool("none", 0)
    assert pool.take(0) == page_ids()
    pool.give_back(page_ids())
    pool.check()
    assert counters(pool) == (0, 0, 0, 0)


def test_impossible_pools_and_pages_are_refused() -> None:
    with pytest.raises(InvalidConfig, match="'device' cannot have -1 pages"):
        PagePool("device", -1)
    with pytest.raises(BrokenInvariant, match="page 7 is out of range"):
        PagePool("device", 7).condition(7)


def test_check_sees_a_wrong_counter_and_a_wrong_free_list() -> None:
    pool = PagePool("device", 8)
    pool.take(2)
    pool._counts[0] += 1
    with pytest.raises(BrokenInvariant, match="counted"):
        pool.check()
    pool._counts[0] -= 1
    pool._free[0] = 3
    with pytest.raises(BrokenInvariant, match="free list"):
        pool.check()
