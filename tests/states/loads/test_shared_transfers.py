"""Requests with a common prefix share the transfer of it before the first of them is READY, but not its failures."""

from __future__ import annotations

from typing import Any

import pytest

from simulation.rig import Rig, ids
from tidekv.states import commands, events
from tidekv.states.component_specs import Component
from tidekv.states.errors import InvalidConfig

PREFIX = b"abcdefgh"
A, B, C = PREFIX + b"123x", PREFIX + b"45y", PREFIX + b"457z"
"""Prompts of one token a page: A and B share 8 pages, B and C 10."""


def sharing(**settings: Any) -> Rig:
    """A rig with requests that share transfers, and prompts that end on a partly filled page."""
    return Rig(share_transfers=True, page_size=1, **settings)


def ask(rig: Rig, name: str, tokens: bytes, **fields: Any) -> commands.SendPromise:
    """A request arrives, and its promise is sent. Its last token has no full page: it is what the keys leave out."""
    rig.arrive(name, tokens, **{"keys": tokens[:-1], **fields})
    promise = rig.take(commands.SendPromise)
    rig.promised(promise, writer=f"prefill of {name}")
    return promise


def sources(ready: commands.ReportReady) -> dict[str, int]:
    return {name: tokens for name, tokens in ready.sources.items() if tokens}


# --- The sender succeeds ---


def test_who_waits_is_sent_only_what_follows_the_common_part_and_at_once() -> None:
    rig = sharing()
    first, second = ask(rig, "a", A), ask(rig, "b", B)
    assert (first.promised_tokens, len(first.pages)) == (0, 12)
    assert (second.promised_tokens, len(second.pages)) == (8, 3)
    rig.chunk(second)
    rig.aux(second)
    rig.nothing_else()
    assert rig.state("b") == "TRANSFER"
    rig.chunk(first)
    ready = rig.take(commands.ReportReady)
    assert (ready.request_id, sources(ready)) == ("b", {"l1": 8, "transfer": 3})
    assert ids(ready.pages) == ids(first.pages[:8] + second.pages)
    rig.aux(first)
    ready = rig.take(commands.ReportReady)
    assert (ready.request_id, sources(ready)) == ("a", {"transfer": 12})
    assert ids(ready.pages) == ids(first.pages)
    assert rig.core.statistics()["shared_transfer_pages"] == 8


def test_the_common_part_is_handed_over_when_it_has_arrived_not_when_all_has() -> None:
    rig = sharing()
    first, second = ask(rig, "a", A), ask(rig, "b", B)
    rig.chunk(second)
    rig.aux(second)
    rig.chunk(first, count=7, last=False)
    rig.nothing_else()
    rig.chunk(first, first=7, count=1, last=False)
    assert rig.take(commands.ReportReady).request_id == "b"
    assert rig.state("a") == "TRANSFER"
    third = ask(rig, "c", C)
    assert third.promised_tokens == 10, "what b brought and a's first pages are cache by now"


def test_what_has_arrived_before_somebody_came_is_theirs_at_once() -> None:
    rig = sharing()
    first = ask(rig, "a", A)
    rig.chunk(first, count=10, last=False)
    second = ask(rig, "b", B)
    assert second.promised_tokens == 8
    rig.chunk(second)
    rig.aux(second)
    assert sources(rig.take(commands.ReportReady)) == {"l1": 8, "transfer": 3}


def test_every_prefill_rank_has_to_have_brought_a_page() -> None:
    rig = sharing()
    rig.arrive("a", A, keys=A[:-1])
    first = rig.take(commands.SendPromise)
    rig.promised(first, ranks=2)
    second = ask(rig, "b", B)
    rig.chunk(second)
    rig.aux(second)
    rig.chunk(first, rank=0)
    rig.nothing_else()
    rig.chunk(first, rank=1)
    assert rig.take(commands.ReportReady).request_id == "b"


