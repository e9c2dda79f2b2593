"""Protocol of one simulated rank, as its parts use it: time, faults, pools, the core, and the content of requests.

The rank creates its parts. Each part depends only on the protocol, not on the rank's class.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from simulation.components import SimulatedComponents, Tags
    from simulation.faults import Faults
    from simulation.memory import Contents, SimulatedPool
    from simulation.rooms import Frames, RoomsOut
    from simulation.schedule import Life
    from simulation.tiers import Outcomes
    from tidekv.states import commands
    from tidekv.states.core import Core
    from tidekv.states.events import Event
    from tidekv.states.prefix.node import TierName
    from tidekv.states.settings import CoreSettings
    from tidekv.states.types import PageIds


class Requester(Protocol):
    """Interface of a request for the tiers: the tags of its pages, and the number of its prompt."""

    tags: list[int]
    component_tags: Tags


class Surroundings(Protocol):
    """Interface of a rank for its tiers and peers."""

    settings: CoreSettings
    core: Core
    schedule: Life
    """What is scheduled here is dropped if the rank's process ends."""
    faults: Faults
    contents: Contents
    device: SimulatedPool
    host: SimulatedPool
    component_pages: SimulatedComponents
    outcomes: Outcomes
    rooms_out: RoomsOut
    frames: Frames
    dead_writers: set[str]

    @property
    def now_s(self) -> float:
        """The virtual time."""
        ...

    @property
    def is_alone(self) -> bool:
        """Whether it is the only rank, whose core takes each event at once."""
        ...

    def delay(self) -> float:
        """Return the duration of an action without a fault."""
        ...

    def pool(self, tier: TierName, component: str) -> SimulatedPool:
        """Return the pages of a tier, of the full KV or of a component."""
        ...

    def flip_one(self, pool: SimulatedPool, pages: PageIds) -> None:
        """Flip a bit of one of these host pages, if that fault strikes."""
        ...

    def tell(self, event: Event) -> None:
        """Pass an event to the core, and execute its commands; with several ranks, pass it to their next vote."""
        ...

    def tell_now(self, event: Event) -> None:
        """Pass on an event that was created earlier, with the current time."""
        ...

    def caller(self, request_id: str) -> Requester:
        """Return the caller of the live request with that id."""
        ...

    def tags_put(self, command: commands.StorePages | commands.FetchPages) -> list[int]:
        """Return the tags of the tokens whose pages are put, or read without a request."""
        ...

    def new_writer(self, peer: str) -> str:
        """Return the name of another life of a peer."""
        ...

    def lose_writer(self, writer: str) -> None:
        """Report that a peer is unreachable."""
        ...

    def note_losses(self, event: Event) -> None:
        """Record the request whose room an event ends: it may fail."""
        ...
