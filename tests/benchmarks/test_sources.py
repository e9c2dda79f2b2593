"""Restore or transfer: the planned way is near the best fixed one at every ratio, and far from the wrong one."""

from __future__ import annotations

from statistics import mean

import pytest

from benchmarks.published.sources import (
    NO_CACHE,
    PLANNED,
    POLICIES,
    RATIOS,
    Raced,
    SourcesSetup,
    faster_at_the_ends,
    race,
    ready_s,
    worst_over_best_fixed,
)
from tidekv import StorageOptions

SETUP = SourcesSetup(requests=12, prompt_pages=(64, 256))


def test_the_same_seed_gives_the_same_race_with_every_policy_at_every_ratio() -> None:
    small = SourcesSetup(requests=2, prompt_pages=(16, 64))
    assert race(small) == race(small)
    raced = race(SETUP)
    assert [one.ratio for one in raced] == [*RATIOS, *RATIOS]
    assert {one.in_flight for one in raced} == {1, 8}
    assert all(list(one.ready_s) == list(POLICIES) for one in raced)
    assert worst_over_best_fixed(raced) == max(one.over_best_fixed for one in raced)
    assert faster_at_the_ends(raced) > 1.3
    # Where both are equally fast each brings a half.
    even = next(one for one in raced if one.ratio == 1)
    assert even.over_best_fixed < 0.8


def test_fixed_policies_take_as_long_as_their_way() -> None:
    setup = SourcesSetup(requests=4, prompt_pages=(100, 100))
    page_s = setup.token_bytes * 64 / setup.bytes_per_s
    restored, sent = (
        mean(ready_s(setup, 4.0, 1, POLICIES[f"always {name}"])) / page_s for name in ("restore", "transfer")
    )
    # Twice as slow and twice as fast as where both are equal; a few milliseconds for questions and messages.
    assert restored - 92 * 2 < 0.01 / page_s
    assert sent - 100 / 2 < 0.01 / page_s
    assert restored > 92 * 2
    assert sent > 100 / 2


def test_storage_that_becomes_slow_does_not_delay_what_the_link_brings() -> None:
    setup = SourcesSetup(requests=40, prompt_pages=(64, 256))
    steady = mean(ready_s(setup, 1.0, 1, POLICIES[PLANNED]))
    slowed = {name: mean(ready_s(setup, 1.0, 1, policy, slow_down=16.0)) for name, policy in POLICIES.items()}
    assert steady < slowed[PLANNED] < slowed["always restore"] / 5
    assert slowed[PLANNED] < 1.3 * slowed["always transfer"]


@pytest.mark.parametrize("in_flight", [1, 8])
@pytest.mark.parametrize("ratio", RATIOS)
def test_the_default_policy_is_never_worse_than_no_cache(ratio: float, in_flight: int) -> None:
    """At the median, and at the end: the first requests, before anything is measured, are among the slowest."""
    assert POLICIES[PLANNED]["prefetch"] == StorageOptions().prefetch
    raced = race_of(ratio, in_flight, POLICIES[PLANNED])
    assert raced.over_no_cache(0.5) <= 1.05
    assert raced.over_no_cache(0.99) <= 1.05
    assert raced.over_no_cache(1.0) <= 1.05


def test_a_policy_that_waits_for_storage_is_worse_than_no_cache_behind_a_fast_link() -> None:
    raced = race_of(16.0, 1, {"prefetch": "timeout"})
    assert raced.over_no_cache(0.5) > 10


def race_of(ratio: float, in_flight: int, policy: dict[str, object]) -> Raced:
    setup = SourcesSetup(requests=40, prompt_pages=(64, 256))
    policies = {PLANNED: policy, NO_CACHE: POLICIES[NO_CACHE]}
    return Raced(ratio, in_flight, {name: ready_s(setup, ratio, in_flight, one) for name, one in policies.items()})
