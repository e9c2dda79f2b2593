"""KV hints in the core: a pin ends, whatever raises meanwhile."""

from __future__ import annotations

import pytest

from simulation.rig import Rig
from tidekv.states import commands, events
from tidekv.states.prefix.index import PrefixIndex


def hinted(rig: Rig, action: str, *, ttl_s: float = 5.0) -> tuple[str, int]:
    """Give a hint about "abcd"; returns its outcome and pages."""
    rig.step(
        events.HintReceived, call=1, action=action, namespace="", keys=b"abcd", tier="host", ttl_s=ttl_s, pages_max=8
    )
    told = rig.take(commands.ReportHinted)
    return told.outcome, told.page_count


def test_a_pin_whose_end_has_raised_ends_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    rig.make_ready("r1", b"abcd")
    rig.finish("r1", b"abcd")
    rig.copied(rig.take(commands.CopyPages, target="host"))
    assert hinted(rig, "pin") == ("accepted", 4)
    unpin = PrefixIndex.unpin

    def raises(*_: object) -> None:
        monkeypatch.setattr(PrefixIndex, "unpin", unpin)
        raise RuntimeError("planted")

    monkeypatch.setattr(PrefixIndex, "unpin", raises)
    assert hinted(rig, "unpin") == ("rejected", 0)
    assert rig.core.hints.pinned_pages == 4
    rig.wait_until(rig.now_s + 5.1)
    assert rig.core.hints.pinned_pages == 0
    rig.core.check()


def test_a_prefix_that_goes_while_its_rest_is_prefetched_leaves_nothing_at_its_place() -> None:
    rig = Rig()
    rig.attach_storage()
    rig.make_cached("past", b"ab")
    rig.flush("l1")
    assert hinted(rig, "prefetch") == ("accepted", 2)
    fetch = rig.take(commands.FetchPages)
    assert list(fetch.positions) == [2, 3]
    rig.flush("l2")
    rig.fetched(fetch)
    # Pages behind another prefix are another prompt's.
    assert rig.core.state.index.probe_prefix("", b"cd") == (0, 0)
    rig.expect_nothing_held()


def test_no_more_shares_than_so_many_are_held_at_once() -> None:
    rig = Rig(peer_reads_max=2)
    rig.make_cached("past", b"abcd")
    for call in (-1, -2, -3):
        rig.step(events.ShareRequested, call=call, read=str(call), namespace="", keys=b"abcd", pages_max=64)
    assert [told.outcome for told in rig.take_all(commands.ReportHinted)] == ["accepted", "accepted", "rejected"]
    for share in rig.take_all(commands.SharePages):
        rig.copied(share)
    rig.expect_nothing_held()


def test_shares_together_hold_a_bounded_number_of_pages() -> None:
    rig = Rig()
    rig.make_cached("past", b"abcd")
    for call in (-1, -2, -3):
        rig.step(events.ShareRequested, call=call, read=str(call), namespace="", keys=b"abcd", pages_max=6)
    told = rig.take_all(commands.ReportHinted)
    assert [(each.outcome, each.page_count) for each in told] == [("accepted", 4), ("clipped", 2), ("rejected", 0)]
    for share in rig.take_all(commands.SharePages):
        rig.copied(share)
    rig.expect_nothing_held()
