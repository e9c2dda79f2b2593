"""The eviction policy is an option, and the priority of a request reaches it."""

from __future__ import annotations

import pytest

from simulation.rig import Rig
from tidekv import EngineConfig, InvalidConfig


def cached_after(eviction: str) -> list[str]:
    """Cache prompts of four pages in a device pool of twelve, then admit one more; return those that stayed."""
    rig = Rig(device_pages=12, host_pages=0, eviction=eviction, growth_reserve_pages=0)
    prompts = {"urgent": b"abcd", "often": b"efgh", "plain": b"ijkl"}
    rig.make_cached("urgent", prompts["urgent"], priority=5)
    rig.make_cached("often", prompts["often"])
    rig.make_cached("plain", prompts["plain"])
    for number in range(3):
        rig.make_cached(f"again {number}", prompts["often"])
    rig.make_cached("plain again", prompts["plain"])
    rig.make_cached("new", b"mnop")
    return [name for name, prompt in prompts.items() if rig.core.state.index.probe_prefix("", prompt) == (4, 0)]


@pytest.mark.parametrize(
    ("eviction", "stayed"),
    [
        ("lru", ["often", "plain"]),
        ("lfu", ["often", "plain"]),
        ("fifo", ["often", "plain"]),
        ("priority", ["urgent", "plain"]),
    ],
)
def test_the_option_chooses_the_order_of_eviction(eviction: str, stayed: list[str]) -> None:
    assert cached_after(eviction) == stayed


def test_another_policy_is_refused_with_the_allowed_ones() -> None:
    with pytest.raises(InvalidConfig, match="eviction must be lru, lfu, slru, fifo or priority"):
        EngineConfig(eviction="random")  # type: ignore[arg-type]  # What is tested.
