"""Promises of rooms that wait: for other ranks, since a room opens once every decode rank has promised the same; and
for a place, if as many rooms are open as may.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from tidekv.states.handover.promise_check import PromiseCheck, RankPromise
from tidekv.states.handover.sender import SPANS_MAX
from tidekv.transports import wire
from tidekv.transports.prefill.room_writer import DecodePeer

RoomOfRanks: TypeAlias = tuple[str, str, int]
"""Key of a room for all ranks of one instance: the name of their group, request id, generation."""


class PendingRoom:
    """The promises of one room so far."""

    def __init__(self, name: RoomOfRanks) -> None:
        self.name = name
        self.promises: list[tuple[DecodePeer, wire.Promise]] = []
        self.extends: list[wire.Extend] = []
        """Further pages requested by ranks before all ranks had promised."""
        self.difference = ""
        """Why the room will never open; empty if it may."""
        self._promise_check = PromiseCheck()
        self._lease_until_s: dict[DecodePeer, float] = {}

    @property
    def lease_until_s(self) -> float:
        """Time at which the first lease of the ranks that have promised expires."""
        return min(self._lease_until_s.values())

    def renew(self, peer: DecodePeer, at_s: float) -> None:
        """Extend the lease of a rank: it named the room at `at_s`."""
        self._lease_until_s[peer] = at_s + peer.lease_s

    @property
    def is_complete(self) -> bool:
        """Whether every rank has promised."""
        return self._promise_check.is_complete

    def take(self, peer: DecodePeer, promise: wire.Promise, at_s: float) -> None:
        """Add a promise, and set `difference` if it differs from earlier ones."""
        self.renew(peer, at_s)
        self.promises.append((peer, promise))
        difference = self._promise_check.take(
            RankPromise(
                rank=promise.rank,
                ranks=promise.ranks,
                prompt_tokens=promise.prompt_tokens,
                promised_tokens=promise.decode_prefix_len,
                prompt_digest=promise.prompt_digest,
                key_seed=promise.key_seed,
                component_pages=None
                if promise.component_pages is None
                else tuple((request.component, request.first) for request in promise.component_pages),
            )
        )
        self.difference = self.difference or difference

    def extend(self, message: wire.Extend, *, page_size: int) -> str:
        """Keep a request for further pages until the room opens. Returns why it is refused; empty if it is kept."""
        if len(self.extends) >= SPANS_MAX:
            return f"decode requests more than {SPANS_MAX} spans in one room"
        prompt_pages = -(-self.promises[0][1].prompt_tokens // page_size)
        if message.first + len(message.pages) // 4 > prompt_pages:
            return f"decode requests pages beyond the prompt's {prompt_pages}"
        self.extends.append(message)
        return ""

    def in_order(self) -> list[tuple[DecodePeer, wire.Promise]]:
        """Return the promises in the order of the ranks."""
        return sorted(self.promises, key=lambda entry: entry[1].rank)


class PendingRooms:
    """All rooms that wait for promises."""

    def __init__(self) -> None:
        self._by_name: dict[RoomOfRanks, PendingRoom] = {}
        self._by_key: dict[wire.RoomId, PendingRoom] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def of(self, key: wire.RoomId) -> PendingRoom | None:
        """Return the pending room that one rank's room belongs to."""
        return self._by_key.get(key)

    def __iter__(self) -> Iterator[PendingRoom]:
        return iter(list(self._by_name.values()))

    def next_complete(self, request_id: str = "", digest: bytes = b"") -> PendingRoom | None:
        """Return the oldest room that waits for nothing but a place, of this prompt if one is given."""
        for pending_room in self._by_name.values():
            promise = pending_room.promises[0][1]
            is_wanted = not request_id or (promise.room.request_id, promise.prompt_digest) == (request_id, digest)
            if is_wanted and pending_room.is_complete:
                return pending_room
        return None

    def take(self, peer: DecodePeer, promise: wire.Promise, at_s: float) -> PendingRoom:
        """Add a promise and return its pending room. The caller drops one that opens or is refused."""
        # An instance of one rank has no group.
        group = promise.group or f"{promise.room.instance}-{promise.room.epoch}"
        name = (group, promise.room.request_id, promise.room.generation)
        pending_room = self._by_name.setdefault(name, PendingRoom(name))
        pending_room.take(peer, promise, at_s)
        self._by_key[promise.room] = pending_room
        return pending_room

    def drop(self, pending_room: PendingRoom) -> None:
        """Forget a pending room."""
        self._by_name.pop(pending_room.name, None)
        for _, promise in pending_room.promises:
            self._by_key.pop(promise.room, None)

    def of_peer(self, peer: DecodePeer) -> list[PendingRoom]:
        """Return the pending rooms that a decode rank is part of."""
        return [
            pending_room
            for pending_room in self._by_name.values()
            if any(other is peer for other, _ in pending_room.promises)
        ]
