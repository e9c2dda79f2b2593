"""Links between core and peers: the peer of each room, and faults of frames on the way."""

from __future__ import annotations

from collections import deque
from random import Random
from typing import TYPE_CHECKING

import msgspec

from simulation.memory import Violation
from simulation.prefill import Incarnation, Peer, Prompt, RoomKey, ServedRoom
from tidekv.states import commands, events

if TYPE_CHECKING:
    from simulation.surroundings import Surroundings


class RoomsOut:
    """Rooms that decode opened, from the promise until decode has finished with them."""

    def __init__(self, world: Surroundings) -> None:
        self._world = world
        self._unsent: dict[RoomKey, bool] = {}
        self._with: dict[RoomKey, tuple[Peer, Incarnation]] = {}

    def promise(self, command: commands.SendPromise, peer: Peer, prompt: Prompt) -> None:
        """Start sending a promise."""
        key = (command.request_id, command.generation)
        if key in self._unsent or key in self._with:
            raise Violation(f"room {key} was promised twice")
        self._unsent[key] = False
        peer.promise(command, prompt)

    def is_cancelled(self, key: RoomKey) -> bool:
        """Whether decode gave the room up before the promise was sent."""
        return self._unsent[key]

    def sent(self, key: RoomKey, peer: Peer) -> None:
        """Note that the promise was sent."""
        del self._unsent[key]
        self._with[key] = (peer, peer.life)

    def unsent(self, command: commands.SendPromise, cause: str) -> None:
        """Fail a promise that could not be sent: no peer will write to the room's pages."""
        key = (command.request_id, command.generation)
        del self._unsent[key]
        failed = events.RoomFailed(
            at_s=self._world.now_s, request_id=key[0], generation=key[1], cause=cause, settled=True
        )
        self._world.note_losses(failed)
        self._world.tell(failed)

    def abort(self, command: commands.SendAbort) -> None:
        """Abort a room for decode."""
        key = (command.request_id, command.generation)
        if key in self._unsent:
            self._unsent[key] = True
            return
        if key not in self._with:
            # The room has no peer, so nothing writes. A rule that raised while it handled this sends the abort again.
            drained = events.RoomDrained(at_s=0, request_id=key[0], generation=key[1], rank=0)
            self._world.schedule.after(0.0, self._world.tell_now, drained)
            return
        peer, life = self._with[key]
        peer.abort(key, life)

    def received(self, command: commands.SendReceived) -> None:
        """Confirm that decode has all of a room."""
        key = (command.request_id, command.generation)
        peer, life = self._with.pop(key)
        peer.received(key, life)

    def extend(self, command: commands.SendExtend) -> None:
        """Send an extend. Before the promise is sent, the extend waits behind it."""
        key = (command.request_id, command.generation)
        if key in self._unsent:
            self._world.schedule.after(self._world.delay(), self._extend_later, command)
        elif key in self._with or self._world.is_alone:
            self._with[key][0].extend(command)
        # Otherwise the promise could not be sent from this rank, and the ranks do not know it yet.

    def _extend_later(self, command: commands.SendExtend) -> None:
        key = (command.request_id, command.generation)
        if key in self._unsent or key in self._with:
            self.extend(command)

    def life(self, key: RoomKey) -> Incarnation:
        """Return the incarnation that has a room."""
        return self._with[key][1]

    def of_writer(self, writer: str) -> list[RoomKey]:
        """Return the rooms that an incarnation has."""
        return [key for key, (_, life) in self._with.items() if life.writer == writer]


class Frames:
    """Delivers frames of prefill to the core, and invented ones."""

    def __init__(self, world: Surroundings, random: Random) -> None:
        self._world = world
        self._random = random
        self._recent: deque[ServedRoom] = deque(maxlen=8)

    def deliver(self, room: ServedRoom, event: events.Event) -> None:
        """Deliver a frame of this room, unless its sender is unreachable."""
        world, life = self._world, room.life
        if life.is_dead:
            return
        if life.is_cut_off:
            if isinstance(event, events.RoomDrained):
                life.unheard_aborts.append(room.key)
            elif self._random.random() < 0.5:
                world.schedule.after(1.0, self._arrive, event)
            return
        self._arrive(event)
        self._recent.append(room)
        if world.faults.hits("frame_repeats"):
            world.schedule.after(world.delay(), self._arrive, event)
        self._invent(room)

    def _arrive(self, event: events.Event) -> None:
        world = self._world
        world.note_losses(event)
        world.tell(msgspec.structs.replace(event, at_s=world.now_s))

    def _invent(self, room: ServedRoom) -> None:
        """Deliver frames that a correct peer never sends, or sends only to another epoch of this worker."""
        faults, random = self._world.faults, self._random
        request_id, generation = room.key
        if faults.hits("frame_is_foreign"):
            self._invented(f"nobody{random.randrange(9)}", generation, 0, 0, 0)
        if faults.hits("frame_is_of_old_generation"):
            old = random.choice(list(self._recent))
            if old.key[1]:
                self._invented(old.key[0], old.key[1] - 1, 0, 0, 0, may_drain=False)
        if faults.hits("frame_of_wrong_rank"):
            self._invented(request_id, generation, random.choice((-1, room.life.ranks, room.life.ranks + 5)), 0, 0)
        if faults.hits("frame_of_wrong_span"):
            self._invented(request_id, generation, 0, random.choice((-1, 1000)), 0)
        if faults.hits("chunk_skips_pages") and len(room.tags) > 1:
            self._invented(request_id, generation, 0, 0, len(room.tags) + 1)

    def _invented(
        self, request_id: str, generation: int, rank: int, span: int, first: int, *, may_drain: bool = True
    ) -> None:
        world, at_s = self._world, self._world.now_s
        # Not for a room that drains: the core must trust a Drained, because the link is authenticated.
        kind = self._random.randrange(2 + may_drain) if span == 0 and first == 0 else 0
        if kind == 0:
            world.tell(
                events.ChunkReceived(
                    at_s=at_s,
                    request_id=request_id,
                    generation=generation,
                    rank=rank,
                    span=span,
                    first=first,
                    count=self._random.randrange(3),
                    last=self._random.random() < 0.5,
                )
            )
        elif kind == 1:
            world.tell(events.AuxReceived(at_s=at_s, request_id=request_id, generation=generation, rank=rank))
        else:
            world.tell(events.RoomDrained(at_s=at_s, request_id=request_id, generation=generation, rank=rank))