def test_requests_in_a_row_each_send_what_is_new_with_them() -> None:
    rig = sharing()
    promises = {name: ask(rig, name, tokens) for name, tokens in (("a", A), ("b", B), ("c", C))}
    assert [promise.promised_tokens for promise in promises.values()] == [0, 8, 10]
    for name in ("c", "b", "a"):
        rig.aux(promises[name])
        rig.chunk(promises[name])
    assert {ready.request_id for ready in rig.take_all(commands.ReportReady)} == {"a", "b", "c"}
    assert rig.core.statistics()["loads"] == 0
    for name in ("a", "b", "c"):
        rig.abort(name)
    rig.settle()
    rig.expect_nothing_held()


def test_of_many_at_once_one_sends_the_prefix() -> None:
    rig = sharing(device_pages=64)
    prompts = {f"r{number}": PREFIX + bytes([number, 0]) for number in range(20)}
    promises = [ask(rig, name, tokens) for name, tokens in prompts.items()]
    assert sum(len(promise.pages) for promise in promises) == 8 + 20 * 2
    for promise in promises:
        rig.chunk(promise)
        rig.aux(promise)
    assert len(rig.take_all(commands.ReportReady)) == 20
    rig.take_all(commands.SendReceived)
    rig.nothing_else()


def test_who_waits_for_memory_needs_none_for_what_is_being_sent() -> None:
    rig = sharing(device_pages=16)
    rig.arrive("a", A, keys=A[:-1])
    rig.take(commands.SendPromise)
    # 12 of 16 pages are a's: b fits only because it shares 8 of them.
    assert ask(rig, "b", B).promised_tokens == 8


# --- The sender leaves ---


def abort(rig: Rig, name: str) -> None:
    rig.abort(name)


def deadline(rig: Rig, name: str) -> None:
    rig.wait_until(10.0)


def prefill_fails(rig: Rig, name: str) -> None:
    rig.step(events.RoomFailed, request_id=name, generation=0, cause="no", settled=False)


def prefill_fails_settled(rig: Rig, name: str) -> None:
    rig.step(events.RoomFailed, request_id=name, generation=0, cause="no", settled=True)


def refused(rig: Rig, name: str) -> None:
    rig.step(events.RoomRefused, request_id=name, generation=0, span=0, cause="no")


def writer_lost(rig: Rig, name: str) -> None:
    rig.step(events.WriterLost, writer=f"prefill of {name}", cause="no heartbeat")


def writer_dead(rig: Rig, name: str) -> None:
    rig.step(events.WriterDead, writer=f"prefill of {name}")


ENDS = (abort, deadline, prefill_fails, prefill_fails_settled, refused, writer_lost, writer_dead)
MOMENTS = ("nothing has come", "a part has come", "the other is complete", "all but the aux record has come")


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("leaves", ENDS)
def test_when_the_sender_ends_the_others_ask_their_own_prefill_at_once(leaves: Any, moment: str) -> None:
    rig = sharing(device_pages=64, share_wait_s=60.0)
    first = ask(rig, "a", A, deadline_at_s=10.0)
    second, third = ask(rig, "b", B), ask(rig, "c", C)
    if moment == "a part has come":
        rig.chunk(first, count=5, last=False)
    elif moment == "the other is complete":
        rig.chunk(second)
        rig.aux(second)
    elif moment == "all but the aux record has come":
        rig.chunk(first)
    leaves(rig, "a")
    assert rig.take(commands.ReportFailed).request_id == "a"
    aborts = rig.take_all(commands.SendAbort)
    if moment == "all but the aux record has come":
        rig.nothing_else()
    else:
        extend = rig.take(commands.SendExtend)
        rig.nothing_else()
        assert (extend.request_id, extend.first, len(extend.pages)) == ("b", 0, 8)
        if leaves is not prefill_fails_settled:
            assert not set(extend.pages) & set(first.pages), "a's prefill may still write to its pages"
        rig.chunk(extend)
    for promise in (second, third):
        if promise is third or moment != "the other is complete":
            rig.chunk(promise)
            rig.aux(promise)
    assert {ready.request_id for ready in rig.take_all(commands.ReportReady)} == {"b", "c"}
    for told in aborts:
        rig.drained(told)
    if leaves is writer_lost:
        rig.step(events.WriterDead, writer="prefill of a")
    assert rig.core.statistics()["device_draining"] == 0
    for name in ("b", "c"):
        rig.abort(name)
    rig.settle()
    rig.expect_nothing_held()


