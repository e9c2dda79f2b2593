"""Restores into pages that the embedder lends: no device pages in the index, partial outcomes, a late return."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from simulation.rig import Rig, ids
from tests.support.each_call import raised_at_each_call
from tidekv.states import commands, events
from tidekv.states.errors import BrokenInvariant, IllegalEvent, InvalidConfig

TOKENS = b"abcdefgh"
PAGES = (4, 9, 2, 7, 1, 30, 3, 8)


def lent_rig(**settings: int | float | bool) -> Rig:
    return Rig(lends_device=True, **settings)


def cached_in_host(rig: Rig, tokens: bytes) -> None:
    """Bring tokens into host memory without a device page."""
    root = rig.core.state.index.tree.root("")
    pages = rig.core.state.host.take(len(tokens))
    rig.core.state.index.insert_host(root, tokens, pages)


def lend(rig: Rig, request_id: str = "a", *, held: int = 0, **fields: object) -> None:
    rig.arrive(request_id, TOKENS, lent_pages=PAGES, held_pages=held, **fields)


def lost(rig: Rig, promise: commands.SendPromise, *, settled: bool) -> None:
    rig.step(
        events.RoomFailed,
        request_id=promise.request_id,
        generation=promise.generation,
        cause="gone",
        settled=settled,
    )


def test_prefill_writes_into_the_lent_pages_and_ready_returns_them() -> None:
    rig = lent_rig()
    lend(rig)
    promise = rig.take(commands.SendPromise)
    assert (promise.promised_tokens, ids(promise.pages)) == (0, list(PAGES))
    assert rig.core.state.device.owned == 8
    rig.serve(promise)
    rig.take(commands.SendReceived)
    restored = rig.take(commands.ReportRestored)
    assert (restored.restored_tokens, restored.cause) == (8, "")
    assert restored.sources == {"l1": 0, "l2": 0, "l3": 0, "transfer": 8}
    rig.nothing_else()
    rig.expect_nothing_held()
    assert not list(rig.core.state.index.nodes())


def test_what_the_pages_hold_is_neither_copied_nor_sent() -> None:
    rig = lent_rig()
    cached_in_host(rig, TOKENS[:5])
    lend(rig, held=3)
    copy, promise = rig.take(commands.CopyPages, target="device"), rig.take(commands.SendPromise)
    assert (list(copy.source_pages), list(copy.target_pages)) == ([3, 4], [7, 1])
    assert (promise.promised_tokens, ids(promise.pages)) == (5, [30, 3, 8])
    rig.copied(copy)
    rig.serve(promise)
    rig.take(commands.SendReceived)
    assert rig.take(commands.ReportRestored).sources == {"l1": 3, "l2": 2, "l3": 0, "transfer": 3}
    rig.nothing_else()
    rig.expect_nothing_held()


def test_pages_from_storage_join_host_memory_on_their_way() -> None:
    rig = lent_rig()
    rig.attach_storage()
    cached_in_host(rig, TOKENS[:2])
    lend(rig)
    query = rig.take(commands.QueryStorage)
    assert (query.first, query.count) == (2, 6)
    rig.answer(query, 4)
    fetch = rig.take(commands.FetchPages)
    rig.copied(rig.take(commands.CopyPages, target="device"))
    promise = rig.take(commands.SendPromise)
    assert promise.promised_tokens == 6
    rig.fetched(fetch)
    copy = rig.take(commands.CopyPages, target="device")
    assert ids(copy.source_pages) == ids(fetch.host_pages)
    assert rig.core.state.index.probe_prefix("", TOKENS) == (0, 6)
    rig.copied(copy)
    rig.serve(promise)
    assert rig.take(commands.ReportRestored).sources == {"l1": 0, "l2": 2, "l3": 4, "transfer": 2}
    rig.take(commands.SendReceived)
    rig.nothing_else()
    rig.expect_nothing_held()


def test_storage_is_asked_beyond_the_held_pages_and_its_pages_stay_out_of_the_tree() -> None:
    rig = lent_rig()
    rig.attach_storage()
    lend(rig, held=4)
    query = rig.take(commands.QueryStorage)
    assert (query.first, query.count) == (4, 4)
    rig.answer(query, 4)
    fetch, promise = rig.take(commands.FetchPages), rig.take(commands.SendPromise)
    rig.fetched(fetch)
    rig.copied(rig.take(commands.CopyPages, target="device"))
    # As the beginning of a prompt they would be found for another one.
    assert not list(rig.core.state.index.nodes())
    rig.serve(promise)
    rig.take(commands.SendReceived)
    assert rig.take(commands.ReportRestored).sources == {"l1": 4, "l2": 0, "l3": 4, "transfer": 0}
    rig.nothing_else()
    rig.expect_nothing_held()


def test_a_short_fetch_is_extended_into_by_prefill() -> None:
    rig = lent_rig()
    rig.attach_storage()
    lend(rig)
    rig.answer(rig.take(commands.QueryStorage), 6)
    fetch, promise = rig.take(commands.FetchPages), rig.take(commands.SendPromise)
    rig.serve(promise)
    rig.fetched(fetch, valid=2)
    extend = rig.take(commands.SendExtend)
    assert (extend.first, ids(extend.pages)) == (2, [2, 7, 1, 30])
    rig.copied(rig.take(commands.CopyPages, target="device"))
    rig.chunk(extend)
    rig.take(commands.SendReceived)
    assert rig.take(commands.ReportRestored).sources == {"l1": 0, "l2": 0, "l3": 2, "transfer": 6}
    # Storage is told in which order the fetched pages belong.
    rig.stored(rig.take(commands.StorePages))
    rig.nothing_else()
    rig.expect_nothing_held()


@pytest.mark.parametrize("settled", [True, False])
def test_a_lost_room_is_a_partial_outcome_and_the_pages_return_when_it_is_drained(*, settled: bool) -> None:
    rig = lent_rig()
    cached_in_host(rig, TOKENS[:2])
    lend(rig, held=1)
    rig.copied(rig.take(commands.CopyPages, target="device"))
    promise = rig.take(commands.SendPromise)
    rig.promised(promise)
    rig.chunk(promise, count=3, last=False)
    lost(rig, promise, settled=settled)
    if not settled:
        rig.drained(rig.take(commands.SendAbort))
    restored = rig.take(commands.ReportRestored)
    assert (restored.restored_tokens, restored.cause) == (5, "prefill failed")
    assert restored.sources == {"l1": 1, "l2": 1, "l3": 0, "transfer": 3}
    rig.nothing_else()
    rig.expect_nothing_held()


def test_pages_are_good_once_every_rank_of_prefill_has_written_them() -> None:
    rig = lent_rig()
    lend(rig)
    promise = rig.take(commands.SendPromise)
    rig.promised(promise, ranks=2)
    rig.chunk(promise, count=5, last=False, rank=0)
    rig.chunk(promise, count=2, last=False, rank=1)
    lost(rig, promise, settled=True)
    assert rig.take(commands.ReportRestored).restored_tokens == 2
    rig.expect_nothing_held()


def test_a_query_is_still_measured_after_its_pages_have_returned() -> None:
    rig = lent_rig()
    rig.attach_storage()
    lend(rig)
    query = rig.take(commands.QueryStorage)
    rig.wait_until(0.5)
    rig.serve(rig.take(commands.SendPromise))
    assert rig.take(commands.ReportRestored).restored_tokens == 8
    rig.answer(query, 8)
    rig.expect_nothing_held()


def test_pages_of_an_ended_request_cannot_be_lent_before_their_return() -> None:
    rig = lent_rig()
    lend(rig)
    promise = rig.take(commands.SendPromise)
    rig.promised(promise)
    rig.abort("a")
    abort = rig.take(commands.SendAbort)
    rig.nothing_else()
    assert rig.core.state.device.draining == 8
    with pytest.raises(BrokenInvariant, match="page 4 is draining"):
        lend(rig, "b")
    assert rig.core.request("b") is None
    rig.drained(abort)
    assert rig.take(commands.ReportFailed).cause == "aborted"
    rig.expect_nothing_held()


def test_pages_that_hold_a_prefix_may_be_named_by_several_requests() -> None:
    rig = lent_rig()
    lend(rig, held=4)
    rig.arrive("b", TOKENS, lent_pages=(*PAGES[:4], 11, 12, 13, 14), held_pages=4)
    for promise in rig.take_all(commands.SendPromise):
        rig.serve(promise)
    assert [restored.restored_tokens for restored in rig.take_all(commands.ReportRestored)] == [8, 8]
    assert rig.core.state.device.free == 32


def test_good_pages_end_at_the_first_gap() -> None:
    rig = lent_rig(fetch_run_pages=2)
    rig.attach_storage()
    lend(rig, deadline_at_s=10.0)
    rig.answer(rig.take(commands.QueryStorage), 6)
    first, _second, third = rig.take_all(commands.FetchPages)
    promise = rig.take(commands.SendPromise)
    rig.serve(promise)
    for fetch in (first, third):
        rig.fetched(fetch)
        rig.copied(rig.take(commands.CopyPages, target="device"))
    rig.wait_until(9.0)
    rig.take(commands.SendExtend)
    rig.wait_until(10.0)
    rig.drained(rig.take(commands.SendAbort))
    restored = rig.take(commands.ReportRestored)
    assert (restored.restored_tokens, restored.cause) == (2, "deadline")
    assert restored.sources == {"l1": 0, "l2": 0, "l3": 2, "transfer": 0}


def test_a_late_copy_holds_the_pages_back_beyond_the_deadline() -> None:
    rig = lent_rig()
    cached_in_host(rig, TOKENS[:4])
    lend(rig, held=1, deadline_at_s=1.0)
    copy, promise = rig.take(commands.CopyPages, target="device"), rig.take(commands.SendPromise)
    rig.serve(promise)
    rig.wait_until(1.0)
    rig.take(commands.SendAbort)
    rig.nothing_else()
    rig.copied(copy)
    assert rig.take(commands.ReportRestored).restored_tokens == 1
    rig.nothing_else()
    rig.expect_nothing_held()


def test_a_deadline_while_the_pages_still_have_a_writer_ends_the_wait_for_admission() -> None:
    rig = lent_rig()
    lend(rig, prefill_count=2, deadline_at_s=5.0)
    promise = rig.take(commands.SendPromise)
    rig.promised(promise)
    rig.chunk(promise, count=3, last=False)
    lost(rig, promise, settled=False)
    assert rig.state("a") == "PREALLOC"
    rig.wait_until(5.0)
    assert rig.core.statistics()["queue"] == 0
    rig.drained(rig.take(commands.SendAbort))
    restored = rig.take(commands.ReportRestored)
    assert (restored.restored_tokens, restored.cause) == (3, "deadline")
    rig.nothing_else()
    rig.expect_nothing_held()


def all_served() -> tuple[Rig, Callable[[], object]]:
    rig = lent_rig()
    lend(rig)
    promise = rig.take(commands.SendPromise)
    return rig, lambda: rig.serve(promise)


def drained_at_last() -> tuple[Rig, Callable[[], object]]:
    rig = lent_rig()
    lend(rig)
    promise = rig.take(commands.SendPromise)
    rig.promised(promise)
    rig.chunk(promise, count=3, last=False)
    lost(rig, promise, settled=False)
    abort = rig.take(commands.SendAbort)
    return rig, lambda: rig.drained(abort)


@pytest.mark.parametrize(("prepare", "valid"), [(all_served, 8), (drained_at_last, 3)])
def test_a_raise_at_any_call_returns_the_pages_once(
    prepare: Callable[[], tuple[Rig, Callable[[], object]]], valid: int
) -> None:
    for call, rig in raised_at_each_call(prepare):
        told = rig.settle()
        ends = [wish for wish in told if isinstance(wish, commands.ReportRestored | commands.ReportFailed)]
        assert len(ends) == 1, (call, told)
        assert isinstance(ends[0], commands.ReportRestored) and ends[0].restored_tokens == valid, (call, ends)
        rig.expect_nothing_held()
        # The embedder may lend them again.
        lend(rig, "next")


def test_the_next_prefill_is_asked_once_the_pages_have_no_writer() -> None:
    rig = lent_rig()
    lend(rig, prefill_count=2)
    promise = rig.take(commands.SendPromise)
    rig.promised(promise)
    rig.chunk(promise, count=3, last=False)
    lost(rig, promise, settled=False)
    abort = rig.take(commands.SendAbort)
    rig.nothing_else()
    assert rig.state("a") == "PREALLOC"
    rig.drained(abort)
    again = rig.take(commands.SendPromise)
    assert (again.prefill, again.promised_tokens, ids(again.pages)) == (1, 3, [7, 1, 30, 3, 8])
    rig.serve(again)
    rig.take(commands.SendReceived)
    assert rig.take(commands.ReportRestored).sources == {"l1": 0, "l2": 0, "l3": 0, "transfer": 8}
    rig.nothing_else()
    rig.expect_nothing_held()


def test_the_partial_last_page_counts_with_its_tokens_only() -> None:
    rig = lent_rig(page_size=4, key_bytes=4)
    rig.arrive("a", b"abcdefghij", lent_pages=(1, 2, 3), held_pages=1)
    rig.serve(rig.take(commands.SendPromise))
    restored = rig.take(commands.ReportRestored)
    assert (restored.restored_tokens, restored.sources["transfer"]) == (10, 6)


def test_shared_transfers_are_refused_with_lent_pages() -> None:
    with pytest.raises(InvalidConfig, match="lent device pages"):
        lent_rig(share_transfers=True)


def test_a_core_takes_lent_and_offered_pages_only_if_it_has_none_of_its_own() -> None:
    for rig, fields in ((Rig(), {"lent_pages": (1,)}), (lent_rig(), {"lent_pages": ()})):
        with pytest.raises(IllegalEvent, match="brings device pages"):
            rig.arrive("a", b"a", **fields)
    with pytest.raises(IllegalEvent, match="device pages of its own"):
        Rig().offer(b"a", [1])


def test_a_raise_at_any_call_of_a_fetched_part_loses_nothing() -> None:
    def prepare() -> tuple[Rig, Callable[[], object]]:
        rig = lent_rig()
        rig.attach_storage()
        cached_in_host(rig, TOKENS[:2])
        lend(rig)
        rig.answer(rig.take(commands.QueryStorage), 4)
        fetch = rig.take(commands.FetchPages)
        return rig, lambda: rig.fetched(fetch, valid=2)

    for call, rig in raised_at_each_call(prepare):
        rig.core.check()
        assert any(isinstance(wish, commands.ReportRestored) for wish in rig.settle()), call
        rig.expect_nothing_held()


@pytest.mark.parametrize("is_first_to_end", [True, False])
def test_an_offer_whose_beginning_was_lost_in_another_one_leaves_nothing_at_its_place(*, is_first_to_end: bool) -> None:
    rig = lent_rig()
    rig.offer(b"ab", (0, 1))
    lost_copy = rig.take(commands.CopyPages, target="host")
    rig.offer(b"abcd", (0, 1, 2, 3))
    rest = rig.take(commands.CopyPages, target="host")
    assert ids(rest.source_pages) == [2, 3]
    if is_first_to_end:
        rig.copied(lost_copy, error="by a test")
        rig.copied(rest)
    else:
        rig.copied(rest)
        rig.copied(lost_copy, error="by a test")
    assert sorted(told.declined for told in rig.take_all(commands.ReportOffered)) == [2, 4]
    # As the beginning of a prompt they would be found for another one.
    assert not list(rig.core.state.index.nodes())
    rig.expect_nothing_held()
