"""How storage is used, on a core stepped by hand: waiting, limits, what is put, the breaker, and its changes."""

from __future__ import annotations

import pytest

from simulation.rig import Rig
from tests.support.asking import ask
from tests.support.rigs import change
from tidekv.states import commands, events
from tidekv.states.errors import InvalidConfig
from tidekv.states.storage_policy import StoragePolicy, changed_policy

TOKENS = b"abcdefgh"


def stored_rig(**settings: object) -> Rig:
    """Storage has the eight pages of TOKENS; device and host have nothing."""
    rig = Rig(prefetch_threshold_tokens=0, **settings)
    rig.attach_storage()
    rig.make_cached("past", TOKENS)
    rig.flush("l1")
    rig.flush("l2")
    return rig


# --- How long to wait ---


def test_best_effort_waits_for_the_transfer_and_extends_what_has_not_arrived() -> None:
    rig = stored_rig(prefetch="best_effort", fetch_run_pages=3)
    promise = ask(rig, "a", TOKENS, 6)
    first, second = rig.take_all(commands.FetchPages)
    rig.fetched(first)
    rig.copied(rig.take(commands.CopyPages, target="device"))
    rig.wait_until(1000.0)
    rig.aux(promise)
    assert rig.state("a") == "PREFETCH"
    rig.chunk(promise)
    extend = rig.take(commands.SendExtend)
    assert (extend.first, len(extend.pages)) == (3, 3)
    rig.chunk(extend)
    assert rig.take(commands.ReportReady).sources == {"l1": 0, "l2": 0, "l3": 3, "transfer": 5}
    # The fetch that was cut keeps its host pages until it ends.
    assert rig.core.state.host.owned == 3
    rig.fetched(second)
    assert rig.core.state.host.owned == 0
    assert rig.core.statistics()["l3_fetches_cut"] == 1


def test_best_effort_cuts_nothing_that_has_arrived_before_the_transfer() -> None:
    rig = stored_rig(prefetch="best_effort")
    promise = ask(rig, "a", TOKENS, 6)
    rig.fetched(rig.take(commands.FetchPages))
    rig.aux(promise)
    rig.chunk(promise)
    rig.copied(rig.take(commands.CopyPages, target="device"))
    assert rig.take(commands.ReportReady).sources["l3"] == 6
    rig.take(commands.SendReceived)
    rig.nothing_else()


def test_wait_complete_has_no_deadline_of_its_own_but_half_of_the_callers() -> None:
    rig = stored_rig(prefetch="wait_complete", fetch_deadline_share=0.0)
    promise = ask(rig, "a", TOKENS, 6)
    rig.chunk(promise)
    rig.aux(promise)
    rig.wait_until(5000.0)
    assert rig.state("a") == "PREFETCH"
    fetch = rig.take(commands.FetchPages)
    assert fetch.timeout_s == 3600.0
    rig.fetched(fetch)
    rig.copied(rig.take(commands.CopyPages, target="device"))
    rig.take(commands.ReportReady)
    rig.take(commands.SendReceived)
    rig.abort("a")
    rig.take(commands.ReportDropped)
    rig.flush("l1", "l2")
    # With a deadline, what is left of it is enough to have prefill send the rest: no tier fails a request.
    rig.arrive("b", TOKENS, deadline_at_s=rig.now_s + 10.0)
    rig.answer(rig.take(commands.QueryStorage), 6)
    rig.take(commands.FetchPages)
    rig.wait_until(rig.now_s + 4.9)
    rig.promised(promise := rig.take(commands.SendPromise))
    assert rig.state("b") == "PREFETCH"
    rig.wait_until(rig.now_s + 0.2)
    assert rig.take(commands.SendExtend).first == 0
    assert promise.promised_tokens == 6


