"""Makes rules of the core raise at an arbitrary call, as a defect, an eviction policy or a hook would.

Every call of a rule to the index, the page pools or the shared state is a possible place; the raise comes before the
call has any effect. At most one call per step raises, so that the recovery itself succeeds.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from simulation.faults import Faults
from tidekv.states.commands import Command
from tidekv.states.core import Core
from tidekv.states.events import Event

INDEX_CALLS = (
    "match",
    "probe_prefix",
    "path",
    "device_path",
    "has_host",
    "lock",
    "unlock",
    "pin",
    "unpin",
    "insert",
    "insert_host",
    "insert_pending",
    "give_device",
    "give_host",
    "split",
    "mark_stored",
    "unmark_stored",
    "set_load",
    "set_reclaiming",
    "drop_reclaiming",
    "withdraw_device",
    "evict_device",
    "evict_host",
    "flush",
)
COMPONENT_CALLS = (
    "sources",
    "positions",
    "trailing_pages_of",
    "lock",
    "unlock",
    "pin",
    "unpin",
    "take",
    "insert",
    "give_back",
    "drain",
    "settle",
)
POOL_CALLS = ("take", "give_back", "drain", "settle", "return_lent")
STATE_CALLS = ("emit", "start_operation", "make_device_room", "make_host_room")
PLACES_MAX = 24


class Injected(Exception):
    """A raise that the simulation injects into a rule."""


class Places:
    """Counts the calls that the rules of a core make, and raises at a chosen one."""

    def __init__(self, core: Core) -> None:
        self.left = 0
        """Calls until the raise; 0 disables it."""
        self.count = 0
        """Calls so far."""
        self._depth = 0
        self._is_stepping = False
        state = core.state
        for name in INDEX_CALLS:
            setattr(state.index, name, self._watched(getattr(state.index, name)))
        for name in COMPONENT_CALLS if state.components is not None else ():
            setattr(state.components, name, self._watched(getattr(state.components, name)))
        for name in STATE_CALLS:
            setattr(state, name, self._watched(getattr(state, name)))
        # A pool has no instance dictionary (slots), so its class is replaced by one with watched methods.
        for pool in (state.device, state.host):
            kind = type(pool)
            calls = {name: self._watched(getattr(kind, name)) for name in POOL_CALLS if hasattr(kind, name)}
            pool.__class__ = type("WatchedPool", (kind,), {"__slots__": (), **calls})
        core.step = self._stepping(core.step)  # type: ignore[method-assign, assignment]  # Calls count only within steps.

    def _stepping(self, step: Callable[[Event], list[Command]]) -> Callable[[Event], list[Command]]:
        def call(event: Event) -> list[Command]:
            self._is_stepping = True
            try:
                return step(event)
            finally:
                self._is_stepping = False

        return call

    def _watched(self, original: Callable[..., Any]) -> Callable[..., Any]:  # Any: all is handed on.
        def call(*arguments: Any, **named: Any) -> Any:
            # A nested call is not a separate place: for example the shared state evicts through the index.
            if self._is_stepping and not self._depth:
                self.count += 1
                if self.left:
                    self.left -= 1
                    if not self.left:
                        raise Injected(original.__name__)
            self._depth += 1
            try:
                return original(*arguments, **named)
            finally:
                self._depth -= 1

        return call


class Raising:
    """Raises occasionally if the run has that fault enabled."""

    def __init__(self, core: Core, seed: object, faults: Faults) -> None:
        """Runs with the same seed raise at the same calls of the same events, as a defect does on all ranks alike."""
        self._seed = seed
        self._faults = faults
        self._rate = faults.rate("rule_raises")
        self._places = Places(core) if self._rate else None

    def begin_step(self, place: int) -> None:
        """Begin a step, of event number `place`: choose whether and where one of its calls raises."""
        if self._places is None or self._faults.is_over:
            return
        random = Random(f"raise {self._seed} {place}")
        if random.random() < self._rate:
            self._faults.counts["rule_raises"] += 1
            self._places.left = random.randint(1, PLACES_MAX)

    def end_step(self) -> None:
        """End a step: cancel a raise whose place was not reached, so that it does not carry over."""
        if self._places is not None:
            self._places.left = 0
