"""Protocols of a simulated world, as its parts use it: time, faults, pools, the core, and the content of requests.

The world creates its parts. Each part depends only on the protocol that it uses, not on the world's class.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random
    from typing import Any

    from simulation.components import SimulatedComponents, Tags
    from simulation.faults import Faults
    from simulation.memory import Contents, SimulatedPool
    from simulation.rank_callers import RankCaller, Script
    from simulation.schedule import Schedule
    from tidekv.states import commands
    from tidekv.states.core import Core
    from tidekv.states.events import Event
    from tidekv.states.settings import CoreSettings
    from tidekv.states.types import PageIds


class Requester(Protocol):
    """Interface of a request for the tiers: the tags of its pages."""

    tags: list[int]
    component_tags: Tags


class Surroundings(Protocol):
    """Interface of the world for its tiers and peers."""

    settings: CoreSettings
    core: Core
    schedule: Schedule
    faults: Faults
    contents: Contents
    device: SimulatedPool
    host: SimulatedPool
    component_pages: SimulatedComponents
    dead_writers: set[str]

    @property
    def now_s(self) -> float:
        """The virtual time."""
        ...

    def delay(self) -> float:
        """Return the duration of an action without a fault."""
        ...

    def flip_one(self, pool: SimulatedPool, pages: PageIds) -> None:
        """Flip a bit of one of these host pages, if that fault strikes."""
        ...

    def step(self, event: Event) -> None:
        """Pass an event to the core, and execute its commands."""
        ...

    def tell_now(self, event: Event) -> None:
        """Pass on an event that was created earlier, with the current time."""
        ...

    def caller(self, request_id: str) -> Requester:
        """Return the live request with that id."""
        ...

    def tags_of(self, namespace: str, tokens: bytes) -> list[int]:
        """Return the tags of the full pages of these tokens."""
        ...

    def tags_put(self, command: commands.StorePages | commands.FetchPages) -> list[int]:
        """Return the tags of the prompt whose pages are put."""
        ...

    def tokens_left(self, request_number: int) -> list[int]:
        """Return the tags of the tokens that a request left."""
        ...

    def lose_writer(self, writer: str) -> None:
        """Report that a peer is unreachable."""
        ...

    def note_losses(self, event: Event) -> None:
        """Record the request whose room an event ends: it may fail."""
        ...


class GroupSettings(Protocol):
    """State that all ranks of a group share."""

    settings: CoreSettings
    contents: Contents


class RankSurroundings(Protocol):
    """Interface of one simulated rank for its tiers and rooms."""

    number: int
    random: Random
    core: Core
    device: SimulatedPool
    host: SimulatedPool
    component_pages: SimulatedComponents
    callers: dict[str, RankCaller]
    stored: set[int]
    records: dict[int, list[int]]

    @property
    def world(self) -> GroupSettings:
        """The group."""
        ...

    def after(self, delay_s: float, action: Any, *arguments: Any) -> None:  # Any: as in Schedule.
        """Schedule an action; it is dropped if the rank's process has ended by then."""
        ...

    def delay(self) -> float:
        """Return the duration of an action."""
        ...

    def hits(self, name: str) -> bool:
        """Whether a fault strikes this rank now."""
        ...

    def receive(self, event: Event) -> None:
        """Pass a local event to the agreement."""
        ...

    def outcome(self, delay_s: float, make: Callable[[], Event]) -> None:
        """Deliver the outcome of an operation after a delay."""
        ...

    def look_for_refusals(self) -> None:
        """Take the calls that end without a vote."""
        ...

    def tags(self, tokens: bytes) -> list[int]:
        """Return the tags of the full pages of these tokens."""
        ...

    def page_tags(self, script: Script) -> list[int]:
        """Return the tags of all pages of a prompt."""
        ...
