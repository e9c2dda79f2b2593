"""The core, stepped by hand: where the pages of a prompt come from, command by command."""

from __future__ import annotations

from simulation.rig import Rig, ids
from tidekv.states import commands
from tidekv.states.records.stages import State

EIGHT = b"abcdefgh"


def test_a_full_transfer_brings_every_page_from_prefill() -> None:
    rig = Rig(growth_reserve_pages=2)
    rig.arrive("a", EIGHT)
    promise = rig.take(commands.SendPromise)
    rig.nothing_else()
    assert (promise.promised_tokens, promise.prompt_tokens, promise.prefill) == (0, 8, 0)
    assert ids(promise.pages) == list(range(8))
    assert rig.state("a") == "TRANSFER"
    rig.promised(promise)
    rig.chunk(promise, first=0, count=5, last=False)
    rig.chunk(promise, first=5, count=3)
    rig.nothing_else()
    rig.aux(promise)
    ready = rig.take(commands.ReportReady)
    assert rig.take(commands.SendReceived).request_id == "a"
    rig.nothing_else()
    assert ids(ready.pages) == list(range(8))
    assert ready.sources == {"l1": 0, "l2": 0, "l3": 0, "transfer": 8}
    assert ids(ready.reserve) == [8, 9]
    assert rig.state("a") == "READY"


def test_an_incremental_transfer_brings_what_the_device_has_not() -> None:
    rig = Rig()
    first = rig.make_ready("a", EIGHT[:5])
    rig.arrive("b", EIGHT)
    promise = rig.take(commands.SendPromise)
    assert promise.promised_tokens == 5
    assert len(promise.pages) == 3
    rig.serve(promise)
    ready = rig.take(commands.ReportReady)
    assert ready.pages[:5] == first.pages
    assert ready.sources == {"l1": 5, "l2": 0, "l3": 0, "transfer": 3}


def test_a_full_hit_moves_nothing_and_still_waits_for_last_chunk_and_first_token() -> None:
    rig = Rig()
    rig.make_ready("a", EIGHT)
    rig.arrive("b", EIGHT)
    promise = rig.take(commands.SendPromise)
    assert (promise.promised_tokens, ids(promise.pages)) == (8, [])
    rig.promised(promise)
    rig.aux(promise)
    assert rig.state("b") == "TRANSFER"
    rig.chunk(promise)
    ready = rig.take(commands.ReportReady)
    assert ready.sources == {"l1": 8, "l2": 0, "l3": 0, "transfer": 0}


def test_a_partial_page_always_comes_from_prefill() -> None:
    rig = Rig(page_size=4, key_bytes=4)
    rig.make_ready("a", b"abcdefghij")
    rig.arrive("b", b"abcdefghij")
    promise = rig.take(commands.SendPromise)
    assert (promise.promised_tokens, len(promise.pages)) == (8, 1)
    rig.serve(promise)
    assert rig.take(commands.ReportReady).sources == {"l1": 8, "l2": 0, "l3": 0, "transfer": 2}


def test_every_rank_of_prefill_must_have_sent_all() -> None:
    rig = Rig()
    rig.arrive("a", EIGHT)
    promise = rig.take(commands.SendPromise)
    rig.promised(promise, ranks=2)
    for rank in (0, 1):
        assert rig.state("a") == "TRANSFER"
        rig.aux(promise, rank=rank)
        rig.chunk(promise, rank=rank)
    rig.take(commands.ReportReady)


def test_a_room_is_complete_when_the_last_page_has_come_from_every_rank() -> None:
    rig = Rig()
    rig.arrive("a", EIGHT)
    promise = rig.take(commands.SendPromise)
    rig.promised(promise, ranks=2)
    for rank in (0, 1):
        rig.aux(promise, rank=rank)
    rig.chunk(promise, rank=1)
    rig.chunk(promise, rank=0, count=5, last=False)
    assert rig.state("a") == "TRANSFER"
    rig.chunk(promise, rank=0, first=5, count=3)
    rig.take(commands.SendReceived)
    rig.take(commands.ReportReady)


def test_frames_that_nobody_should_send_change_nothing() -> None:
    rig = Rig()
    rig.arrive("a", EIGHT)
    promise = rig.take(commands.SendPromise)
    rig.promised(promise)
    rig.aux(promise, rank=1)
    rig.aux(promise, rank=-1)
    for field in ({"rank": 1}, {"rank": -1}, {"first": 1, "count": 7}, {"count": 9}, {"count": -1}):
        rig.chunk(promise, **field)
    rig.chunk(promise, count=5, last=True)
    rig.chunk(promise, first=0, count=5, last=False)
    assert rig.state("a") == "TRANSFER"
    assert rig.core.statistics()["chunks_foreign"] == 3
    assert rig.core.statistics()["frames_foreign"] == 2
    rig.aux(promise)
    rig.chunk(promise, first=5, count=3)
    rig.take(commands.ReportReady)


def test_host_pages_are_copied_while_prefill_sends_the_rest() -> None:
    rig = Rig()
    rig.make_cached("past", EIGHT[:6])
    assert rig.flush("l1").dropped == {"l1": 6}
    rig.arrive("a", EIGHT)
    copy, promise = rig.take(commands.CopyPages, target="device"), rig.take(commands.SendPromise)
    rig.nothing_else()
    assert promise.promised_tokens == 6
    assert len(copy.source_pages) == len(copy.target_pages) == 6
    assert rig.state("a") == "LOCAL_RESTORE"
    rig.serve(promise)
    assert rig.state("a") == "LOCAL_RESTORE"
    rig.copied(copy)
    assert rig.take(commands.ReportReady).sources == {"l1": 0, "l2": 6, "l3": 0, "transfer": 2}


