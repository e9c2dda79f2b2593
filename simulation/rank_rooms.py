"""Simulated prefill ranks that write for one decode rank. They are slow, refuse, fail and die independently."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulation.prefill import Prompt, computed_by_name
from tidekv.states import commands, events
from tidekv.states.types import FULL

if TYPE_CHECKING:
    from simulation.components import Tags
    from simulation.surroundings import RankSurroundings
    from tidekv.states.component_specs import ComponentPages
    from tidekv.states.types import PageIds

RoomKey = tuple[str, int]


class WrittenRoom:
    """One room, as its writer sees it."""

    def __init__(self, key: RoomKey, writer: str, tags: list[int], component_pages: Tags) -> None:
        self.key = key
        self.writer = writer
        self.tags = tags
        self.component_pages = component_pages
        self.components_open = 0
        """Tails that are not written yet; span 0 does not end before."""
        self.held: list[events.ChunkLanded] = []
        """The last chunk of span 0 while it waits for tails."""
        self.is_sent = False
        self.is_aborted = False
        self.is_over = False
        self.writing = 0
        self.aux_sent = False
        self.waiting: list[commands.SendExtend] = []


class RankRooms:
    """All rooms of one rank."""

    def __init__(self, rank: RankSurroundings) -> None:
        self._rank = rank
        self._rooms: dict[RoomKey, WrittenRoom] = {}
        self._lives = [0, 0, 0]

    @property
    def in_flight(self) -> int:
        """Number of writes in flight."""
        return sum(room.writing for room in self._rooms.values())

    def promise(self, command: commands.SendPromise) -> None:
        """Send a promise."""
        rank, key = self._rank, (command.request_id, command.generation)
        prefill = command.prefill
        script = rank.callers[command.request_id].script
        rank.component_pages.check_promise(command.component_pages, command.prompt_tokens)
        component_pages = rank.component_pages.tags_of("", script.tokens)
        prompt = Prompt(rank.page_tags(script), component_pages)
        if rank.hits("same_id_elsewhere"):
            # Each prefill rank finds rooms by itself, and the promises reach it in an order of its own.
            prompt = computed_by_name(key[0], prompt, order=int(key[0][1:]) + rank.number)
        room = WrittenRoom(key, self._writer(prefill), prompt.tags, prompt.component_pages)
        self._rooms[key] = room
        if rank.hits("promise_fails"):
            rank.after(rank.delay(), self._refuse_to_connect, room)
        else:
            rank.after(rank.delay(), self._send, room, prefill, command)
        if rank.hits("writer_dies"):
            rank.after(rank.delay() * 2, self._die, prefill)

    def _writer(self, prefill: int) -> str:
        return f"prefill-{prefill}.{self._rank.number}.{self._lives[prefill]}"

    def _refuse_to_connect(self, room: WrittenRoom) -> None:
        if not room.is_over:
            del self._rooms[room.key]
            room.is_over = True
            self._failed(room, settled=True)

    def _send(self, room: WrittenRoom, prefill: int, command: commands.SendPromise) -> None:
        if room.is_over:
            return
        pages = command.pages
        room.writer = self._writer(prefill)
        room.is_sent = True
        rank = self._rank
        rank.receive(
            events.PromiseSent(at_s=0.0, request_id=room.key[0], generation=room.key[1], writer=room.writer, ranks=1)
        )
        if rank.hits("room_is_refused"):
            rank.after(
                rank.delay(),
                self._say,
                room,
                events.RoomRefused(at_s=0.0, request_id=room.key[0], generation=room.key[1], span=0, cause="injected"),
            )
            return
        for tail in command.component_pages or ():
            if tail.pages:
                room.components_open += 1
                rank.after(rank.delay(), self._write_component, room, tail)
        self._write_span(room, 0, len(room.tags) - len(pages), pages)
        for extend in room.waiting:
            self._write_span(room, extend.span, extend.first, extend.pages, extend.component)
        rank.after(rank.delay() * 3, self._send_aux, room)
        if rank.hits("room_fails"):
            rank.after(rank.delay(), self._fail, room)

    def _send_aux(self, room: WrittenRoom) -> None:
        self._say(room, events.AuxLanded(at_s=0.0, request_id=room.key[0], generation=room.key[1], rank=0))

    def _fail(self, room: WrittenRoom) -> None:
        if not room.is_over and not room.is_aborted:
            self._failed(room, settled=False)

    def _failed(self, room: WrittenRoom, *, settled: bool) -> None:
        self._rank.receive(
            events.RoomFailed(
                at_s=0.0, request_id=room.key[0], generation=room.key[1], cause="injected", settled=settled
            )
        )

    def _say(self, room: WrittenRoom, event: events.Event) -> None:
        if not room.is_over and not room.is_aborted:
            self._rank.receive(event)

    def _write_span(self, room: WrittenRoom, span: int, first: int, pages: PageIds, component: str = FULL) -> None:
        """Write a span in one or two chunks, each landing after a while."""
        rank = self._rank
        cut = rank.random.randint(0, len(pages)) if len(pages) > 1 else len(pages)
        self._write(room, span, first, pages, 0, cut, component)

    def _write(
        self, room: WrittenRoom, span: int, first: int, pages: PageIds, at: int, end: int, component: str
    ) -> None:
        if room.is_over or room.is_aborted:
            return
        rank, who = self._rank, f"room {room.key}"
        chunk, is_full = pages[at:end], component == FULL
        pool = rank.device if is_full else rank.component_pages.pools["device", component]
        tags = room.tags if is_full else room.component_pages[component]
        pool.begin_write(chunk, who)
        room.writing += 1

        def land() -> None:
            room.writing -= 1
            pool.end_write(chunk, who, tags[first + at : first + end])
            if room.is_aborted:
                self._drain(room)
                return
            chunk_landed = events.ChunkLanded(
                at_s=0.0,
                request_id=room.key[0],
                generation=room.key[1],
                rank=0,
                span=span,
                first=first + at,
                count=end - at,
                last=end == len(pages),
            )
            if span == 0 and chunk_landed.last and room.components_open:
                room.held.append(chunk_landed)
                return
            self._say(room, chunk_landed)
            if end < len(pages):
                self._write(room, span, first, pages, end, len(pages), component)

        rank.after(rank.delay(), land)

    def _write_component(self, room: WrittenRoom, tail: ComponentPages) -> None:
        """Write the requested pages of a component."""
        if room.is_over or room.is_aborted:
            return
        rank, who = self._rank, f"room {room.key}"
        pool = rank.component_pages.pools["device", tail.component]
        pool.begin_write(tail.pages, who)
        room.writing += 1

        def land() -> None:
            room.writing -= 1
            room.components_open -= 1
            pool.end_write(tail.pages, who, room.component_pages[tail.component][tail.first :])
            if room.is_aborted:
                self._drain(room)
            elif not room.components_open:
                for chunk in room.held:
                    self._say(room, chunk)

        rank.after(rank.delay(), land)

    def extend(self, command: commands.SendExtend) -> None:
        """Request further pages."""
        room = self._rooms.get((command.request_id, command.generation))
        if room is None or room.is_over:
            return
        if room.is_sent:
            self._write_span(room, command.span, command.first, command.pages, command.component)
        else:
            room.waiting.append(command)

    def abort(self, command: commands.SendAbort) -> None:
        """Stop writing, and report once no write is in flight."""
        key = (command.request_id, command.generation)
        room = self._rooms.get(key)
        if room is None or not room.is_sent:
            if room is not None:
                room.is_over = True
                del self._rooms[key]
            self._rank.after(0.0, self._tell_drained, key)
            return
        room.is_aborted = True
        self._rank.after(self._rank.delay(), self._drain, room)

    def _drain(self, room: WrittenRoom) -> None:
        if not room.is_over and not room.writing:
            room.is_over = True
            del self._rooms[room.key]
            self._tell_drained(room.key)

    def _tell_drained(self, key: RoomKey) -> None:
        self._rank.receive(events.RoomDrained(at_s=0.0, request_id=key[0], generation=key[1], rank=0))

    def received(self, command: commands.SendReceived) -> None:
        """Release the room: prefill may free its pages."""
        room = self._rooms.pop((command.request_id, command.generation), None)
        if room is not None:
            room.is_over = True

    def _die(self, prefill: int) -> None:
        """End the writer's process. Its writes in flight land before its death is proven."""
        rank, writer = self._rank, self._writer(prefill)
        self._lives[prefill] += 1
        rank.receive(events.WriterLost(at_s=0.0, writer=writer, cause="injected"))
        for room in self._rooms.values():
            if room.writer == writer and room.is_sent:
                room.is_aborted = True
        rank.after(0.2, self._prove, writer)

    def _prove(self, writer: str) -> None:
        for room in [room for room in self._rooms.values() if room.writer == writer and room.is_sent]:
            room.is_over = True
            del self._rooms[room.key]
        self._rank.receive(events.WriterDead(at_s=0.0, writer=writer))
