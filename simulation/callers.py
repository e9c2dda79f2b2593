"""Simulated callers: conversations that share prefixes, and every call that a caller can make for a request."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Protocol

from simulation.components import LiveComponents
from simulation.memory import Violation
from simulation.tiers import TierSurroundings
from tidekv.states import commands, events
from tidekv.states.types import PageIds, page_ids

if TYPE_CHECKING:
    from collections.abc import Sized

    from tidekv.states.events import ComponentLeft

SESSIONS = 5
ALPHABET = b"ab"


class CallerSurroundings(TierSurroundings, Protocol):
    """Interface of the world for its callers."""

    prompt_tokens_max: int
    retracting: dict[str, tuple[Caller, bytes]]
    retracted_ids: set[str]

    @property
    def peers(self) -> Sized:
        """The prefill peers."""
        ...

    def next_number(self) -> int:
        """Return a new number, which identifies the tokens of a request."""
        ...

    def new_id(self) -> str:
        """Return a request id: a new one, or one that was used before."""
        ...

    def take_arrival(self) -> bool:
        """Whether one more request may be made."""
        ...

    def arrive(self, caller: Caller, *, cache: bool, priority: int) -> None:
        """Submit a request."""
        ...

    def is_live(self, caller: Caller) -> bool:
        """Whether the request is live."""
        ...

    @property
    def restoring(self) -> list[Caller]:
        """The callers of requests that are not READY."""
        ...

    def has_aborted(self, caller: Caller) -> None:
        """End what a caller that has just aborted its request still uses of its pages."""
        ...

    def end(self, caller: Caller) -> None:
        """Forget a request that has ended for its caller."""
        ...

    def leave_tokens(self, caller: Caller, tags: list[int]) -> None:
        """Keep the tokens that a request leaves, which operations may name until the core forgets them."""
        ...

    def check_components(self, caller: Caller, who: str) -> None:
        """Check the component pages of a ready request."""
        ...


class Submitter(Protocol):
    """What made a request: a client of some kind."""

    def failed(self, caller: Caller) -> None:
        """Handle the failure of the request."""
        ...

    def abort(self, caller: Caller) -> None:
        """Abort the request, unless it has ended."""
        ...


class Caller:
    """The caller's state of one request."""

    def __init__(
        self, world: CallerSurroundings, client: Submitter, request_id: str, tokens: bytes, namespace: str
    ) -> None:
        self.client = client
        self.request_id = request_id
        self.tokens = tokens
        self.namespace = namespace
        self.tags = world.tags_of(namespace, tokens)
        self.request_number = world.next_number()
        full = len(self.tags) * world.settings.page_size
        # The KV of a partial page depends on the request, so its tag is unique: it must never match another page.
        self.tail = [world.contents.tag(f"tail {self.request_number}", tokens[full:])] if full < len(tokens) else []
        self.component_tags = world.component_pages.tags_of(namespace, tokens)
        self.component_pages = LiveComponents((), len(tokens))
        self.prefills: list[int] = []
        self.deadline_at_s = float("inf")
        self.has_aborted = False
        self.can_recompute = False
        self.recompute_failed = False
        self.losses = 0
        self.ends: list[str] = []
        self.is_ready = False
        self.pages: PageIds = page_ids()
        self.held = 0
        """Pages of the prompt that lent pages hold before the restore."""
        self.lent_components: dict[str, PageIds] = {}
        self.reserve: PageIds = page_ids()