def test_a_timeout_grows_with_the_storage_run() -> None:
    rig = stored_rig(prefetch_base_s=1.0, prefetch_per_ki_token_s=512.0)
    ask(rig, "a", TOKENS, 4)
    assert rig.take(commands.FetchPages).timeout_s == pytest.approx(1.0 + 512.0 * 4 / 1024)
    rig.wait_until(rig.now_s + 2.9)
    assert rig.state("a") == "PREFETCH"
    rig.wait_until(rig.now_s + 0.2)
    assert rig.take(commands.SendExtend).first == 0


# --- How much ---


def test_the_limit_of_pages_in_flight_shrinks_the_promise() -> None:
    rig = stored_rig(fetch_pages_in_flight_max=5)
    assert ask(rig, "a", TOKENS, 6).promised_tokens == 5
    fetch = rig.take(commands.FetchPages)
    assert rig.core.statistics()["l3_declined_pages"] == 1
    # All five are under way: another prompt has to do without.
    assert ask(rig, "b", b"xyz", 3).promised_tokens == 0
    assert rig.core.statistics()["l3_declined_pages"] == 4
    rig.fetched(fetch)
    assert ask(rig, "c", b"uvw", 3).promised_tokens == 3


def test_a_fetch_that_was_given_up_counts_until_it_ends() -> None:
    # Without the limit by measured speed, which the ten seconds of this fetch would lower.
    rig = stored_rig(fetch_pages_in_flight_max=6, prefetch_base_s=1.0, fetch_deadline_share=0.0)
    ask(rig, "a", TOKENS, 6)
    fetch = rig.take(commands.FetchPages)
    rig.wait_until(10.0)
    assert ask(rig, "b", b"xyz", 3).promised_tokens == 0
    rig.fetched(fetch)
    assert ask(rig, "c", b"uvw", 3).promised_tokens == 3


def test_the_rate_limit_saves_up_one_second_and_shrinks_the_promise() -> None:
    rig = stored_rig(fetch_pages_per_s=4.0)
    assert ask(rig, "a", TOKENS, 6).promised_tokens == 4
    assert ask(rig, "b", b"xyz", 3).promised_tokens == 0
    rig.wait_until(rig.now_s + 0.5)
    assert ask(rig, "c", b"uvw", 3).promised_tokens == 2
    rig.wait_until(rig.now_s + 100.0)
    assert ask(rig, "d", b"ABCDEFGH", 8).promised_tokens == 4


def test_what_the_limits_leave_is_not_fetched_below_the_threshold() -> None:
    rig = stored_rig(fetch_pages_in_flight_max=3)
    change(rig, prefetch_threshold_tokens=4)
    assert ask(rig, "a", TOKENS, 6).promised_tokens == 0
    assert rig.core.statistics()["l3_declined_pages"] == 6


# --- What is put ---


def turn(rig: Rig, name: str, tokens: bytes) -> None:
    """A whole request, up to the copy of its backup."""
    rig.make_ready(name, tokens)
    rig.finish(name, tokens)
    for copy in rig.take_all(commands.CopyPages, target="host"):
        rig.copied(copy)


def test_selective_puts_what_was_part_of_several_prompts() -> None:
    rig = Rig(prefetch_threshold_tokens=0, write="selective", write_hits_min=2)
    rig.attach_storage()
    turn(rig, "a", b"abcd")
    assert rig.take_all(commands.StorePages) == []
    turn(rig, "b", b"abxy")
    # The beginning that both share, and neither's end.
    put = rig.take(commands.StorePages)
    assert len(put.host_pages) == 2
    rig.stored(put)
    turn(rig, "c", b"abxyz")
    put = rig.take(commands.StorePages)
    assert len(put.host_pages) == 4
    rig.stored(put)
    assert rig.core.is_idle
    # Asked again by another policy: what was held back is put now.
    change(rig, write="through")
    turn(rig, "d", b"abcd")
    put = rig.take(commands.StorePages)
    assert len(put.host_pages) == 4


