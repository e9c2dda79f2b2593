"""What `native_steps.c` offers where it was built."""

from collections.abc import Callable

from tidekv.engine.journal.native import Left
from tidekv.states.commands import Command
from tidekv.states.core import Core
from tidekv.states.events import Event
from tidekv.states.node import Node, TierName
from tidekv.states.request import Request
from tidekv.states.witness import BookPlace

class StepWriter:
    """See tidekv.engine.journal.native."""

    events: int
    """The number of the next step."""

    def __init__(
        self,
        *,
        core: Core,
        requests: dict[str, Request],
        evicted: list[tuple[str, int, int]],
        arrived: dict[str, tuple[bytes, bytes]],
        states: tuple[object, ...],
        books: tuple[BookPlace, ...],
        encode: Callable[[object], bytes],
        begun: Callable[[], None],
        full: Callable[[], None],
        left: Left,
        crowded: Callable[[], int],
        array_type: type,
        books_every: int,
        full_steps: int,
        key_bytes: int,
        pages_max: int,
        arrived_max: int,
        with_tokens: bool,
    ) -> None: ...
    def stepped(self, event: Event, given: list[Command], error: str = "", /) -> None:
        """Write the step that the core has just made."""

    def note_eviction(self, node: Node, tier: TierName, /) -> None:
        """Note that a copy of a node's pages leaves the index."""

    def take(self) -> tuple[bytes, int] | None:
        """Return the steps in the buffer as a JSON list, and how many there are, and empty it; None while another
        thread writes a step.
        """

    def add_kind(
        self,
        kind: type,
        words: bytes,
        head: int,
        tail: int,
        fields: tuple[tuple[str, int, object], ...],
        request_id: str | None,
        keys: int,
        /,
    ) -> None:
        """Make structs of a type known."""