def test_who_has_several_prefills_goes_on_with_the_next_and_shares_in_its_turn() -> None:
    rig = sharing(device_pages=64)
    ask(rig, "a", A, prefill_count=2)
    ask(rig, "b", B)
    refused(rig, "a")
    extend = rig.take(commands.SendExtend)
    assert extend.request_id == "b"
    again = rig.take(commands.SendPromise)
    assert (again.request_id, again.generation, again.promised_tokens) == ("a", 1, 8)
    rig.take(commands.SendAbort)


def test_what_nobody_else_waits_for_leaves_nothing_in_the_tree() -> None:
    rig = sharing()
    first = ask(rig, "a", A)
    rig.chunk(first)
    rig.abort("a")
    rig.take(commands.ReportFailed)
    assert not list(rig.core.state.index.nodes())
    second = ask(rig, "b", B)
    assert second.promised_tokens == 0
    rig.serve(second, "prefill of b")
    rig.take(commands.ReportReady)
    assert rig.core.statistics()["device_cached"] == 10, "what the first left is in nobody's way"


def test_where_there_are_no_fresh_pages_the_others_start_over() -> None:
    rig = sharing(device_pages=16)
    ask(rig, "a", A)
    ask(rig, "b", B)
    rig.abort("a")
    rig.take(commands.ReportFailed)
    for told in rig.take_all(commands.SendAbort):
        rig.drained(told)
    again = rig.take(commands.SendPromise)
    assert (again.request_id, again.generation, again.promised_tokens) == ("b", 1, 0)
    rig.serve(again)
    rig.take(commands.SendReceived)
    assert rig.take(commands.ReportReady).request_id == "b"


def test_fresh_pages_are_for_what_others_wait_for_alone() -> None:
    # 12 pages of a, 3 of b, and 8 fresh ones: with 11 fresh ones, as many as a's room was to bring, it would not do.
    rig = sharing(device_pages=23)
    ask(rig, "a", A)
    ask(rig, "b", B)
    rig.abort("a")
    assert len(rig.take(commands.SendExtend).pages) == 8
    assert rig.core.statistics()["device_free"] == 0


def test_whoever_extends_and_leaves_as_well_is_followed_by_the_next() -> None:
    rig = sharing(device_pages=96)
    for name, tokens in (("a", A), ("b", B), ("c", C)):
        ask(rig, name, tokens)
    rig.abort("a")
    assert rig.take(commands.SendExtend).request_id == "b"
    rig.abort("b")
    extends = rig.take_all(commands.SendExtend)
    assert [(extend.request_id, extend.first, len(extend.pages)) for extend in extends] == [("c", 0, 8), ("c", 8, 2)]
    rig.abort("c")
    rig.settle()
    rig.expect_nothing_held()


def test_who_waits_may_leave_and_the_sender_does_not_notice() -> None:
    rig = sharing()
    first = ask(rig, "a", A)
    ask(rig, "b", B)
    rig.abort("b")
    rig.take(commands.ReportFailed)
    rig.drained(rig.take(commands.SendAbort))
    rig.chunk(first)
    rig.aux(first)
    assert sources(rig.take(commands.ReportReady)) == {"transfer": 12}


# --- The sender is slow ---


def stalled(**settings: Any) -> tuple[Rig, commands.SendPromise]:
    """b has all that its own prefill was to bring, and waits for a, of which 3 pages have come."""
    rig = sharing(share_wait_s=1.0, **settings)
    first, second = ask(rig, "a", A), ask(rig, "b", B, deadline_at_s=30.0)
    rig.chunk(first, count=3, last=False)
    rig.chunk(second)
    rig.aux(second)
    rig.nothing_else()
    return rig, first


