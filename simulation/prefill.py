"""Simulated prefill peers: they write requested pages, refuse, fail, crash, restart and repeat messages.

A peer lives in incarnations (epochs). After a crash it sends nothing more, but its writes in flight still arrive before
its death is reported. A peer that is cut off for a while continues to write, and receives nothing meanwhile.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from simulation.memory import Violation
from simulation.schedule import Link
from simulation.surroundings import Surroundings
from tidekv.states import commands, events
from tidekv.states.errors import PrefillCause
from tidekv.states.handover.prompt_digest import digest_of
from tidekv.states.handover.room_claims import RoomClaims
from tidekv.states.types import FULL, PageIds, page_ids

if TYPE_CHECKING:
    from simulation.components import Tags
    from simulation.memory import SimulatedPool
    from tidekv.states.component_specs import ComponentPages

DETECTION_S = 0.2
RoomKey = tuple[str, int]


class Incarnation:
    """One life of a peer."""

    def __init__(self, writer: str, ranks: int, inbox: Link) -> None:
        self.writer = writer
        self.ranks = ranks
        self.inbox = inbox
        self.rooms: dict[RoomKey, ServedRoom] = {}
        self.is_dead = False
        self.is_cut_off = False
        self.is_silent = False
        """Whether it sends nothing for rooms that it is promised from now on."""
        self.is_lost = False
        """Whether decode was informed that it is unreachable."""
        self.in_flight = 0
        self.unheard_aborts: list[RoomKey] = []


class Prompt:
    """The content that prefill computes: tags of a prompt's pages, and of each component's page at each position."""

    def __init__(self, tags: list[int], component_pages: Tags) -> None:
        self.tags = tags
        self.component_pages = component_pages


def computed_by_name(name: str, prompt: Prompt, *, order: int) -> Prompt:
    """Return the prompt whose pages a room gets at a prefill that is asked by name, where another decode worker has a
    room with this name for another prompt.

    By `order`, rooms open before the prompts are computed or after, and the other decode worker declines its own.
    """
    other = Prompt([-1 - tag for tag in prompt.tags], prompt.component_pages)
    ours, theirs = (digest_of(repr(each.tags).encode(), b"").digest for each in (prompt, other))
    claims: RoomClaims[str, Prompt] = RoomClaims(is_open=lambda room: True, declines_max=1)
    sent: dict[str, Prompt | None] = {}
    rooms = [("theirs", theirs), ("ours", ours)]
    computed = [(ours, prompt), (theirs, other)]
    if order % 2:
        rooms.reverse()
    if order % 3 == 0:
        computed.reverse()
    if order % 5 == 0:
        claims.decline(name, theirs, 0.0)
    if order % 7 < 4:
        for room, digest in rooms:
            claims.open(name, digest, room, 0.0)
        for digest, each in computed:
            sent[claims.claim(name, digest, each, 0.0) or ""] = each
    else:
        for digest, each in computed:
            claims.claim(name, digest, each, 0.0)
        for room, digest in rooms:
            sent[room] = claims.open(name, digest, room, 0.0)
    got = sent.get("ours")
    if got is None:
        raise Violation(f"prefill has computed the prompt of room {name}, which did not get it")
    return got


class ServedRoom:
    """One room, as prefill sees it."""

    def __init__(self, key: RoomKey, life: Incarnation, prompt: Prompt, frames: list[Link]) -> None:
        self.key = key
        self.life = life
        self.tags = prompt.tags
        self.component_pages = prompt.component_pages
        self.frames = frames
        self.spans: dict[int, tuple[int, PageIds]] = {}
        self.component_of: dict[int, str] = {}
        """Component of the spans that are not of full pages."""
        self.slices: dict[int, int] = {}
        """Number of ranks that have written a page of a span."""
        self.cursors: dict[tuple[int, int], int] = {}
        """First page not yet reported to decode, by span and rank."""
        self.unsaid: dict[tuple[int, int, int], tuple[int, bool]] = {}
        """Chunks that arrived before their predecessors, by span, rank and first page."""
        self.in_flight = [0] * life.ranks
        self.components_open = [0] * life.ranks
        """Tails that a rank has not written yet; it does not end span 0 before."""
        self.component_slices: dict[tuple[str, int], int] = {}
        """Number of ranks that have written a page of a component."""
        self.flipped: set[tuple[int, int, int]] = set()
        """Pages of which a bit has flipped on the way, by span, rank and number in the prompt."""
        self.refused_ranks: set[int] = set()
        """Ranks whose pages failed their checksums at decode, which takes only Drained of them from then on."""
        self.has_stopped = False
        self.is_aborted = False
        self.fails_when_settled = False

    @property
    def who(self) -> str:
        """Name of the room as a writer of pages."""
        return f"room {self.key[0]}/{self.key[1]}"


class Peer:
    """One prefill worker."""

    verifies = True
    """Whether decode verifies the checksums of the pages that this worker sends."""

    def __init__(self, world: Surroundings, random: Random, name: str) -> None:
        self._world = world
        self._random = random
        self.name = name
        self.life = self._new_life()

    def _new_life(self) -> Incarnation:
        ranks = self._random.choice((1, 1, 1, 2, 3))
        return Incarnation(self._world.new_writer(self.name), ranks, Link(self._world.schedule))

    # --- Messages from decode ---

    def promise(self, command: commands.SendPromise, prompt: Prompt) -> None:
        """Send a promise to this peer, or fail to connect."""
        world = self._world
        if world.faults.hits("connect_fails"):
            world.schedule.after(world.delay(), world.rooms_out.unsent, command, "connection refused")
        else:
            world.schedule.after(self._random.choice((0.0, world.delay())), self._send, command, prompt)

    def _send(self, command: commands.SendPromise, prompt: Prompt) -> None:
        world, life, key = self._world, self.life, (command.request_id, command.generation)
        if life.is_dead or life.is_lost or world.rooms_out.is_cancelled(key):
            world.rooms_out.unsent(command, "unreachable")
            return
        world.rooms_out.sent(key, self)
        slow = 0.5 if world.faults.hits("promise_is_slow") else 0.0
        life.inbox.send(world.delay() + slow, self._receive, life, command, prompt)
        world.tell(
            events.PromiseSent(
                at_s=world.now_s, request_id=key[0], generation=key[1], writer=life.writer, ranks=life.ranks
            )
        )

    def _receive(self, life: Incarnation, command: commands.SendPromise, prompt: Prompt) -> None:
        world, faults = self._world, self._world.faults
        if life.is_dead or life.is_cut_off:
            return
        key = (command.request_id, command.generation)
        if key in life.rooms:
            raise Violation(f"{life.writer} was promised room {key} twice")
        frames = [Link(world.schedule) for _ in range(life.ranks)]
        if faults.hits("same_id_elsewhere"):
            prompt = computed_by_name(key[0], prompt, order=command.generation)
        room = life.rooms[key] = ServedRoom(key, life, prompt, frames)
        if life.is_silent:
            return
        if faults.hits("room_is_refused"):
            room.has_stopped = True
            self._tell(
                room,
                0,
                events.RoomRefused(at_s=0, request_id=key[0], generation=key[1], span=0, cause="injected"),
            )
            return
        self._serve(room, 0, len(room.tags) - len(command.pages), command.pages)
        for rank in range(life.ranks):
            for tail in command.component_pages or ():
                self._serve_component(room, rank, tail)
            slow = 0.5 if faults.hits("aux_is_slow") else 0.0
            world.schedule.after(world.delay() + slow, self._finish, room, rank)
        if faults.hits("room_fails"):
            world.schedule.after(world.delay(), self._fail, room)
        elif faults.hits("room_fails_settled"):
            world.schedule.after(world.delay(), self._fail_settled, room)

    def extend(self, command: commands.SendExtend) -> None:
        """Send an extend, which requests a part of the promise after all."""
        self.life_of(command).inbox.send(self._world.delay(), self._extended, self.life_of(command), command)

    def _extended(self, life: Incarnation, command: commands.SendExtend) -> None:
        room = life.rooms.get((command.request_id, command.generation))
        if life.is_dead or life.is_cut_off or life.is_silent or room is None or room.has_stopped:
            return
        world = self._world
        if world.faults.hits("extend_is_refused"):
            self._tell(
                room,
                0,
                events.RoomRefused(
                    at_s=0, request_id=room.key[0], generation=room.key[1], span=command.span, cause="injected"
                ),
            )
            return
        if command.component != FULL:
            room.component_of[command.span] = command.component
            world.component_pages.check_extend(command)
        self._serve(room, command.span, command.first, command.pages)

    def abort(self, key: RoomKey, life: Incarnation) -> None:
        """Send an abort of a room."""
        life.inbox.send(self._world.delay(), self._aborted, life, key)

    def _aborted(self, life: Incarnation, key: RoomKey) -> None:
        if life.is_dead:
            return
        if life.is_cut_off:
            life.unheard_aborts.append(key)
            return
        room = life.rooms.get(key)
        if room is None:
            # The promise was lost on the way, so nothing was or will be written.
            frames = [Link(self._world.schedule) for _ in range(life.ranks)]
            room = life.rooms[key] = ServedRoom(key, life, Prompt([], {}), frames)
        room.has_stopped = room.is_aborted = True
        for rank in range(life.ranks):
            self._drain(room, rank)

    def received(self, key: RoomKey, life: Incarnation) -> None:
        """Send decode's confirmation that it has all of a room."""
        life.inbox.send(self._world.delay(), self._released, life, key)
        room = life.rooms.get(key)
        if room is not None and any(room.in_flight):
            raise Violation(f"{room.who} was received while writes of it were in flight")

    def _released(self, life: Incarnation, key: RoomKey) -> None:
        room = life.rooms.pop(key, None)
        if room is not None:
            room.has_stopped = True

    def life_of(self, command: commands.SendExtend) -> Incarnation:
        """Return the incarnation that has the room."""
        return self._world.rooms_out.life((command.request_id, command.generation))

    # --- Writing ---

    def _serve(self, room: ServedRoom, span: int, first: int, pages: PageIds) -> None:
        room.spans[span] = (first, pages)
        for rank in range(room.life.ranks):
            room.cursors[span, rank] = first
            self._world.schedule.after(self._world.delay(), self._post, room, span, rank, first)

    def _post(self, room: ServedRoom, span: int, rank: int, cursor: int) -> None:
        world, random = self._world, self._random
        if room.has_stopped or room.life.is_dead:
            return
        first, pages = room.spans[span]
        left = first + len(pages) - cursor
        if not left:
            self._chunk(room, span, rank, cursor, 0, last=True)
            return
        count = random.randint(1, left)
        last = count == left and random.random() < 0.7
        ours = pages[cursor - first : cursor - first + count]
        pool, _ = self._target(room, span)
        pool.begin_write(ours, room.who)
        room.in_flight[rank] += 1
        room.life.in_flight += 1
        slow = 0.4 if world.faults.hits("write_is_slow") else 0.0
        world.schedule.after(world.delay() + slow, self._land, room, span, rank, cursor, ours, last)
        if count < left or not last:
            world.schedule.after(world.delay(), self._post, room, span, rank, cursor + count)

    def _target(self, room: ServedRoom, span: int) -> tuple[SimulatedPool, list[int]]:
        """The pool that a span is written to, and the tags of the prompt's pages there."""
        component = room.component_of.get(span, FULL)
        if component == FULL:
            return self._world.device, room.tags
        return self._world.component_pages.pools["device", component], room.component_pages[component]

    def _land(self, room: ServedRoom, span: int, rank: int, cursor: int, pages: PageIds, last: bool) -> None:
        world, life = self._world, room.life
        pool, of_prompt = self._target(room, span)
        if world.faults.hits("sent_page_is_flipped"):
            room.flipped.add((span, rank, cursor + self._random.randrange(len(pages))))
        for at in range(len(pages)):
            key = span << 32 | cursor + at
            slices = room.slices[key] = room.slices.get(key, 0) + 1
            # A page is whole once every rank has written its slice.
            tags = [of_prompt[cursor + at]] if slices == life.ranks else None
            pool.end_write(pages[at : at + 1], room.who, tags)
            if any((span, each, cursor + at) in room.flipped for each in range(life.ranks)):
                pool.flipped.add(pages[at])
        room.in_flight[rank] -= 1
        life.in_flight -= 1
        if life.is_dead:
            self._tell_death(life)
        else:
            self._chunk(room, span, rank, cursor, len(pages), last=last)
            self._drain(room, rank)
            self._settle(room)

    def _serve_component(self, room: ServedRoom, rank: int, tail: ComponentPages) -> None:
        """Schedule the write of a rank's slice of a component's pages, at any time before it ends span 0."""
        if tail.pages:
            room.components_open[rank] += 1
            self._world.schedule.after(self._world.delay(), self._post_component, room, rank, tail)

    def _post_component(self, room: ServedRoom, rank: int, tail: ComponentPages) -> None:
        world = self._world
        if room.has_stopped or room.life.is_dead:
            return
        world.component_pages.pools["device", tail.component].begin_write(tail.pages, room.who)
        room.in_flight[rank] += 1
        room.life.in_flight += 1
        slow = 0.4 if world.faults.hits("component_write_is_slow") else 0.0
        world.schedule.after(world.delay() + slow, self._land_component, room, rank, tail)

    def _land_component(self, room: ServedRoom, rank: int, tail: ComponentPages) -> None:
        life, pool = room.life, self._world.component_pages.pools["device", tail.component]
        for position, page in enumerate(tail.pages, tail.first):
            key = (tail.component, position)
            slices = room.component_slices[key] = room.component_slices.get(key, 0) + 1
            tags = [room.component_pages[tail.component][position]] if slices == life.ranks else None
            pool.end_write(page_ids([page]), room.who, tags)
        room.in_flight[rank] -= 1
        life.in_flight -= 1
        if life.is_dead:
            self._tell_death(life)
        else:
            room.components_open[rank] -= 1
            self._report_received(room, 0, rank)
            self._drain(room, rank)
            self._settle(room)

    def _drain(self, room: ServedRoom, rank: int) -> None:
        if room.is_aborted and not room.in_flight[rank]:
            slow = 1.0 if self._world.faults.hits("drain_is_slow") else 0.0
            drained = events.RoomDrained(at_s=0, request_id=room.key[0], generation=room.key[1], rank=rank)
            self._tell(room, rank, drained, slow)

    def _finish(self, room: ServedRoom, rank: int) -> None:
        if not room.has_stopped and not room.life.is_dead:
            self._tell(
                room, rank, events.AuxReceived(at_s=0, request_id=room.key[0], generation=room.key[1], rank=rank)
            )

    def _fail(self, room: ServedRoom) -> None:
        if not room.has_stopped and not room.life.is_dead:
            room.has_stopped = True
            self._tell(
                room,
                0,
                events.RoomFailed(
                    at_s=0, request_id=room.key[0], generation=room.key[1], cause="injected", settled=False
                ),
            )

    def _fail_settled(self, room: ServedRoom) -> None:
        if not room.has_stopped and not room.life.is_dead:
            room.has_stopped = room.fails_when_settled = True
            self._settle(room)

    def _settle(self, room: ServedRoom) -> None:
        if room.fails_when_settled and not any(room.in_flight):
            room.fails_when_settled = False
            failed = events.RoomFailed(
                at_s=0, request_id=room.key[0], generation=room.key[1], cause="injected", settled=True
            )
            self._tell(room, 0, failed)

    # --- Death and partition ---

    def crash(self) -> None:
        """Crash: writes in flight arrive until the death is reported, and no message is sent any more."""
        world, life = self._world, self.life
        life.is_dead = True
        world.schedule.after(DETECTION_S * self._random.random(), self._tell_lost, life)
        world.schedule.after(DETECTION_S * (1 + self._random.random()), self._tell_death, life)
        self.life = self._new_life()

    def fall_silent(self) -> None:
        """Send nothing for new rooms and extends, until a restart."""
        life = self.life
        if not life.is_silent:
            life.is_silent = True
            self._world.schedule.after(DETECTION_S * (1 + 10 * self._random.random()), self._restart, life)

    def _restart(self, life: Incarnation) -> None:
        if not life.is_dead:
            self.crash()

    def cut_off(self) -> None:
        """Become unreachable for a while, without noticing it."""
        life = self.life
        if life.is_cut_off or life.is_lost:
            return
        life.is_cut_off = True
        self._world.schedule.after(DETECTION_S * self._random.random(), self._tell_lost, life)
        self._world.schedule.after(DETECTION_S * (1 + 5 * self._random.random()), self._heal, life)

    def _heal(self, life: Incarnation) -> None:
        if life.is_dead:
            return
        life.is_cut_off = life.is_lost = False
        for key in life.unheard_aborts:
            self.abort(key, life)
        life.unheard_aborts = []

    def _tell_lost(self, life: Incarnation) -> None:
        if not life.is_lost:
            life.is_lost = True
            self._world.lose_writer(life.writer)

    def _tell_death(self, life: Incarnation) -> None:
        if life.is_lost and not life.in_flight and life.writer not in self._world.dead_writers:
            self._world.dead_writers.add(life.writer)
            self._world.schedule.after(self._world.delay(), self._say_dead, life)

    def _say_dead(self, life: Incarnation) -> None:
        self._world.tell(events.WriterDead(at_s=self._world.now_s, writer=life.writer))

    # --- Messages to decode ---

    def _chunk(self, room: ServedRoom, span: int, rank: int, first: int, count: int, *, last: bool) -> None:
        """Report a chunk that has arrived and those that waited for it, in the order of their pages within the span."""
        room.unsaid[span, rank, first] = (count, last)
        self._report_received(room, span, rank)

    def _report_received(self, room: ServedRoom, span: int, rank: int) -> None:
        while (received := room.unsaid.get((span, rank, room.cursors[span, rank]))) is not None:
            count, last = received
            if last and span == 0 and room.components_open[rank]:
                return
            first = room.cursors[span, rank]
            del room.unsaid[span, rank, first]
            if self.verifies and any((span, rank, at) in room.flipped for at in range(first, first + count)):
                cause = PrefillCause.DAMAGED.words("injected")
                self._tell(
                    room,
                    rank,
                    events.RoomFailed(
                        at_s=0, request_id=room.key[0], generation=room.key[1], cause=cause, settled=False
                    ),
                )
                room.refused_ranks.add(rank)
                return
            chunk = events.ChunkReceived(
                at_s=0,
                request_id=room.key[0],
                generation=room.key[1],
                rank=rank,
                span=span,
                first=room.cursors[span, rank],
                count=count,
                last=last,
            )
            room.cursors[span, rank] += count
            self._tell(room, rank, chunk)

    def _tell(self, room: ServedRoom, rank: int, event: events.Event, slow_s: float = 0.0) -> None:
        if rank in room.refused_ranks and not isinstance(event, events.RoomDrained):
            return
        room.frames[rank].send(self._world.delay() + slow_s, self._world.frames.deliver, room, event)
