"""The split between storage and prefill: the arithmetic against trying everything, and its effect on plans."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulation.rig import Rig
from tests.support.asking import ask
from tidekv.states import commands, events
from tidekv.states.storage.fetch_source import ESTIMATE_FRESH_S
from tidekv.states.storage.source_split import (
    MARKED_GAIN,
    PROBE_PARTS,
    SMALL_GAIN,
    SourceLoad,
    fetches_to_keep,
    pages_to_load,
)

WAYS = st.builds(SourceLoad, st.floats(0.001, 10), st.integers(0, 50))
TOKENS = b"abcdefgh"


@given(st.integers(0, 60), st.integers(0, 20), WAYS, WAYS)
def test_a_plan_takes_all_from_storage_unless_prefill_or_a_split_is_ready_markedly_sooner(
    count: int, rest: int, storage: SourceLoad, link: SourceLoad
) -> None:
    def ready_s(fetched: int) -> float:
        sent = (link.queued_pages + rest + count - fetched) * link.page_s
        return max((storage.queued_pages + fetched) * storage.page_s if fetched else 0.0, sent)

    chosen = pages_to_load(count, rest, tier=storage, link=link)
    assert 0 <= chosen <= count
    # Pages that wait on storage do not delay a plan that fetches none.
    best = min(map(ready_s, range(count + 1)))
    if chosen in (0, count):
        assert ready_s(chosen) <= best * MARKED_GAIN * (1 + 1e-9)
    else:
        assert ready_s(chosen) == pytest.approx(best)
    # What prefill is asked for delays what only it can send to other requests.
    assert chosen == count or ready_s(chosen) * SMALL_GAIN < ready_s(count)


@given(st.integers(0, 60), st.floats(0, 1), WAYS)
def test_a_source_of_which_nothing_is_known_is_measured_by_one_plan_at_a_time(
    count: int, page_s: float, known: SourceLoad
) -> None:
    idle, busy = known._replace(queued_pages=0), known._replace(queued_pages=3)
    assert pages_to_load(count, 5, tier=SourceLoad(0.0, 0), link=known) == -(-count // PROBE_PARTS)
    assert pages_to_load(count, 5, tier=SourceLoad(0.0, 0), link=known, shortest=16) == min(
        max(-(-count // PROBE_PARTS), 16), count
    )
    assert pages_to_load(count, 5, tier=SourceLoad(0.0, 0), link=SourceLoad(0.0, 0)) == count
    assert pages_to_load(count, 5, tier=SourceLoad(0.0, 3), link=known) == 0
    assert pages_to_load(count, 5, tier=idle, link=SourceLoad(0.0, 3)) == count
    assert pages_to_load(count, 5, tier=busy, link=SourceLoad(0.0, 3)) == count
    assert pages_to_load(count, 5, tier=SourceLoad(0.0, 3), link=SourceLoad(0.0, 3)) == 0


@given(st.lists(st.tuples(st.floats(0.001, 100), st.integers(1, 32)), max_size=12), WAYS)
def test_fetches_in_flight_are_given_up_if_the_last_page_comes_markedly_sooner_by_that(
    fetches: list[tuple[float, int]], link: SourceLoad
) -> None:
    def ready_s(keep: int) -> float:
        sent = sum(pages for _, pages in fetches[keep:])
        waits = (link.queued_pages + sent) * link.page_s if sent else 0.0
        return max((waits, *(lands_s for lands_s, _ in fetches[:keep])))

    kept = fetches_to_keep(fetches, link=link)
    best = min(ready_s(keep) for keep in range(len(fetches) + 1))
    if kept == len(fetches):
        assert ready_s(kept) <= best * MARKED_GAIN * (1 + 1e-9)
        return
    assert ready_s(kept) == best
    # A fetch is not given up, and read in vain, without a gain.
    assert all(ready_s(more) > ready_s(kept) for more in range(kept + 1, len(fetches) + 1))


@pytest.mark.parametrize(("count", "kept"), [(0, 0), (1, 1), (2, 1), (5, 3)])
def test_fetches_in_flight_are_halved_if_nothing_is_known(count: int, kept: int) -> None:
    assert fetches_to_keep([(0.0, 32)] * count, link=SourceLoad(0.1, 0)) == kept
    assert fetches_to_keep([(1.0, 32)] * count, link=SourceLoad(0.0, 0)) == kept


# --- In the core ---


def planned_rig(**settings: object) -> Rig:
    """Storage takes 0.2 s a page; one request has shown it. Runs of two pages."""
    rig = Rig(prefetch="soonest", prefetch_threshold_tokens=0, prefetch_base_s=100.0, fetch_run_pages=2, **settings)
    rig.attach_storage()
    ask(rig, "slow", b"12", 2)
    rig.wait_until(rig.now_s + 0.4)
    rig.fetched(rig.take(commands.FetchPages))
    return rig


def send(rig: Rig, name: str, tokens: bytes, taken_s: float) -> None:
    """Prefill sends a prompt that storage does not have, in the given time."""
    promise = ask(rig, name, tokens, 0)
    rig.wait_until(rig.now_s + taken_s)
    rig.aux(promise)
    rig.chunk(promise)
    rig.take(commands.SendReceived)
    rig.take(commands.ReportReady)


def test_a_plan_leaves_to_prefill_what_it_brings_sooner_and_gives_the_cause() -> None:
    rig = planned_rig()
    send(rig, "sent", b"uvwx", 0.4)
    # 0.2 s a page from storage, 0.1 s from prefill, which has one page more to send: three pages here, six there.
    assert ask(rig, "a", TOKENS + b"i", 8).promised_tokens == 3
    assert [len(fetch.host_pages) for fetch in rig.take_all(commands.FetchPages)] == [2, 1]
    assert rig.request("a").sources.declined == ("slower", 5)
    assert rig.core.statistics()["l3_declined_pages"] == 5
    # Six pages wait on the link and three on storage now.
    assert rig.core.rooms.source_load == (pytest.approx(0.1), 6)
    assert rig.core.storage.source_load == (pytest.approx(0.2), 3)


def test_a_share_below_the_threshold_is_not_fetched_at_all() -> None:
    rig = planned_rig()
    send(rig, "sent", b"uvwx", 0.04)
    policy = rig.settings
    rig.core.state.settings = type(policy)(
        **{**{name: getattr(policy, name) for name in policy.__struct_fields__}, "prefetch_threshold_tokens": 3}
    )
    assert ask(rig, "a", TOKENS, 8).promised_tokens == 0
    assert rig.request("a").sources.declined == ("slower", 8)


def test_if_nothing_is_known_of_prefill_all_is_promised() -> None:
    assert ask(planned_rig(), "a", TOKENS, 8).promised_tokens == 8


def test_other_policies_ignore_the_throughput_of_prefill() -> None:
    rig = Rig(prefetch_threshold_tokens=0)
    rig.attach_storage()
    send(rig, "sent", b"uvwx", 1.0)
    assert rig.core.rooms.source_load == (0.0, 0)


def test_after_each_end_of_the_transfer_it_takes_over_pages_that_it_brings_sooner() -> None:
    rig = planned_rig()
    promise = ask(rig, "a", TOKENS + b"i", 8)
    fetches = rig.take_all(commands.FetchPages)
    assert [fetch.positions[0] for fetch in fetches] == [0, 2, 4, 6]
    rig.wait_until(rig.now_s + 0.1)
    rig.chunk(promise)
    assert rig.take_all(commands.SendExtend) == []
    # A page in 0.1 s. With the aux the transfer is done: storage needs 1.5 s for the rest, and for the first two pages
    # 0.3 s; prefill 0.6 s for the last six.
    rig.aux(promise)
    extends = rig.take_all(commands.SendExtend)
    assert [extend.first for extend in extends] == [2, 4, 6]
    assert rig.core.statistics()["l3_fetches_cut"] == 3
    # Prefill is as fast as before, and storage has stopped: prefill takes those two over, too, once it has sent all.
    rig.wait_until(rig.now_s + 0.6)
    for extend in extends:
        assert rig.take_all(commands.SendExtend) == []
        rig.chunk(extend)
    last = rig.take(commands.SendExtend)
    assert last.first == 0
    # That it was to have arrived long ago counts for the plans that follow.
    assert rig.core.storage.source_load.page_s > 0.25
    rig.chunk(last)
    rig.take(commands.SendReceived)
    assert rig.take(commands.ReportReady).sources == {"l1": 0, "l2": 0, "l3": 0, "transfer": 9}
    for fetch in fetches:
        rig.fetched(fetch)
    assert rig.core.storage.pages_in_flight == 0


def test_a_fetch_that_lands_sooner_is_waited_for() -> None:
    rig = planned_rig()
    promise = ask(rig, "a", b"abi", 2)
    rig.wait_until(rig.now_s + 0.3)
    rig.aux(promise)
    rig.chunk(promise)
    assert rig.take_all(commands.SendExtend) == []
    rig.fetched(rig.take(commands.FetchPages))
    assert not rig.core.statistics()["l3_fetches_cut"]


def test_fetches_that_ended_late_together_do_not_make_the_others_look_slow() -> None:
    """The first of a burst wait for this process. The others are not overdue by the speed of their plan."""
    rig = planned_rig()
    send(rig, "sent", b"uvwx", 3.2)
    promise = ask(rig, "a", TOKENS + b"i", 8)
    first, *others = rig.take_all(commands.FetchPages)
    rig.aux(promise)
    rig.wait_until(rig.now_s + 1.1)
    rig.fetched(first)
    rig.chunk(promise)
    # The first two pages took 0.55 s each, prefill takes 0.8 s. At 0.2 s a page the last one is due after 1.6 s.
    assert rig.take_all(commands.SendExtend) == []
    for fetch in others:
        rig.fetched(fetch)
    assert not rig.core.statistics()["l3_fetches_cut"]


def test_pages_under_way_are_counted_until_the_slowest_rank_has_sent_them() -> None:
    rig = planned_rig()
    rig.arrive("a", b"uvwx")
    rig.answer(rig.take(commands.QueryStorage), 0)
    promise = rig.take(commands.SendPromise)
    assert rig.core.rooms.source_load.queued_pages == 4
    rig.promised(promise, ranks=2)
    rig.chunk(promise, count=3, last=False)
    assert rig.core.rooms.source_load.queued_pages == 4
    rig.chunk(promise, count=2, last=False, rank=1)
    assert rig.core.rooms.source_load.queued_pages == 2
    assert rig.core.rooms.source_load.page_s == 0.0


def test_a_hit_just_above_the_threshold_measures_storage_with_all_that_the_threshold_asks_for() -> None:
    rig = Rig(prefetch="soonest", prefetch_threshold_tokens=6, prefetch_base_s=100.0, device_pages=64)
    rig.attach_storage()
    send(rig, "sent", b"stuvwx", 0.6)
    assert ask(rig, "a", b"abcdefghijklmnop", 16).promised_tokens == 6
    assert rig.request("a").sources.declined == ("unmeasured", 10)


def test_the_first_put_measures_storage_before_any_hit() -> None:
    rig = Rig(prefetch="soonest", prefetch_threshold_tokens=2, prefetch_base_s=100.0, device_pages=64, host_pages=64)
    rig.attach_storage()
    send(rig, "sent", b"uvwx", 0.4)
    rig.finish("sent", b"uvwx")
    rig.copied(rig.take(commands.CopyPages, target="host"))
    rig.stored(rig.take(commands.StorePages))
    read = rig.take(commands.FetchPages)
    assert (read.request_id, len(read.host_pages)) == ("", 4)
    assert rig.core.keys_stored(read.op) == ("", b"uvwx")
    # Plans made meanwhile leave storage alone: their fetches would wait behind it.
    assert ask(rig, "a", b"abcdefghijklmnop", 16).promised_tokens == 0
    rig.now_s += 0.04
    rig.fetched(read)
    assert rig.core.storage.source_load == (pytest.approx(0.01), 0)
    assert rig.core.state.host.owned == 0


def measure_by_put(rig: Rig, request_id: str, tokens: bytes, taken_s: float) -> None:
    """Finish a request that prefill sends in 0.4 s; its put makes storage read, which takes `taken_s`."""
    send(rig, request_id, tokens, 0.4)
    rig.finish(request_id, tokens)
    rig.copied(rig.take(commands.CopyPages, target="host"))
    rig.stored(rig.take(commands.StorePages))
    read = rig.take(commands.FetchPages)
    rig.now_s += taken_s
    rig.fetched(read)


@pytest.mark.parametrize("stalled_s", [4.0, 0.2])
def test_a_first_measurement_is_repeated_by_the_next_put(stalled_s: float) -> None:
    """It may have met a stall. Hits that are fetched in part, or not at all, correct it too late: 0.2 s, twice as fast
    as prefill, would share the pages out to both.
    """
    rig = Rig(prefetch="soonest", prefetch_threshold_tokens=2, prefetch_base_s=100.0, device_pages=64, host_pages=64)
    rig.attach_storage()
    measure_by_put(rig, "stalled", b"uvwx", stalled_s)
    measure_by_put(rig, "again", b"klmn", 0.04)
    assert rig.core.storage.source_load.page_s == pytest.approx(0.01)
    assert ask(rig, "a", b"abcdefghijklmnop", 16).promised_tokens == 16


def test_a_storage_that_is_slow_twice_is_not_read_again() -> None:
    rig = Rig(prefetch="soonest", prefetch_threshold_tokens=2, prefetch_base_s=100.0, device_pages=64, host_pages=64)
    rig.attach_storage()
    measure_by_put(rig, "a", b"uvwx", 4.0)
    measure_by_put(rig, "b", b"klmn", 4.0)
    send(rig, "c", b"opqr", 0.4)
    rig.finish("c", b"opqr")
    rig.copied(rig.take(commands.CopyPages, target="host"))
    rig.stored(rig.take(commands.StorePages))
    assert rig.take_all(commands.FetchPages) == []


def test_a_measurement_that_does_not_end_says_how_slow_storage_is_at_least() -> None:
    rig = Rig(prefetch="soonest", prefetch_threshold_tokens=2, prefetch_base_s=2.0, device_pages=64, host_pages=64)
    rig.attach_storage()
    rig.make_ready("sent", b"uvwx")
    rig.finish("sent", b"uvwx")
    rig.copied(rig.take(commands.CopyPages, target="host"))
    rig.stored(rig.take(commands.StorePages))
    read = rig.take(commands.FetchPages)
    rig.wait_until(rig.now_s + 3.0)
    assert rig.core.storage.source_load.page_s >= 0.5
    rig.fetched(read)
    rig.take_all(commands.ReportFinished)
    rig.take_all(commands.ForgetTokens)
    rig.take_all(commands.SendReceived)
    rig.expect_nothing_held()


def test_while_storage_is_unknown_one_plan_measures_it_with_a_part() -> None:
    rig = Rig(prefetch="soonest", prefetch_threshold_tokens=0, prefetch_base_s=100.0, device_pages=64)
    rig.attach_storage()
    send(rig, "sent", b"uvwx", 0.4)
    assert ask(rig, "a", b"abcdefghijklmnop", 16).promised_tokens == 2
    assert rig.request("a").sources.declined == ("unmeasured", 14)
    # Nothing more is read until that has ended: reads cannot be cancelled.
    assert ask(rig, "b", TOKENS.upper(), 8).promised_tokens == 0
    rig.now_s += 0.02
    rig.fetched(rig.take(commands.FetchPages))
    # A page from storage in 0.01 s, from prefill in 0.1 s.
    assert ask(rig, "c", b"01234567", 8).promised_tokens == 8


@pytest.mark.parametrize(("lands_after_s", "promised"), [(0.04, 8), (0.06, 0)])
def test_while_nothing_is_known_others_wait_for_the_first_fetch_but_not_for_long(
    lands_after_s: float, promised: int
) -> None:
    """What a slow prefill was asked for delays all plans after it, and cannot be taken back."""
    rig = Rig(prefetch="soonest", prefetch_threshold_tokens=0, prefetch_base_s=100.0, device_pages=64, host_pages=64)
    rig.attach_storage()
    assert ask(rig, "a", b"abcdefghijklmnop", 16).promised_tokens == 16
    fetch = rig.take(commands.FetchPages)
    rig.arrive("b", TOKENS.upper())
    rig.answer(rig.take(commands.QueryStorage), 8)
    assert rig.take_all(commands.SendPromise) == []
    rig.wait_until(rig.now_s + lands_after_s)
    rig.fetched(fetch)
    rig.copied(rig.take(commands.CopyPages))
    assert rig.take(commands.SendPromise).promised_tokens == promised


def test_a_fetch_that_was_waited_for_and_is_overdue_is_asked_of_prefill() -> None:
    """Long before its deadline: prefill has sent everything else, and storage has stalled."""
    rig = planned_rig()
    promise = ask(rig, "a", b"abi", 2)
    fetch = rig.take(commands.FetchPages)
    rig.wait_until(rig.now_s + 0.3)
    rig.aux(promise)
    rig.chunk(promise)
    # Due in 0.1 s. Overdue, it is expected in the time that it has taken so far, until prefill's 0.6 s are less.
    rig.wait_until(rig.now_s + 0.75)
    assert rig.take_all(commands.SendExtend) == []
    rig.wait_until(rig.now_s + 0.1)
    extend = rig.take(commands.SendExtend)
    assert (extend.first, len(extend.pages)) == (0, 2)
    rig.chunk(extend)
    rig.take(commands.ReportReady)
    assert rig.core.statistics()["l3_fetches_cut"] == 1 and rig.core.statistics()["l3_fetches_late"] == 0
    # Its end, late as it is, is measured: 2 s for two pages.
    rig.wait_until(rig.now_s + 1.0)
    before = rig.core.storage.source_load.page_s
    rig.fetched(fetch)
    assert rig.core.storage.source_load.page_s > before


def test_an_overdue_fetch_without_a_gain_is_waited_for_until_its_deadline() -> None:
    """Prefill takes 2 s a page: however late storage is, it is asked for nothing."""
    rig = planned_rig()
    send(rig, "sent", b"uvwx", 8.0)
    promise = ask(rig, "a", b"abi", 2)
    rig.serve(promise)
    assert rig.take_all(commands.SendExtend) == []
    rig.wait_until(rig.now_s + 2.0)
    assert rig.take_all(commands.SendExtend) == []
    rig.fetched(rig.take(commands.FetchPages))


def test_an_overdue_fetch_whose_request_has_left_changes_nothing() -> None:
    rig = planned_rig()
    promise = ask(rig, "a", b"abi", 2)
    rig.wait_until(rig.now_s + 0.3)
    rig.serve(promise)
    assert rig.take_all(commands.SendExtend) == []
    rig.abort("a")
    rig.wait_until(rig.now_s + 5.0)
    assert rig.take_all(commands.SendExtend) == []


# --- Trust in old figures ---


def test_plans_rely_on_an_old_figure_as_on_a_new_one() -> None:
    rig = planned_rig()
    send(rig, "sent", b"uvwx", 8.0)
    rig.wait_until(rig.now_s + ESTIMATE_FRESH_S + 0.1)
    # Storage takes 0.2 s a page, prefill 2 s: all of the hit, by each of several plans at once.
    assert [ask(rig, name, name * 8, 8).promised_tokens for name in (b"a", b"b", b"c")] == [8, 8, 8]


def test_what_is_measured_after_a_pause_replaces_the_old_figure() -> None:
    rig = planned_rig()
    rig.wait_until(rig.now_s + ESTIMATE_FRESH_S + 0.1)
    ask(rig, "a", b"ab", 2)
    rig.now_s += 0.01
    rig.fetched(rig.take(commands.FetchPages))
    assert rig.core.storage.source_load.page_s == pytest.approx(0.005)


def test_a_storage_left_alone_because_it_was_slow_is_measured_again_by_one_plan_at_a_time() -> None:
    rig = planned_rig(device_pages=64)
    send(rig, "sent", b"uvwx", 0.04)
    assert ask(rig, "a", TOKENS, 8).promised_tokens == 0
    rig.wait_until(rig.now_s + ESTIMATE_FRESH_S + 0.1)
    assert ask(rig, "b", TOKENS.upper(), 8).promised_tokens == 1
    assert rig.request("b").sources.declined == ("slower", 7)
    assert ask(rig, "c", b"01234567", 8).promised_tokens == 0
    rig.now_s += 0.001
    rig.fetched(rig.take(commands.FetchPages))
    assert ask(rig, "d", b"!?.,:;+-", 8).promised_tokens == 8


def test_a_stall_of_the_process_is_not_taken_for_one_of_storage() -> None:
    rig = planned_rig()
    promise = ask(rig, "a", b"abi", 2)
    rig.wait_until(rig.now_s + 0.3)
    rig.aux(promise)
    rig.chunk(promise)
    # Overdue in 0.15 s. The event that finds it so comes five seconds later, in front of the outcome.
    rig.now_s += 5.0
    rig.step(events.ClockAdvanced)
    assert rig.take_all(commands.SendExtend) == []
    rig.fetched(rig.take(commands.FetchPages))
    assert not rig.core.statistics()["l3_fetches_cut"]
