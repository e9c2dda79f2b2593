"""The simulation of host engines that lend their device pages finds bugs that were put into the core on purpose."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from simulation import SimulationFailed, simulate
from simulation.simulate import draw_settings, lending, with_components
from tidekv.states.backup.offers import Offer, Offers
from tidekv.states.components.offered import OfferedComponents, OfferedCopy
from tidekv.states.components.request_components import ComponentCopy, ComponentRestore
from tidekv.states.loads.loads import Loads
from tidekv.states.pages.page_pool import LentPool
from tidekv.states.records.loan import LentGroup, Loan
from tidekv.states.records.request import Load, Request
from tidekv.states.request.lending import Lending
from tidekv.states.settings import CoreSettings
from tidekv.states.types import FULL, PageIds

Mutant = Callable[[pytest.MonkeyPatch], None]
REQUESTS = 60
SEEDS_MAX = 120
FIRST_SEEDS = {
    "a_copy_of_a_request_that_left_is_forgotten": 7,
    "a_late_offer_gives_its_pages_back": 7,
    "component_pages_go_back_while_a_copy_writes_to_them": 16,
    "component_pages_go_back_while_prefill_writes_to_them": 1,
    "full_pages_are_good_whatever_components_hold": 5,
    "pages_after_a_gap_count_as_good": 13,
    "pages_go_back_while_something_writes_to_them": 5,
    "pages_of_a_failed_copy_of_an_offer_join": 3,
    "pages_to_be_written_again_count_as_good": 9,
    "the_next_generation_does_not_wait_for_the_writers_of_the_last": 5,
}
"""Where the search for a bug begins: runs of the seeds before do not find it, or late."""
MUTANTS: dict[str, Mutant] = {}
COMPONENT_MUTANTS: dict[str, Mutant] = {}


def component_mutant(plant: Mutant) -> Mutant:
    COMPONENT_MUTANTS[plant.__name__] = plant
    return plant


def mutant(plant: Mutant) -> Mutant:
    MUTANTS[plant.__name__] = plant
    return plant


@mutant
def pages_go_back_while_something_writes_to_them(patch: pytest.MonkeyPatch) -> None:
    def has_writers(self: LentPool, pages: PageIds) -> bool:
        return False

    patch.setattr(LentPool, "has_writers", has_writers)


@mutant
def the_next_generation_does_not_wait_for_the_writers_of_the_last(patch: pytest.MonkeyPatch) -> None:
    def grant(self: Lending, request: Request, lent: Loan) -> bool:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(LentPool, "has_writers", lambda pool, pages: False)
            return original(self, request, lent)

    original = Lending.grant
    patch.setattr(Lending, "grant", grant)


@mutant
def a_copy_of_a_request_that_left_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    def end_with(self: Loads, load: Load) -> None:
        pass

    patch.setattr(Loads, "_end_with", end_with)


@mutant
def pages_after_a_gap_count_as_good(patch: pytest.MonkeyPatch) -> None:
    in_place = property(lambda self: self.first + sum(1 for source in self._sources if source))
    patch.setattr(LentGroup, "restored", in_place)


@mutant
def pages_to_be_written_again_count_as_good(patch: pytest.MonkeyPatch) -> None:
    def forget_rest(self: LentGroup) -> None:
        pass

    patch.setattr(LentGroup, "forget_rest", forget_rest)


@mutant
def a_page_that_has_not_arrived_counts_as_received(patch: pytest.MonkeyPatch) -> None:
    def note_received(self: Lending, request: Request) -> None:
        if request.lent is not None and request.room is not None:
            for span in request.room.spans:
                received = min(span.received(request.room.ranks) + 1, span.first + span.count)
                request.lent.full.note(span.first, received - span.first, "transfer")

    patch.setattr(Lending, "note_received", note_received)


@mutant
def a_late_offer_gives_its_pages_back(patch: pytest.MonkeyPatch) -> None:
    def late(self: Offer) -> None:
        self._offers.abandon(self)

    patch.setattr(Offer, "late", late)


@mutant
def an_offer_joins_the_tree_before_the_one_that_it_follows(patch: pytest.MonkeyPatch) -> None:
    def find_followed(self: Offers, offer: Offer) -> None:
        original(self, offer)
        offer.follows = None

    original = Offers._find_followed
    patch.setattr(Offers, "_find_followed", find_followed)


# --- With components ---


@component_mutant
def component_pages_go_back_while_a_copy_writes_to_them(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ComponentRestore, "_drain", lambda self, component_pages: None)


@component_mutant
def component_pages_go_back_while_prefill_writes_to_them(patch: pytest.MonkeyPatch) -> None:
    def has_writers(self: Lending, groups: Loan) -> bool:
        return self._pools[FULL].has_writers(groups.lent[FULL])

    patch.setattr(Lending, "_has_writers", has_writers)


@component_mutant
def full_pages_are_good_whatever_components_hold(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Loan, "restored", property(lambda self: self.full.restored))


@component_mutant
def a_failed_copy_counts_as_in_place(patch: pytest.MonkeyPatch) -> None:
    def copied(self: ComponentRestore, copy: ComponentCopy, error: str) -> None:
        original(self, copy, "")

    original = ComponentRestore.copied
    patch.setattr(ComponentRestore, "copied", copied)


@component_mutant
def pages_of_a_failed_copy_of_an_offer_join(patch: pytest.MonkeyPatch) -> None:
    def copied(self: OfferedComponents, copy: OfferedCopy, error: str) -> None:
        original(self, copy, "")

    original = OfferedComponents.copied
    patch.setattr(OfferedComponents, "copied", copied)


@component_mutant
def an_offer_ends_while_a_copy_of_a_component_reads(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Offer, "reads", property(lambda self: self.is_copying))


@component_mutant
def what_prefill_was_asked_for_counts_as_in_place(patch: pytest.MonkeyPatch) -> None:
    def hold_lent(self: ComponentRestore, request: Request, groups: Loan) -> None:
        original(self, request, groups)
        for pages in groups.components.values():
            pages.note(pages.first, len(pages.pages), "transfer")

    original = ComponentRestore.hold_lent
    patch.setattr(ComponentRestore, "hold_lent", hold_lent)


def drawn(seed: int, *, has_components: bool) -> CoreSettings:
    settings = draw_settings(Random(f"settings {seed}"))
    return lending(with_components(settings, seed, always=True) if has_components else settings)


def run_until_found(name: str, *, has_components: bool = False) -> bool:
    first = FIRST_SEEDS.get(name, 1)
    for seed in range(first, first + SEEDS_MAX):
        try:
            simulate(seed, REQUESTS, settings=drawn(seed, has_components=has_components), hints=False)
        except SimulationFailed:
            return True
    return False


@pytest.mark.parametrize("name", COMPONENT_MUTANTS)
def test_the_simulation_of_components_finds_that(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    COMPONENT_MUTANTS[name](monkeypatch)
    assert run_until_found(name, has_components=True), f"{SEEDS_MAX} seeds of {REQUESTS} did not find that {name}"


@pytest.mark.parametrize("name", MUTANTS)
def test_the_simulation_finds_that(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name](monkeypatch)
    assert run_until_found(name), f"{SEEDS_MAX} seeds of {REQUESTS} did not find that {name}"


@pytest.mark.parametrize("has_components", [False, True])
def test_the_core_as_it_is_passes_the_first_seeds(*, has_components: bool) -> None:
    for seed in range(1, 4):
        simulate(seed, REQUESTS, settings=drawn(seed, has_components=has_components))
