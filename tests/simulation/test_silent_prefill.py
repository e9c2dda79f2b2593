"""A simulated prefill that takes promises and never sends, beside good ones."""

from __future__ import annotations

from simulation.simulate import simulate
from simulation.world import World
from tidekv.states.settings import CoreSettings

RESTART_S = 20.0


def ready_before_the_restart(seed: int, prefill_share: float) -> int:
    """Serve requests while one of three prefills is silent; return how many became READY meanwhile."""
    worlds: list[World] = []

    def watch(world: World) -> None:
        worlds.append(world)
        world.ranks[0].peers[0].life.is_silent = True
        world.schedule.after(RESTART_S, lambda: counts.append(world.ends.get("READY", 0)))
        world.schedule.after(RESTART_S, world.ranks[0].peers[0].crash)

    counts: list[int] = []
    settings = CoreSettings(page_size=2, key_bytes=2, device_pages=48, prefill_share=prefill_share)
    report = simulate(seed, 400, "none", settings=settings, clients=40, watch=watch)
    assert report.ends.get("READY", 0) >= 390
    return counts[0]


def test_requests_of_other_prefills_are_served_beside_a_silent_one() -> None:
    with_quota, without = ready_before_the_restart(1, 0.5), ready_before_the_restart(1, 1.0)
    assert with_quota > 1.5 * without
