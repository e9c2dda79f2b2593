"""The core, stepped by hand: what a READY request may still ask for, and what it leaves behind."""

from __future__ import annotations

from simulation.rig import Rig, ids
from tidekv.states import commands, events

EIGHT = b"abcdefgh"


def test_growth_takes_from_the_reserve_and_refills_it() -> None:
    rig = Rig(growth_reserve_pages=2)
    ready = rig.make_ready("a", EIGHT)
    assert len(ready.reserve) == 2
    rig.step(events.GrowthTaken, request_id="a", page_count=1)
    assert len(rig.take(commands.GiveReserve).pages) == 1
    rig.step(events.GrowthTaken, request_id="a", page_count=2, wanted=3)
    assert len(rig.take(commands.GiveReserve).pages) == 5
    assert len(rig.request("a").held.table) == 11
    rig.abort("a")
    rig.expect_nothing_held()


def test_growth_gives_what_there_is_and_evicts_for_it() -> None:
    rig = Rig(device_pages=12, growth_reserve_pages=1)
    rig.make_ready("old", b"xy")
    rig.finish("old", b"xy")
    rig.pending = []
    rig.make_ready("a", EIGHT)
    assert rig.core.statistics()["device_free"] == 1
    rig.step(events.GrowthTaken, request_id="a", page_count=1, wanted=9)
    assert len(rig.take(commands.GiveReserve).pages) == 1
    rig.step(events.GrowthTaken, request_id="a", page_count=0, wanted=1)
    assert ids(rig.take(commands.GiveReserve).pages) == []


def test_finish_keeps_prompt_and_output_in_every_tier() -> None:
    rig = Rig(growth_reserve_pages=2)
    rig.attach_storage()
    rig.make_ready("a", EIGHT)
    rig.step(events.GrowthTaken, request_id="a", page_count=2)
    rig.take(commands.GiveReserve)
    rig.finish("a", b"abcdefghij")
    copy = rig.take(commands.CopyPages, target="host")
    assert len(copy.source_pages) == 10
    assert rig.take(commands.ReportFinished).inserted == 2
    rig.copied(copy)
    put = rig.take(commands.StorePages)
    assert len(put.host_pages) == 10
    rig.nothing_else()
    rig.stored(put)
    assert rig.take(commands.ForgetTokens).request_number == put.request_number
    rig.nothing_else()
    rig.expect_nothing_held()
    assert rig.core.statistics()["device_cached"] == rig.core.statistics()["host_cached"] == 10


def test_a_put_names_the_whole_path_so_that_what_storage_lost_of_it_is_stored_again() -> None:
    rig = Rig()
    rig.attach_storage()
    rig.make_cached("past", EIGHT[:4])
    rig.make_ready("a", EIGHT)
    rig.finish("a", EIGHT)
    copy = rig.take(commands.CopyPages, target="host")
    assert len(copy.target_pages) == 4
    rig.copied(copy)
    put = rig.take(commands.StorePages)
    assert len(put.host_pages) == 8
    rig.step(events.PagesStored, op=put.op, stored=8, written=6)
    counters = rig.core.state.counters
    assert (counters["pages_stored"], counters["pages_stored_again"]) == (4 + 6, 2)


def test_two_that_generated_the_same_keep_it_once() -> None:
    rig = Rig(growth_reserve_pages=1)
    for name in ("a", "b"):
        rig.make_ready(name, EIGHT)
        rig.step(events.GrowthTaken, request_id=name, page_count=1)
        rig.take(commands.GiveReserve)
    rig.finish("a", b"abcdefghi")
    rig.finish("b", b"abcdefghi")
    assert [told.inserted for told in rig.take_all(commands.ReportFinished)] == [1, 0]
    copies = rig.take_all(commands.CopyPages, target="host")
    for copy in copies:
        rig.copied(copy)
    rig.expect_nothing_held()
    assert rig.core.statistics()["device_cached"] == 9
    assert rig.core.statistics()["host_cached"] == 9


def test_a_request_without_cache_leaves_nothing() -> None:
    rig = Rig()
    rig.make_ready("a", EIGHT, cache=False)
    rig.finish("a", EIGHT)
    assert rig.take(commands.ReportFinished).inserted == 0
    rig.take(commands.ForgetTokens)
    rig.nothing_else()
    rig.expect_nothing_held()
    assert rig.core.statistics()["device_cached"] == 0


def test_output_is_not_kept_where_the_settings_say_so() -> None:
    rig = Rig(growth_reserve_pages=2, keep_output=False)
    rig.make_ready("a", EIGHT)
    rig.step(events.GrowthTaken, request_id="a", page_count=2)
    rig.take(commands.GiveReserve)
    rig.finish("a", b"abcdefghij")
    assert rig.take(commands.ReportFinished).inserted == 0
    assert rig.core.statistics()["device_cached"] == 8


def test_finish_with_less_than_the_prompt_loses_no_page() -> None:
    rig = Rig(growth_reserve_pages=1)
    rig.make_ready("first", EIGHT[:6])
    rig.make_ready("a", EIGHT, cache=False)
    rig.finish("a", EIGHT[:3])
    rig.finish("first", EIGHT[:2])
    for copy in rig.take_all(commands.CopyPages, target="host"):
        rig.copied(copy)
    rig.expect_nothing_held()