def test_a_sender_that_brings_nothing_is_waited_for_no_longer() -> None:
    rig, first = stalled(device_pages=64)
    rig.wait_until(1.1)
    extend = rig.take(commands.SendExtend)
    assert (extend.request_id, extend.first, len(extend.pages)) == ("b", 0, 8)
    assert not set(extend.pages) & set(first.pages)
    rig.chunk(extend)
    assert sources(rig.take(commands.ReportReady)) == {"transfer": 11}
    rig.chunk(first, first=3, count=9)
    rig.aux(first)
    late = rig.take(commands.ReportReady)
    assert (late.request_id, sources(late)) == ("a", {"transfer": 12})
    for name in ("a", "b"):
        rig.abort(name)
    rig.settle()
    rig.expect_nothing_held()


def test_a_sender_that_brings_something_is_waited_for() -> None:
    rig, first = stalled(device_pages=64)
    rig.wait_until(0.9)
    rig.chunk(first, first=3, count=1, last=False)
    rig.wait_until(1.9)
    rig.nothing_else()
    rig.wait_until(2.1)
    assert rig.take(commands.SendExtend).request_id == "b"


def test_a_request_with_little_time_left_waits_for_half_of_it() -> None:
    rig = sharing(share_wait_s=20.0, device_pages=64)
    ask(rig, "a", A)
    second = ask(rig, "b", B, deadline_at_s=4.0)
    rig.chunk(second)
    rig.aux(second)
    rig.wait_until(2.1)
    assert rig.take(commands.SendExtend).request_id == "b"


def test_without_fresh_pages_a_slow_sender_is_waited_for_after_all() -> None:
    rig, first = stalled(device_pages=16)
    rig.wait_until(5.0)
    rig.nothing_else()
    rig.chunk(first, first=3, count=9)
    assert rig.take(commands.ReportReady).request_id == "b"


def test_the_deadline_of_who_waits_is_its_own() -> None:
    rig, _ = stalled(device_pages=16)
    rig.wait_until(31.0)
    failed = rig.take(commands.ReportFailed)
    assert (failed.request_id, failed.cause) == ("b", "deadline")
    assert rig.state("a") == "TRANSFER"


# --- Requests that do not share ---


def test_without_the_setting_everybody_is_sent_everything() -> None:
    rig = Rig()
    assert [ask(rig, name, tokens).promised_tokens for name, tokens in (("a", A), ("b", B))] == [0, 0]


def test_a_request_that_is_not_to_be_cached_is_not_shared() -> None:
    rig = sharing()
    ask(rig, "a", A, cache=False)
    assert ask(rig, "b", B).promised_tokens == 0


def test_namespaces_share_nothing() -> None:
    rig = sharing(device_pages=64)
    ask(rig, "a", A, namespace="one")
    assert ask(rig, "b", B, namespace="two").promised_tokens == 0


def test_who_recomputes_neither_shares_nor_is_shared() -> None:
    rig = sharing(device_pages=64)
    ask(rig, "a", A)
    ask(rig, "b", B, can_recompute=True)
    refused(rig, "b")
    recompute = rig.take(commands.Recompute)
    assert recompute.first == 0, "it could not extend into what the other is being sent"


def test_workers_with_components_share_full_pages_and_each_end_gets_its_own_window() -> None:
    window = Component(name="w", kind="window", window_tokens=2, device_pages=16, host_pages=16)
    rig = Rig(share_transfers=True, components=(window,), page_size=1)
    longer = A + b"!"
    rig.arrive("a", A)
    rig.arrive("b", longer)
    first, second = rig.take_all(commands.SendPromise)
    assert (first.promised_tokens, second.promised_tokens) == (0, len(A))
    windows = [promise.component_pages[0] for promise in (first, second)]
    assert [one.first for one in windows] == [len(A) - 2, len(longer) - 2]
    assert [len(one.pages) for one in windows] == [2, 2]
    assert set(windows[0].pages).isdisjoint(windows[1].pages)
    rig.serve(second)
    assert rig.state("b") == "TRANSFER"
    rig.serve(first)
    assert [ready.request_id for ready in rig.take_all(commands.ReportReady)] == ["a", "b"]


def test_the_wait_must_be_some_time() -> None:
    with pytest.raises(InvalidConfig, match="share_wait_s must be a number above 0"):
        Rig(share_wait_s=0)
