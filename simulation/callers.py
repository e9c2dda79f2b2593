"""Simulated callers: conversations that share prefixes, and every call that a caller can make for a request.

A request is one `Script`, which the callers of all ranks follow, each at its own time. What a caller decides on the way
is drawn once, by the first rank that gets there, so that all decide alike.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Protocol, TypeVar

from simulation.components import LiveComponents
from simulation.memory import Violation
from tidekv.states import commands, events
from tidekv.states.ranks.vote_items import LOST_RANK
from tidekv.states.types import PageIds, page_ids

if TYPE_CHECKING:
    from collections.abc import Callable

    from simulation.rank import Rank
    from simulation.world import World
    from tidekv.states.events import ComponentLeft

SESSIONS = 5
ALPHABET = b"ab"
NOBODY = -1
"""Instead of the number of a rank."""

Drawn = TypeVar("Drawn")


class Script:
    """One request: what it asks for, how its callers decide, and what becomes of it on each rank."""

    def __init__(self, world: World, client: Client, request_id: str, tokens: bytes, namespace: str) -> None:
        self._world = world
        self.client = client
        self.request_id = request_id
        self.tokens = tokens
        self.namespace = namespace
        self.number = world.next_number()
        self.generation = world.generations.get(request_id, -1) + 1
        self.prefills: list[int] = []
        self.deadline_at_s = float("inf")
        self.cache = True
        self.priority = 0
        self.can_recompute = False
        self.early = False
        self.missing_on = NOBODY
        """The rank whose caller never submits the request."""
        self.has_aborted = False
        self.recompute_failed = False
        self.was_taken = False
        """Whether a core has taken it."""
        self.was_ready = False
        self.losses: set[object] = set()
        """Attempts at a prefill that have failed, by what is the same on all ranks."""
        self.kept = b""
        """Prompt and output once it has been generated."""
        self.ends: dict[int, str] = {}
        """How it ended, by rank."""
        self._drawn: dict[object, object] = {}

    def __contains__(self, what: object) -> bool:
        return what in self._drawn

    def once(self, what: object, draw: Callable[[], Drawn]) -> Drawn:
        """Return what was drawn for `what`, which is drawn at the first call."""
        if what not in self._drawn:
            self._drawn[what] = draw()
        return self._drawn[what]  # type: ignore[return-value]  # Equal names have equal types.

    def hits(self, fault: str, *part: object) -> bool:
        """Whether a fault strikes this request on all ranks, or a part of it."""
        return self.once((fault, *part), lambda: self._world.faults.hits(fault))

    def strikes(self, fault: str, rank: int, *part: object) -> bool:
        """Whether a fault strikes this request on this rank, and on no other one."""
        world = self._world
        draw = lambda: world.random.randrange(len(world.ranks)) if world.faults.hits(fault) else NOBODY  # noqa: E731
        return self.once((fault, *part), draw) == rank

    def aborts_on(self, rank: int) -> bool:
        """Whether it is this rank's caller that aborts the request, if one does."""
        return self.once("aborts", lambda: self._world.random.randrange(len(self._world.ranks))) == rank


class Caller:
    """The caller of a request on one rank."""

    def __init__(self, rank: Rank, script: Script) -> None:
        self.script = script
        self.request_id, self.tokens = script.request_id, script.tokens
        self.tags = rank.tags_of(script.namespace, script.tokens)
        full = len(self.tags) * rank.settings.page_size
        # The KV of a partial page depends on the request, so its tag is unique: it must never match another page.
        rest = script.tokens[full:]
        self.tail = [rank.contents.tag(f"tail {script.number}", rest)] if rest else []
        self.component_tags = rank.component_pages.tags_of(script.namespace, script.tokens)
        self.component_pages = LiveComponents((), len(script.tokens))
        self.is_ready = False
        self.has_aborted = False
        self.is_given_back = False
        self.waits_for_pages = False
        self.pages: PageIds = page_ids()
        self.held = 0
        """Pages of the prompt that lent pages hold before the restore."""
        self.lent_components: dict[str, PageIds] = {}
        self.reserve: PageIds = page_ids()

    @property
    def goes_on(self) -> bool:
        """Whether the caller has neither aborted the request nor given it back."""
        return not self.has_aborted and not self.is_given_back


