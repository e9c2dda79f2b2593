"""Up to which boundary all ranks can go on with what storage has: the question about a `QueryComponents`.

Which pages of a component are in storage is a set, and of sets a vote can make nothing. But a plan needs one boundary
only, and the caches of all ranks are the same. So the ranks look for the longest boundary that each of them serves, by
the caches and its own storage together:

    rank 0 serves   . 2 . 4 . . 7       says 7    4
    rank 1 serves   . . 3 4 5 .         says 5    4     the same: boundary 4
    least / most                          5/7    4/4

Where not all said the same, each says its longest up to the least of them: what is agreed on goes down at every vote.
The core then hears of the whole tails of that boundary as if all of them were in storage: what the caches have of them
is used from there, and the rest is in the storage of every rank. What is not there any more by then fails the fetch on
all ranks, and the request goes on without storage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidekv.states import events
from tidekv.states.ranks.vote_items import decode_end, encode_end, has_failed

if TYPE_CHECKING:
    from tidekv.states.commands import QueryComponents
    from tidekv.states.components.storage import PrefixCoverage
    from tidekv.states.core import Core
    from tidekv.states.events import Event
    from tidekv.states.ranks.votes import VoteVector

VOTES_MAX = 16
"""So many votes may ask for a boundary, before the ranks do without the tails in storage."""


class ComponentVote:
    """How many full pages the storage of every rank has, and the longest boundary that all ranks serve.

    The first word is that of an operation, 0 until storage has answered here. The second is the boundary that this rank
    proposes, plus one, and the third its negative, by which ranks see whether all propose the same.
    """

    __slots__ = ("_core", "_coverage", "_end", "_first", "_prompt", "_votes", "is_over", "number", "op", "slots")

    def __init__(self, number: int, vote_vector: VoteVector, command: QueryComponents, core: Core) -> None:
        self.number = number
        self.op = command.op
        self.slots = (vote_vector.open(self), vote_vector.open(self), vote_vector.open(self))
        self.is_over = False
        """Whether the core is told, and nothing is to be asked any more."""
        # The request may be over when storage answers, or even by now.
        request = core.state.requests.get(command.request_id)
        self._prompt = None if request is None else (request.namespace, request.keys)
        self._first = command.first
        self._end = command.first + command.count
        self._core = core
        self._coverage: PrefixCoverage | None = None
        """What this rank serves; None: it has no answer of use."""
        self._votes = 0

    def receive(self, vote_vector: VoteVector, rank: int, event: Event) -> None:
        """Storage has answered on this rank. Told twice, only the first counts."""
        if vote_vector.value(self.slots[0]):
            return
        found, failed = 0, has_failed(event)
        if isinstance(event, events.StorageAnswered) and not failed:
            found = event.found
            if self._prompt is not None:
                assert self._core.component_pages is not None, "who asks for tails has components"
                self._coverage = self._core.component_pages.storage.coverage(
                    *self._prompt, self._first, found, event.component_pages
                )
        boundary = self._longest(self._end)
        for slot, value in zip(self.slots, (encode_end(found, rank, failed=failed), *_proposal(boundary)), strict=True):
            vote_vector.set(slot, value)

    def decide(self, vote_vector: VoteVector, at_s: float) -> list[Event]:
        """See `VoteItem`."""
        ended, least, most = (vote_vector.agreed(slot) for slot in self.slots)
        if not ended:
            return []
        self._votes += 1
        boundary, is_same = least - 1, least == -most
        if boundary and not is_same and self._votes < VOTES_MAX:
            for slot, value in zip(self.slots[1:], _proposal(self._longest(boundary)), strict=True):
                vote_vector.reset(slot, value)
            return []
        self.is_over = True
        component_pages = self._component_pages_of(boundary) if boundary and is_same else ()
        found, error = decode_end(ended)
        return [
            events.StorageAnswered(at_s=at_s, op=self.op, found=found, error=error, component_pages=component_pages)
        ]

    def close(self, vote_vector: VoteVector) -> None:
        """See `VoteItem`."""
        for slot in self.slots:
            vote_vector.close(slot)

    def _longest(self, limit: int) -> int:
        return self._coverage.longest(limit) if self._coverage is not None else 0

    def _component_pages_of(self, boundary: int) -> tuple[events.StoredComponent, ...]:
        settings = self._core.settings
        return tuple(
            events.StoredComponent(
                component.name, ((max(0, boundary - component.trailing_pages(settings.page_size)), boundary),)
            )
            for component in settings.components
        )


def _proposal(boundary: int) -> tuple[int, int]:
    # Never 0: that what is asked anew was answered is seen by the answer's being another one.
    return boundary + 1, -boundary - 1
