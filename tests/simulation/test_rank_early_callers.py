"""Callers of several ranks that begin early: all ranks report the same layers, and bugs of the votes are found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec
import pytest

from simulation.campaign import run_campaign
from simulation.early_callers import draws_early
from simulation.faults import Chosen
from simulation.simulate import Report, simulate
from simulation.world import World
from tests.simulation.test_early_callers import MUTANTS as CORE_MUTANTS
from tests.simulation.test_early_callers import component_settings_of, settings_of
from tests.support.thorough import thorough_beyond
from tidekv.states import commands, events
from tidekv.states.commands import OperationCommand
from tidekv.states.errors import TidekvError
from tidekv.states.events import Event
from tidekv.states.ranks.agreement import Agreement
from tidekv.states.ranks.vote_items import COUNT_MAX, OperationVote, encode_end
from tidekv.states.ranks.votes import VoteVector
from tidekv.states.settings import CoreSettings

Mutant = Callable[[pytest.MonkeyPatch], None]
SEEDS_MAX = 60
MUTANTS: dict[str, Mutant] = {}
FIRST_SEEDS = {
    "a_copy_that_failed_on_one_rank_counts_as_all_layers_there": 15,
    "a_left_room_does_not_wait_for_its_caller": 24,
    "a_use_ends_with_its_first_caller": 24,
}
"""Where the search for a bug begins: these runs find it soon."""
CORE_NAMES = ("a_layer_too_many_is_reported", "a_left_room_does_not_wait_for_its_caller", "a_loss_is_not_reported")
"""Bugs of the core that the ranks' simulation must find, too."""


def mutant(plant: Mutant) -> Mutant:
    MUTANTS[plant.__name__] = plant
    return plant


FAULTS_BETWEEN_LAYERS = {
    "copy_in_fails": 0.05,
    "copy_in_is_late": 0.05,
    "component_copy_fails": 0.05,
    "peer_crashes": 0.03,
    "room_fails": 0.02,
    "copy_in_raises": 0.01,
    "outcome_repeats": 0.1,
    "flush": 0.4,
    "abort": 0.05,
    "rank_lags": 0.01,
    "rank_dies": 0.005,
}


def settings_for(seed: int) -> CoreSettings:
    """Components in every other seed."""
    return component_settings_of(seed) if seed % 2 else settings_of(seed)


def run(seed: int, ranks: int, requests: int, faults: Chosen = "all") -> Report:
    return simulate(seed, requests, faults, ranks=ranks, settings=settings_for(seed), early=True)


def between_layers(seed: int, ranks: int, requests: int) -> World:
    """A run with the faults that strike between layers; all faults at once leave few callers that begin."""
    world = World(
        seed=seed,
        ranks=ranks,
        requests=requests,
        settings=settings_for(seed),
        faults=FAULTS_BETWEEN_LAYERS,
        early=True,
    )
    world.run(4)
    return world


@pytest.mark.parametrize(
    ("ranks", "seed"),
    thorough_beyond(
        # The others give each number of ranks components in one of its runs.
        [(ranks, 100 + ranks) for ranks in (2, 3, 4, 5, 8)],
        [(ranks, seed + ranks) for ranks in range(2, 9) for seed in (100, 111)],
    ),
)
def test_ranks_with_faults_of_their_own_break_nothing(ranks: int, seed: int) -> None:
    assert sum(run(seed, ranks, 30).ends.values()) >= 30


def test_without_faults_no_layer_is_lost_on_any_rank() -> None:
    done, ends = Counter[str](), Counter[str]()
    # Runs with many callers that begin; the odd one has components.
    for seed in (2, 7, 8, 10):
        # Votes take longer than the drawn deadlines of copies.
        settings = msgspec.structs.replace(settings_for(seed), copy_deadline_s=5.0)
        report = simulate(seed, 40, {"flush": 0.4}, ranks=3, settings=settings, early=True)
        done.update(report.early)
        ends.update(report.ends)
    assert done["begun"] > 10 and done["begun with components"] and done["layers"] > 10, done
    assert not done["lost"] and set(ends) == {"READY"}, (done, ends)


@pytest.mark.slow
def test_every_way_through_an_early_ready_is_taken_on_ranks() -> None:
    done, faults = Counter[str](), Counter[str]()
    for seed in range(8, 28):
        world = between_layers(seed, 2 + seed % 2, 60)
        faults.update(world.faults.counts)
        for rank in world.ranks:
            done.update(rank.early_counts)
    assert done["begun"] > 100 and done["begun with components"] > 25 and done["layers"] > 80, done
    assert done["lost"] > 40 and done["aborted"] > 5 and done["ready before the caller has stopped"], done
    assert all(faults[name] for name in FAULTS_BETWEEN_LAYERS), faults


def test_a_campaign_counts_them() -> None:
    assert draws_early(62)
    assert run_campaign(first_seed=62, seeds=1, requests=40, ranks=2).early["begun"]


# --- Bugs of the votes ---


@mutant
def each_rank_reports_its_own_layers(patch: pytest.MonkeyPatch) -> None:
    original = OperationVote.decide

    def decide(self: OperationVote, vote_vector: VoteVector, at_s: float) -> list[Event]:
        taken = original(self, vote_vector, at_s)
        if self.layers_slot is not None and not self.is_over:
            layers = min(vote_vector.value(self.layers_slot), 3)
            return [events.LayersCopied(at_s=at_s, op=self.op, layers=layers)] if layers else []
        return taken

    patch.setattr(OperationVote, "decide", decide)


@mutant
def a_copy_that_failed_on_one_rank_counts_as_all_layers_there(patch: pytest.MonkeyPatch) -> None:
    original = OperationVote.receive

    def receive(self: OperationVote, vote_vector: VoteVector, rank: int, event: Event) -> None:
        original(self, vote_vector, rank, event)
        if self.layers_slot is not None and not isinstance(event, events.LayersCopied):
            vote_vector.set(self.layers_slot, COUNT_MAX)

    patch.setattr(OperationVote, "receive", receive)


@mutant
def a_use_ends_with_its_first_caller(patch: pytest.MonkeyPatch) -> None:
    original = OperationVote.__init__

    def init(self: OperationVote, number: int, vote_vector: VoteVector, command: OperationCommand) -> None:
        original(self, number, vote_vector, command)
        if isinstance(command, commands.ReportEarly):
            # All ranks vote its end from the beginning, so that any other vote decides it.
            vote_vector._values[self.slot] = encode_end(0, 0, failed=False)

    patch.setattr(OperationVote, "__init__", init)


@mutant
def ready_does_not_close_the_vote(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Agreement, "_close_early", lambda self, op: None)


@pytest.mark.parametrize("name", [*MUTANTS, *CORE_NAMES])
def test_the_simulation_of_ranks_finds_that(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ({**CORE_MUTANTS, **MUTANTS})[name](monkeypatch)
    first = FIRST_SEEDS.get(name, 0)
    with pytest.raises((TidekvError, AssertionError)):
        for seed in range(first, first + SEEDS_MAX):
            between_layers(seed, 2 + seed % 3, 60)
