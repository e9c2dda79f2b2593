"""Vote on component pages in storage: the item of a query that asks for them.

What a request uses of a component ends before the first page that device, host and storage lack, because prefill writes
everything from there on. Each rank proposes that end for each component, from its caches and its own storage. The least
proposal is one that every rank can serve:

    position       5   6   7   8              proposes
    rank 0         L1  L3  L3  .              8
    rank 1         L1  L3  .   L3             7              agreed: [5, 7), prefill sends the rest

The core then receives all positions before the agreed end as if storage had them: pages in the caches, which are the
same on all ranks, are used from there, and the storage of every rank has the others. If a page has gone by the time of
its fetch, the fetch fails on all ranks, and the request continues without component pages from storage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidekv.states import events
from tidekv.states.ranks.vote_items import decode_end, encode_end, has_failed

if TYPE_CHECKING:
    from tidekv.states.commands import QueryStorage
    from tidekv.states.core import Core
    from tidekv.states.events import Event
    from tidekv.states.ranks.votes import VoteVector


class ComponentVote:
    """The full pages that the storage of every rank has, and for each component the end of what every rank can serve.

    The value of the first slot is that of an operation, 0 until storage has answered on this rank. The others are the
    ends of the components in the order of the query, 0 with the first.
    """

    __slots__ = ("_core", "_firsts", "_prompt", "number", "op", "slots")

    def __init__(self, number: int, vote_vector: VoteVector, command: QueryStorage, core: Core) -> None:
        self.number = number
        self.op = command.op
        self._firsts = command.components_first
        self.slots = tuple(vote_vector.open(self) for _ in range(1 + len(self._firsts)))
        # The request may end before storage answers, or have ended already.
        request = core.state.requests.get(command.request_id)
        self._prompt = None if request is None else (request.namespace, request.keys)
        self._core = core

    @property
    def is_over(self) -> bool:
        """Whether the item is closed after its decision."""
        return True

    def receive(self, vote_vector: VoteVector, rank: int, event: Event) -> None:
        """Take the answer of storage on this rank; only the first one counts."""
        if vote_vector.value(self.slots[0]):
            return
        found, failed, ends = 0, has_failed(event), dict(self._firsts)
        if isinstance(event, events.StorageAnswered) and not failed:
            found = event.found
            if self._prompt is not None:
                assert self._core.component_pages is not None, "only cores with components query for component pages"
                served = self._core.component_pages.storage
                answers = {entry.component: entry for entry in event.component_pages}
                for name, first in self._firsts.items():
                    ends[name] = served.available_end(*self._prompt, name, first, answers.get(name))
        values = (encode_end(found, rank, failed=failed), *ends.values())
        for slot, value in zip(self.slots, values, strict=True):
            vote_vector.set(slot, value)

    def decide(self, vote_vector: VoteVector, at_s: float) -> list[Event]:
        """See `VoteItem`."""
        ended, *ends = (vote_vector.agreed(slot) for slot in self.slots)
        if not ended:
            return []
        found, error = decode_end(ended)
        component_pages = tuple(
            events.StoredComponent(name, ((first, end),))
            for (name, first), end in zip(self._firsts.items(), ends, strict=True)
            if end > first
        )
        return [
            events.StorageAnswered(at_s=at_s, op=self.op, found=found, error=error, component_pages=component_pages)
        ]

    def close(self, vote_vector: VoteVector) -> None:
        """See `VoteItem`."""
        for slot in self.slots:
            vote_vector.close(slot)
