"""Makes rules of the core raise somewhere in their middle, as a bug of ours, an eviction policy or a hook would.

Every call that a rule makes to the index, the accounts or the books is a place where it may raise, before the call has
done anything. At most one call of a step does, so that whatever mends the damage works.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from tidekv.engine.simulation.faults import Faults
from tidekv.states.accounts import PageAccount
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
    "set_load",
    "set_void",
    "drop_void",
    "withdraw_device",
    "evict_device",
    "evict_host",
    "flush",
)
COMPONENT_CALLS = (
    "match",
    "probe_prefix",
    "tail",
    "lock",
    "unlock",
    "pin",
    "unpin",
    "reserve",
    "insert",
    "take_host",
    "give_back",
    "drain",
    "settle",
)
ACCOUNT_CALLS = ("take", "give_back", "drain", "settle")
BOOKS_CALLS = ("say", "begin", "make_device_room", "make_host_room")
PLACES_MAX = 24


class Injected(Exception):
    """A raise that the simulation put into a rule."""


class Places:
    """Counts down the calls that the rules of a core make, and raises at one of them."""

    def __init__(self, core: Core) -> None:
        self.left = 0
        """How many calls from now the raise comes; 0 for never."""
        self.count = 0
        """Calls seen so far."""
        self._depth = 0
        self._is_stepping = False
        books = core.books
        for name in INDEX_CALLS:
            setattr(books.index, name, self._watched(getattr(books.index, name)))
        for name in COMPONENT_CALLS if books.components is not None else ():
            setattr(books.components, name, self._watched(getattr(books.components, name)))
        for name in BOOKS_CALLS:
            setattr(books, name, self._watched(getattr(books, name)))
        # An account has no room for methods of its own: it becomes one of a class that does.
        calls = {name: self._watched(getattr(PageAccount, name)) for name in ACCOUNT_CALLS}
        for account in (books.device, books.host):
            account.__class__ = type("WatchedAccount", (PageAccount,), {"__slots__": (), **calls})
        core.step = self._stepping(core.step)  # type: ignore[method-assign, assignment]  # Calls count within steps alone.

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
            # A call within a call is not a place of a rule: books evict by the index.
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
    """Raises now and then, where the run has that fault on."""

    def __init__(self, core: Core, random: Random, faults: Faults) -> None:
        self._random = random
        self._faults = faults
        self._places = Places(core) if faults.is_on("rule_raises") else None

    def begin_step(self) -> None:
        """A step begins: maybe one of its calls is to raise."""
        if self._places is not None and self._faults.hits("rule_raises"):
            self._places.left = self._random.randint(1, PLACES_MAX)

    def end_step(self) -> None:
        """A step is over: whatever was to raise and was not reached does not raise in the next one."""
        if self._places is not None:
            self._places.left = 0
