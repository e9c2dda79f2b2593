"""The simulation itself: it repeats itself, reports what failed, and passes on the core as it is."""

from __future__ import annotations

from collections import Counter

import pytest

from simulation import FAULTS, SimulationFailed, prefill, simulate
from simulation.campaign import shapes_of
from simulation.prefill import Peer
from simulation.schedule import Link, Schedule
from simulation.tiers import SimulatedCopies
from tests.support.thorough import thorough_beyond
from tidekv.states.errors import InvalidConfig
from tidekv.states.handover.prompt_digest import PromptDigest
from tidekv.states.records.request import Load
from tidekv.states.settings import CoreSettings


@pytest.mark.parametrize("seed", thorough_beyond((9, 12, 16, 17), range(1, 21)))
def test_a_run_with_all_faults_breaks_nothing(seed: int) -> None:
    report = simulate(seed, 200)
    assert sum(report.ends.values()) >= 200


@pytest.mark.parametrize("seed", thorough_beyond((102, 105, 107, 108), range(101, 111)))
def test_a_run_whose_rules_raise_breaks_nothing(seed: int) -> None:
    simulate(seed, 150, ["rule_raises", "abort", "retract", "copy_in_fails", "fetch_is_short"])


@pytest.mark.parametrize("seed", thorough_beyond((202, 203), range(201, 206)))
def test_without_faults_every_request_is_ready(seed: int) -> None:
    report = simulate(seed, 200, "none")
    assert report.ends == {"READY": 200}
    assert report.faults == {}


@pytest.mark.parametrize("fault", [name for name in FAULTS if name.startswith(("query", "fetch", "store", "copy"))])
def test_no_fault_of_a_tier_fails_a_request(fault: str) -> None:
    # A run that uses every tier, in which each of them strikes.
    report = simulate(303, 60, {fault: 0.3})
    assert report.ends == {"READY": 60}
    assert report.faults[fault]


def test_each_room_gets_its_own_prompt_though_its_id_is_used_elsewhere_and_by_name_alone_it_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert all(simulate(seed, 30).faults["same_id_elsewhere"] > 0 for seed in range(1, 6))
    monkeypatch.setattr(prefill, "digest_of", lambda packed, seed: PromptDigest(0, bytes(32)))
    with pytest.raises(SimulationFailed, match=r"expected|has|holds|not"):
        simulate(1, 30)


FLIPS = ["host_page_is_flipped", "sent_page_is_flipped"]


@pytest.mark.parametrize("seed", thorough_beyond((402, 405, 408), range(401, 411)))
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
        for seed in range(21, 51):
            simulate(seed, 150, [fault])


def test_some_runs_write_back_and_fetch_ahead() -> None:
    reached = Counter[str]()
    for seed in range(303, 306):
        reached.update(simulate(seed, 100, "none").counters)
    for name in ("pages_fetched_ahead", "pages_backed_up", "pages_stored", "l1_pages_dropped", "l3_declined_pages"):
        assert reached[name], name


def test_the_same_seed_gives_the_same_run() -> None:
    first, second = simulate(5, 60), simulate(5, 60)
    assert first == second
    assert first.digest != simulate(6, 60).digest


def test_every_seed_of_a_campaign_has_components_ranks_and_lent_pages_as_far_as_they_go_together() -> None:
    ranks, lent_alone, peers, without_components = Counter[int](), 0, 0, 0
    for seed in range(200):
        alone, together = shapes_of(seed, 12)
        assert (alone.ranks, alone.requests, together.requests) == (1, 9, 3)
        ranks[together.ranks] += 1
        assert alone.lends != together.lends
        lent_alone += alone.lends
        peers += alone.has_neighbours
        for shape in (alone, together):
            # Short rests are for models without further groups.
            assert shape.has_components or not shape.lends
            without_components += not shape.has_components
    assert set(ranks) == {2, 3, 4} and min(ranks.values()) > 40
    assert 60 < lent_alone < 140 and 20 < peers < 60 and without_components < 120


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
