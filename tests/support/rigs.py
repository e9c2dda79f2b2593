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


def planned(rig: Rig) -> list[str]:
    """Requests that were let in since the last call, in order."""
    return [promise.request_id for promise in rig.take_all(commands.SendPromise)]
