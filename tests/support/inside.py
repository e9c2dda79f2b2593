"""The parts of an engine that tests of faults look at: the one place that knows where they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidekv import DecodeEngine
    from tidekv.engine.decode.pending_calls import PendingCalls
    from tidekv.engine.decode.runtime import Runtime
    from tidekv.states.core import Core


def runtime_of(engine: DecodeEngine) -> Runtime:
    """What an engine starts and closes: transport, tiers, driver, journal."""
    return engine._runtime


def core_of(engine: DecodeEngine) -> Core:
    """The core that decides for an engine."""
    return engine._runtime.core


def calls_of(engine: DecodeEngine) -> PendingCalls:
    """The calls of an engine's users that wait for an outcome."""
    return engine._runtime.calls
