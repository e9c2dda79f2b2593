"""Simulated host engines: callers that own the device pages, lend them for a restore, and offer what they computed.

The host engine has blocks and a prefix cache of its own. It reuses a block as soon as a call has given it back, so a
write or read of the core after that is found by the simulated pool.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Protocol

from simulation.callers import ALPHABET, Caller, CallerSurroundings, draw_prompt
from simulation.memory import Violation
from tidekv.states import commands, events
from tidekv.states.types import PageIds, page_ids

if TYPE_CHECKING:
    from collections.abc import Callable

RETRY_S = 0.01
"""Seconds after which a client without free blocks tries again."""


class LendingSurroundings(CallerSurroundings, Protocol):
    """Interface of the world for clients that lend device pages."""

    offered_by: dict[int, LendingClient]


class Blocks:
    """The host engine's block manager: the device pages that are neither lent nor offered nor in use."""

    def __init__(self, page_count: int) -> None:
        self._free = list(range(page_count))

    def take(self, count: int, random: Random) -> PageIds | None:
        """Take blocks, in no particular order; None if too few are free."""
        if count > len(self._free):
            return None
        random.shuffle(self._free)
        taken = page_ids(self._free[:count])
        del self._free[:count]
        return taken

    def free(self, pages: PageIds) -> None:
        """Free blocks for the next request."""
        self._free += pages


class LendingClient:
    """Makes one request after another, each in blocks of the host engine."""

    def __init__(
        self, world: LendingSurroundings, random: Random, sessions: list[tuple[str, bytes]], blocks: Blocks
    ) -> None:
        self._world = world
        self._random = random
        self._sessions = sessions
        self._session = 0
        self._blocks = blocks
        self._offers: dict[int, tuple[PageIds, Callable[[], None]]] = {}

    def begin(self) -> None:
        """Make the next request, unless all were made."""
        world = self._world
        if not world.take_arrival():
            return
        self._session, namespace, tokens = draw_prompt(world, self._random, self._sessions)
        self._ask(namespace, tokens)

    def _ask(self, namespace: str, tokens: bytes) -> None:
        world, random = self._world, self._random
        pages = self._blocks.take(world.settings.pages_of(len(tokens)), random)
        if pages is None:
            world.schedule.after(RETRY_S, self._ask, namespace, tokens)
            return
        caller = Caller(world, self, world.new_id(), tokens, namespace)
        caller.pages = pages
        # The host engine's own prefix cache has the first pages.
        caller.held = random.choice((0, 0, random.randint(0, len(caller.tags))))
        for at in range(caller.held):
            world.device.put(pages[at], caller.tags[at], f"the cache of {caller.request_id}")
        if world.faults.hits("deadline"):
            caller.deadline_at_s = world.now_s + random.choice((0.0, 0.01, 0.05, 0.2))
        caller.prefills = random.sample(range(len(world.peers)), k=random.randint(1, len(world.peers)))
        world.arrive(caller, cache=not world.faults.hits("no_cache"), priority=random.choice((0, 0, 0, 1, 5)))
        if world.faults.hits("abort_at_once"):
            world.schedule.after(0.0, self.abort, caller)
        elif world.faults.hits("abort"):
            world.schedule.after(random.choice((0.002, 0.01, 0.05, 0.2)) * random.random(), self.abort, caller)
        if world.faults.hits("abort_of_nothing"):
            world.step(events.AbortRequested(at_s=world.now_s, request_id=random.choice(("nobody", "r0"))))

    def abort(self, caller: Caller) -> None:
        if self._world.is_live(caller):
            caller.has_aborted = True
            self._world.step(events.AbortRequested(at_s=self._world.now_s, request_id=caller.request_id))

    # --- Commands of the core ---

    def restored(self, caller: Caller, command: commands.ReportRestored) -> None:
        """Take the pages back: check what is in place, compute the rest, generate, and offer pages."""
        world = self._world
        page_size = world.settings.page_size
        world.device.expect_quiet(caller.pages, caller.request_id)
        good = world.settings.pages_of(command.good_tokens)
        tags = caller.tags + caller.tail
        if command.good_tokens not in (good * page_size, len(caller.tokens)) or good < caller.held:
            raise Violation(f"{command} of {len(caller.tokens)} tokens, {caller.held} pages of them held before")
        if sum(command.sources.values()) != command.good_tokens or min(command.sources.values()) < 0:
            raise Violation(f"{command} has sources that are not {command.good_tokens} tokens")
        if bool(command.cause) != (command.good_tokens < len(caller.tokens)) and good < len(tags):
            raise Violation(f"{command} has a cause, or none, although the prompt has {len(caller.tokens)} tokens")
        world.device.expect(caller.pages[:good], tags[:good], caller.request_id)
        for at in range(good, len(tags)):
            world.device.put(caller.pages[at], tags[at], f"the computation of {caller.request_id}")
        world.end(caller)
        world.schedule.after(world.delay() * 3, self._generate, caller)

    def failed(self, caller: Caller) -> None:
        """Take the pages back of a request that failed: they can be used again at once."""
        self._world.device.expect_quiet(caller.pages, caller.request_id)
        self._world.end(caller)
        self._leave(caller.pages)

    def _leave(self, pages: PageIds) -> None:
        self._blocks.free(pages)
        self._world.schedule.after(self._world.delay(), self.begin)

    # --- After the restore ---

    def _generate(self, caller: Caller) -> None:
        world, random = self._world, self._random
        page_size = world.settings.page_size
        output = bytes(random.choices(ALPHABET, k=random.randint(0, 3 * page_size)))
        tokens = caller.tokens + output
        more = self._blocks.take(world.settings.pages_of(len(tokens)) - len(caller.pages), random)
        if more is None:
            tokens, more = caller.tokens, page_ids()
        pages, tags = caller.pages + more, world.tags_of(caller.namespace, tokens)
        for at in range(len(caller.tags), len(tags)):
            world.device.put(pages[at], tags[at], f"decoding of {caller.request_id}")
        if world.faults.hits("flush"):
            tiers = random.choice((("l1",), ("l2",), ("l1", "l2")))
            world.step(events.FlushRequested(at_s=world.now_s, call=1, tiers=tiers))
        self._sessions[self._session] = (caller.namespace, tokens)
        if not tags or world.faults.hits("pages_are_not_offered"):
            self._leave(pages)
            return
        # In one offer, or chunk by chunk, of which the later ones follow copies that are under way.
        cut = random.choice((0, random.randrange(len(tags))))
        self._offer(caller, tokens, pages, tags, cut)

    def _offer(self, caller: Caller, tokens: bytes, pages: PageIds, tags: list[int], cut: int) -> None:
        world, left = self._world, [1 + bool(cut)]

        def returned() -> None:
            left[0] -= 1
            if not left[0]:
                self._leave(pages)

        for first, end in ((0, cut), (cut, len(tags))) if cut else ((0, len(tags)),):
            number = world.next_serial()
            self._offers[number] = (pages[first:end], returned)
            world.offered_by[number] = self
            world.step(
                events.PagesOffered(
                    at_s=world.now_s,
                    offer=number,
                    keys=tokens[: end * world.settings.page_size],
                    pages=tuple(pages[first:end]),
                    namespace=caller.namespace,
                )
            )

    def offered(self, command: commands.ReportOffered) -> None:
        """Take the pages of an offer back."""
        pages, returned = self._offers.pop(command.offer)
        self._world.device.expect_quiet(pages, command)
        if min(command.written, command.present, command.declined) < 0 or (
            command.written + command.present + command.declined != len(pages)
        ):
            raise Violation(f"{command} of {len(pages)} pages")
        returned()
