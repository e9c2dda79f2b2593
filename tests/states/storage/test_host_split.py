"""Host memory beside prefill: trusted until its copies are measured to be slower, then divided by the same rule."""

from __future__ import annotations

import pytest

from simulation.rig import Rig
from tidekv.states import commands
from tidekv.states.storage.fetch_source import ESTIMATE_FRESH_S
from tidekv.states.storage.source_split import TRUSTED_S

COPY_S, SENT_S = 0.2, 0.1
"""Seconds of a page, from host memory and from prefill."""


def in_host(rig: Rig, name: str, tokens: bytes, page_s: float = SENT_S) -> None:
    """Prefill sends a prompt at this speed. After its end, host memory has it and device memory does not."""
    rig.arrive(name, tokens)
    for query in rig.take_all(commands.QueryStorage):
        rig.answer(query, 0)
    promise = rig.take(commands.SendPromise)
    rig.promised(promise)
    rig.wait_until(rig.now_s + page_s * len(tokens))
    rig.aux(promise)
    rig.chunk(promise)
    rig.finish(name, tokens)
    rig.copied(rig.take(commands.CopyPages, target="host"))
    for put in rig.take_all(commands.StorePages):
        rig.stored(put)
    rig.flush("l1")


def copied_from_host(rig: Rig, name: str, tokens: bytes, page_s: float) -> None:
    """A prompt is restored from host memory at this speed, and leaves device memory again."""
    rig.arrive(name, tokens)
    rig.wait_until(rig.now_s + page_s * len(tokens))
    rig.copied(rig.take(commands.CopyPages, target="device"))
    rig.serve(rig.take(commands.SendPromise))
    rig.finish(name, tokens)
    rig.flush("l1")


def slow_rig(copy_s: float = COPY_S, **settings: int | float | str) -> Rig:
    """Two copies have shown the speed of host memory, two transfers that of prefill."""
    rig = Rig(prefetch="soonest", copy_deadline_s=100.0, device_pages=64, host_pages=64, **settings)
    for name, tokens in (("a", b"abcd"), ("b", b"efgh")):
        in_host(rig, name, tokens)
    copied_from_host(rig, "c", b"abcd", copy_s)
    # A copy that is faster than the first one would take its place.
    copied_from_host(rig, "d", b"efgh", copy_s * 1.001)
    rig.take_all(commands.SendReceived)
    in_host(rig, "long", b"0123456789")
    return rig


def promised(rig: Rig, name: str, tokens: bytes) -> int:
    rig.arrive(name, tokens)
    return rig.take(commands.SendPromise).promised_tokens


def test_pages_in_host_memory_that_prefill_sends_sooner_are_left_to_it() -> None:
    rig = slow_rig()
    assert rig.core.loads.source_load == (pytest.approx(COPY_S), 0)
    # Ten pages here and one that only prefill has: four by copies in 0.8 s, seven by prefill in 0.7 s.
    assert promised(rig, "r", b"0123456789x") == 4
    assert len(rig.take(commands.CopyPages, target="device").target_pages) == 4
    assert rig.core.statistics()["l2_declined_pages"] == 6
    assert rig.core.loads.source_load.queued_pages == 4


def test_the_prompt_is_whole_and_in_the_cache_after_such_a_plan() -> None:
    rig = slow_rig()
    rig.arrive("r", b"0123456789x")
    promise = rig.take(commands.SendPromise)
    rig.copied(rig.take(commands.CopyPages, target="device"))
    rig.serve(promise)
    ready = rig.take(commands.ReportReady, request_id="r")
    assert ready.sources == {"l1": 0, "l2": 4, "l3": 0, "transfer": 7}
    rig.finish("r", b"0123456789x")
    assert promised(rig, "again", b"0123456789xy") == 11


def test_host_memory_is_trusted_until_two_copies_have_shown_that_it_is_slow() -> None:
    rig = Rig(prefetch="soonest", copy_deadline_s=100.0, device_pages=64, host_pages=64)
    in_host(rig, "a", b"0123456789")
    copied_from_host(rig, "b", b"0123456789", COPY_S)
    rig.take_all(commands.SendReceived)
    assert promised(rig, "c", b"0123456789x") == 10


@pytest.mark.parametrize("copy_s", [SENT_S / 8, SENT_S * 0.9])
def test_host_memory_that_is_not_slower_than_prefill_gives_all_it_has(copy_s: float) -> None:
    assert promised(slow_rig(copy_s), "r", b"0123456789x") == 10


def test_copies_that_end_soon_anyway_are_not_compared() -> None:
    """A busy processor makes them look slow, and prefill's work is worth more than a few milliseconds."""
    rig = Rig(prefetch="soonest", device_pages=64, host_pages=64)
    in_host(rig, "a", b"0123456789", page_s=TRUSTED_S / 1000)
    for name, page_s in (("b", TRUSTED_S / 12), ("c", TRUSTED_S / 11)):
        copied_from_host(rig, name, b"0123456789", page_s)
    rig.take_all(commands.SendReceived)
    assert promised(rig, "d", b"0123456789x") == 10


def test_host_memory_left_alone_is_measured_again_by_one_plan_at_a_time() -> None:
    rig = slow_rig(copy_s=9 * SENT_S)
    assert promised(rig, "r", b"0123456789x") == 0
    assert rig.take_all(commands.CopyPages, target="device") == []
    rig.wait_until(rig.now_s + ESTIMATE_FRESH_S + 0.1)
    assert promised(rig, "s", b"0123456789y") == 1
    assert promised(rig, "t", b"abcdz") == 0
    # It is fast again.
    rig.copied(rig.take(commands.CopyPages, target="device"))
    assert promised(rig, "u", b"efghz") == 4


def test_a_plan_that_leaves_host_pages_to_prefill_fetches_nothing_behind_them() -> None:
    rig = slow_rig(copy_s=9 * SENT_S)
    rig.attach_storage()
    rig.arrive("r", b"0123456789abcdefghij")
    rig.answer(rig.take(commands.QueryStorage), 9)
    assert rig.take(commands.SendPromise).promised_tokens == 0
    assert rig.take_all(commands.FetchPages) == []


def test_a_fast_storage_behind_slow_copies_counts_as_slow() -> None:
    rig = slow_rig()
    rig.attach_storage()
    rig.arrive("first", b"qrst")
    rig.answer(rig.take(commands.QueryStorage), 4)
    rig.wait_until(rig.now_s + 0.004)
    rig.fetched(rig.take(commands.FetchPages))
    rig.take_all(commands.CopyPages, target="device")
    rig.take_all(commands.SendPromise)
    # A page in 1 ms to host memory, where four wait already, and in 0.2 s from there; prefill has one more to send.
    rig.arrive("r", b"ABCDEFGHIJKLx")
    rig.answer(rig.take(commands.QueryStorage), 12)
    assert 0 < rig.take(commands.SendPromise).promised_tokens < 6
    assert rig.request("r").sources.declined[0] == "slower"