def draw_prompt(world: World, sessions: list[tuple[str, bytes]]) -> tuple[int, str, bytes]:
    """Return the number of a conversation, its namespace, and a prompt that usually continues it."""
    random, settings = world.random, world.settings
    session = random.randrange(len(sessions))
    namespace, history = sessions[session]
    if random.random() < 0.2:
        history = history[: random.randrange(len(history) + 1)]
    turn = bytes(random.choices(ALPHABET, k=random.randint(1, 3 * settings.page_size)))
    tokens = history + turn
    if len(tokens) > world.prompt_tokens_max:
        tokens = history[: settings.page_size * random.randint(0, 3)] + turn
    if random.random() < 0.2 and len(tokens) > settings.page_size:
        tokens = tokens[: len(tokens) // settings.page_size * settings.page_size]
    if settings.components and len(history) > 1 and random.random() < 0.2:
        # Exactly the tokens written when a request ended: only its tails are missing then.
        tokens = history[:-1]
    if settings.components and settings.share_transfers and random.random() < 0.2 and world.restoring:
        # The prompt of a request that is on its way: then both have the same end.
        other = random.choice(world.restoring)
        return session, other.namespace, other.tokens
    return session, namespace, tokens[: world.prompt_tokens_max]


class Client:
    """Makes one request after another, on all ranks."""

    def __init__(self, world: World, sessions: list[tuple[str, bytes]]) -> None:
        self._world = world
        self._sessions = sessions
        self._session = 0
        self._resumed: Script | None = None

    def begin(self) -> None:
        """Make the next request, unless all were made."""
        world = self._world
        if world.take_arrival():
            self._session, namespace, tokens = draw_prompt(world, self._sessions)
            self._ask(world.new_id(), tokens, namespace)

    def _ask(self, request_id: str, tokens: bytes, namespace: str) -> Script:
        world, random, faults = self._world, self._world.random, self._world.faults
        script = Script(world, self, request_id, tokens, namespace)
        if faults.hits("deadline"):
            script.deadline_at_s = world.now_s + random.choice((0.0, 0.01, 0.05, 0.2))
        script.can_recompute = not world.settings.lends_device and random.random() < 0.3
        script.prefills = random.sample(range(world.prefill_count), k=random.randint(1, world.prefill_count))
        script.cache = not faults.hits("no_cache")
        script.priority = random.choice((0, 0, 0, 1, 5))
        script.early = world.draws_early()
        if faults.hits("rank_misses_a_call"):
            script.missing_on = random.randrange(len(world.ranks))
        world.submit(script)
        if faults.hits("abort_of_nothing"):
            nobody = random.choice(("nobody", "r0"))
            world.ranks[0].tell(events.AbortRequested(at_s=world.now_s, request_id=nobody))
        return script

    def ended(self, script: Script, end: str) -> None:
        """Go on once a request has ended on all ranks: with the next one, or with what was retracted."""
        world = self._world
        if script.kept:
            self._sessions[self._session] = (script.namespace, script.kept)
        if self._resumed is script and not script.was_taken and end != LOST_RANK:
            # Not all ranks have taken the resumed request, so what was retracted is still held.
            script.kept = script.tokens
            world.retracted_ids.add(script.request_id)
            self._drop(script, world.turns.epoch)
            return
        if end != "retracted":
            world.begin_later(self)
            return
        too_long = len(script.kept) > world.prompt_tokens_max
        is_dropped = too_long or world.faults.hits("retracted_is_dropped")
        world.schedule.after(world.delay(), self._drop if is_dropped else self._resume, script, world.turns.epoch)

    def _drop(self, script: Script, epoch: int) -> None:
        world = self._world
        world.retracted_ids.remove(script.request_id)
        for rank in world.ranks if world.turns.epoch == epoch and world.turns.is_whole else ():
            delay_s = 0.0 if rank.is_alone else rank.delay()
            dropped = events.RetractedDropped(at_s=world.now_s, request_id=script.request_id)
            rank.schedule.after(delay_s, rank.tell_now, dropped)
        world.begin_later(self)

    def _resume(self, script: Script, epoch: int) -> None:
        self._world.retracted_ids.remove(script.request_id)
        self._resumed = self._ask(script.request_id, script.kept, script.namespace)


class Work(Protocol):
    """What a rank does for its callers: it has device pages of its own, or a host engine lends them."""

    @property
    def is_quiet(self) -> bool:
        """Whether nothing of its own is under way."""
        ...

    def ask(self, caller: Caller) -> None:
        """Submit a request, now or when there are pages for it."""
        ...

    def failed(self, caller: Caller) -> None:
        """Take back what a request had that has ended without success."""
        ...

    def declined(self, offer: events.PagesOffered) -> None:
        """Take back the pages of an offer that not all ranks have made."""
        ...


class OwnPages:
    """Callers of a rank whose device pages are the core's own: they generate in the pages that a restore brought."""

    is_quiet = True

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def ask(self, caller: Caller) -> None:
        """Submit a request."""
        self._rank.arrive(caller)

    def failed(self, caller: Caller) -> None:
        """Do nothing: the pages are the core's."""

    def declined(self, offer: events.PagesOffered) -> None:
        """Raise a Violation: nothing is offered."""
        raise Violation(f"{offer} of a rank with pages of its own")

    # --- Commands of the core ---

    def recompute(self, command: commands.Recompute) -> None:
        """Handle a recomputation: compute the pages that the device lacks, using those that it has."""
        rank, caller = self._rank, self._rank.caller(command.request_id)
        rank.outcomes.begin(command.op)
        if rank.faults.hits("recompute_raises"):
            caller.script.recompute_failed = True
            rank.outcomes.raised(command.op)
            return
        who, tags = f"recompute {command.op}", caller.tags + caller.tail
        rank.device.expect(command.pages[: command.first], tags[: command.first], who)
        rest = command.pages[command.first :]
        rank.device.begin_write(rest, who)
        components = command.component_pages or (), command.resume_from or (), command.first, caller.component_tags, who
        rank.component_pages.begin_compute(*components)
        slow = 0.5 if rank.faults.hits("recompute_is_slow") else 0.0

        def end() -> None:
            error = "injected" if rank.faults.hits("recompute_fails") else ""
            caller.script.recompute_failed |= bool(error)
            rank.device.end_write(rest, who, None if error else tags[command.first :])
            rank.component_pages.end_compute(*components, snapshots=command.snapshots or {}, is_garbage=bool(error))
            rank.outcomes.tell(lambda at_s: events.Recomputed(at_s=at_s, op=command.op, error=error), command.op)

        rank.schedule.after(rank.delay() + slow, end)

    def ready(self, command: commands.ReportReady) -> None:
        """Handle the end of a restore: generate, or abort at once."""
        rank, caller = self._rank, self._rank.caller(command.request_id)
        if caller.is_ready:
            raise Violation(f"{command}, which was ready before")
        caller.is_ready = caller.script.was_ready = True
        rank.device.expect(command.pages, caller.tags + caller.tail, command.request_id)
        if rank.early_callers is not None:
            rank.early_callers.ready(command)
        if sum(command.sources.values()) != len(caller.tokens) or min(command.sources.values()) < 0:
            raise Violation(f"{command} has sources that are not {len(caller.tokens)} tokens")
        caller.pages, caller.reserve = command.pages[:], command.reserve[:]
        if (command.component_pages is None) != (not rank.settings.components):
            raise Violation(f"{command} has tails although there are no components, or none although there are")
        caller.component_pages = LiveComponents(command.component_pages or (), len(caller.tokens))
        if rank.early_callers is not None and rank.early_callers.has_aborted(caller):
            return  # The abort is on its way to all ranks, and this report crossed it.
        rank.check_components(caller)
        if caller.script.hits("abort_when_ready") and caller.script.aborts_on(rank.number):
            rank.schedule.after(0.0, rank.abort, caller)
        rank.schedule.after(rank.delay() * 3, self._generate, caller)

    def give_reserve(self, command: commands.GiveReserve) -> None:
        """Take further pages."""
        caller = self._rank.caller(command.request_id)
        caller.reserve += command.pages
        if caller.reserve:
            self._go_on(caller)

    def grown(self, event: events.GrowthTaken) -> None:
        """Go on after the answer to a wish for pages: without further ones there are none."""
        caller = self._rank.callers.get(event.request_id)
        if caller is not None and caller.waits_for_pages:
            limit = len(caller.pages) * self._rank.settings.page_size
            caller.script.once("tokens_max", lambda: limit)
            self._go_on(caller)

    def _go_on(self, caller: Caller) -> None:
        if caller.waits_for_pages:
            caller.waits_for_pages = False
            self._rank.schedule.after(0.0 if self._rank.is_alone else self._rank.delay(), self._grow, caller)

    def retracted(self, command: commands.ReportRetracted) -> None:
        """Handle the end of a retraction."""
        caller = self._rank.caller(command.request_id)
        if command.held_pages > len(caller.script.kept) // self._rank.settings.page_size:
            raise Violation(f"{command} holds more pages than the tokens have")
        self._rank.end(caller, "retracted")

    # --- After the restore ---

    def _generate(self, caller: Caller) -> None:
        rank, script, size = self._rank, caller.script, self._rank.settings.page_size
        if not rank.is_live(caller) or not caller.goes_on:
            return
        rank.device.expect(caller.pages[: len(caller.tags)], caller.tags, f"{caller.request_id}, whose restore is over")
        rank.check_components(caller)
        random = rank.world.random

        def draw() -> bytes:
            output = bytes(random.choices(ALPHABET, k=random.randint(0, 3 * size)))
            if caller.component_pages.tables and random.random() < 0.7:
                # Component state can be left only at the end of a page, and the last generated token has no KV yet.
                output = output[: len(output) - (len(caller.tokens) + len(output) - 1) % size]
            return output

        script.once("output", draw)
        self._grow(caller)

    def _written(self, script: Script) -> tuple[bytes, int]:
        """Return prompt and output, and how many of these tokens have KV, as far as there were pages for them."""
        output = script.once("output", bytes)
        written = len(script.tokens) + max(0, len(output) - 1)
        limit = script.once("tokens_max", lambda: written) if "tokens_max" in script else written
        if limit < written:
            written, output = limit, output[: limit - len(script.tokens) + 1]
        return script.tokens + output, written

    def _grow(self, caller: Caller) -> None:
        rank, script = self._rank, caller.script
        random = rank.world.random
        while rank.is_live(caller) and caller.goes_on:
            if rank.settings.pages_of(self._written(script)[1]) <= len(caller.pages):
                self._give_back(caller)
                return
            taken = min(1, len(caller.reserve))
            wanted = script.once(("wanted", len(caller.pages)), lambda: random.choice((0, 1, 2)))
            caller.waits_for_pages = not taken
            caller.pages += caller.reserve[:taken]
            del caller.reserve[:taken]
            wanted = wanted if taken else max(wanted, 1)
            rank.tell(
                events.GrowthTaken(at_s=rank.now_s, request_id=caller.request_id, page_count=taken, wanted=wanted)
            )
            if not taken:
                return

    def _give_back(self, caller: Caller) -> None:
        rank, script, size = self._rank, caller.script, self._rank.settings.page_size
        tokens, written = self._written(script)
        left, who = rank.tags_of(script.namespace, tokens[:written]), f"decoding of {caller.request_id}"
        for at in range(len(caller.tags), len(left)):
            # Generation fills the prompt's partial page and the pages added by growth.
            rank.device.put(caller.pages[at], left[at], who)
        component_tags = rank.component_pages.tags_of(script.namespace, tokens[:written])
        rank.component_pages.generate(caller.component_pages, component_tags, len(caller.tokens), written, who)
        rank.flush_with(script)
        if not rank.is_live(caller):
            return
        if script.hits("output_is_dropped"):
            written = min(written, len(caller.tokens))
        caller.is_given_back = True
        script.kept = tokens
        rank.records[script.number] = left
        retracts = script.hits("retract")
        if retracts:
            rank.world.retracted_ids.add(script.request_id)
        kind = events.RetractRequested if retracts else events.FinishRequested
        rank.tell(
            kind(
                at_s=rank.now_s,
                request_id=caller.request_id,
                keys=tokens[: written // size * size],
                tokens=written,
                component_pages=self._component_pages_left(caller, written),
            )
        )

    def _component_pages_left(self, caller: Caller, kept: int) -> tuple[ComponentLeft, ...]:
        rank, script = self._rank, caller.script
        if not caller.component_pages.tables or script.strikes("rank_leaves_otherwise", rank.number):
            return ()
        # Seeded by the request, so that all ranks draw the same.
        left = rank.component_pages.left(caller.component_pages, kept, Random(f"left {script.number}"))
        return tuple(tail for tail in left if not script.hits("component_is_not_left", tail.component))
