"""Runs that split pages between storage and transfer: with faults at every boundary, nothing is lost or stuck."""

from __future__ import annotations

import importlib
from random import Random

import msgspec
import pytest

from simulation import policies
from tests.support.thorough import thorough_beyond
from tidekv.states.loads import loads
from tidekv.states.request import plan_fetches, restore

# Both bear the name of a function that their package has, too.
SIMULATE = importlib.import_module("simulation.simulate")
WORLD = importlib.import_module("simulation.world")


@pytest.fixture(autouse=True)
def _always_soonest(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = policies.draw_policy

    def soonest(random: Random, page_size: int) -> object:
        return msgspec.structs.replace(drawn(random, page_size), prefetch="soonest")

    monkeypatch.setattr(SIMULATE, "draw_policy", soonest)
    monkeypatch.setattr(WORLD, "draw_policy", soonest)


@pytest.mark.parametrize("seed", thorough_beyond((1, 2), range(6)))
def test_a_run_ends_well(seed: int) -> None:
    report = SIMULATE.simulate(seed, 150)
    assert report.ends["READY"] > 30


def test_a_run_ends_well_however_a_plan_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    random = Random(1)
    monkeypatch.setattr(plan_fetches, "pages_to_load", lambda count, *_, **__: random.randint(0, count))
    monkeypatch.setattr(restore, "pages_to_copy", lambda count, *_, **__: random.randint(0, count))
    counters = [SIMULATE.simulate(seed, 150).counters for seed in range(20, 26)]
    for tier in ("l2", "l3"):
        assert sum(one.get(f"{tier}_declined_pages", 0) for one in counters) > 50


def test_a_run_ends_well_where_every_fetch_is_given_up_that_the_transfer_outruns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loads, "fetches_to_keep", lambda fetches, link: 0)
    seeds = (7, 10, 23, 24, 30, 5)
    assert any(SIMULATE.simulate(seed, 150, ["fetch_is_late"]).counters.get("l3_fetches_cut", 0) for seed in seeds)
