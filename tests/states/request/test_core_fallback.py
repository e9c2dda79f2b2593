"""The core, stepped by hand: a tier that falls short costs an extend, and never the request."""

from __future__ import annotations

import pytest

from simulation.rig import Rig, ids
from tidekv.states import commands, events
from tidekv.states.records.stages import State

EIGHT = b"abcdefgh"


def in_prefetch(rig: Rig, found: int = 6) -> tuple[list[commands.FetchPages], commands.SendPromise]:
    """Request "a" waits for fetches of its first pages; prefill has sent the rest."""
    rig.attach_storage()
    rig.arrive("a", EIGHT)
    rig.answer(rig.take(commands.QueryStorage), found)
    promise = rig.take(commands.SendPromise)
    rig.serve(promise)
    return rig.take_all(commands.FetchPages), promise


def expect_extend(rig: Rig, first: int, count: int, span: int = 1) -> commands.SendExtend:
    """Exactly these pages are asked of prefill as well."""
    extend = rig.take(commands.SendExtend)
    assert (extend.span, extend.first, len(extend.pages)) == (span, first, count)
    return extend


def test_a_query_that_fails_leaves_all_to_prefill() -> None:
    rig = Rig()
    rig.attach_storage()
    rig.arrive("a", EIGHT)
    rig.answer(rig.take(commands.QueryStorage), 0, error="EIO")
    assert rig.take(commands.SendPromise).promised_tokens == 0
    assert rig.core.statistics()["l3_queries_failed"] == 1


def test_a_query_that_raises_leaves_all_to_prefill() -> None:
    rig = Rig()
    rig.attach_storage()
    rig.arrive("a", EIGHT)
    rig.step(events.CommandRaised, op=rig.take(commands.QueryStorage).op, detail="")
    assert rig.take(commands.SendPromise).promised_tokens == 0


def test_a_policy_that_waits_for_fetches_waits_for_the_answer_until_its_deadline_and_holds_no_pages() -> None:
    rig = Rig(query_deadline_s=0.5, prefetch="wait_complete")
    rig.attach_storage()
    rig.arrive("a", EIGHT)
    query = rig.take(commands.QueryStorage)
    rig.wait_until(0.4)
    rig.nothing_else()
    assert rig.core.statistics()["device_free"] == rig.settings.device_pages
    rig.wait_until(0.6)
    assert rig.take(commands.SendPromise).promised_tokens == 0
    rig.answer(query, 8)
    rig.nothing_else()
    assert rig.core.statistics()["outcomes_late"] == 1
    assert rig.core.statistics()["l3_queries_late"] == 1


def test_a_read_that_falls_short_in_its_middle_asks_for_exactly_what_is_missing() -> None:
    rig = Rig()
    (fetch,), _ = in_prefetch(rig)
    rig.fetched(fetch, valid=4)
    copy = rig.take(commands.CopyPages, target="device")
    assert list(copy.source_pages) == list(fetch.host_pages[:4])
    extend = expect_extend(rig, 4, 2)
    rig.nothing_else()
    rig.copied(copy)
    assert rig.state("a") == "TRANSFER"
    rig.chunk(extend)
    assert rig.take(commands.ReportReady).sources == {"l1": 0, "l2": 0, "l3": 4, "transfer": 4}
    assert rig.core.statistics()["host_cached"] == 4


def test_a_read_that_brings_nothing_asks_for_all_of_it() -> None:
    rig = Rig()
    (fetch,), _ = in_prefetch(rig)
    rig.fetched(fetch, valid=0, error="EIO")
    rig.chunk(expect_extend(rig, 0, 6))
    assert rig.take(commands.ReportReady).sources == {"l1": 0, "l2": 0, "l3": 0, "transfer": 8}
    assert rig.core.statistics()["host_owned"] == rig.core.statistics()["host_cached"] == 0


def test_a_read_that_is_short_in_one_run_leaves_the_others_alone() -> None:
    rig = Rig(fetch_run_pages=2)
    fetches, _ = in_prefetch(rig)
    rig.fetched(fetches[1], valid=1)
    extend = expect_extend(rig, 3, 1)
    rig.fetched(fetches[2])
    rig.fetched(fetches[0])
    for copy in rig.take_all(commands.CopyPages, target="device"):
        rig.copied(copy)
    rig.chunk(extend)
    assert rig.take(commands.ReportReady).sources == {"l1": 0, "l2": 0, "l3": 5, "transfer": 3}


