"""Comparison of what the ranks of a decode instance promised for one room, before prefill sends anything.

Every decode rank sends its promise to every prefill rank. If the ranks promised different lengths, they would be sent
different parts of the prompt: all would consider themselves complete, and one would serve pages that were never
written. Prefill trims nothing to fit: it refuses the room, and the cause names both values. Pure: no I/O, no clock.
"""

from __future__ import annotations

import msgspec


class RankPromise(msgspec.Struct, frozen=True):
    """The promise of one rank."""

    rank: int
    ranks: int
    prompt_tokens: int
    promised_tokens: int
    prompt_digest: bytes = b""
    key_seed: bytes | None = None
    component_pages: tuple[tuple[str, int], ...] | None = None
    """By component, the position from which its pages are requested. None: the rank has no components."""


class PromiseCheck:
    """The promises received so far for one room."""

    __slots__ = ("_first", "_ranks")

    def __init__(self) -> None:
        self._first: RankPromise | None = None
        self._ranks: set[int] = set()

    @property
    def is_complete(self) -> bool:
        """Whether every rank has promised."""
        return self._first is not None and len(self._ranks) == self._first.ranks

    def take(self, rank_promise: RankPromise) -> str:
        """Record a promise. Returns a description of its difference from the first one, "" if there is none."""
        first = self._first = self._first or rank_promise
        if not 0 <= rank_promise.rank < rank_promise.ranks or rank_promise.rank in self._ranks:
            return f"rank {rank_promise.rank} of {rank_promise.ranks} is out of range, or has promised before"
        self._ranks.add(rank_promise.rank)
        return difference(first, rank_promise)


def difference(one: RankPromise, other: RankPromise) -> str:
    """A description of the difference between two promises of one room, "" if there is none."""
    for names, template in (
        (("ranks",), "{0} counts {1} ranks in the instance"),
        (("promised_tokens", "prompt_tokens"), "{0} promised {1} of {2} tokens"),
        (("prompt_digest",), "{0} has a prompt with the digest {1}"),
        (("key_seed",), "{0} has the key seed {1!r} for the prompt"),
        (("component_pages",), "{0} requests component pages from positions {1} on"),
    ):
        values = [[getattr(rank_promise, name) for name in names] for rank_promise in (one, other)]
        if values[0] != values[1]:
            values_by_rank = [
                template.format(f"rank {rank_promise.rank}", *value)
                for rank_promise, value in zip((one, other), values, strict=True)
            ]
            return f"the ranks of this room made different promises: {', '.join(values_by_rank)}"
    return ""
