"""Pages that a room asked prefill to write, and how many of them have arrived."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidekv.states.types import FULL

if TYPE_CHECKING:
    from tidekv.states.events import ChunkReceived


class Span:
    """Pages [first, first + count) of the prompt that a room asked for, of the full KV or of a component.

    The cursor of each rank only grows.
    """

    __slots__ = ("asked_at_s", "cause", "component", "count", "cursors", "ended", "first", "queued_pages")

    def __init__(
        self,
        first: int,
        count: int,
        *,
        asked_at_s: float = 0.0,
        queued_pages: int = 0,
        component: str = FULL,
        cause: str = "",
    ) -> None:
        self.component = component
        self.cause = cause
        """Key of `LOST_CAUSES`, of a component."""
        self.asked_at_s = asked_at_s
        """When it was asked for."""
        self.queued_pages = queued_pages
        """Pages that prefill owed at that time, its own included. 0 if its throughput is not measured."""
        self.first = first
        self.count = count
        self.cursors: dict[int, int] = {}
        """By rank, the end of what has arrived; a rank that has sent nothing has no entry."""
        self.ended: set[int] = set()
        """Ranks that have sent their last chunk."""

    def take(self, event: ChunkReceived) -> None:
        """Note a chunk that continues the span: the cursor of its rank moves to its end."""
        self.cursors[event.rank] = event.first + event.count

    def end(self, rank: int) -> None:
        """Note that a rank has sent its last chunk."""
        self.ended.add(rank)

    def was_connected(self, at_s: float) -> None:
        """Note that its writer is known only now: the time to connect is no property of prefill's throughput."""
        self.asked_at_s = at_s

    def continues(self, event: ChunkReceived) -> bool:
        """Whether a chunk begins at its rank's cursor and ends within the span."""
        cursor = self.cursors.get(event.rank, self.first)
        return (
            event.first == cursor
            and 0 <= event.count <= self.first + self.count - cursor
            and event.rank not in self.ended
        )

    def received(self, ranks: int) -> int:
        """End of the part that has arrived from every rank, as a page of the prompt."""
        return self.first + self.count - self.pages_missing(ranks)

    def pages_missing(self, ranks: int) -> int:
        """Number of pages that have not arrived from every rank."""
        if not ranks or len(self.cursors) < ranks:
            return self.count
        return self.first + self.count - min(self.cursors.values())