def test_a_late_read_is_asked_of_prefill_at_once_and_gives_its_host_pages_back_when_it_ends() -> None:
    rig = Rig(prefetch_base_s=1.0)
    (fetch,), _ = in_prefetch(rig)
    rig.wait_until(1.5)
    extend = expect_extend(rig, 0, 6)
    assert rig.core.statistics()["host_owned"] == 6
    rig.chunk(extend)
    rig.take(commands.ReportReady)
    rig.finish("a", EIGHT)
    rig.fetched(fetch)
    assert rig.core.statistics()["host_owned"] == 8  # The backup of the finished request.
    rig.copied(rig.take(commands.CopyPages, target="host"))
    rig.stored(rig.take(commands.StorePages))
    rig.expect_nothing_held()


@pytest.mark.parametrize("raised", [False, True])
def test_a_copy_that_fails_is_asked_of_prefill(raised: bool) -> None:
    rig = Rig()
    rig.make_cached("past", EIGHT[:6])
    rig.flush("l1")
    rig.arrive("a", EIGHT)
    copy = rig.take(commands.CopyPages, target="device")
    rig.serve(rig.take(commands.SendPromise))
    if raised:
        rig.step(events.CommandRaised, op=copy.op, detail="")
    else:
        rig.copied(copy, error="device event failed")
    extend = expect_extend(rig, 0, 6)
    assert list(extend.pages) == list(copy.target_pages)
    rig.chunk(extend)
    assert rig.take(commands.ReportReady).sources == {"l1": 0, "l2": 0, "l3": 0, "transfer": 8}
    assert rig.core.statistics()["host_protected"] == 0


def test_an_extend_that_prefill_refuses_starts_over_with_the_next_prefill() -> None:
    rig = Rig()
    rig.attach_storage()
    rig.arrive("a", EIGHT, prefill_count=2)
    rig.answer(rig.take(commands.QueryStorage), 6)
    promise, fetch = rig.take(commands.SendPromise), rig.take(commands.FetchPages)
    rig.serve(promise)
    rig.fetched(fetch, valid=0)
    extend = expect_extend(rig, 0, 6)
    rig.step(
        events.RoomRefused, request_id="a", generation=promise.generation, span=extend.span, cause="no longer there"
    )
    rig.drained(rig.take(commands.SendAbort))
    rig.answer(rig.take(commands.QueryStorage), 0)
    again = rig.take(commands.SendPromise)
    assert (again.prefill, again.promised_tokens, again.renewed) == (1, 0, True)
    rig.serve(again)
    rig.take(commands.ReportReady)


def test_several_extends_of_one_room_are_numbered() -> None:
    rig = Rig(fetch_run_pages=2)
    fetches, _ = in_prefetch(rig)
    extends = []
    for number, fetch in enumerate(fetches):
        rig.fetched(fetch, valid=0)
        extends.append(expect_extend(rig, 2 * number, 2, span=number + 1))
    for extend in reversed(extends):
        assert rig.state("a") == "TRANSFER"
        rig.chunk(extend)
    assert ids(rig.take(commands.ReportReady).pages)


def test_the_end_of_a_late_recomputation_admits_a_request_that_waits_for_its_pages() -> None:
    rig = Rig(device_pages=8)
    rig.arrive("a", EIGHT, can_recompute=True)
    rig.promised(rig.take(commands.SendPromise))
    rig.step(events.WriterLost, writer="prefill.1", cause="silence")
    rig.step(events.WriterDead, writer="prefill.1")
    recompute = rig.take(commands.Recompute)
    rig.abort("a")
    rig.take_all(commands.ReportFailed)
    # The caller still writes to all pages of the pool.
    rig.arrive("b", bytes(range(20, 28)))
    rig.take_all(commands.QueryStorage)
    assert rig.request("b").state is State.PREALLOC
    assert not rig.take_all(commands.SendPromise)
    rig.step(events.Recomputed, op=recompute.op, error="")
    assert rig.take(commands.SendPromise).request_id == "b"
