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
