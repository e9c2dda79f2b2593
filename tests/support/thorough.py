"""Which combinations of values, and how many examples of hypothesis, only `test --all` tries."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Hashable, Iterable
from typing import Any

import pytest
from _pytest.mark import ParameterSet
from hypothesis import HealthCheck, settings

ALL, FEW = "tidekv", "tidekv-few"
"""Profiles of hypothesis: of `test --all`, and of the default tier, which has a third of the examples."""


# Registered by the import: the fuzzer, too, imports modules of tests that ask for their examples.
# How long an example takes depends on what else the machine does.
settings.register_profile(ALL, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(FEW, settings.get_profile(ALL), max_examples=33)


def load_profile(marks: str) -> None:
    """Load the profile for a run that selects tests by this expression of marks."""
    settings.load_profile(FEW if "not thorough" in marks else ALL)


def examples(count: int, **fields: Any) -> settings:  # Any: as in `settings`.
    """Return settings of `count` examples, of which the default tier tries a third, others in each run."""
    share = settings().max_examples / settings.get_profile(ALL).max_examples
    return settings(max_examples=max(1, round(count * share)), **fields)


def thorough_beyond(chosen: Container[Any], values: Iterable[Any]) -> list[Any]:  # Any: as pytest.mark.parametrize.
    """Return `values` as parameters of a test, of which the default tier has only those in `chosen`.

    A tuple gives several parameters. `chosen` has every value of each parameter at least once.
    """
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=() if value in chosen else pytest.mark.thorough,
        )
        for value in values
    ]


def pairs(*values: Hashable) -> set[Hashable]:
    """Return all pairs of values of different parameters: what faults of a combination mostly need."""
    return set(itertools.combinations(enumerate(values), 2))


def mark_rest(cases: Iterable[object], shows: Callable[..., Iterable[Hashable]] = pairs) -> list[ParameterSet]:
    """Return all cases as parameters; the default tier has as few as show what all show, such as all pairs of values.

    A tuple gives several parameters. `shows` is called with the values of a case. Of the cases that show most, the
    first one is taken.
    """
    each = (case if isinstance(case, tuple) else (case,) for case in cases)
    params = [values if isinstance(values, ParameterSet) else pytest.param(*values) for values in each]
    left = {at: set(shows(*param.values)) for at, param in enumerate(params)}
    taken = set[int]()
    while any(left.values()):
        best = max(left, key=lambda at: len(left[at]))
        taken.add(best)
        left = {at: shown - left[best] for at, shown in left.items()}
    return [
        param if at in taken else param._replace(marks=(*param.marks, pytest.mark.thorough))
        for at, param in enumerate(params)
    ]
