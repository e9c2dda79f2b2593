"""What the parts of a simulated world ask of it: time, faults, pools, the core, and what requests know.

The world makes its parts and is made of them; each part names only the protocol of what it uses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random
    from typing import Any

    from tidekv.engine.simulation.components import SimulatedComponents, Tags
    from tidekv.engine.simulation.faults import Faults
    from tidekv.engine.simulation.memory import Contents, SimulatedPool
    from tidekv.engine.simulation.rank_callers import RankCaller, Script
    from tidekv.engine.simulation.schedule import Schedule
    from tidekv.states import commands
    from tidekv.states.core import Core
    from tidekv.states.events import Event
    from tidekv.states.settings import CoreSettings


class Requester(Protocol):
    """A request as the tiers see it: the tags of its pages."""

    tags: list[int]
    component_tags: Tags


class Surroundings(Protocol):
    """The world as its tiers and peers see it."""

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
        """How long something takes that goes well."""
        ...

    def step(self, event: Event) -> None:
        """Let the core take an event, and run its commands."""
        ...

    def tell_now(self, event: Event) -> None:
        """Step an event that was made before its time."""
        ...

    def caller(self, request_id: str) -> Requester:
        """The live request of that name."""
        ...

    def tags_of(self, namespace: str, tokens: bytes) -> list[int]:
        """The tags of the full pages of these tokens."""
        ...

    def tags_put(self, command: commands.StorePages) -> list[int]:
        """The tags of the prompt whose pages are put."""
        ...

    def tokens_left(self, serial: int) -> list[int]:
        """The tags of what a request left."""
        ...

    def lose_writer(self, writer: str) -> None:
        """Step the event that a peer is out of reach."""
        ...

    def note_losses(self, event: Event) -> None:
        """Remember the request whose room an event ends: it may fail."""
        ...


class GroupSettings(Protocol):
    """What all ranks of a group share."""

    settings: CoreSettings
    contents: Contents


class RankSurroundings(Protocol):
    """One simulated rank as its tiers and rooms see it."""

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
        """Do something later, if this life of the rank goes on until then."""
        ...

    def delay(self) -> float:
        """How long something takes."""
        ...

    def hits(self, name: str) -> bool:
        """Whether a fault strikes this rank now."""
        ...

    def receive(self, event: Event) -> None:
        """Take something that this rank has seen to the vote."""
        ...

    def outcome(self, delay_s: float, make: Callable[[], Event]) -> None:
        """End an operation after a while."""
        ...

    def tags(self, tokens: bytes) -> list[int]:
        """The tags of the full pages of these tokens."""
        ...

    def page_tags(self, script: Script) -> list[int]:
        """The tags of all pages of a prompt."""
        ...
