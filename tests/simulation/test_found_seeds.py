"""Seeds that have found a fault of the core, or of the simulation, each by a coincidence that no other test has."""

from __future__ import annotations

import pytest

from simulation.simulate import simulate
from tests.simulation.test_early_callers import component_settings_of


@pytest.mark.slow
def test_a_request_whose_failure_raises_once_fails_at_the_second_try() -> None:
    """The caller could not compute the rest, and the step that fails the request raised behind its leaving."""
    simulate(691768212, 1000, always_components=True, hints=False)


def test_a_report_that_crosses_an_early_callers_abort_is_given_to_nobody() -> None:
    """The caller had written its state record when it aborted, and READY was decided in the same turn."""
    faults = {"flush": 0.3, "abort": 0.3, "abort_at_once": 0.0, "rank_lags": 0.05}
    report = simulate(5, 60, faults, ranks=2, settings=component_settings_of(5), early=True)
    assert report.early["aborted"]


def test_a_request_that_waits_for_lent_pages_ends_before_its_rank_forms_a_group_again() -> None:
    """A rank had died, and the others had nothing in flight but a request that their host engines had no pages for."""
    simulate(410004, 200, ranks=3, always_components=True, lends=True)


def test_an_offer_counts_a_page_that_is_there_already_once_if_giving_it_back_raises() -> None:
    """Another offer had brought the page, and the end of this one was called again after the raise."""
    without = ("component_copy_fails", "share_fails")
    simulate(820021, 333, always_components=True, lends=True, neighbours=True, without=without)