def test_short_prefixes_are_not_put() -> None:
    rig = Rig(prefetch_threshold_tokens=0, write_tokens_min=5)
    rig.attach_storage()
    turn(rig, "a", b"abcd")
    assert rig.take_all(commands.StorePages) == []
    turn(rig, "b", b"abcde")
    assert len(rig.take(commands.StorePages).host_pages) == 5


def test_a_put_gives_way_to_fetches_for_a_while() -> None:
    rig = stored_rig(store_wait_s=1.0, prefetch_base_s=100.0)
    ask(rig, "a", TOKENS, 6)
    fetch = rig.take(commands.FetchPages)
    rig.make_ready("b", b"xyz")
    rig.finish("b", b"xyz")
    rig.copied(rig.take(commands.CopyPages, target="host"))
    assert rig.take_all(commands.StorePages) == []
    assert not rig.core.is_idle
    rig.core.check()
    rig.fetched(fetch)
    rig.stored(rig.take(commands.StorePages))
    # And no longer than that while.
    ask(rig, "c", b"ABCDEFGH", 6)
    rig.make_ready("d", b"uvw")
    rig.finish("d", b"uvw")
    rig.copied(rig.take_all(commands.CopyPages, target="host")[-1])
    rig.wait_until(rig.now_s + 0.9)
    assert rig.take_all(commands.StorePages) == []
    rig.wait_until(rig.now_s + 0.2)
    rig.take(commands.StorePages)
    # By a policy of not waiting it begins at once.
    change(rig, store_wait_s=0.0)
    rig.make_ready("e", b"rst")
    rig.finish("e", b"rst")
    rig.copied(rig.take_all(commands.CopyPages, target="host")[-1])
    rig.take(commands.StorePages)


def test_a_put_that_waits_when_storage_goes_ends_without_it() -> None:
    rig = stored_rig(store_wait_s=1.0, prefetch_base_s=100.0)
    ask(rig, "a", TOKENS, 6)
    rig.make_ready("b", b"xyz")
    rig.finish("b", b"xyz")
    rig.copied(rig.take(commands.CopyPages, target="host"))
    rig.step(events.StorageChanged, available=False)
    rig.fetched(rig.take(commands.FetchPages))
    assert rig.take_all(commands.StorePages) == []
    assert not rig.core.backups
    rig.core.check()


# --- The breaker ---


def fail_queries(rig: Rig, count: int, first: int = 0) -> None:
    for number in range(first, first + count):
        rig.arrive(f"q{number}", b"Q%c" % (65 + number))
        rig.answer(rig.take(commands.QueryStorage), 0, error="no")
        rig.serve(rig.take(commands.SendPromise))


def test_the_breaker_opens_after_failures_in_a_row_and_closes_by_a_probe() -> None:
    rig = stored_rig(breaker_failures=3, breaker_backoff_s=1.0, breaker_backoff_max_s=3.0, growth_reserve_pages=0)
    fail_queries(rig, 2)
    ask(rig, "good", b"xy", 0)
    fail_queries(rig, 3, first=2)
    assert rig.core.statistics()["l3_breaker_opened"] == 1
    rig.arrive("without", TOKENS)
    assert rig.take_all(commands.QueryStorage) == []
    promises = rig.take_all(commands.SendPromise)
    assert promises[-1].promised_tokens == 0
    # The probes come after 1, 2, 3, 3 seconds.
    for backoff_s in (1.0, 2.0, 3.0, 3.0):
        rig.wait_until(rig.now_s + backoff_s - 0.1)
        assert rig.take_all(commands.ProbeStorage) == []
        rig.wait_until(rig.now_s + 0.2)
        probe = rig.take(commands.ProbeStorage)
        rig.step(events.StorageProbed, op=probe.op, error="still gone")
    rig.wait_until(rig.now_s + 3.1)
    rig.step(events.StorageProbed, op=rig.take(commands.ProbeStorage).op)
    assert rig.core.statistics()["l3_breaker_closed"] == 1
    rig.arrive("with", b"mnop")
    rig.take(commands.QueryStorage)
    # It opened at the third failure; now it takes three more again.
    assert rig.core.storage.is_usable