def test_a_backup_without_host_memory_stops_there_and_nothing_else_suffers() -> None:
    rig = Rig(host_pages=3)
    rig.attach_storage()
    rig.make_ready("a", EIGHT)
    rig.finish("a", EIGHT)
    copy = rig.take(commands.CopyPages, target="host")
    assert len(copy.target_pages) == 3
    rig.copied(copy)
    assert len(rig.take(commands.StorePages).host_pages) == 3


def test_a_backup_that_fails_gives_its_pages_back() -> None:
    rig = Rig()
    rig.make_ready("a", EIGHT)
    rig.finish("a", EIGHT)
    rig.copied(rig.take(commands.CopyPages, target="host"), error="failed")
    rig.take(commands.ForgetTokens)
    rig.expect_nothing_held()
    assert rig.core.statistics()["host_cached"] == 0


def test_two_backups_of_one_path_keep_one_copy() -> None:
    rig = Rig()
    for name in ("a", "b"):
        rig.make_ready(name, EIGHT)
    for name in ("a", "b"):
        rig.finish(name, EIGHT)
    for copy in rig.take_all(commands.CopyPages, target="host"):
        rig.copied(copy)
    rig.expect_nothing_held()
    assert rig.core.statistics()["host_cached"] == 8


def test_retract_holds_the_request_in_host_memory_until_it_is_resumed() -> None:
    rig = Rig(growth_reserve_pages=2)
    rig.make_ready("a", EIGHT)
    rig.step(events.GrowthTaken, request_id="a", page_count=2)
    rig.take(commands.GiveReserve)
    rig.step(events.RetractRequested, request_id="a", keys=b"abcdefghij", tokens=10)
    rig.copied(rig.take(commands.CopyPages, target="host"))
    assert rig.take(commands.ReportRetracted).held_pages == 10
    rig.flush("l1", "l2")
    assert rig.core.statistics()["host_protected"] == 10
    rig.arrive("a", b"abcdefghijk")
    rig.copied(rig.take(commands.CopyPages, target="device"))
    promise = rig.take(commands.SendPromise)
    assert promise.promised_tokens == 10
    rig.serve(promise)
    assert rig.take(commands.ReportReady).sources["l2"] == 10
    assert rig.core.statistics()["host_protected"] == 0
    assert rig.core.statistics()["requests_retracted"] == 0


def test_a_retracted_request_that_is_dropped_holds_nothing() -> None:
    rig = Rig()
    rig.make_ready("a", EIGHT)
    rig.step(events.RetractRequested, request_id="a", keys=EIGHT, tokens=8)
    rig.copied(rig.take(commands.CopyPages, target="host"))
    rig.step(events.RetractedDropped, request_id="a")
    rig.expect_nothing_held()
    assert rig.core.statistics()["requests_retracted"] == 0


def test_a_retract_that_cannot_reach_the_host_says_so() -> None:
    rig = Rig(host_pages=0)
    rig.make_ready("a", EIGHT)
    rig.step(events.RetractRequested, request_id="a", keys=EIGHT, tokens=8)
    assert rig.take(commands.ReportRetracted).held_pages == 0
    rig.step(events.RetractedDropped, request_id="a")
    rig.expect_nothing_held()


def test_flush_spares_what_is_locked_and_says_how_much() -> None:
    rig = Rig()
    rig.make_cached("past", b"stuv")
    rig.make_ready("a", EIGHT)
    told = rig.flush("l1", "l2")
    assert told.dropped == {"l1": 4, "l2": 4}
    assert told.spared == {"l1": 8, "l2": 0}


def test_calls_for_what_is_over_are_counted_and_nothing_else() -> None:
    rig = Rig()
    rig.abort("nobody")
    rig.finish("nobody", b"")
    rig.step(events.GrowthTaken, request_id="nobody", page_count=1)
    rig.step(events.RetractedDropped, request_id="nobody")
    rig.nothing_else()
    assert rig.core.statistics()["calls_late"] == 3


def test_lock_receipts_return_to_zero_after_every_kind_of_transfer() -> None:
    rig = Rig()

    def locks() -> int:
        return sum(node.anchored + node.host_anchored for node in rig.core.state.index.nodes())

    rig.make_ready("full", EIGHT)
    rig.make_ready("incremental", b"abcdefghij")
    rig.make_ready("hit", EIGHT)
    assert locks() == 3
    rig.arrive("failed", b"abcdefxy")
    rig.promised(rig.take(commands.SendPromise))
    assert locks() == 4
    rig.step(events.RoomFailed, request_id="failed", generation=0, cause="no", settled=True)
    assert locks() == 3
    for name, tokens in (("full", EIGHT), ("incremental", b"abcdefghij"), ("hit", EIGHT)):
        rig.finish(name, tokens)
    for copy in rig.take_all(commands.CopyPages, target="host"):
        rig.copied(copy)
    assert locks() == 0
    rig.expect_nothing_held()
