"""A step of a core in which one call raises, for each of its calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from simulation.raising import Places
from simulation.rig import Rig


def raised_at_each_call(prepare: Callable[[], tuple[Rig, Callable[[], object]]]) -> Iterator[tuple[int, Rig]]:
    """Prepare a core and take its step, first with its first call raising, then with its second, up to its last.

    Yields which call it was, and the core as the step left it; nothing raises any more then.
    """
    calls = raised = 0
    while raised == calls:
        rig, step = prepare()
        places = Places(rig.core)
        raised += 1
        places.left = raised
        step()
        calls, places.left = places.count if places.left else raised, 0
        yield raised, rig
    assert raised > 1, "the step made no call at all"
