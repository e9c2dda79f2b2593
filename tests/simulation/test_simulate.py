"""The simulation itself: it repeats itself, reports what failed, and passes on the core as it is."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from simulation import FAULTS, SimulationFailed, campaign, prefill, simulate
from simulation.faults import Chosen
from simulation.prefill import Peer
from simulation.schedule import Link, Schedule
from simulation.simulate import settings_of
from simulation.tiers import SimulatedCopies
from simulation.world import World
from tidekv.states.errors import InvalidConfig
from tidekv.states.handover.prompt_digest import PromptDigest
from tidekv.states.records.request import Load
from tidekv.states.settings import CoreSettings


@pytest.mark.parametrize("seed", range(1, 21))
def test_a_run_with_all_faults_breaks_nothing(seed: int) -> None:
    report = simulate(seed, 200)
    assert sum(report.ends.values()) >= 200


@pytest.mark.parametrize("seed", range(101, 111))
def test_a_run_whose_rules_raise_breaks_nothing(seed: int) -> None:
    simulate(seed, 150, ["rule_raises", "abort", "retract", "copy_in_fails", "fetch_is_short"])


@pytest.mark.parametrize("seed", range(201, 206))
def test_without_faults_every_request_is_ready(seed: int) -> None:
    report = simulate(seed, 200, "none")
    assert report.ends == {"READY": 200}
    assert report.faults == {}


@pytest.mark.parametrize("fault", [name for name in FAULTS if name.startswith(("query", "fetch", "store", "copy"))])
def test_no_fault_of_a_tier_fails_a_request(fault: str) -> None:
    report = simulate(7, 150, [fault])
    assert report.ends == {"READY": 150}


def test_each_room_gets_its_own_prompt_though_its_id_is_used_elsewhere_and_by_name_alone_it_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert all(simulate(seed, 30).faults["same_id_elsewhere"] > 0 for seed in range(1, 6))
    monkeypatch.setattr(prefill, "digest_of", lambda packed, seed: PromptDigest(0, bytes(32)))
    with pytest.raises(SimulationFailed, match=r"expected|has|holds|not"):
        simulate(1, 30)


FLIPS = ["host_page_is_flipped", "sent_page_is_flipped"]


@pytest.mark.parametrize("seed", range(401, 411))
def test_flipped_bits_never_reach_a_ready_request(seed: int) -> None:
    report = simulate(seed, 150, [*FLIPS, "retract", "abort"])
    assert set(report.ends) <= {"READY", "pages damaged", "aborted"}
    # Damage of host memory is made good by prefill: it fails no request.
    assert simulate(seed, 100, FLIPS[:1]).ends == {"READY": 100}


@pytest.mark.parametrize(("part", "fault"), [(SimulatedCopies, FLIPS[0]), (Peer, FLIPS[1])])
def test_without_checksums_a_flipped_bit_reaches_a_ready_request(
    monkeypatch: pytest.MonkeyPatch, part: type[SimulatedCopies] | type[Peer], fault: str
) -> None:
    monkeypatch.setattr(part, "verifies", False)
    with pytest.raises(SimulationFailed, match="has a flipped bit"):
        for seed in range(1, 31):
            simulate(seed, 150, [fault])


def test_some_runs_write_back_and_fetch_ahead() -> None:
    reached = Counter[str]()
    for seed in range(301, 317):
        reached.update(simulate(seed, 100, "none").counters)
    for name in ("pages_fetched_ahead", "pages_backed_up", "pages_stored", "l1_pages_dropped", "l3_declined_pages"):
        assert reached[name], name


def test_the_same_seed_gives_the_same_run() -> None:
    first, second = simulate(5, 150), simulate(5, 150)
    assert first == second
    assert first.digest != simulate(6, 150).digest


def test_seeds_of_a_campaign_have_components_but_for_short_rests_and_peers_and_many_lend_or_have_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    components, lent, ranks_drawn, short_rests, peers = set(), set(), Counter[int](), set(), set()

    def note(
        seed: int, requests: int, faults: Chosen, *, ranks: int, without: object, neighbours: bool, **shape: bool
    ) -> None:
        settings = settings_of(Random(f"settings {seed}"), seed, **shape)
        components.update({seed} if settings.components else ())
        lent.update({seed} if settings.lends_device else ())
        short_rests.update({seed} if settings.recompute_threshold else ())
        peers.update({seed} if neighbours else ())
        ranks_drawn[ranks] += 1
        assert requests == (12 if ranks == 1 else 3)
        world = World(seed=seed, requests=requests, faults="none", settings=settings)
        raise SimulationFailed(world, requests, faults, ZeroDivisionError("no run"))

    monkeypatch.setattr(campaign, "simulate", note)
    seeds = 200
    campaign.run_campaign(first_seed=1, seeds=seeds, requests=12)
    assert components | short_rests | peers == set(range(1, seeds + 1))
    assert seeds * 0.1 < len(peers) < seeds * 0.3
    assert seeds * 0.05 < len(short_rests) < seeds * 0.15
    assert seeds / 3 <= len(lent) <= seeds / 2
    assert set(ranks_drawn) == {1, 2, 3, 4}
    assert seeds * 0.15 < seeds - ranks_drawn[1] < seeds * 0.35


def test_settings_can_be_given() -> None:
    settings = CoreSettings(page_size=2, key_bytes=2, device_pages=30, copy_deadline_s=0.2)
    assert simulate(3, 50, settings=settings).counters.get("pages_backed_up", 0) == 0


def test_an_unknown_fault_is_refused_by_name() -> None:
    with pytest.raises(InvalidConfig, match="there is no fault 'gremlin'"):
        simulate(1, 1, ["gremlin"])


def test_a_failure_says_how_to_see_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Load, "unlock", lambda self, index: setattr(self, "lock", None))
    with pytest.raises(SimulationFailed, match=r"seed 1, 120 requests, faults 'all': BrokenInvariant") as caught:
        simulate(1, 120)
    assert caught.value.seed == 1
    assert any("RequestArrived" in line for line in caught.value.recent)


def test_a_schedule_runs_in_the_order_of_time_and_of_asking() -> None:
    schedule, seen = Schedule(), list[str]()
    schedule.after(2.0, seen.append, "late")
    schedule.after(1.0, seen.append, "first")
    schedule.after(1.0, seen.append, "second")
    schedule.at(-5.0, seen.append, "past")
    while schedule.run_next():
        pass
    assert seen == ["past", "first", "second", "late"]
    assert schedule.now_s == 2.0


def test_a_link_keeps_the_order_of_what_is_sent() -> None:
    schedule, seen = Schedule(), list[str]()
    link = Link(schedule)
    link.send(5.0, seen.append, "slow")
    link.send(0.1, seen.append, "fast")
    while schedule.run_next():
        pass
    assert seen == ["slow", "fast"]
