"""What the core believes of storage, stepped by hand: hits above it renew its pages, and find what it has lost."""

from __future__ import annotations

import pytest

from simulation.rig import Rig
from tidekv.states import commands, events
from tidekv.states.storage_policy import changed_policy, policy_of

EIGHT = b"abcdefgh"


def stored_rig(**settings: object) -> Rig:
    """A rig whose storage has the pages of EIGHT."""
    rig = Rig(renew_s=30.0, **settings)
    rig.attach_storage()
    rig.make_cached("past", EIGHT)
    return rig


def turn(rig: Rig, name: str, tokens: bytes) -> list[commands.StorePages]:
    """A whole request; returns the puts that it leads to."""
    rig.make_ready(name, tokens)
    rig.finish(name, tokens)
    for copy in rig.take_all(commands.CopyPages, target="host"):
        rig.copied(copy)
    return rig.take_all(commands.StorePages)


def test_a_page_in_use_is_renewed_once_a_period_and_not_more_often() -> None:
    rig = stored_rig()
    assert turn(rig, "a", EIGHT) == []
    rig.now_s += 29.0
    assert turn(rig, "b", EIGHT) == []
    rig.now_s += 2.0
    (renewal,) = turn(rig, "c", EIGHT)
    assert (len(renewal.host_pages), renewal.asked) == (8, 0)
    rig.stored(renewal)
    assert turn(rig, "d", EIGHT) == []
    assert rig.core.state.counters["pages_stored"] == 8
    assert rig.core.state.counters["pages_stored_again"] == 0


def test_a_worker_that_fills_a_small_storage_renews_pages_sooner() -> None:
    rig = Rig(renew_s=1000.0)
    rig.step(events.StorageChanged, available=True, capacity_pages=64)
    rig.make_cached("past", EIGHT)
    rig.make_cached("other", b"0123")
    (renewal,) = turn(rig, "a", EIGHT)
    rig.stored(renewal)
    assert turn(rig, "b", EIGHT) == [], "nothing was put since"


def test_pages_that_storage_has_lost_are_not_believed_to_be_there_and_are_put_again() -> None:
    rig = stored_rig()
    (put,) = turn(rig, "a", EIGHT + b"ijkl")
    rig.step(events.PagesStored, op=put.op, stored=2, written=0)
    (again,) = turn(rig, "b", EIGHT)
    assert len(again.host_pages) == 8
    rig.step(events.PagesStored, op=again.op, stored=8, written=6)
    assert rig.core.state.counters["pages_stored"] == 8 + 6
    assert turn(rig, "c", EIGHT) == []


def test_a_storage_that_is_detached_leaves_no_marks() -> None:
    rig = stored_rig()
    tree = rig.core.state.index.tree
    assert all(tree.is_stored(node) for node in tree.nodes())
    rig.step(events.StorageChanged, available=False)
    assert not any(tree.is_stored(node) for node in tree.nodes())


def test_a_failed_put_is_no_evidence_about_what_storage_has() -> None:
    rig = stored_rig()
    (put,) = turn(rig, "a", EIGHT + b"ijkl")
    rig.step(events.PagesStored, op=put.op, stored=0, error="down")
    assert turn(rig, "b", EIGHT) == []


def test_pages_that_came_from_storage_are_renewed_in_their_order() -> None:
    rig = stored_rig()
    rig.flush("l1", "l2")
    rig.arrive("a", EIGHT)
    rig.answer(rig.take(commands.QueryStorage), 8)
    rig.fetched(rig.take(commands.FetchPages))
    rig.copied(rig.take(commands.CopyPages, target="device"))
    rig.serve(rig.take(commands.SendPromise))
    rig.finish("a", EIGHT)
    assert len(rig.take(commands.StorePages).host_pages) == 8


def test_with_write_back_a_hit_renews_what_storage_has_and_puts_nothing_else() -> None:
    rig = stored_rig(write="through")
    rig.step(events.PolicyChanged, policy=policy(rig, write="back"))
    rig.flush("l2")
    rig.now_s += 31.0
    (renewal,) = turn(rig, "a", EIGHT + b"ijkl")
    assert (len(renewal.host_pages), renewal.asked) == (0, 8)
    # While storage is asked, the pages cannot leave the tree.
    rig.flush("l1")
    rig.stored(renewal)
    assert turn(rig, "b", EIGHT) == []
    rig.settle()
    rig.expect_nothing_held()


def test_with_write_back_a_page_that_storage_has_lost_is_copied_before_it_is_evicted() -> None:
    rig = Rig(device_pages=16, host_pages=16, write_back_ahead=1.0)
    rig.attach_storage()
    rig.make_cached("past", EIGHT)
    rig.step(events.PolicyChanged, policy=policy(rig, write="back", write_back_ahead=1.0))
    rig.flush("l2")
    rig.now_s += 31.0
    (renewal,) = turn(rig, "a", EIGHT)
    assert renewal.asked == 8
    rig.stored(renewal, 3)
    copy = rig.take(commands.CopyPages, target="host")
    assert len(copy.source_pages) == 8
    rig.copied(copy)
    rig.settle()
    rig.expect_nothing_held()


@pytest.mark.parametrize("held", [0, 8])
def test_pages_that_are_lent_renew_what_storage_has_whichever_copy_was_of_use(held: int) -> None:
    rig = stored_rig(lends_device=True)
    for wait_s, renewals in ((1.0, 0), (31.0, 1), (1.0, 0)):
        rig.now_s += wait_s
        rig.arrive("a", EIGHT, lent_pages=tuple(range(8, 16)), held_pages=held)
        for copy in rig.take_all(commands.CopyPages, target="device"):
            rig.copied(copy)
        rig.serve(rig.take(commands.SendPromise))
        rig.take(commands.ReportRestored)
        puts = rig.take_all(commands.StorePages)
        assert [len(put.host_pages) for put in puts] == [8] * renewals
        for put in puts:
            rig.stored(put)
    rig.take_all(commands.SendReceived)
    rig.expect_nothing_held()


def policy(rig: Rig, **changes: object) -> object:
    return changed_policy(policy_of(rig.core.state.settings), changes)


def test_a_renewal_that_has_waited_protects_what_came_to_the_host_meanwhile() -> None:
    rig = stored_rig(write="through", store_wait_s=5.0, prefetch_base_s=100.0)
    rig.step(events.PolicyChanged, policy=policy(rig, write="back"))
    rig.flush("l2")
    rig.now_s += 31.0
    rig.arrive("reads", b"stuvwxyz")
    rig.answer(rig.take(commands.QueryStorage), 8)
    fetch = rig.take(commands.FetchPages)
    rig.take_all(commands.SendPromise)
    assert turn(rig, "a", EIGHT) == [], "puts wait for the fetch"
    rig.make_ready("b", EIGHT)
    rig.step(events.RetractRequested, request_id="b", keys=EIGHT, tokens=len(EIGHT))
    rig.copied(rig.take(commands.CopyPages, target="host"))
    rig.step(events.RetractedDropped, request_id="b")
    rig.take_all(commands.StorePages)
    rig.fetched(fetch)
    (renewal,) = rig.take_all(commands.StorePages)
    assert len(renewal.host_pages) == 8
    rig.flush("l2")
    free = set(rig.core.state.host.free_pages)
    assert not free & set(renewal.host_pages), "a page that is read must not be given to another"
