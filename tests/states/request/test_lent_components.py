"""Component pages that the embedder lends and offers, beside those of the full KV."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from simulation.rig import Rig, ids
from tests.support.component_stories import state, window
from tests.support.each_call import raised_at_each_call
from tidekv.states import commands, events
from tidekv.states.errors import IllegalEvent
from tidekv.states.records.loan import Loan

TOKENS = b"abcdefgh"
PAGES = (4, 9, 2, 7, 1, 30, 3, 8)
LENT = {"window": (5, 2, 9), "state": (6,)}
OTHER = {"window": (1, 3, 4), "state": (2,)}


def lent_rig(*, storage: bool = False, **settings: object) -> Rig:
    rig = Rig(lends_device=True, components=(window(), state()), **settings)  # type: ignore[arg-type]  # Not a number.
    if storage:
        rig.attach_storage(component_pages=True)
    return rig


def lend(rig: Rig, request_id: str = "a", **fields: object) -> None:
    rig.arrive(request_id, TOKENS, **{"lent_pages": PAGES, "lent_components": LENT, **fields})


def offer(rig: Rig, **fields: object) -> None:
    rig.offer(TOKENS, range(16, 24), **{"offered_components": OTHER, **fields})


def kept(rig: Rig) -> None:
    """Everything is in host memory."""
    offer(rig)
    rig.settle()
    rig.expect_nothing_held()


def device(rig: Rig, name: str) -> tuple[int, int]:
    counts = rig.core.statistics()
    return counts[f"{name}_device_owned"], counts[f"{name}_device_draining"]


def test_prefill_is_asked_for_the_pages_of_every_group() -> None:
    rig = lent_rig()
    lend(rig)
    promise = rig.take(commands.SendPromise)
    assert promise.component_pages is not None
    assert [(each.component, each.first, ids(each.pages)) for each in promise.component_pages] == [
        ("window", 5, [5, 2, 9]),
        ("state", 7, [6]),
    ]
    rig.serve(promise)
    rig.take(commands.SendReceived)
    assert rig.take(commands.ReportRestored).restored_tokens == 8
    rig.nothing_else()
    rig.expect_nothing_held()


def test_an_offer_copies_what_host_memory_lacks_of_every_group_once() -> None:
    rig = lent_rig()
    offer(rig)
    assert len(rig.take(commands.CopyPages, target="host").target_pages) == 8
    copies = rig.take_all(commands.CopyPages, of_components=True)
    assert {copy.component: ids(copy.source_pages) for copy in copies} == {"window": [1, 3, 4], "state": [2]}
    assert {copy.target for copy in copies} == {"host"}


def test_host_memory_fills_the_pages_of_every_group_without_prefill() -> None:
    rig = lent_rig()
    kept(rig)
    lend(rig)
    copies = {copy.component: ids(copy.target_pages) for copy in rig.take_all(commands.CopyPages, of_components=True)}
    assert copies == {"window": [5, 2, 9], "state": [6]}
    promise = rig.take(commands.SendPromise)
    assert promise.component_pages is not None
    assert [len(each.pages) for each in promise.component_pages] == [0, 0]


def test_a_failed_copy_is_asked_of_prefill_into_the_same_pages() -> None:
    rig = lent_rig()
    kept(rig)
    lend(rig)
    rig.copied(rig.take(commands.CopyPages, target="device"))
    promise = rig.take(commands.SendPromise)
    rig.serve(promise)
    for copy in rig.take_all(commands.CopyPages, of_components=True):
        rig.copied(copy, "broken" if copy.component == "state" else "")
    extend = rig.take(commands.SendExtend)
    assert (extend.component, extend.first, ids(extend.pages)) == ("state", 7, [6])
    rig.chunk(extend)
    rig.take(commands.SendReceived)
    assert rig.take(commands.ReportRestored).sources == {"l1": 0, "l2": 8, "l3": 0, "transfer": 0}
    rig.expect_nothing_held()


def test_an_abort_gives_component_pages_back_when_the_copies_into_them_have_ended() -> None:
    rig = lent_rig()
    kept(rig)
    lend(rig)
    rig.abort("a")
    assert (device(rig, "window"), device(rig, "state")) == ((0, 3), (0, 1))
    rig.drained(rig.take(commands.SendAbort))
    rig.copied(rig.take(commands.CopyPages, target="device"))
    first, second = rig.take_all(commands.CopyPages, of_components=True)
    rig.copied(first)
    assert not rig.take_all(commands.ReportFailed)
    rig.copied(second)
    rig.take(commands.ReportFailed)
    rig.expect_nothing_held()


def test_a_late_copy_into_lent_pages_is_waited_for() -> None:
    rig = lent_rig(copy_deadline_s=1.0)
    kept(rig)
    lend(rig)
    rig.copied(rig.take(commands.CopyPages, target="device"))
    copies = rig.take_all(commands.CopyPages, of_components=True)
    rig.serve(rig.take(commands.SendPromise))
    rig.wait_until(rig.now_s + 3.0)
    rig.nothing_else()
    for copy in copies:
        rig.copied(copy)
    rig.take(commands.SendReceived)
    assert rig.take(commands.ReportRestored).restored_tokens == 8
    assert rig.core.statistics()["copies_late"] == 2
    rig.expect_nothing_held()


def test_the_deadline_returns_the_end_that_the_embedder_holds() -> None:
    rig = lent_rig()
    lend(rig, held_pages=3, deadline_at_s=5.0)
    promise = rig.take(commands.SendPromise)
    rig.promised(promise)
    rig.chunk(promise, count=4, last=False)
    rig.wait_until(6.0)
    rig.drained(rig.take(commands.SendAbort))
    restored = rig.take(commands.ReportRestored)
    assert (restored.restored_tokens, restored.cause) == (3, "deadline")
    rig.expect_nothing_held()


def test_the_next_prefill_is_not_asked_for_component_pages_that_are_in_place() -> None:
    rig = lent_rig()
    kept(rig)
    lend(rig, prefill_count=2)
    rig.copied(rig.take(commands.CopyPages, target="device"))
    for copy in rig.take_all(commands.CopyPages, of_components=True):
        rig.copied(copy)
    promise = rig.take(commands.SendPromise)
    rig.promised(promise)
    rig.step(events.RoomFailed, request_id="a", generation=promise.generation, cause="gone", settled=True)
    again = rig.take(commands.SendPromise)
    assert again.component_pages is not None
    assert [len(each.pages) for each in again.component_pages] == [0, 0]
    assert not rig.take_all(commands.CopyPages, of_components=True)


def committing() -> tuple[Rig, Callable[[], object]]:
    rig = lent_rig()
    lend(rig)
    promise = rig.take(commands.SendPromise)
    rig.promised(promise)
    rig.aux(promise)
    return rig, lambda: rig.chunk(promise)


def aborting() -> tuple[Rig, Callable[[], object]]:
    rig = lent_rig()
    kept(rig)
    lend(rig)
    return rig, lambda: rig.abort("a")


def copying() -> tuple[Rig, Callable[[], object]]:
    rig = lent_rig()
    kept(rig)
    lend(rig)
    rig.copied(rig.take(commands.CopyPages, target="device"))
    rig.serve(rig.take(commands.SendPromise))
    first, second = rig.take_all(commands.CopyPages, of_components=True)
    rig.copied(first)
    return rig, lambda: rig.copied(second)


@pytest.mark.parametrize("prepare", [committing, aborting, copying])
def test_a_raise_at_any_call_ends_the_request_once_and_gives_every_page_back(
    prepare: Callable[[], tuple[Rig, Callable[[], object]]],
) -> None:
    for call, rig in raised_at_each_call(prepare):
        told = rig.settle()
        ends = [wish for wish in told if isinstance(wish, commands.ReportRestored | commands.ReportFailed)]
        assert len(ends) == 1, (call, told)
        rig.expect_nothing_held()
        rig.core.check()
        lend(rig, "next")


def offering() -> tuple[Rig, Callable[[], object]]:
    rig = lent_rig(storage=True)
    return rig, lambda: offer(rig)


def joining() -> tuple[Rig, Callable[[], object]]:
    rig = lent_rig(storage=True)
    offer(rig)
    first, second = rig.take_all(commands.CopyPages, of_components=True)
    rig.copied(rig.take(commands.CopyPages, target="host"))
    rig.copied(first)
    return rig, lambda: rig.copied(second)


@pytest.mark.parametrize("prepare", [offering, joining])
def test_a_raise_at_any_call_ends_the_offer_once(prepare: Callable[[], tuple[Rig, Callable[[], object]]]) -> None:
    for call, rig in raised_at_each_call(prepare):
        told = rig.settle()
        ends = [wish for wish in told if isinstance(wish, commands.ReportOffered)]
        assert len(ends) == 1, (call, told)
        rig.expect_nothing_held()
        rig.core.check()


@pytest.mark.parametrize(
    "lent",
    [{}, {"window": (5, 2, 9)}, {**LENT, "window": (5, 2)}, {**LENT, "draft": (1,)}],
)
def test_a_core_takes_one_page_for_each_position_that_the_end_needs(lent: dict[str, tuple[int, ...]]) -> None:
    rig = lent_rig()
    with pytest.raises(IllegalEvent, match="lends pages"):
        lend(rig, lent_components=lent)
    rig.expect_nothing_held()


@pytest.mark.parametrize("offered", [{"window": (1, 2, 3, 4)}, {"state": (1, 2)}, {"draft": (1,)}, {"state": ()}])
def test_a_core_takes_offers_of_pages_of_their_end_only(offered: dict[str, tuple[int, ...]]) -> None:
    rig = lent_rig()
    with pytest.raises(IllegalEvent, match="not those of its end"):
        offer(rig, offered_components=offered)
    rig.expect_nothing_held()


def groups_of(held: int) -> Loan:
    return Loan(PAGES, LENT, (window(), state()), held=held, page_size=1)


def test_a_prefix_is_in_place_where_every_group_can_continue() -> None:
    groups = groups_of(held=2)
    groups.full.note(2, 6, "transfer")
    assert groups.restored == 2
    groups.components["window"].note(5, 3, "l2")
    assert groups.restored == 2
    groups.components["state"].note(7, 1, "l3")
    assert groups.restored == 8
    assert groups.sources(prompt_tokens=8, page_size=1) == {"l1": 2, "l2": 0, "l3": 0, "transfer": 6}


@pytest.mark.parametrize(("held", "restored"), [(5, 7), (6, 7), (4, 4)])
def test_windows_alone_continue_where_their_pages_are_in_place(held: int, restored: int) -> None:
    groups = Loan(PAGES, {"window": LENT["window"]}, (window(),), held=held, page_size=1)
    groups.full.note(held, 7 - held, "transfer")
    groups.components["window"].note(max(held, 5), 7 - max(held, 5), "transfer")
    # The window of seven pages begins at the fifth; only what is held or lent of it counts.
    assert groups.restored == restored


def test_the_next_prefill_is_not_asked_for_the_record_of_a_partial_page_that_is_in_place() -> None:
    rig = Rig(lends_device=True, components=(state(),), page_size=4, key_bytes=4)
    rig.arrive("a", b"abcdefghij", prefill_count=2)
    promise = rig.take(commands.SendPromise)
    rig.promised(promise)
    rig.chunk(promise)
    rig.step(events.RoomFailed, request_id="a", generation=promise.generation, cause="gone", settled=True)
    again = rig.take(commands.SendPromise)
    assert again.component_pages is not None
    assert (len(again.pages), [len(each.pages) for each in again.component_pages]) == (0, [0])
    rig.serve(again)
    rig.take(commands.SendReceived)
    assert rig.take(commands.ReportRestored).restored_tokens == 10
    rig.expect_nothing_held()
