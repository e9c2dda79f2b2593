"""Other decode workers in the simulation: runs with them hold every promise, and bugs in the sharing are found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from simulation import SimulationFailed, simulate
from simulation.campaign import shapes_of
from simulation.faults import FAULTS, OF_NEIGHBOURS, OF_RANKS_OF_NEIGHBOURS
from simulation.neighbours import draws_neighbours
from simulation.simulate import draw_settings, with_neighbours
from simulation.smallest import find_smallest
from tidekv.states.backup.backups import Backup, Backups
from tidekv.states.core_state import CoreState
from tidekv.states.hints import Hints, Share
from tidekv.states.records.request import Load
from tidekv.states.storage.peer_fetches import PeerFetches
from tidekv.states.storage.taken_prompts import TakenPrompts
from tidekv.states.types import page_ids

SEEDS = range(1, 31)
FIRST_SEEDS = {
    (1, "a_share_holds_nothing"): 8,
    (1, "a_late_peer_gives_its_host_pages_back_at_once"): 4,
    (2, "a_late_peer_gives_its_host_pages_back_at_once"): 3,
    (1, "a_share_never_ends"): 14,
    (1, "what_a_peer_did_not_send_counts"): 2,
    (2, "what_a_peer_did_not_send_counts"): 2,
    (1, "what_a_worker_did_not_hand_over_counts"): 15,
    (2, "what_a_worker_did_not_hand_over_counts"): 6,
}
"""Where the search for a bug begins, by the number of ranks: runs of these seeds find it soon."""
WAYS = (
    "peer_fetches",
    "peer_fetches_late",
    "peer_pages_short",
    "pages_shared",
    "peer_pages_declined",
    "pages_handed",
    "pages_taken",
)


def test_runs_with_other_workers_have_every_kind_of_their_faults_and_no_violation() -> None:
    counted, struck = Counter[str](), Counter[str]()
    of_one_rank = OF_NEIGHBOURS - OF_RANKS_OF_NEIGHBOURS
    # The seeds that have most kinds of faults; the search goes on from there.
    for seed in (3, 17, 11, 2, 4, 8, *range(18, 31)):
        report = simulate(seed, 60, neighbours=True, always_components=seed % 3 == 0, lends=seed % 4 == 0)
        counted.update(report.counters)
        struck.update(report.faults)
        if all(struck[name] for name in of_one_rank) and all(counted[name] for name in WAYS):
            break
    assert set(FAULTS) >= OF_NEIGHBOURS and {name for name in OF_NEIGHBOURS if struck[name]} == of_one_rank, struck
    assert all(counted[name] for name in WAYS), counted


def test_several_ranks_have_other_workers_of_as_many_and_all_kinds_of_their_faults() -> None:
    counted, struck = Counter[str](), Counter[str]()
    rates = {**dict.fromkeys(OF_NEIGHBOURS, 0.1), "rank_lags": 0.1, "rank_dies": 0.01, "host_page_is_flipped": 0.02}
    # Few offers get as far.
    rates["neighbour_takes_nothing"] = 0.3
    for seed in (2, 3, 6, 5, 4, 1):
        report = simulate(seed, 60, rates, ranks=2 + seed % 2, neighbours=True, lends=seed % 4 == 0)
        counted.update(report.counters)
        struck.update(report.faults)
        if all(struck[name] for name in rates) and all(counted[name] for name in WAYS):
            break
    assert {name for name in rates if struck[name]} == set(rates), struck
    assert all(counted[name] for name in WAYS), counted


def test_the_same_seed_is_the_same_run_and_without_them_it_is_another() -> None:
    seed = 2
    first, second, alone = simulate(seed, 40, neighbours=True), simulate(seed, 40, neighbours=True), simulate(seed, 40)
    assert first.counters["peer_fetches"]
    assert first == second != alone
    assert not any(alone.faults.get(name) for name in OF_NEIGHBOURS)


def test_every_seed_of_a_campaign_that_asks_for_other_workers_has_them() -> None:
    for seed in SEEDS:
        assert all(shape.has_neighbours for shape in shapes_of(seed, 100, neighbours=True))
        assert {shape.ranks > 1 for shape in shapes_of(seed, 100, neighbours=True)} == {False, True}
    seeds = SEEDS[:8]
    seeds_without_peers = [seed for seed in seeds if not simulate(seed, 25, neighbours=True).counters["pages_shared"]]
    # A short run may end before a prompt is in host memory.
    assert len(seeds_without_peers) < len(seeds) / 2, seeds_without_peers


def test_some_seeds_of_a_campaign_have_other_workers() -> None:
    drawn = sum(draws_neighbours(seed) for seed in range(200))
    assert 20 < drawn < 100


def a_share_holds_nothing(patch: pytest.MonkeyPatch) -> None:
    """The pages of a peer's read may be evicted while they are read."""
    shared = Hints._share

    def share(self: Hints, event):  # type: ignore[no-untyped-def]  # As in the class.
        answer = shared(self, event)
        for one in self.shares:
            if not one.receipt.released:
                self._state.index.unpin(one.receipt)
        return answer

    patch.setattr(Hints, "_share", share)
    # The audit would name the receipt at once: the pages must show it.
    patch.setattr("tidekv.states.inspect.invariants._check_receipts", lambda core, loads: None)


