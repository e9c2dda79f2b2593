"""Rooms that prefill asks for by name: which room is that of the prompt that it computed.

A claim has a name and the digest of a prompt. It gets a room with both, once: rooms with the name and another digest
belong to other prompts. They may be claimed later, by the request that computes them. But if a claim waits for a room
while a room with its name and another digest waits for a claim, both ends of one request were probably given different
prompts. After `MISMATCH_S` such a room is reported, for its owner to refuse it, rather than wait for its deadline.

A decline ends one claim of its prompt. If none waits, it is remembered for `DECLINE_KEPT_S`, since decode may decline
before prefill has begun; a claim made meanwhile ends with that time, unless its room opens: it may be a retry.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

MISMATCH_S = 1.0
"""Seconds for which a room and a claim of one name may wait beside each other."""
DECLINE_KEPT_S = 2.0
"""Seconds for which a decline without a claim is remembered."""

Room = TypeVar("Room")
Claim = TypeVar("Claim")


class _Waiting(msgspec.Struct, Generic[Claim]):
    """A room or a claim that waits for its counterpart."""

    digest: bytes
    one: Claim
    since_s: float


class RoomClaims(Generic[Room, Claim]):
    """Rooms that are not claimed, claims that have no room, and declines, by name."""

    def __init__(self, *, is_open: Callable[[Room], bool], declines_max: int) -> None:
        """`is_open`: whether a room can be served. The caller bounds rooms and claims."""
        self.claim_count = 0
        """Claims that wait."""
        self._is_open = is_open
        self._declines_max = declines_max
        self._rooms: dict[str, list[_Waiting[Room]]] = {}
        self._claims: dict[str, list[_Waiting[Claim]]] = {}
        self._declined_until_s: dict[tuple[str, bytes], float] = {}

    def claim(self, name: str, digest: bytes, claim: Claim, at_s: float) -> Room | None:
        """Return the newest open room of the prompt, which is claimed by that. None: the claim waits for one."""
        for waiting in reversed(self._rooms.get(name, ())):
            if waiting.digest == digest and self._is_open(waiting.one):
                _remove(self._rooms, name, waiting)
                return waiting.one
        self._claims.setdefault(name, []).append(_Waiting(digest, claim, at_s))
        self.claim_count += 1
        return None

    def declined_until_s(self, name: str, digest: bytes, at_s: float) -> float | None:
        """Return the end of the time for which a claim may wait, if its prompt was declined. Takes the decline."""
        until_s = self._declined_until_s.pop((name, digest), 0.0)
        return until_s if until_s > at_s else None

    def is_claimed(self, name: str, digest: bytes) -> bool:
        """Whether a claim waits for the room of a prompt."""
        return any(waiting.digest == digest for waiting in self._claims.get(name, ()))

    def withdraw(self, name: str, claim: Claim) -> None:
        """Forget a claim, if it waits."""
        for waiting in self._claims.get(name, ()):
            if waiting.one is claim:
                self._end_claim(name, waiting)
                return

    def open(self, name: str, digest: bytes, room: Room, at_s: float) -> Claim | None:
        """Return the oldest claim of a room, which has it by that. None: the room waits for a claim."""
        self._declined_until_s.pop((name, digest), None)
        for waiting in self._claims.get(name, ()):
            if waiting.digest == digest:
                self._end_claim(name, waiting)
                return waiting.one
        self._rooms.setdefault(name, []).append(_Waiting(digest, room, at_s))
        return None

    def close(self, name: str, room: Room) -> None:
        """Forget a room that has ended."""
        for waiting in self._rooms.get(name, ()):
            if waiting.one is room:
                _remove(self._rooms, name, waiting)
                return

    def decline(self, name: str, digest: bytes, at_s: float) -> Claim | None:
        """Return the oldest claim of a declined prompt, which it ends. None: it is remembered for a while."""
        for waiting in self._claims.get(name, ()):
            if waiting.digest == digest:
                self._end_claim(name, waiting)
                return waiting.one
        self._declined_until_s.pop((name, digest), None)
        self._declined_until_s[name, digest] = at_s + DECLINE_KEPT_S
        # Bounded: the oldest is forgotten first.
        if len(self._declined_until_s) > self._declines_max:
            del self._declined_until_s[next(iter(self._declined_until_s))]
        return None

    def mismatched(self, at_s: float) -> list[Room]:
        """Return the open rooms that have waited beside a claim of their name for `MISMATCH_S`."""
        before_s = at_s - MISMATCH_S
        return [
            waiting.one
            for name, claims in self._claims.items()
            if any(claim.since_s <= before_s for claim in claims)
            for waiting in self._rooms.get(name, ())
            if waiting.since_s <= before_s and self._is_open(waiting.one)
        ]

    def claims(self) -> list[Claim]:
        """Return all claims that wait."""
        return [waiting.one for claims in self._claims.values() for waiting in claims]

    def _end_claim(self, name: str, waiting: _Waiting[Claim]) -> None:
        _remove(self._claims, name, waiting)
        self.claim_count -= 1


def _remove(by_name: dict[str, list[_Waiting[Claim]]], name: str, waiting: _Waiting[Claim]) -> None:
    """Remove an entry by identity, and the list of its name with the last one."""
    left = [other for other in by_name[name] if other is not waiting]
    if left:
        by_name[name] = left
    else:
        del by_name[name]
