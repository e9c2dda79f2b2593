"""What the ranks of a decode instance promised for one room: prefill compares it before it sends anything.

Every decode rank tells every prefill rank what it promised. Ranks that promised different lengths would be sent
different parts of the prompt: all would believe that they are complete, and one would serve pages that nobody wrote.
Nothing is trimmed to fit: the room is refused, with both numbers. Pure: no I/O, no time.
"""

from __future__ import annotations

import msgspec


class RankPromise(msgspec.Struct, frozen=True):
    """What one rank promised."""

    rank: int
    ranks: int
    prompt_tokens: int
    promised_tokens: int
    key_seed: bytes | None = None
    component_pages: tuple[tuple[str, int], ...] | None = None
    """By component the position from which on its tail is asked for. None: the rank has no components."""


class PromiseCheck:
    """The pledges of one room, as they come."""

    __slots__ = ("_first", "_ranks")

    def __init__(self) -> None:
        self._first: RankPromise | None = None
        self._ranks: set[int] = set()

    @property
    def is_complete(self) -> bool:
        """Whether every rank has pledged."""
        return self._first is not None and len(self._ranks) == self._first.ranks

    def take(self, rank_promise: RankPromise) -> str:
        """Note one; returns in words how it differs from what was pledged before, nothing where it does not."""
        first = self._first = self._first or rank_promise
        if not 0 <= rank_promise.rank < rank_promise.ranks or rank_promise.rank in self._ranks:
            return f"rank {rank_promise.rank} of {rank_promise.ranks} cannot promise, or has promised before"
        self._ranks.add(rank_promise.rank)
        return difference(first, rank_promise)


def difference(one: RankPromise, other: RankPromise) -> str:
    """How two pledges of one room differ, in words; nothing where they do not."""
    for names, template in (
        (("ranks",), "{0} says that the instance has {1} ranks"),
        (("promised_tokens", "prompt_tokens"), "{0} promised {1} of {2} tokens"),
        (("key_seed",), "{0} names the storage keys of the prompt by {1!r}"),
        (("component_pages",), "{0} asks for tails of components from positions {1} on"),
    ):
        values = [[getattr(rank_promise, name) for name in names] for rank_promise in (one, other)]
        if values[0] != values[1]:
            values_by_rank = [
                template.format(f"rank {rank_promise.rank}", *value)
                for rank_promise, value in zip((one, other), values, strict=True)
            ]
            return f"the ranks of this room did not promise the same: {', '.join(values_by_rank)}"
    return ""