def a_late_peer_gives_its_host_pages_back_at_once(patch: pytest.MonkeyPatch) -> None:
    given_up = PeerFetches.fetch_given_up

    def give_up(self: PeerFetches, fetch: Load, **fields: str) -> None:
        given_up(self, fetch, **fields)
        late = self._state.operations[fetch.op]
        self._state.host.give_back(late.host_pages)  # type: ignore[attr-defined]  # A LateFetch.
        self.pages_in_flight -= len(late.host_pages)  # type: ignore[attr-defined]
        late.host_pages = page_ids()  # type: ignore[attr-defined]

    patch.setattr(PeerFetches, "fetch_given_up", give_up)


def a_share_forgets_its_bound(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Hints, "shared_pages", property(lambda self: 0))


def a_share_never_ends(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Share, "ended", lambda self, event, error: None)


def what_a_peer_did_not_send_counts(patch: pytest.MonkeyPatch) -> None:
    from tidekv.states.storage.peer_fetches import PeerCalls

    ended = PeerCalls.fetch_ended
    patch.setattr(PeerCalls, "fetch_ended", lambda self, event: ended(self, event) + 1)


def an_offered_prompt_is_not_held(patch: pytest.MonkeyPatch) -> None:
    offered = Backups._offer

    def offer(self: Backups, backup: Backup) -> None:
        offered(self, backup)
        if backup.handing:
            self._pin(backup, None)

    patch.setattr(Backups, "_offer", offer)


def what_a_worker_did_not_hand_over_counts(patch: pytest.MonkeyPatch) -> None:
    received = TakenPrompts.received
    patch.setattr(TakenPrompts, "received", lambda self, part, valid: received(self, part, len(part.host_pages)))


BUGS = (
    a_share_holds_nothing,
    a_late_peer_gives_its_host_pages_back_at_once,
    a_share_forgets_its_bound,
    a_share_never_ends,
    what_a_peer_did_not_send_counts,
    an_offered_prompt_is_not_held,
    what_a_worker_did_not_hand_over_counts,
)


@pytest.mark.parametrize("plant", BUGS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_bug_in_the_sharing_is_found(ranks: int, plant: Callable[[pytest.MonkeyPatch], None], monkeypatch) -> None:
    plant(monkeypatch)
    first = FIRST_SEEDS.get((ranks, plant.__name__), 1)
    for seed in range(first, first + 60):
        try:
            simulate(seed, 120, ranks=ranks, neighbours=True)
        except SimulationFailed:
            return
    raise AssertionError(f"{plant.__name__} was not found")


def test_a_failing_run_with_other_workers_is_reduced_and_repeated(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_share_never_ends(monkeypatch)

    def fails(seed: int) -> bool:
        (shape,) = shapes_of(seed, 40, ranks=1, neighbours=True)
        try:
            simulate(seed, 40, lends=shape.lends, neighbours=True)
        except SimulationFailed:
            return True
        return False

    seed = next(seed for seed in range(1, 61) if fails(seed))
    smallest = find_smallest(seed, 40, "all", tmp_path / "journal", ranks=1, neighbours=True)
    assert "--peers" in smallest.command and smallest.requests <= 40


def test_bounds_are_drawn_beside_the_other_settings() -> None:
    from random import Random

    settings = draw_settings(Random(1))
    drawn = {with_neighbours(settings, seed).peer_reads_max for seed in range(20)}
    assert drawn == {1, 3, 16} and CoreState(with_neighbours(settings, 1)).host.total == settings.host_pages