def draw_prompt(world: CallerSurroundings, random: Random, sessions: list[tuple[str, bytes]]) -> tuple[int, str, bytes]:
    """Return the number of a conversation, its namespace, and a prompt that usually continues it."""
    session = random.randrange(len(sessions))
    namespace, history = sessions[session]
    if random.random() < 0.2:
        history = history[: random.randrange(len(history) + 1)]
    turn = bytes(random.choices(ALPHABET, k=random.randint(1, 3 * world.settings.page_size)))
    tokens = history + turn
    if len(tokens) > world.prompt_tokens_max:
        tokens = history[: world.settings.page_size * random.randint(0, 3)] + turn
    if random.random() < 0.2 and len(tokens) > world.settings.page_size:
        tokens = tokens[: len(tokens) // world.settings.page_size * world.settings.page_size]
    if world.settings.components and len(history) > 1 and random.random() < 0.2:
        # Exactly the tokens written when a request ended: only its tails are missing then.
        tokens = history[:-1]
    if world.settings.components and world.settings.share_transfers and random.random() < 0.2 and world.restoring:
        # The prompt of a request that is on its way: then both have the same end.
        other = random.choice(world.restoring)
        return session, other.namespace, other.tokens
    return session, namespace, tokens[: world.prompt_tokens_max]


class Client:
    """Makes one request after another."""

    def __init__(self, world: CallerSurroundings, random: Random, sessions: list[tuple[str, bytes]]) -> None:
        self._world = world
        self._random = random
        self._sessions = sessions
        self._session = 0
        self._flushes = 0

    def begin(self) -> None:
        """Make the next request, unless all were made."""
        world = self._world
        if not world.take_arrival():
            return
        self._session, namespace, tokens = draw_prompt(world, self._random, self._sessions)
        self._ask(world.new_id(), tokens, namespace)

    def _ask(self, request_id: str, tokens: bytes, namespace: str) -> None:
        world, random = self._world, self._random
        caller = Caller(world, self, request_id, tokens, namespace)
        if world.faults.hits("deadline"):
            caller.deadline_at_s = world.now_s + random.choice((0.0, 0.01, 0.05, 0.2))
        caller.can_recompute = random.random() < 0.3
        caller.prefills = random.sample(range(len(world.peers)), k=random.randint(1, len(world.peers)))
        world.arrive(caller, cache=not world.faults.hits("no_cache"), priority=random.choice((0, 0, 0, 1, 5)))
        if world.faults.hits("abort_at_once"):
            world.schedule.after(0.0, self.abort, caller)
        elif world.faults.hits("abort"):
            world.schedule.after(random.choice((0.002, 0.01, 0.05, 0.2)) * random.random(), self.abort, caller)
        if world.faults.hits("abort_of_nothing"):
            world.step(events.AbortRequested(at_s=world.now_s, request_id=random.choice(("nobody", "r0"))))

    def abort(self, caller: Caller) -> None:
        """Abort the request, unless it has ended."""
        world = self._world
        if not world.is_live(caller):
            return
        was_ready, caller.has_aborted = caller.is_ready, True
        world.step(events.AbortRequested(at_s=world.now_s, request_id=caller.request_id))
        world.has_aborted(caller)
        if was_ready and world.is_live(caller):
            self._end(caller)

    # --- Commands of the core ---

    def recompute(self, caller: Caller, command: commands.Recompute) -> None:
        """Handle a recomputation: compute the pages that the device lacks, using those that it has."""
        world = self._world
        world.outcomes.begin(command.op)
        if world.faults.hits("recompute_raises"):
            caller.recompute_failed = True
            world.outcomes.raised(command.op)
            return
        who, tags = f"recompute {command.op}", caller.tags + caller.tail
        world.device.expect(command.pages[: command.first], tags[: command.first], who)
        rest = command.pages[command.first :]
        world.device.begin_write(rest, who)
        components = command.component_pages or (), command.resume_from or (), command.first, caller.component_tags, who
        world.component_pages.begin_compute(*components)
        slow = 0.5 if world.faults.hits("recompute_is_slow") else 0.0

        def end() -> None:
            error = "injected" if world.faults.hits("recompute_fails") else ""
            caller.recompute_failed |= bool(error)
            world.device.end_write(rest, who, None if error else tags[command.first :])
            world.component_pages.end_compute(*components, snapshots=command.snapshots or {}, is_garbage=bool(error))
            world.outcomes.tell(lambda at_s: events.Recomputed(at_s=at_s, op=command.op, error=error), command.op)

        world.schedule.after(world.delay() + slow, end)

    def ready(self, caller: Caller) -> None:
        """Handle the end of a restore: generate, or abort at once."""
        caller.is_ready = True
        if self._world.faults.hits("abort_when_ready"):
            self._world.schedule.after(0.0, self.abort, caller)
        self._world.schedule.after(self._world.delay() * 3, self._generate, caller)

    def failed(self, caller: Caller) -> None:
        """Handle the failure of the request."""
        self._end(caller)

    def _end(self, caller: Caller) -> None:
        self._world.end(caller)
        self._world.schedule.after(self._world.delay(), self.begin)

    # --- After the restore ---

    def _generate(self, caller: Caller) -> None:
        world, random = self._world, self._random
        if not world.is_live(caller):
            return
        self._check_prompt(caller)
        page_size = world.settings.page_size
        output = bytes(random.choices(ALPHABET, k=random.randint(0, 3 * page_size)))
        if caller.component_pages.tables and random.random() < 0.7:
            # Component state can be left only at the end of a page, and the last generated token has no KV yet.
            output = output[: len(output) - (len(caller.tokens) + len(output) - 1) % page_size]
        written = len(caller.tokens) + max(0, len(output) - 1)
        while len(caller.pages) * page_size < written:
            if not self._grow(caller):
                written = len(caller.pages) * page_size
                output = output[: written - len(caller.tokens) + 1]
        if not world.is_live(caller):
            return
        tokens = caller.tokens + output
        left = world.tags_of(caller.namespace, tokens[:written])
        for at in range(len(caller.tags), len(left)):
            # Generation fills the prompt's partial page and the pages added by growth.
            world.device.put(caller.pages[at], left[at], f"decoding of {caller.request_id}")
        component_tags = world.component_pages.tags_of(caller.namespace, tokens[:written])
        world.component_pages.generate(
            caller.component_pages, component_tags, len(caller.tokens), written, f"decoding of {caller.request_id}"
        )
        if world.faults.hits("flush"):
            self._flush()
        if world.faults.hits("retract"):
            self._retract(caller, tokens, written, left)
        else:
            self._finish(caller, tokens, written, left)

    def _check_prompt(self, caller: Caller) -> None:
        self._world.device.expect(
            caller.pages[: len(caller.tags)], caller.tags, f"{caller.request_id}, whose restore is over"
        )
        self._world.check_components(caller, f"{caller.request_id}, whose restore is over")

    def _grow(self, caller: Caller) -> bool:
        world = self._world
        taken, wanted = min(1, len(caller.reserve)), self._random.choice((0, 1, 2))
        if not taken:
            wanted = max(wanted, 1)
        caller.pages += caller.reserve[:taken]
        del caller.reserve[:taken]
        if not taken and not len(caller.reserve):
            world.step(events.GrowthTaken(at_s=world.now_s, request_id=caller.request_id, page_count=0, wanted=wanted))
            return bool(caller.reserve)
        world.step(events.GrowthTaken(at_s=world.now_s, request_id=caller.request_id, page_count=taken, wanted=wanted))
        return True

    def _keys(self, caller: Caller, tokens: bytes, written: int) -> tuple[bytes, int]:
        page_size = self._world.settings.page_size
        if self._world.faults.hits("output_is_dropped"):
            written = min(written, len(caller.tokens))
        return tokens[: written // page_size * page_size], written

    def _component_pages_left(self, caller: Caller, kept: int) -> tuple[ComponentLeft, ...]:
        world = self._world
        left = (
            world.component_pages.left(caller.component_pages, kept, self._random)
            if caller.component_pages.tables
            else ()
        )
        return tuple(tail for tail in left if not world.faults.hits("component_is_not_left"))

    def _finish(self, caller: Caller, tokens: bytes, written: int, left: list[int]) -> None:
        world = self._world
        keys, written = self._keys(caller, tokens, written)
        world.leave_tokens(caller, left)
        world.step(
            events.FinishRequested(
                at_s=world.now_s,
                request_id=caller.request_id,
                keys=keys,
                tokens=written,
                component_pages=self._component_pages_left(caller, written),
            )
        )
        self._sessions[self._session] = (caller.namespace, tokens)
        if world.is_live(caller):
            self._end(caller)

    def _retract(self, caller: Caller, tokens: bytes, written: int, left: list[int]) -> None:
        world = self._world
        keys, written = self._keys(caller, tokens, written)
        world.leave_tokens(caller, left)
        world.retracting[caller.request_id] = (caller, tokens)
        world.retracted_ids.add(caller.request_id)
        world.step(
            events.RetractRequested(
                at_s=world.now_s,
                request_id=caller.request_id,
                keys=keys,
                tokens=written,
                component_pages=self._component_pages_left(caller, written),
            )
        )
        if world.is_live(caller):
            world.end(caller)

    def retracted(self, caller: Caller, tokens: bytes, command: commands.ReportRetracted) -> None:
        """Handle the end of a retraction: resume the request later, or drop it."""
        world = self._world
        if command.held_pages > len(tokens) // world.settings.page_size:
            raise Violation(f"{command} holds more pages than the tokens have")
        too_long = len(tokens) > world.prompt_tokens_max
        world.schedule.after(
            world.delay(),
            self._drop if too_long or world.faults.hits("retracted_is_dropped") else self._resume,
            caller,
            tokens,
        )

    def _drop(self, caller: Caller, tokens: bytes) -> None:
        world = self._world
        world.retracted_ids.remove(caller.request_id)
        world.step(events.RetractedDropped(at_s=world.now_s, request_id=caller.request_id))
        world.schedule.after(world.delay(), self.begin)

    def _resume(self, caller: Caller, tokens: bytes) -> None:
        self._world.retracted_ids.remove(caller.request_id)
        self._ask(caller.request_id, tokens, caller.namespace)

    def _flush(self) -> None:
        world, random = self._world, self._random
        tiers = random.choice((("l1",), ("l2",), ("l1", "l2")))
        self._flushes += 1
        world.step(events.FlushRequested(at_s=world.now_s, call=self._flushes, tiers=tiers))
