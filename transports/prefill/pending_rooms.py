"""Promises of rooms that wait for those of other ranks: a room opens when every decode rank has promised the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from tidekv.states.handover.promise_check import Pledge, Pledges
from tidekv.transports.control import wire
from tidekv.transports.prefill.room_writer import DecodePeer

RoomOfRanks: TypeAlias = tuple[str, str, int]
"""What the ranks of one instance know a room by: the name of their group, request id, generation."""


class Gathering:
    """The promises of one room so far."""

    def __init__(self, name: RoomOfRanks) -> None:
        self.name = name
        self.promises: list[tuple[DecodePeer, wire.Promise]] = []
        self.extends: list[wire.Extend] = []
        """What ranks asked for in addition while others had not promised yet."""
        self.difference = ""
        """Why the room will never open."""
        self._pledges = Pledges()
        self._lease_until_s: dict[DecodePeer, float] = {}

    @property
    def lease_until_s(self) -> float:
        """Until when all ranks that have promised must have named the room again."""
        return min(self._lease_until_s.values())

    def renew(self, peer: DecodePeer, at_s: float) -> None:
        """A rank that has promised named the room."""
        self._lease_until_s[peer] = at_s + peer.lease_s

    @property
    def is_complete(self) -> bool:
        """Whether every rank has promised."""
        return self._pledges.is_complete

    def take(self, peer: DecodePeer, promise: wire.Promise, at_s: float) -> None:
        """Note a promise, and how it differs."""
        self.renew(peer, at_s)
        self.promises.append((peer, promise))
        difference = self._pledges.take(
            Pledge(
                rank=promise.rank,
                ranks=promise.ranks,
                prompt_tokens=promise.prompt_tokens,
                promised_tokens=promise.decode_prefix_len,
                key_seed=promise.key_seed,
                tails=None if promise.tails is None else tuple((tail.component, tail.first) for tail in promise.tails),
            )
        )
        self.difference = self.difference or difference

    def in_order(self) -> list[tuple[DecodePeer, wire.Promise]]:
        """The promises in the order of the ranks."""
        return sorted(self.promises, key=lambda entry: entry[1].rank)


class Gatherings:
    """All rooms that wait for promises."""

    def __init__(self) -> None:
        self._by_name: dict[RoomOfRanks, Gathering] = {}
        self._by_key: dict[wire.Room, Gathering] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def of(self, key: wire.Room) -> Gathering | None:
        """The gathering that one rank's room is part of."""
        return self._by_key.get(key)

    def __iter__(self) -> Iterator[Gathering]:
        return iter(list(self._by_name.values()))

    def take(self, peer: DecodePeer, promise: wire.Promise, at_s: float) -> Gathering:
        """Note a promise; what came of it is left to the caller, who drops the gathering when it is over."""
        name = (promise.group, promise.room.request_id, promise.room.generation)
        gathering = self._by_name.setdefault(name, Gathering(name))
        gathering.take(peer, promise, at_s)
        self._by_key[promise.room] = gathering
        return gathering

    def drop(self, gathering: Gathering) -> None:
        """Forget a gathering."""
        self._by_name.pop(gathering.name, None)
        for _, promise in gathering.promises:
            self._by_key.pop(promise.room, None)

    def of_peer(self, peer: DecodePeer) -> list[Gathering]:
        """The gatherings that a decode rank is part of."""
        return [
            gathering for gathering in self._by_name.values() if any(other is peer for other, _ in gathering.promises)
        ]
