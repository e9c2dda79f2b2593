"""The promise, and what becomes of it when local tiers bring less: decided on a core, one event at a time.

A page is one token here, so that a prompt of bytes reads as its pages.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulation.rig import Rig, ids
from tidekv.states import commands, events

TEN = b"abcdefghij"


def stored_only(**settings: int | float) -> Rig:
    """A core with the whole of TEN in storage, and with an empty device and host."""
    rig = Rig(**settings)
    rig.attach_storage()
    rig.make_cached("past", TEN)
    rig.flush("l1")
    rig.flush("l2")
    return rig


def become_ready(rig: Rig, promise: commands.SendPromise) -> commands.ReportReady:
    """Prefill does what the promise and every extend of it ask for."""
    rig.serve(promise)
    for extend in rig.take_all(commands.SendExtend):
        rig.chunk(extend)
    rig.take(commands.SendReceived)
    return rig.take(commands.ReportReady)


def over(rig: Rig, request_id: str, tokens: bytes) -> None:
    """The caller is done; backups end; nothing is held."""
    rig.finish(request_id, tokens)
    while copies := rig.take_all(commands.CopyPages, target="host"):
        for copy in copies:
            rig.copied(copy)
    for put in rig.take_all(commands.StorePages):
        rig.stored(put)
    rig.expect_nothing_held()


@given(l1=st.integers(0, 10), l2=st.integers(0, 10), l3=st.integers(0, 12))
def test_every_page_has_one_source_and_the_promise_is_what_they_cover(l1: int, l2: int, l3: int) -> None:
    """One plan lists what is copied, read, promised and requested; together these cover the prompt exactly once."""
    rig = Rig(host_pages=32)
    rig.attach_storage()
    if l1 or l2:
        rig.make_cached("deep", TEN[: max(l1, l2)])
        rig.flush("l1" if l2 >= l1 else "l2")
    if 0 < l1 < l2:
        # The device gets its part back by a request for just that part.
        rig.arrive("shallow", TEN[:l1])
        for copy in rig.take_all(commands.CopyPages, target="device"):
            rig.copied(copy)
        rig.serve(rig.take(commands.SendPromise))
        rig.take(commands.SendReceived)
        rig.take(commands.ReportReady)
        over(rig, "shallow", TEN[:l1])
        rig.take(commands.ReportFinished)
        rig.take_all(commands.ForgetTokens)
    device, host = rig.core.state.index.probe_prefix("", TEN)
    rig.arrive("a", TEN)
    found = 0
    for query in rig.take_all(commands.QueryStorage):
        assert (query.first, query.count) == (device + host, 10 - device - host)
        found = max(0, min(query.count, l3 - query.first))
        rig.answer(query, found)
    copies, fetches = rig.take_all(commands.CopyPages, target="device"), rig.take_all(commands.FetchPages)
    promise = rig.take(commands.SendPromise)
    assert sum(len(copy.target_pages) for copy in copies) == host
    assert [(fetch.positions[0], len(fetch.host_pages)) for fetch in fetches] == (
        [(device + host, found)] if found else []
    )
    assert promise.promised_tokens == device + host + found
    assert len(promise.pages) == 10 - promise.promised_tokens
    for fetch in fetches:
        rig.fetched(fetch)
    for copy in [*copies, *rig.take_all(commands.CopyPages, target="device")]:
        rig.copied(copy)
    ready = become_ready(rig, promise)
    assert len(set(ids(ready.pages))) == 10
    assert ready.sources == {"l1": device, "l2": host, "l3": found, "transfer": 10 - device - host - found}


@pytest.mark.parametrize("gate", ["threshold", "host memory", "detached"])
def test_what_is_declined_is_not_promised(gate: str) -> None:
    """Each gate in front of a read makes the promise shorter; none leaves a promise that is not kept."""
    rig = stored_only(host_pages=32)
    if gate == "threshold":
        rig.core.state.settings = rig.core.settings.__class__(
            **{name: getattr(rig.settings, name) for name in rig.settings.__struct_fields__}
            | {"prefetch_threshold_tokens": 8}
        )
    rig.arrive("a", TEN)
    query = rig.take(commands.QueryStorage)
    if gate == "host memory":
        rig.core.state.host.take(rig.core.state.host.free)
        rig.core.check = lambda: None  # type: ignore[method-assign]  # Those pages are the test's, which no audit knows.
    elif gate == "detached":
        rig.step(events.StorageChanged, available=False)
    rig.answer(query, 5 if gate == "threshold" else 10)
    assert rig.take_all(commands.FetchPages) == []
    promise = rig.take(commands.SendPromise)
    assert (promise.promised_tokens, len(promise.pages)) == (0, 10)
    assert become_ready(rig, promise).sources["transfer"] == 10


@pytest.mark.parametrize("valid", range(5))
def test_a_short_read_is_extended_by_what_is_missing_and_no_more(valid: int) -> None:
    rig = stored_only(fetch_run_pages=5)
    rig.arrive("a", TEN)
    rig.answer(rig.take(commands.QueryStorage), 10)
    first, second = rig.take_all(commands.FetchPages)
    promise = rig.take(commands.SendPromise)
    assert promise.promised_tokens == 10
    rig.promised(promise)
    rig.fetched(second)
    rig.fetched(first, valid=valid)
    extend = rig.take(commands.SendExtend)
    assert (extend.first, len(extend.pages)) == (valid, 5 - valid)
    for copy in rig.take_all(commands.CopyPages, target="device"):
        rig.copied(copy)
    rig.aux(promise)
    rig.chunk(extend)
    assert rig.state("a") == "TRANSFER"
    rig.chunk(promise)
    rig.take(commands.SendReceived)
    assert rig.take(commands.ReportReady).sources == {"l1": 0, "l2": 0, "l3": 5 + valid, "transfer": 5 - valid}


def test_at_the_deadline_each_run_that_has_not_arrived_is_asked_of_prefill_and_no_other() -> None:
    rig = stored_only(fetch_run_pages=4, prefetch_base_s=1.0)
    rig.arrive("a", TEN)
    rig.answer(rig.take(commands.QueryStorage), 10)
    first, late, copying = rig.take_all(commands.FetchPages)
    promise = rig.take(commands.SendPromise)
    rig.promised(promise)
    rig.fetched(copying)
    rig.fetched(first)
    (first_copy, *others) = rig.take_all(commands.CopyPages, target="device")
    rig.copied(first_copy)
    rig.wait_until(5.0)
    extend = rig.take(commands.SendExtend)
    assert (extend.first, len(extend.pages)) == (late.positions[0], len(late.host_pages))
    for copy in others:
        rig.copied(copy)
    rig.aux(promise)
    rig.chunk(promise)
    rig.chunk(extend)
    rig.take(commands.SendReceived)
    assert rig.take(commands.ReportReady).sources == {"l1": 0, "l2": 0, "l3": 6, "transfer": 4}
    # The late read still writes to its host pages: it owns them until it reports its end.
    assert rig.core.statistics()["host_owned"] == 4
    rig.fetched(late)
    over(rig, "a", TEN)


def test_a_miss_allocates_nothing_and_the_promise_goes_in_the_step_of_the_answer() -> None:
    rig = Rig()
    rig.attach_storage()
    rig.arrive("a", TEN)
    query = rig.take(commands.QueryStorage)
    assert rig.core.state.host.free == 32
    rig.nothing_else()
    assert [type(wish) for wish in rig.answer(query, 0)] == [commands.SendPromise]
    assert rig.core.state.host.free == 32


def test_storage_is_asked_while_a_request_waits_for_memory_and_nothing_is_reserved_by_that() -> None:
    rig = stored_only(device_pages=12)
    rig.make_ready("big", b"ABCDEFGH")
    rig.arrive("a", TEN)
    assert rig.state("a") == "PREALLOC"
    rig.answer(rig.take(commands.QueryStorage), 10)
    assert (rig.state("a"), rig.core.state.host.free) == ("PREALLOC", 32)
    rig.nothing_else()


def test_done_is_usable_in_the_same_step_with_five_hundred_requests_in_the_queue() -> None:
    rig = Rig(device_pages=10, queue_max=1000)
    rig.arrive("a", TEN)
    promise = rig.take(commands.SendPromise)
    for number in range(500):
        rig.core.step(
            events.RequestArrived(
                at_s=0.0, request_id=f"w{number}", request_number=1000 + number, keys=b"0123456789", prompt_tokens=10
            )
        )
    assert rig.core.statistics()["queue"] == 500
    rig.promised(promise)
    rig.chunk(promise)
    assert commands.ReportReady in [type(wish) for wish in rig.aux(promise)]


def test_promised_host_pages_are_pinned_against_whoever_needs_host_memory() -> None:
    """While a's pages are copied to the device, b's backup wants all of host memory, and gets none of them."""
    rig = Rig(device_pages=32, host_pages=10)
    rig.make_cached("past", TEN)
    rig.flush("l1")
    rig.arrive("a", TEN)
    copy = rig.take(commands.CopyPages, target="device")
    promise = rig.take(commands.SendPromise)
    assert promise.promised_tokens == 10
    rig.make_ready("b", b"ABCDEFGHIJ")
    rig.finish("b", b"ABCDEFGHIJ")
    assert rig.take_all(commands.CopyPages, target="host") == []
    assert rig.core.state.index.host_protected == 10
    rig.copied(copy)
    assert become_ready(rig, promise).sources["l2"] == 10


def test_an_answer_that_comes_when_the_tree_has_grown_promises_what_is_there_now() -> None:
    """Another request brings the same prompt while this one waits for storage: what was reserved for it goes back."""
    rig = Rig()
    rig.attach_storage()
    rig.stop_in_match("slow", TEN)
    query = rig.take(commands.QueryStorage)
    rig.core.state.storage_available = False
    rig.make_ready("fast", TEN[:7])
    rig.core.state.storage_available = True
    rig.answer(query, 0)
    rig.leave_match("slow")
    promise = rig.take(commands.SendPromise)
    assert (promise.promised_tokens, len(promise.pages)) == (7, 3)
    assert become_ready(rig, promise).sources == {"l1": 7, "l2": 0, "l3": 0, "transfer": 3}
    rig.abort("fast")
    rig.abort("slow")
    rig.take_all(commands.ReportDropped)
    rig.expect_nothing_held()
