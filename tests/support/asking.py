"""The arrival of a request that storage answers, for tests of how storage is used."""

from __future__ import annotations

from simulation.rig import Rig
from tidekv.states import commands


def ask(rig: Rig, name: str, tokens: bytes, found: int) -> commands.SendPromise:
    """A prompt arrives; storage returns how much of it it has; the promise follows."""
    rig.arrive(name, tokens)
    rig.answer(rig.take(commands.QueryStorage), found)
    promise = rig.take(commands.SendPromise)
    rig.promised(promise)
    return promise
