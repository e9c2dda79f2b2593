"""Ranks of the real core, with faults of one rank at a time: they take the same events, and none is stuck."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulation import SimulationFailed, prefill, simulate
from simulation.campaign import run_campaign
from simulation.faults import FAULTS, OF_RANKS
from simulation.simulate import draw_settings
from simulation.votes import Member
from tests.support.thorough import examples
from tidekv.states import events
from tidekv.states.errors import RanksDiverged
from tidekv.states.handover.prompt_digest import PromptDigest
from tidekv.states.ranks import agreement, call_votes


@examples(15)
@given(seed=st.integers(0, 2**31), ranks=st.integers(2, 8))
def test_ranks_with_faults_of_their_own_take_the_same_events(seed: int, ranks: int) -> None:
    report = simulate(seed, 12, ranks=ranks)
    assert sum(report.ends.values()) >= 12


@examples(15)
@given(seed=st.integers(0, 2**31), ranks=st.integers(2, 8))
def test_ranks_restore_equal_parts_into_pages_that_each_lends(seed: int, ranks: int) -> None:
    report = simulate(seed, 12, ranks=ranks, lends=True)
    assert sum(report.ends.values()) >= 12


@pytest.mark.parametrize("planted", ["pages", "held_pages"])
def test_lent_pages_that_the_ranks_do_not_vote_on_are_found(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if planted == "pages":
        # The pages of the leader instead of this rank's own.
        monkeypatch.delitem(call_votes.OWN_FIELDS, "lent_pages")
    else:
        content_of = call_votes.content_of
        monkeypatch.setattr(
            call_votes, "content_of", lambda call: content_of(without(call, held_pages=0, lent_pages=(), pages=()))
        )
    with pytest.raises(SimulationFailed):
        for seed in range(5, 25):
            simulate(seed, 25, ranks=3, lends=True, hints=False)


def without(call: events.Event, **empty: object) -> Any:
    return msgspec.structs.replace(call, **{name: empty[name] for name in empty if hasattr(call, name)})


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_every_request_of_every_rank_ends(ranks: int) -> None:
    report = simulate(17, 25, ranks=ranks)
    assert sum(report.ends.values()) >= 25


@pytest.mark.parametrize(("seed", "ranks"), [(3, 2), (25, 4)])
def test_ranks_that_lost_one_form_a_group_again_and_go_on(seed: int, ranks: int) -> None:
    faults = {"rank_dies": 0.05, "storage_is_detached": 0.05, "abort": 0.1}
    report = simulate(seed, 100, faults, ranks=ranks, settings=draw_settings(Random(f"settings {seed}")))
    assert report.epochs >= 3
    assert report.ends["READY"] > 50, report.ends


def test_one_rank_alone_needs_nobody() -> None:
    assert sum(simulate(3, 40, ranks=1).ends.values()) >= 40


def test_hints_are_given_to_ranks_unless_a_test_leaves_them_out() -> None:
    first = simulate(5, 30, ranks=3)
    assert first == simulate(5, 30, ranks=3, hints=True)
    assert first.digest != simulate(5, 30, ranks=3, hints=False).digest


def test_the_same_seed_gives_the_same_run() -> None:
    first = simulate(5, 30, ranks=3)
    assert first == simulate(5, 30, ranks=3)
    assert first.digest != simulate(6, 30, ranks=3).digest


def test_every_fault_strikes_somewhere() -> None:
    struck = dict.fromkeys(OF_RANKS, 0)
    epochs = 0
    # The first three have all; the search goes on from there.
    for seed in (5, 11, 16, *range(30)):
        report = simulate(seed, 25, ranks=2 + seed % 2)
        epochs += report.epochs - 1
        for name in OF_RANKS:
            struck[name] += report.faults.get(name, 0)
        if all(struck.values()) and epochs:
            break
    assert all(struck.values()), struck
    assert epochs


def test_each_rank_gets_the_pages_of_its_prompt_though_the_id_is_used_elsewhere_and_by_name_alone_it_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert all(simulate(seed, 15, ranks=2).faults["same_id_elsewhere"] > 0 for seed in range(1, 4))
    monkeypatch.setattr(prefill, "digest_of", lambda packed, seed: PromptDigest(0, bytes(32)))
    with pytest.raises(SimulationFailed, match=r"Violation.*(expected|has|holds|not)"):
        simulate(1, 15, ranks=2, hints=False)


def test_an_event_of_one_rank_alone_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    # A rank that clears its device on its own keeps other pages than the others from then on.
    def decide(member: Member, reduced: list[int]) -> None:
        honest(member, reduced)
        rank = member._rank
        if rank.number == 1 and rank.events > 40:
            rank.core.step(events.FlushRequested(at_s=0.0, call=0, tiers=("l1",)))

    honest = Member.decide
    monkeypatch.setattr(Member, "decide", decide)
    with pytest.raises(SimulationFailed) as caught:
        simulate(1, 40, "none", ranks=2, hints=False)
    assert isinstance(caught.value.__cause__, RanksDiverged)
    assert {"index", "device pool"} & set(caught.value.__cause__.parts)


def test_a_rank_that_counts_its_own_progress_alone_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    # Were the agreement wrong on one rank, its core would take other events: the simulation must see that.
    honest = agreement.Agreement.decide

    def decide(self: agreement.Agreement, reduced: list[int]) -> agreement.Decision:
        decision = honest(self, reduced)
        if self.rank == 1 and len(decision.events) > 1:
            decision.events.reverse()
        return decision

    monkeypatch.setattr(agreement.Agreement, "decide", decide)
    with pytest.raises(SimulationFailed):
        simulate(2, 60, ranks=2, hints=False)


def test_a_campaign_serves_every_request_on_all_ranks() -> None:
    campaign = run_campaign(first_seed=40, seeds=3, requests=10, ranks=2)
    assert campaign.requests == 30
    assert sum(campaign.ends.values()) >= 30
    assert set(campaign.faults) == set(FAULTS)
    assert campaign.failures == {}
