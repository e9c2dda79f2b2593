"""How fast storage has been lately, and what plans and puts make of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulation.rig import Rig
from tests.support.asking import ask
from tidekv.states import commands, events
from tidekv.states.storage.circuit_breaker import FETCH, QUERY, STORE, CallKind, CircuitBreaker
from tidekv.states.storage.fetch_source import ESTIMATE_FRESH_S, ThroughputEstimator
from tidekv.states.storage_policy import changed_policy, policy_of

TOKENS = b"abcdefgh"


def test_nothing_is_known_at_first_and_what_is_known_becomes_old() -> None:
    throughput = ThroughputEstimator()
    assert (throughput.page_s, throughput.fetch_s, throughput.is_old(0.0)) == (0.0, 0.0, True)
    throughput.note(taken_s=2.0, pages=4, now_s=10.0)
    assert (throughput.page_s, throughput.fetch_s) == (0.5, 2.0)
    assert not throughput.is_old(10.0 + ESTIMATE_FRESH_S)
    assert throughput.is_old(10.1 + ESTIMATE_FRESH_S)
    assert throughput.page_s == 0.5


def test_short_fetches_do_not_hide_what_a_page_costs_in_a_long_one() -> None:
    throughput = ThroughputEstimator()
    throughput.note(taken_s=1.0, pages=100, now_s=0.0)
    for _ in range(100):
        throughput.note(taken_s=0.1, pages=1, now_s=0.0)
    assert throughput.page_s == 0.01
    # That it is dearer than that is seen if short ones take as long as a long one; that it is cheaper, at once.
    for _ in range(20):
        throughput.note(taken_s=2.0, pages=1, now_s=0.0)
    assert throughput.page_s > 0.03
    for _ in range(100):
        throughput.note(taken_s=0.001, pages=1, now_s=0.0)
    assert throughput.page_s == pytest.approx(0.001, rel=0.1)


@given(st.lists(st.tuples(st.floats(0.001, 10.0), st.integers(1, 100)), min_size=1, max_size=50))
def test_the_throughput_is_between_the_slowest_and_the_fastest(fetches: list[tuple[float, int]]) -> None:
    throughput = ThroughputEstimator()
    for at, (taken_s, pages) in enumerate(fetches):
        throughput.note(taken_s=taken_s, pages=pages, now_s=at / 100)
    rates = [taken_s / pages for taken_s, pages in fetches]
    assert min(rates) * 0.999 <= throughput.page_s <= max(rates) * 1.001
    assert throughput.fetch_s <= max(taken_s for taken_s, _ in fetches) * 1.001


def test_a_stall_of_this_process_makes_no_source_look_slow() -> None:
    """The first fetches of a burst end together and late; a source that has become slow shows it again and again."""
    throughput = ThroughputEstimator()
    for _ in range(2):
        throughput.note(taken_s=0.003, pages=128, now_s=0.0)
    usual_s = throughput.page_s
    for pages in (32, 64):
        throughput.note(taken_s=0.031, pages=pages, now_s=0.0)
    assert throughput.page_s < 4 * usual_s
    for _ in range(12):
        throughput.note(taken_s=16 * 32 * usual_s, pages=32, now_s=0.0)
    assert throughput.page_s > 8 * usual_s


def test_the_last_fetches_weigh_most() -> None:
    throughput = ThroughputEstimator()
    for _ in range(50):
        throughput.note(taken_s=1.0, pages=1, now_s=0.0)
    for _ in range(24):
        throughput.note(taken_s=0.1, pages=1, now_s=0.0)
    assert throughput.page_s < 0.15


def test_one_fetch_shows_that_a_stall_is_over() -> None:
    throughput = ThroughputEstimator()
    for _ in range(20):
        throughput.note(taken_s=1.0, pages=10, now_s=0.0)
    throughput.note(taken_s=0.02, pages=10, now_s=0.0)
    assert throughput.page_s == 0.002
    # Slower ones are believed little by little.
    throughput.note(taken_s=1.0, pages=10, now_s=0.0)
    assert throughput.page_s < 0.06


def test_of_the_fetches_made_to_measure_the_fastest_counts_until_one_is_not_faster() -> None:
    """They may include the opening of files, or a stall that is less than several times a read."""
    throughput = ThroughputEstimator()
    for taken_s in (1.0, 0.9, 0.3):
        throughput.note_trial(taken_s=taken_s, pages=10, now_s=0.0)
        assert throughput.page_s == pytest.approx(taken_s / 10)
        assert not throughput.is_confirmed
    throughput.note_trial(taken_s=0.8, pages=10, now_s=0.0)
    assert throughput.page_s == pytest.approx(0.03)
    assert throughput.is_confirmed
    # From now on it is one of many.
    throughput.note_trial(taken_s=0.2, pages=10, now_s=0.0)
    assert 0.02 < throughput.page_s < 0.03
    throughput.begin_again()
    assert throughput.is_confirmed
    throughput.forget()
    assert not throughput.is_confirmed


def test_two_fetches_of_requests_confirm_the_estimate() -> None:
    throughput = ThroughputEstimator()
    throughput.note(taken_s=1.0, pages=10, now_s=0.0)
    assert not throughput.is_confirmed
    throughput.note(taken_s=1.0, pages=10, now_s=0.0)
    assert throughput.is_confirmed


def stored_rig(**settings: object) -> Rig:
    rig = Rig(prefetch_threshold_tokens=0, prefetch_base_s=4.0, prefetch_per_ki_token_s=0.001, **settings)
    rig.attach_storage()
    return rig


def slow_fetch(rig: Rig, taken_s: float) -> None:
    """Two pages take so long."""
    ask(rig, "slow", b"12", 2)
    rig.wait_until(rig.now_s + taken_s)
    rig.fetched(rig.take(commands.FetchPages))
    rig.take_all(commands.CopyPages, target="device")


def test_a_plan_fetches_what_lands_in_its_time_and_promises_no_more() -> None:
    rig = stored_rig()
    slow_fetch(rig, 2.0)
    # A page a second, four seconds.
    assert ask(rig, "a", TOKENS, 8).promised_tokens == 4
    assert rig.core.statistics()["l3_declined_pages"] == 4
    # Those four are in front of the next plan's pages.
    assert ask(rig, "b", b"stuvwxyz", 8).promised_tokens == 0


@pytest.mark.parametrize(("share", "promised"), [(0.0, 8), (0.5, 2), (1.0, 4), (10.0, 8)])
def test_the_share_of_the_time_is_a_policy(share: float, promised: int) -> None:
    rig = stored_rig(fetch_deadline_share=share)
    slow_fetch(rig, 2.0)
    assert ask(rig, "a", TOKENS, 8).promised_tokens == promised


def test_storage_is_tried_again_after_a_while_and_when_it_is_another() -> None:
    rig = stored_rig()
    slow_fetch(rig, 2.0)
    rig.wait_until(rig.now_s + ESTIMATE_FRESH_S + 0.1)
    assert ask(rig, "a", TOKENS, 8).promised_tokens == 8
    rig = stored_rig()
    slow_fetch(rig, 2.0)
    rig.step(events.StorageChanged, available=True)
    assert ask(rig, "a", TOKENS, 8).promised_tokens == 8


def test_a_fetch_that_is_late_counts_with_the_time_that_it_had() -> None:
    rig = stored_rig()
    ask(rig, "slow", b"12", 2)
    rig.wait_until(rig.now_s + 4.1)
    assert ask(rig, "a", TOKENS, 8).promised_tokens == 0
    fetch = rig.take(commands.FetchPages)
    rig.fetched(fetch)
    # It has taken a little longer than its deadline in the end, so two pages would, too.
    assert ask(rig, "b", b"stuvwxyz", 8).promised_tokens == 1


def test_a_short_or_failed_fetch_is_no_measurement() -> None:
    rig = stored_rig()
    ask(rig, "slow", b"12", 2)
    rig.wait_until(rig.now_s + 3.0)
    rig.fetched(rig.take(commands.FetchPages), 1)
    assert ask(rig, "a", TOKENS, 8).promised_tokens == 8


def test_a_plan_without_a_deadline_takes_all() -> None:
    rig = stored_rig(prefetch="wait_complete")
    slow_fetch(rig, 100.0)
    assert ask(rig, "a", TOKENS, 8).promised_tokens == 8


def test_puts_wait_while_fetches_take_long() -> None:
    rig = stored_rig(store_fetch_s_max=1.0, store_wait_s=3.0)
    slow_fetch(rig, 2.0)
    rig.make_ready("b", b"xyz")
    rig.finish("b", b"xyz")
    rig.copied(rig.take(commands.CopyPages, target="host"))
    assert rig.take_all(commands.StorePages) == []
    rig.wait_until(rig.now_s + 2.9)
    assert rig.take_all(commands.StorePages) == []
    rig.wait_until(rig.now_s + 0.2)
    rig.take(commands.StorePages)
    # With another bound it does not wait at all; a waiting one continues at the next event.
    rig.make_ready("c", b"uvw")
    rig.finish("c", b"uvw")
    rig.copied(rig.take_all(commands.CopyPages, target="host")[-1])
    assert rig.take_all(commands.StorePages) == []
    policy = changed_policy(policy_of(rig.core.state.settings), {"store_fetch_s_max": 0.0})
    rig.step(events.PolicyChanged, policy=policy)
    rig.take(commands.StorePages)


# --- The breaker by itself ---


def test_a_breaker_opens_at_the_limit_and_doubles_its_back_off() -> None:
    breaker = CircuitBreaker()
    for failed in (True, True, False, True, True):
        breaker.note(FETCH, failed=failed, failures_max=3, backoff_s=1.0, backoff_max_s=3.0)
    assert not breaker.is_open
    breaker.note(FETCH, failed=True, failures_max=3, backoff_s=1.0, backoff_max_s=3.0)
    assert breaker.backoff_s == 1.0
    # What was under way does not open it again, nor close it.
    breaker.note(FETCH, failed=True, failures_max=3, backoff_s=5.0, backoff_max_s=9.0)
    breaker.note(FETCH, failed=False, failures_max=3, backoff_s=5.0, backoff_max_s=9.0)
    assert breaker.backoff_s == 1.0
    for backoff_s in (2.0, 3.0, 3.0):
        breaker.probed(failed=True, backoff_max_s=3.0)
        assert breaker.backoff_s == backoff_s
    # A probe is no fetch: the next one that fails opens it again.
    breaker.probed(failed=False, backoff_max_s=3.0)
    assert not breaker.is_open
    breaker.note(FETCH, failed=True, failures_max=3, backoff_s=1.0, backoff_max_s=3.0)
    assert breaker.backoff_s == 3.0
    breaker.probed(failed=False, backoff_max_s=3.0)
    for failed in (False, True, True):
        breaker.note(FETCH, failed=failed, failures_max=3, backoff_s=1.0, backoff_max_s=3.0)
    assert not breaker.is_open


def test_a_probe_closes_a_breaker_and_only_a_call_that_succeeds_forgets_its_back_off() -> None:
    breaker = CircuitBreaker()
    for backoff_s in (1.0, 2.0, 3.0, 3.0):
        # The service answers probes and fails calls.
        breaker.note(FETCH, failed=True, failures_max=1, backoff_s=1.0, backoff_max_s=3.0)
        assert breaker.backoff_s == backoff_s
        # A call that began before does not count.
        breaker.note(FETCH, failed=False, failures_max=1, backoff_s=1.0, backoff_max_s=3.0)
        breaker.probed(failed=False, backoff_max_s=3.0)
        assert not breaker.is_open
    for failed in (False, True):
        breaker.note(FETCH, failed=failed, failures_max=1, backoff_s=1.0, backoff_max_s=3.0)
    assert breaker.backoff_s == 1.0
    breaker.probed(failed=True, backoff_max_s=3.0)
    breaker.forget()
    assert not breaker.is_open
    breaker.note(FETCH, failed=True, failures_max=1, backoff_s=1.0, backoff_max_s=3.0)
    assert breaker.backoff_s == 1.0


@pytest.mark.parametrize(("failing", "works"), [(FETCH, QUERY), (FETCH, STORE), (STORE, QUERY), (QUERY, STORE)])
def test_a_call_that_succeeds_says_nothing_of_those_of_another_kind(failing: CallKind, works: CallKind) -> None:
    breaker = CircuitBreaker()

    def note(kind: CallKind, *, failed: bool) -> None:
        breaker.note(kind, failed=failed, failures_max=2, backoff_s=1.0, backoff_max_s=3.0)

    for _ in range(2):
        note(works, failed=False)
        note(failing, failed=True)
    # Once that was learned, each further failure suffices.
    for backoff_s in (1.0, 2.0, 3.0, 3.0):
        assert breaker.backoff_s == backoff_s
        breaker.probed(failed=False, backoff_max_s=3.0)
        note(works, failed=False)
        assert not breaker.is_open
        note(failing, failed=True)
    breaker.probed(failed=False, backoff_max_s=3.0)
    note(failing, failed=False)
    note(failing, failed=True)
    assert not breaker.is_open


def test_storage_that_delivers_pages_is_called_although_it_takes_none() -> None:
    breaker = CircuitBreaker()
    for kind, failed in ((STORE, True), (FETCH, False), (STORE, True)):
        breaker.note(kind, failed=failed, failures_max=2, backoff_s=1.0, backoff_max_s=3.0)
    assert not breaker.is_open


def test_a_breaker_without_a_limit_never_opens() -> None:
    breaker = CircuitBreaker()
    for _ in range(100):
        breaker.note(FETCH, failed=True, failures_max=0, backoff_s=1.0, backoff_max_s=3.0)
    assert not breaker.is_open
