"""Vote on a boundary that all ranks can continue from with their storage: the item of a `QueryComponents`.

The component pages in storage form a set, and MIN cannot reduce sets. But a plan needs only one boundary, and the
caches of all ranks are the same. So the ranks look for the longest boundary that each of them serves, from the caches
and its own storage together:

    rank 0 serves   . 2 . 4 . . 7       proposes 7    4
    rank 1 serves   . . 3 4 5 .         proposes 5    4     equal: boundary 4
    least / most                             5/7    4/4

If the proposals differ, each rank proposes its longest boundary up to the least of them, so the agreed value falls with
every vote. The core then receives all component pages of the boundary as if storage had them: pages in the caches are
used from there, and the storage of every rank has the others. If a page has gone by the time of its fetch, the fetch
fails on all ranks, and the request continues without storage.
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
"""Maximum votes on a boundary, before the ranks continue without component pages from storage."""


class ComponentVote:
    """The full pages that the storage of every rank has, and the longest boundary that all ranks serve.

    The first value is that of an operation, 0 until storage has answered on this rank. The second is the proposed
    boundary plus one, the third its negative; together they show whether all ranks propose the same.
    """

    __slots__ = ("_core", "_coverage", "_end", "_first", "_prompt", "_votes", "is_over", "number", "op", "slots")

    def __init__(self, number: int, vote_vector: VoteVector, command: QueryComponents, core: Core) -> None:
        self.number = number
        self.op = command.op
        self.slots = (vote_vector.open(self), vote_vector.open(self), vote_vector.open(self))
        self.is_over = False
        """Whether the core has received the answer, so that no vote is needed any more."""
        # The request may end before storage answers, or have ended already.
        request = core.state.requests.get(command.request_id)
        self._prompt = None if request is None else (request.namespace, request.keys)
        self._first = command.first
        self._end = command.first + command.count
        self._core = core
        self._coverage: PrefixCoverage | None = None
        """The boundaries that this rank serves. None: storage gave no usable answer."""
        self._votes = 0

    def receive(self, vote_vector: VoteVector, rank: int, event: Event) -> None:
        """Take the answer of storage on this rank; only the first one counts."""
        if vote_vector.value(self.slots[0]):
            return
        found, failed = 0, has_failed(event)
        if isinstance(event, events.StorageAnswered) and not failed:
            found = event.found
            if self._prompt is not None:
                assert self._core.component_pages is not None, "only cores with components query for component pages"
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
    # Never 0: `reset` sets the agreed value to 0, and `take` notices the next result only if it differs from that.
    return boundary + 1, -boundary - 1