def test_long_host_runs_are_copied_in_pieces() -> None:
    rig = Rig(copy_run_pages=2)
    rig.make_cached("one", b"ab")
    rig.make_cached("two", b"abcd")
    rig.make_cached("three", b"abcde")
    rig.flush("l1")
    rig.arrive("a", b"abcdef")
    copies = rig.take_all(commands.CopyPages, target="device")
    assert [len(copy.source_pages) for copy in copies] == [2, 2, 1]


def bring_into_storage(rig: Rig, tokens: bytes) -> None:
    rig.attach_storage()
    rig.make_cached("past", tokens)
    rig.flush("l1", "l2")


def test_storage_is_read_in_runs_and_each_is_copied_as_it_lands() -> None:
    rig = Rig(fetch_run_pages=2)
    bring_into_storage(rig, EIGHT[:6])
    rig.arrive("a", EIGHT)
    query = rig.take(commands.QueryStorage)
    assert (query.first, query.count) == (0, 8)
    rig.nothing_else()
    assert rig.state("a") == "PREALLOC"
    rig.answer(query, 6)
    fetches, promise = rig.take_all(commands.FetchPages), rig.take(commands.SendPromise)
    rig.nothing_else()
    assert [(fetch.positions[0], len(fetch.host_pages)) for fetch in fetches] == [(0, 2), (2, 2), (4, 2)]
    assert promise.promised_tokens == 6
    assert rig.state("a") == "PREFETCH"
    rig.serve(promise)
    rig.fetched(fetches[1])
    second = rig.take(commands.CopyPages, target="device")
    assert list(second.source_pages) == list(fetches[1].host_pages)
    rig.fetched(fetches[0])
    first = rig.take(commands.CopyPages, target="device")
    rig.copied(second)
    rig.fetched(fetches[2])
    third = rig.take(commands.CopyPages, target="device")
    assert rig.state("a") == "LOCAL_RESTORE"
    rig.copied(third)
    rig.copied(first)
    assert rig.take(commands.ReportReady).sources == {"l1": 0, "l2": 0, "l3": 6, "transfer": 2}
    # What was fetched in the order of the prompt stays in host memory; the second run came before its parent.
    assert rig.core.statistics()["host_cached"] in (2, 4, 6)


def test_all_three_tiers_and_prefill_serve_one_prompt() -> None:
    rig = Rig()
    rig.attach_storage()
    rig.make_cached("three", b"abcdef")
    rig.flush("l1", "l2")
    rig.make_ready("one", b"ab")
    rig.arrive("a", EIGHT)
    rig.answer(rig.take(commands.QueryStorage), 4)
    fetch, promise = rig.take(commands.FetchPages), rig.take(commands.SendPromise)
    assert (fetch.positions[0], len(fetch.host_pages), promise.promised_tokens) == (2, 4, 6)
    rig.fetched(fetch)
    rig.copied(rig.take(commands.CopyPages, target="device"))
    rig.serve(promise)
    assert rig.take(commands.ReportReady).sources == {"l1": 2, "l2": 0, "l3": 4, "transfer": 2}


def test_what_is_too_little_for_a_fetch_is_not_asked_for() -> None:
    rig = Rig(prefetch_threshold_tokens=9)
    rig.attach_storage()
    rig.arrive("a", EIGHT)
    rig.take(commands.SendPromise)
    rig.nothing_else()


def test_a_hit_below_the_threshold_is_left_to_prefill() -> None:
    rig = Rig(prefetch_threshold_tokens=4)
    rig.attach_storage()
    rig.arrive("a", EIGHT)
    rig.answer(rig.take(commands.QueryStorage), 3)
    assert rig.take(commands.SendPromise).promised_tokens == 0
    rig.nothing_else()


def test_without_host_memory_storage_is_left_to_prefill() -> None:
    rig = Rig(host_pages=0)
    rig.attach_storage()
    rig.arrive("a", EIGHT)
    rig.answer(rig.take(commands.QueryStorage), 8)
    assert rig.take(commands.SendPromise).promised_tokens == 0
    rig.nothing_else()


def test_an_answer_that_is_no_number_of_pages_is_cut_to_one() -> None:
    for found, promised in ((-3, 0), (99, 8)):
        rig = Rig()
        rig.attach_storage()
        rig.arrive("a", EIGHT)
        rig.answer(rig.take(commands.QueryStorage), found)
        assert rig.take(commands.SendPromise).promised_tokens == promised


def test_two_prompts_that_come_at_once_share_what_the_first_was_brought() -> None:
    rig = Rig()
    rig.arrive("a", EIGHT)
    rig.arrive("b", EIGHT)
    promises = rig.take_all(commands.SendPromise)
    assert [promise.promised_tokens for promise in promises] == [0, 0]
    rig.serve(promises[0])
    first = rig.take(commands.ReportReady)
    rig.serve(promises[1])
    second = rig.take(commands.ReportReady)
    # Both were written; the second goes over to the pages of the first and gives its own back.
    assert first.pages == second.pages
    assert rig.core.statistics()["device_free"] == 24
    assert rig.state("b") == State.READY.value
