"""A caller that can compute does so at once if the device lacks few tokens; the decision follows the caches."""

from __future__ import annotations

import pytest

from simulation.rig import Rig
from simulation.simulate import simulate, with_short_rests
from tidekv.states import commands, events
from tidekv.states.errors import InvalidConfig
from tidekv.states.settings import CoreSettings

FOUR = b"abcd"


def rig_with_four(**settings: int | float | bool) -> Rig:
    rig = Rig(recompute_threshold=2, **settings)
    rig.make_cached("first", FOUR)
    return rig


def test_neither_prefill_nor_storage_is_asked_for_a_short_rest() -> None:
    rig = rig_with_four()
    rig.attach_storage()
    rig.arrive("a", b"abcdef", can_recompute=True)
    recompute = rig.take(commands.Recompute)
    assert (recompute.first, len(recompute.pages), recompute.is_short) == (4, 6, True)
    rig.nothing_else()
    rig.step(events.Recomputed, op=recompute.op, error="")
    assert rig.take(commands.ReportReady).sources["recompute"] == 2


@pytest.mark.parametrize(("tokens", "can_recompute"), [(b"abcdefg", True), (b"abcdef", False)])
def test_prefill_is_asked_for_a_longer_rest_and_for_a_caller_that_cannot_compute(
    tokens: bytes, *, can_recompute: bool
) -> None:
    rig = rig_with_four()
    rig.arrive("a", tokens, can_recompute=can_recompute)
    assert rig.take(commands.SendPromise).promised_tokens == 4


def test_a_rest_that_grows_while_the_request_waits_is_asked_of_storage_and_prefill() -> None:
    rig = rig_with_four(device_pages=8)
    rig.attach_storage()
    rig.make_ready("holds", bytes(range(3)))
    # All but one page are locked or cached; the request needs two.
    rig.arrive("large", bytes(range(10, 18)), can_recompute=True)
    rig.take_all(commands.QueryStorage)
    rig.arrive("a", b"abcdef", can_recompute=True)
    assert rig.request("a").recompute.is_short
    rig.pending.clear()
    rig.flush("l1")
    rig.abort("large")
    rig.finish("holds", bytes(range(3)))
    rig.copied(rig.take(commands.CopyPages, target="host"))
    query = rig.take(commands.QueryStorage)
    rig.answer(query, 0)
    assert rig.take(commands.SendPromise).request_id == "a"


def test_a_caller_that_fails_is_not_asked_again_while_there_is_a_prefill() -> None:
    rig = rig_with_four()
    rig.arrive("a", b"abcdef", can_recompute=True)
    rig.step(events.Recomputed, op=rig.take(commands.Recompute).op, error="out of memory")
    promise = rig.take(commands.SendPromise)
    assert (promise.promised_tokens, promise.renewed) == (4, True)
    rig.promised(promise)
    rig.step(events.WriterLost, writer="prefill.1", cause="silence")
    # Then it is the last resort.
    last = rig.take(commands.Recompute)
    assert not last.is_short
    rig.step(events.WriterDead, writer="prefill.1")
    rig.step(events.Recomputed, op=last.op, error="out of memory")
    assert rig.take(commands.ReportFailed).cause == "recompute failed"


def test_a_prefill_at_its_quota_does_not_hold_back_a_short_rest() -> None:
    rig = rig_with_four(prefill_share=0.25)
    rig.arrive("slow", bytes(range(8)), can_recompute=True)
    rig.take(commands.SendPromise)
    rig.arrive("a", b"abcdef", can_recompute=True)
    assert rig.take(commands.Recompute).is_short
    rig.core.check()


def test_a_threshold_is_refused_with_lent_pages() -> None:
    with pytest.raises(InvalidConfig, match="recompute_threshold must be 0"):
        CoreSettings(page_size=1, key_bytes=1, device_pages=8, lends_device=True, recompute_threshold=1)


def test_a_part_of_all_seeds_has_short_rests_and_they_take_every_way() -> None:
    plain = CoreSettings(page_size=1, key_bytes=1, device_pages=8)
    seeds = [seed for seed in range(5000, 5100) if with_short_rests(plain, seed).recompute_threshold]
    assert 10 < len(seeds) < 40
    reports = [simulate(seed, 80) for seed in seeds[4:8]]
    assert sum(report.counters["short_rests"] for report in reports) > 20
    assert sum(report.ends.get("READY", 0) for report in reports) > 150
