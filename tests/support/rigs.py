"""What tests of several folders ask of a rig."""

from __future__ import annotations

from simulation.rig import Rig
from tidekv.states import commands, events
from tidekv.states.storage_policy import changed_policy, policy_of


def change(rig: Rig, **changes: object) -> None:
    """Change storage policies of a running core."""
    policy = changed_policy(policy_of(rig.core.state.settings), changes)
    rig.step(events.PolicyChanged, policy=policy)


def tails_of(promise: commands.SendPromise) -> dict[str, tuple[int, int]]:
    """Return the first page and the number of pages that a promise requests of each component."""
    assert promise.component_pages is not None
    return {asked_for.component: (asked_for.first, len(asked_for.pages)) for asked_for in promise.component_pages}


def extended(rig: Rig) -> dict[str, tuple[int, int]]:
    """Return the first position and the number of pages that the extends since the last call request of each
    component, each of one run; prefill serves them.
    """
    extends = rig.take_all(commands.SendExtend)
    found = {extend.component: (extend.first, len(extend.pages)) for extend in extends}
    assert len(found) == len(extends), extends
    for extend in extends:
        rig.chunk(extend)
    return found


def planned(rig: Rig) -> list[str]:
    """Requests that were let in since the last call, in order."""
    return [promise.request_id for promise in rig.take_all(commands.SendPromise)]
