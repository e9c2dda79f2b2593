"""Ranks with windows and states, with faults of one rank at a time: all decide alike, and what differs is named."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from simulation import SimulationFailed, simulate
from simulation.memory import Violation
from simulation.votes import Member
from simulation.world import World
from tests.support.thorough import thorough_beyond
from tidekv.states import events
from tidekv.states.component_specs import Component
from tidekv.states.errors import RanksDiverged
from tidekv.states.ranks.agreement import Agreement
from tidekv.states.ranks.component_votes import ComponentVote
from tidekv.states.ranks.votes import VoteVector
from tidekv.states.settings import CoreSettings

COMPONENTS = (
    Component(name="window", kind="window", window_tokens=4, device_pages=24, host_pages=30),
    Component(name="state", kind="state", device_pages=12, host_pages=30),
)
SETTINGS = CoreSettings(
    page_size=2, key_bytes=2, device_pages=40, host_pages=80, copy_deadline_s=0.2, components=COMPONENTS
)


@pytest.mark.parametrize("ranks", thorough_beyond((2, 3, 5, 8), range(2, 9)))
def test_ranks_with_faults_of_their_own_decide_alike(ranks: int) -> None:
    report = simulate(ranks, 30, ranks=ranks, settings=SETTINGS)
    assert sum(report.ends.values()) >= 30


def test_copies_of_components_fail_on_one_rank_and_no_request_fails_by_that() -> None:
    done, faults, ends = Counter[str](), Counter[str](), Counter[str]()
    for seed in (24, 25):
        report = simulate(seed, 40, ranks=3, settings=SETTINGS)
        done.update(report.component_pages)
        faults.update(report.faults)
        ends.update(report.ends)
    assert all(faults[f"component_copy_{what}"] for what in ("fails", "is_late", "raises")), faults
    for name in (
        "tails_sent",
        "tails_cached",
        "component_pages_left",
        "copies_device_to_host",
        "copies_device_to_device",
    ):
        assert done[name], done
    assert not any("copy" in end or end == "internal error" for end in ends), ends


def test_ranks_become_idle_although_storage_answers_probes_and_fails_every_put() -> None:
    # Write-back to eight host pages. As long as each closing of the breaker allowed further copies to the host, this
    # seed had tens of thousands of turns after its last request.
    report = simulate(2424097, 35, ranks=4, always_components=True, early=False, hints=False)
    assert sum(report.ends.values()) >= 35 and report.turns < 2000


@pytest.mark.parametrize("name", ["window", "state"])
@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_component_that_one_rank_evicts_alone_is_named(name: str, tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def decide(member: Member, reduced: list[int]) -> None:
        honest(member, reduced)
        rank = member._rank
        components = rank.core.state.components
        assert components is not None
        if rank.number == 1:
            components.evict(tier, name, 1)  # type: ignore[arg-type]  # One of the two.

    honest = Member.decide
    monkeypatch.setattr(Member, "decide", decide)
    with pytest.raises(SimulationFailed) as caught:
        simulate(1, 40, "none", ranks=3, settings=SETTINGS, hints=False)
    cause = caught.value.__cause__
    assert isinstance(cause, RanksDiverged), cause
    assert f"component {name}" in cause.parts


def test_a_failed_copy_that_one_rank_keeps_to_itself_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Agreement.receive

    def receive(self: Agreement, event: events.Event) -> None:
        if self.rank == 1 and isinstance(event, events.CopyEnded) and event.error:
            event = events.CopyEnded(at_s=event.at_s, op=event.op)
        honest(self, event)

    monkeypatch.setattr(Agreement, "receive", receive)
    with pytest.raises(SimulationFailed, match=r"holds|garbage"):
        for seed in range(23, 60):
            simulate(seed, 40, ranks=2, settings=SETTINGS, hints=False)


STORAGE_FAULTS = {
    "query_promises_too_little": 0.05,
    "fetch_is_short": 0.05,
    "fetch_is_late": 0.05,
    "store_fails": 0.005,
    "outcome_repeats": 0.1,
    "component_copy_fails": 0.01,
    "fetch_raises": 0.005,
    "flush": 0.2,
    "rank_dies": 0.003,
}


def in_storage(seed: int, ranks: int, requests: int) -> World:
    """Serve requests of which many go on from what storage alone has, each rank with records of its own missing."""
    settings = msgspec.structs.replace(SETTINGS, prefetch_threshold_tokens=2)
    world = World(seed=seed, ranks=ranks, requests=requests, settings=settings, faults=STORAGE_FAULTS)
    world.run(4)
    return world


@pytest.mark.slow
def test_tails_come_from_storage_where_every_rank_has_them() -> None:
    done, faults = Counter[str](), Counter[str]()
    for seed in range(106, 130):
        world = in_storage(seed, 2 + seed % 3, 40)
        assert sum(world.ends.values()) == 40
        faults.update(world.faults.counts)
        for rank in world.ranks:
            done.update(rank.component_counts)
    assert done["components_stored"] and done["components_fetched"] >= 4, done
    assert faults["fetch_is_short"] and faults["fetch_is_late"] and faults["outcome_repeats"], faults


def test_component_pages_that_one_rank_has_alone_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = ComponentVote.decide

    def decide(self: ComponentVote, vote_vector: VoteVector, at_s: float) -> list[events.Event]:
        told = honest(self, vote_vector, at_s)
        # Each rank takes what it has itself.
        ends = (vote_vector.value(slot) for slot in self.slots[1:])
        own = tuple(
            events.StoredComponent(name, ((first, end),))
            for (name, first), end in zip(self._firsts.items(), ends, strict=True)
        )
        return [msgspec.structs.replace(event, component_pages=own) for event in told]

    monkeypatch.setattr(ComponentVote, "decide", decide)
    with pytest.raises((Violation, RanksDiverged)):
        for seed in range(45, 65):
            in_storage(seed, 3, 40)
