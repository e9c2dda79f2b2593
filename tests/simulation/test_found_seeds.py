"""Seeds that have found a fault of the core, each by a coincidence that no other test has."""

from __future__ import annotations

import pytest

from simulation.simulate import simulate


@pytest.mark.slow
def test_a_request_whose_failure_raises_once_fails_at_the_second_try() -> None:
    """The caller could not compute the rest, and the step that fails the request raised behind its leaving."""
    simulate(691768212, 1000, always_components=True, hints=False)
