"""Which combinations of values only `test --all` tries."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


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
