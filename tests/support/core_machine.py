"""The core against any order of events that a world can produce: Hypothesis plays every part, and pages hold tags.

Few tokens and small pools, so that prefixes collide and pages are short. Hypothesis decides when each operation in
flight ends, and how: well, badly, in part, or not before the end.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from simulation.memory import Contents, SimulatedPool
from simulation.rig import Rig
from tidekv.states import commands, events
from tidekv.states.types import PageIds

PROMPTS = st.binary(min_size=1, max_size=7).map(lambda raw: bytes(b"ab"[byte % 2] for byte in raw))
PICKS = st.integers(min_value=0, max_value=99)


class Sending:
    """A room as prefill serves it, one rank."""

    def __init__(self, promise: commands.SendPromise, tags: list[int]) -> None:
        self.promise = promise
        self.key = (promise.request_id, promise.generation)
        self.tags = tags
        self.cursors = {0: len(tags) - len(promise.pages)}
        self.spans = {0: (self.cursors[0], promise.pages)}
        self.components: dict[int, str] = {}
        """Component of each further span."""
        self.in_flight: list[tuple[int, int, PageIds]] = []
        self.said_aux = False
        self.is_aborted = False

    def open_spans(self) -> list[int]:
        """Spans with chunks left to send."""
        return [] if self.is_aborted else [span for span in self.spans if span in self.cursors]


class CoreMachine(RuleBasedStateMachine):
    """Any mix of events that a world can produce keeps every pool, receipt and byte right."""

    @initialize(
        device_pages=st.sampled_from((8, 14)),
        host_pages=st.sampled_from((0, 5, 20)),
        run_pages=st.sampled_from((1, 2, 32)),
        reserve=st.sampled_from((0, 1)),
        share=st.booleans(),
    )
    def begin(self, device_pages: int, host_pages: int, run_pages: int, reserve: int, *, share: bool) -> None:
        self.rig = Rig(
            device_pages=device_pages,
            host_pages=host_pages,
            fetch_run_pages=run_pages,
            copy_run_pages=run_pages,
            growth_reserve_pages=reserve,
            share_transfers=share,
            share_wait_s=0.5,
        )
        self.contents = Contents()
        self.device = SimulatedPool(self.rig.core.state.device)
        self.host = SimulatedPool(self.rig.core.state.host)
        self.sent: set[tuple[str, int]] = set()
        self.fetched_tokens: dict[int, bytes] = {}
        self.prompts: dict[str, bytes] = {}
        self.left: dict[int, bytes] = {}
        self.ready: dict[str, commands.ReportReady] = {}
        self.reading: dict[int, tuple[SimulatedPool, PageIds, list[int]]] = {}
        self.operations: list[commands.OperationCommand] = []
        self.sendings: list[Sending] = []
        self.names = 0
        self.rig.attach_storage()

    def tags(self, tokens: bytes) -> list[int]:
        return self.contents.tags("", tokens, 1)

    # --- What the core wishes ---

    def obey(self) -> None:
        """Start what the core has wished for in the last step."""
        pending, self.rig.pending = self.rig.pending, []
        for wish in pending:
            match wish:
                case commands.CopyPages():
                    pools = {"host": self.host, "device": self.device}
                    source = pools[wish.source]
                    self.reading[wish.op] = (source, wish.source_pages, source.begin_read(wish.source_pages, wish.op))
                    pools[wish.target].begin_write(wish.target_pages, wish.op)
                    self.operations.append(wish)
                case commands.FetchPages():
                    self.host.begin_write(wish.host_pages, wish.op)
                    is_of_request = bool(wish.request_id)
                    tokens = self.prompts[wish.request_id] if is_of_request else self.rig.core.keys_stored(wish.op)[1]
                    self.fetched_tokens[wish.op] = tokens
                    self.operations.append(wish)
                case commands.StorePages():
                    tokens = (
                        self.left[wish.request_number] if wish.request_number else self.rig.core.keys_stored(wish.op)[1]
                    )
                    expected = self.tags(tokens)[: len(wish.host_pages)]
                    self.host.expect(wish.host_pages, expected, wish.op)
                    self.reading[wish.op] = (self.host, wish.host_pages, self.host.begin_read(wish.host_pages, wish.op))
                    self.operations.append(wish)
                case commands.QueryStorage():
                    self.operations.append(wish)
                case commands.SendPromise():
                    self.sendings.append(Sending(wish, self.tags(self.prompts[wish.request_id])))
                case commands.SendExtend():
                    room = self.room((wish.request_id, wish.generation))
                    room.spans[wish.span] = (wish.first, wish.pages)
                    room.cursors[wish.span] = wish.first
                    room.components[wish.span] = wish.component
                case commands.SendAbort():
                    self.room((wish.request_id, wish.generation)).is_aborted = True
                case commands.SendReceived():
                    room = self.room((wish.request_id, wish.generation))
                    assert not room.in_flight
                    self.sendings.remove(room)
                case commands.ReportReady():
                    self.device.expect(wish.pages, self.tags(self.prompts[wish.request_id]), wish.request_id)
                    assert sum(wish.sources.values()) == len(self.prompts[wish.request_id])
                    self.ready[wish.request_id] = wish
                case commands.ReportFailed():
                    del self.prompts[wish.request_id]
                case commands.ForgetTokens():
                    del self.left[wish.request_number]
                case _:
                    pass

    def room(self, key: tuple[str, int]) -> Sending:
        return next(room for room in self.sendings if room.key == key)

    # --- Callers ---

    @precondition(lambda self: len(self.prompts) < 5)
    @rule(tokens=PROMPTS, prefills=st.sampled_from((1, 2)), cache=st.booleans(), hurried=st.booleans())
    def arrive(self, tokens: bytes, prefills: int, cache: bool, hurried: bool) -> None:
        self.names += 1
        name = f"r{self.names}"
        self.prompts[name] = tokens
        deadline = {"deadline_at_s": self.rig.now_s + 3.0} if hurried else {}
        self.rig.arrive(name, tokens, prefill_count=prefills, cache=cache, **deadline)
        self.obey()

    @precondition(lambda self: self.prompts)
    @rule(pick=PICKS)
    def abort(self, pick: int) -> None:
        name = list(self.prompts)[pick % len(self.prompts)]
        if self.ready.pop(name, None):
            del self.prompts[name]
        self.rig.abort(name)
        self.obey()

    @precondition(lambda self: self.ready)
    @rule(pick=PICKS, output=PROMPTS, retracts=st.booleans())
    def finish(self, pick: int, output: bytes, retracts: bool) -> None:
        name = list(self.ready)[pick % len(self.ready)]
        ready, tokens = self.ready.pop(name), self.prompts.pop(name)
        pages = self.rig.request(name).held.table[:]
        assert list(pages[: len(tokens)]) == list(ready.pages)
        self.device.expect(ready.pages, self.tags(tokens), name)
        reserve = self.rig.request(name).held.reserve[:]
        grown = reserve[: len(output)]
        if grown:
            self.rig.step(events.GrowthTaken, request_id=name, page_count=len(grown))
        tokens += output[: len(grown)]
        for page, tag in zip(grown, self.tags(tokens)[len(pages) :], strict=True):
            self.device.put(page, tag, name)
        self.left[self.rig.request(name).request_number] = tokens
        kind = events.RetractRequested if retracts else events.FinishRequested
        self.rig.step(kind, request_id=name, keys=tokens, tokens=len(tokens))
        self.obey()

    @rule(pick=PICKS)
    def drop_retracted(self, pick: int) -> None:
        self.rig.step(events.RetractedDropped, request_id=f"r{pick % (self.names + 1)}")
        self.obey()

    @rule(tiers=st.sampled_from((("l1",), ("l2",), ("l1", "l2"))))
    def flush(self, tiers: tuple[str, ...]) -> None:
        self.rig.flush(*tiers)
        self.obey()

    @rule(seconds=st.sampled_from((0.6, 1.2, 40.0)))
    def pass_time(self, seconds: float) -> None:
        self.rig.wait_until(self.rig.now_s + seconds)
        self.obey()

    # --- This machine ---

    @precondition(lambda self: self.operations)
    @rule(pick=PICKS, share=st.sampled_from((0, 1, 2, 99)), fails=st.booleans(), loses=st.booleans())
    def end_operation(self, pick: int, share: int, fails: bool, loses: bool) -> None:
        wish = self.operations.pop(pick % len(self.operations))
        if wish.op in self.reading:
            pool, pages, found = self.reading.pop(wish.op)
            pool.end_read(pages, wish.op, found)
        match wish:
            case commands.QueryStorage():
                self.rig.answer(wish, min(share, wish.count), "failed" if fails else "")
            case commands.FetchPages():
                known = self.tags(self.fetched_tokens.pop(wish.op))
                tags = [known[at] for at in wish.positions]
                valid = min(share, len(tags)) if fails or loses else len(tags)
                self.host.end_write(wish.host_pages, wish.op, tags[:valid] + [0] * (len(wish.host_pages) - valid))
                self.rig.fetched(wish, valid=valid)
            case commands.CopyPages():
                target = self.device if wish.target == "device" else self.host
                target.end_write(wish.target_pages, wish.op, None if fails else found)
                self.rig.copied(wish, error="failed" if fails else "")
            case commands.StorePages():
                self.rig.stored(wish, stored=min(share, len(found) + wish.asked))
        self.obey()

    # --- Prefill ---

    @precondition(lambda self: self.unsent())
    @rule(pick=PICKS, reached=st.booleans())
    def send_promise(self, pick: int, reached: bool) -> None:
        unsent = self.unsent()
        room = unsent[pick % len(unsent)]
        if reached and not room.is_aborted:
            self.sent.add(room.key)
            self.rig.promised(room.promise)
        else:
            self.sendings.remove(room)
            self.fail(room, settled=True)
        self.obey()

    def unsent(self) -> list[Sending]:
        return [room for room in self.sendings if room.key not in self.sent]

    def sent_rooms(self) -> list[Sending]:
        return [room for room in self.sendings if room.key in self.sent]

    def fail(self, room: Sending, *, settled: bool) -> None:
        self.rig.step(
            events.RoomFailed,
            request_id=room.key[0],
            generation=room.key[1],
            cause="chosen",
            settled=settled,
        )

    @precondition(lambda self: any(room.open_spans() for room in self.sent_rooms()))
    @rule(pick=PICKS, count=st.integers(min_value=1, max_value=4))
    def post(self, pick: int, count: int) -> None:
        """Start to write pages of a span, or send its last chunk."""
        open_spans = [(room, span) for room in self.sent_rooms() for span in room.open_spans()]
        room, span = open_spans[pick % len(open_spans)]
        first, pages = room.spans[span]
        cursor = room.cursors[span]
        rest = pages[cursor - first :]
        if any(flying[0] == span for flying in room.in_flight):
            return
        if not rest:
            del room.cursors[span]
            self.chunk(room, span, cursor, 0, last=True)
            return
        ours = rest[:count]
        self.target(room, span)[0].begin_write(ours, room.key)
        room.in_flight.append((span, cursor, ours))

    def target(self, room: Sending, span: int) -> tuple[SimulatedPool, list[int]]:
        """The pool that a span is written to, and the tags of the prompt's pages there."""
        return self.device, room.tags

    @precondition(lambda self: any(room.in_flight for room in self.sendings))
    @rule(pick=PICKS)
    def land(self, pick: int) -> None:
        flying = [(room, flight) for room in self.sendings for flight in room.in_flight]
        room, (span, cursor, pages) = flying[pick % len(flying)]
        room.in_flight.remove((span, cursor, pages))
        pool, tags = self.target(room, span)
        pool.end_write(pages, room.key, tags[cursor : cursor + len(pages)])
        if span in room.cursors:
            room.cursors[span] = cursor + len(pages)
        self.chunk(room, span, cursor, len(pages), last=False)

    def chunk(self, room: Sending, span: int, first: int, count: int, *, last: bool) -> None:
        self.rig.step(
            events.ChunkReceived,
            request_id=room.key[0],
            generation=room.key[1],
            rank=0,
            span=span,
            first=first,
            count=count,
            last=last,
        )
        self.obey()

    @precondition(lambda self: any(not room.said_aux for room in self.sent_rooms()))
    @rule(pick=PICKS)
    def say_aux(self, pick: int) -> None:
        rooms = [room for room in self.sent_rooms() if not room.said_aux]
        room = rooms[pick % len(rooms)]
        room.said_aux = True
        self.rig.aux(room.promise)
        self.obey()

    @precondition(lambda self: self.sent_rooms())
    @rule(pick=PICKS)
    def give_up(self, pick: int) -> None:
        rooms = self.sent_rooms()
        self.fail(rooms[pick % len(rooms)], settled=False)
        self.obey()

    @precondition(lambda self: any(room.is_aborted and not room.in_flight for room in self.sent_rooms()))
    @rule(pick=PICKS)
    def drain(self, pick: int) -> None:
        rooms = [room for room in self.sent_rooms() if room.is_aborted and not room.in_flight]
        room = rooms[pick % len(rooms)]
        self.sendings.remove(room)
        self.rig.step(events.RoomDrained, request_id=room.key[0], generation=room.key[1], rank=0)
        self.obey()

    # --- What must hold ---

    @invariant()
    def cached_pages_hold_what_their_keys_say(self) -> None:
        if not hasattr(self, "rig"):
            return
        for node in self.rig.core.state.index.nodes():
            keys, above = node.edge, node.parent
            while above is not None:
                keys, above = above.edge + keys, above.parent
            tags = self.tags(keys)[-node.page_count :]
            if node.device is not None and node.load is None and not node.is_reclaiming:
                self.device.expect(node.device, tags, node)
            if node.host is not None:
                self.host.expect(node.host, tags, node)
        self.device.check()
        self.host.check()

    def teardown(self) -> None:
        """Let everything end: then nothing is held."""
        if not hasattr(self, "rig"):
            return
        for name in list(self.prompts):
            if name in self.prompts:
                self.ready.pop(name, None)
                self.rig.abort(name)
                self.obey()
        for _ in range(10):
            while self.operations:
                self.end_operation(0, 99, False, False)
            for room in list(self.sendings):
                while room.in_flight:
                    flying = [(other, flight) for other in self.sendings for flight in other.in_flight]
                    self.land(flying.index((room, room.in_flight[0])))
            for room in list(self.sendings):
                self.sendings.remove(room)
                if room.key in self.sent:
                    self.rig.step(events.RoomDrained, request_id=room.key[0], generation=room.key[1], rank=0)
                else:
                    self.fail(room, settled=True)
                self.obey()
        for number in range(self.names + 1):
            self.rig.step(events.RetractedDropped, request_id=f"r{number}")
        self.rig.expect_nothing_held()