def test_storage_that_answers_queries_and_never_delivers_is_left_alone() -> None:
    rig = stored_rig(
        breaker_failures=2, breaker_backoff_s=1.0, breaker_backoff_max_s=8.0, prefetch_base_s=1.0,
        growth_reserve_pages=0, device_pages=128,
    )  # fmt: skip
    fetched_at_s, begun_s = list[float](), rig.now_s
    for number in range(48):
        # A prompt each half second, of which storage says that it has the first page.
        rig.arrive(f"q{number}", b"%cy" % number)
        for query in rig.take_all(commands.QueryStorage):
            rig.answer(query, 1)
        for fetch in rig.take_all(commands.FetchPages):
            fetched_at_s.append(rig.now_s - begun_s)
            rig.step(events.PagesFetched, op=fetch.op, valid=0, error="the node is gone")
        rig.serve(rig.take(commands.SendPromise))
        rig.abort(f"q{number}")
        rig.wait_until(rig.now_s + 0.5)
        for probe in rig.take_all(commands.ProbeStorage):
            rig.step(events.StorageProbed, op=probe.op)
    assert rig.core.statistics()["l3_queries_failed"] == 0
    assert fetched_at_s == pytest.approx([0.0, 0.5, 1.5, 3.5, 7.5, 15.5, 23.5])
    rig.core.check()


def test_lates_count_as_failures_and_a_new_storage_is_trusted() -> None:
    rig = stored_rig(breaker_failures=2, query_deadline_s=0.5, prefetch_base_s=1.0, growth_reserve_pages=0)
    rig.arrive("a", b"xy")
    rig.take(commands.QueryStorage)
    rig.wait_until(rig.now_s + 0.6)
    assert rig.core.storage.is_usable
    rig.arrive("b", b"uv")
    rig.take(commands.QueryStorage)
    rig.wait_until(rig.now_s + 0.6)
    assert not rig.core.storage.is_usable
    rig.step(events.StorageChanged, available=True)
    assert rig.core.storage.is_usable
    assert rig.core.storage.op == 0
    rig.core.check()


def test_an_open_breaker_keeps_nothing_busy() -> None:
    rig = stored_rig(breaker_failures=1, growth_reserve_pages=0)
    fail_queries(rig, 1)
    rig.take(commands.ReportReady)
    rig.take(commands.SendReceived)
    rig.abort("q0")
    assert rig.core.storage.is_open
    assert rig.core.is_idle
    turn(rig, "a", b"xyz")
    assert rig.take_all(commands.StorePages) == []
    assert rig.core.is_idle


def test_zero_switches_the_breaker_off() -> None:
    rig = stored_rig(breaker_failures=0, growth_reserve_pages=0)
    fail_queries(rig, 12)
    assert rig.core.storage.is_usable


# --- Values ---


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prefetch": "soon"}, "prefetch"),
        ({"write": "never"}, "write"),
        ({"breaker_failures": -1}, "breaker_failures must be a whole number, 0 or more, not -1"),
        ({"breaker_backoff_s": 0.0}, "breaker_backoff_s must be a number above 0"),
        ({"prefetch_base_s": "long"}, "prefetch_base_s must be a number above 0, at most 31,536,000, not 'long'"),
        ({"fetch_pages": 1}, "there is no policy 'fetch_pages'; did you mean fetch_pages_per_s"),
    ],
)
def test_wrong_policies_are_refused_by_name(changes: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidConfig, match=words):
        changed_policy(StoragePolicy(), changes)


def test_a_policy_is_checked_however_it_is_made() -> None:
    with pytest.raises(InvalidConfig, match="through, selective or back"):
        StoragePolicy(write="never")  # type: ignore[arg-type]  # That is the point.
