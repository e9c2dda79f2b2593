"""Work ahead (of eviction, of admission) with rules that raise: at every call, nothing is lost and no request fails."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from simulation.rig import Rig
from tests.support.each_call import raised_at_each_call
from tidekv.states import commands, events
from tidekv.states.errors import BrokenInvariant
from tidekv.states.prefix.index import PrefixIndex

EIGHT = b"abcdefgh"
BIG = bytes(range(128, 152))
RequestTrace = Callable[[], tuple[Rig, Callable[[], object]]]


def waiting() -> tuple[Rig, commands.QueryStorage]:
    rig = Rig(device_pages=24, host_pages=16, lookahead_pages_max=100, fetch_run_pages=3)
    rig.attach_storage()
    rig.make_ready("big", BIG)
    rig.arrive("a", EIGHT)
    return rig, rig.take(commands.QueryStorage)


def under_way() -> tuple[Rig, list[commands.FetchPages]]:
    rig, query = waiting()
    rig.answer(query, 8)
    return rig, rig.take_all(commands.FetchPages)


def answer() -> tuple[Rig, Callable[[], object]]:
    rig, query = waiting()
    return rig, lambda: rig.answer(query, 8)


def landing() -> tuple[Rig, Callable[[], object]]:
    rig, (first, second, third) = under_way()
    rig.fetched(second)
    rig.pending.append(third)
    return rig, lambda: rig.fetched(first)


def short_landing() -> tuple[Rig, Callable[[], object]]:
    rig, (first, second, third) = under_way()
    rig.fetched(third)
    rig.pending.append(second)
    return rig, lambda: rig.fetched(first, 1)


def late() -> tuple[Rig, Callable[[], object]]:
    rig, runs = under_way()
    rig.fetched(runs[2])
    rig.pending += runs[:2]
    return rig, lambda: rig.wait_until(20.0)


def admission() -> tuple[Rig, Callable[[], object]]:
    rig, (first, second, third) = under_way()
    rig.fetched(first)
    rig.fetched(third)
    rig.pending.append(second)
    return rig, lambda: rig.abort("big")


def abort() -> tuple[Rig, Callable[[], object]]:
    rig, (first, second, third) = under_way()
    rig.fetched(first)
    rig.fetched(third)
    rig.pending.append(second)
    return rig, lambda: rig.abort("a")


def write_back(**settings: object) -> Rig:
    rig = Rig(
        **{
            "device_pages": 16,
            "host_pages": 8,
            "write": "back",
            "write_back_ahead": 1.0,
            "store_wait_s": 0.0,
            **settings,
        }
    )
    rig.attach_storage()
    rig.make_ready("big", EIGHT)
    return rig


def finish() -> tuple[Rig, Callable[[], object]]:
    rig = write_back()
    return rig, lambda: rig.finish("big", EIGHT)


def copied_ahead() -> tuple[Rig, Callable[[], object]]:
    rig = write_back()
    rig.finish("big", EIGHT)
    copy = rig.take(commands.CopyPages, target="host")
    return rig, lambda: rig.copied(copy)


def store_ahead() -> tuple[Rig, Callable[[], object]]:
    rig = write_back()
    rig.finish("big", EIGHT)
    rig.copied(rig.take(commands.CopyPages, target="host"))
    put = rig.take(commands.StorePages)
    return rig, lambda: rig.stored(put)


@pytest.mark.parametrize(
    "story",
    [answer, landing, short_landing, late, admission, abort, finish, copied_ahead, store_ahead],
    ids=lambda story: story.__name__,
)
def test_a_raise_at_any_call_loses_nothing(story: RequestTrace) -> None:
    for _, rig in raised_at_each_call(story):
        rig.settle()
        for name in ("a", "big"):
            if rig.core.request(name) is not None:
                rig.abort(name)
                rig.settle()
        rig.expect_nothing_held()
        assert rig.core.storage.pages_in_flight == 0
        assert rig.core.lookahead.pages == 0


@pytest.mark.parametrize("story", [answer, landing], ids=lambda story: story.__name__)
def test_look_ahead_that_raises_costs_its_request_no_more_than_storage(story: RequestTrace) -> None:
    for _, rig in raised_at_each_call(story):
        assert rig.take_all(commands.ReportFailed) == []
        assert rig.state("a") == "PREALLOC"


def test_a_broken_invariant_is_met_by_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise BrokenInvariant("at last")

    rig, query = waiting()
    with monkeypatch.context() as patch:
        patch.setattr(PrefixIndex, "pin", broken)
        with pytest.raises(BrokenInvariant, match="at last"):
            rig.core.step(events.StorageAnswered(at_s=0.0, op=query.op, found=8))
    rig = write_back()
    with monkeypatch.context() as patch:
        patch.setattr(PrefixIndex, "lock", broken)
        with pytest.raises(BrokenInvariant, match="at last"):
            rig.core.step(events.FinishRequested(at_s=0.0, request_id="big", keys=EIGHT, tokens=8))


# --- What else can be in the way ---


def test_void_pages_are_in_the_way_of_what_was_fetched_ahead() -> None:
    rig = Rig(device_pages=24, host_pages=24, lookahead_pages_max=100, copy_deadline_s=0.5)
    rig.attach_storage()
    rig.make_cached("past", EIGHT[:6])
    rig.flush("l1")
    rig.arrive("b", EIGHT[:6] + b"xy")
    rig.answer(rig.take(commands.QueryStorage), 0)
    copy = rig.take(commands.CopyPages, target="device")
    rig.promised(rig.take(commands.SendPromise))
    # Its request has left, and the copy is late: its pages are reclaimed.
    rig.abort("b")
    rig.take(commands.ReportFailed)
    rig.drained(rig.take(commands.SendAbort))
    rig.wait_until(1.0)
    rig.make_ready("big", BIG[:6])
    rig.arrive("a", EIGHT)
    assert rig.state("a") == "PREALLOC"
    rig.answer(rig.take(commands.QueryStorage), 6)
    for fetch in rig.take_all(commands.FetchPages):
        rig.fetched(fetch)
    assert rig.core.state.host.owned == 0
    rig.copied(copy)
    rig.core.check()


def test_an_answer_that_comes_when_storage_is_gone_starts_nothing() -> None:
    rig, query = waiting()
    rig.step(events.StorageChanged, available=False)
    rig.answer(query, 8)
    rig.nothing_else()
    assert rig.core.lookahead.pages == 0


def test_who_was_faster_is_in_the_way_of_a_read_that_was_begun_ahead() -> None:
    """Another request is admitted first, and loads the very pages that are fetched ahead for this one."""
    rig, runs = under_way()
    rig.arrive("b", EIGHT[:2], priority=1000)
    for query in rig.take_all(commands.QueryStorage):
        rig.answer(query, 2)
    rig.abort("big")
    rig.settle()
    for fetch in runs:
        rig.fetched(fetch)
    rig.settle()
    for name in ("a", "b"):
        if rig.core.request(name) is not None:
            rig.abort(name)
    rig.settle()
    rig.expect_nothing_held()
    assert rig.core.storage.pages_in_flight == 0


def test_no_more_than_some_puts_ahead_are_under_way() -> None:
    rig = write_back(device_pages=64, host_pages=64)
    rig.abort("big")
    for number in range(6):
        tokens = bytes(range(10 * number, 10 * number + 5))
        rig.make_ready(f"r{number}", tokens)
        rig.finish(f"r{number}", tokens)
        for copy in rig.take_all(commands.CopyPages, target="host"):
            rig.copied(copy)
    puts = rig.take_all(commands.StorePages)
    assert len(puts) == 4
    assert rig.core.state.host.cached == 38
    rig.stored(puts[0])
    assert len(rig.take_all(commands.StorePages)) == 1


def test_host_pages_may_come_ahead_of_a_fetch_of_the_same_pages() -> None:
    rig = Rig(device_pages=24, host_pages=24)
    rig.attach_storage()
    rig.arrive("a", EIGHT)
    rig.answer(rig.take(commands.QueryStorage), 4)
    rig.promised(rig.take(commands.SendPromise))
    (fetch,) = rig.take_all(commands.FetchPages)
    index, host = rig.core.state.index, rig.core.state.host
    node, unused = index.insert_host(index.tree.root(""), EIGHT[:2], host.take(2))
    assert (node.depth_pages, len(unused), index.host_protected) == (2, 0, 2)
    rig.fetched(fetch)
    assert host.cached == 4
    assert host.owned == 0
    rig.copied(rig.take(commands.CopyPages, target="device"))
    assert index.host_protected == 0
