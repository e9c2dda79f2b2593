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

    from simulation.components import SimulatedComponents, Tags
    from tidekv.states.settings import CoreSettings

RETRY_S = 0.01
"""Seconds after which a client without free blocks tries again."""
RETRY_MAX_S = 2.0


class LendingCaller(Protocol):
    """Interface of the caller of a request in lent pages."""

    request_id: str
    component_tags: Tags
    lent_components: dict[str, PageIds]
    held: int


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


class ComponentBlocks:
    """The same for the pages of all components. Without components every method is a no-op."""

    def __init__(self, settings: CoreSettings, component_pages: SimulatedComponents) -> None:
        self._settings = settings
        self._component_pages = component_pages
        self._blocks = {each.name: Blocks(each.device_pages) for each in settings.components}

    def take(self, prompt_tokens: int, random: Random) -> dict[str, PageIds] | None:
        """Take blocks for what the end of a prompt needs; None, with nothing taken, if too few are free."""
        pages, size = self._settings.pages_of(prompt_tokens), self._settings.page_size
        needed = {each.name: pages - each.needed_from(prompt_tokens, size) for each in self._settings.components}
        return self._take(needed, random)

    def _take(self, needed: dict[str, int], random: Random) -> dict[str, PageIds] | None:
        taken: dict[str, PageIds] = {}
        for name, count in needed.items():
            pages = self._blocks[name].take(count, random)
            if pages is None:
                self.free(taken)
                return None
            taken[name] = pages
        return taken

    def free(self, pages: dict[str, PageIds]) -> None:
        """Free blocks for the next request."""
        for name, ours in pages.items():
            self._blocks[name].free(ours)

    def hold(self, caller: LendingCaller) -> None:
        """Fill the pages at positions that the host engine's cache holds."""
        for name, pages in caller.lent_components.items():
            tags = caller.component_tags[name]
            first = len(tags) - len(pages)
            for at in range(first, caller.held):
                pool = self._component_pages.pools["device", name]
                pool.put(pages[at - first], tags[at], f"the cache of {caller.request_id}")

    def check(self, caller: LendingCaller, restored: int, *, is_complete: bool) -> None:
        """Raise a Violation unless every component can continue after `restored` pages of the prompt."""
        self.expect_quiet(caller.lent_components, caller.request_id)
        size = self._settings.page_size
        for component in self._settings.components:
            name = component.name
            tags, pages = caller.component_tags[name], caller.lent_components[name]
            first = len(tags) - len(pages)
            low = first if restored == len(tags) else max(restored - component.trailing_pages(size), caller.held)
            if restored == len(tags) and not is_complete and restored == caller.held:
                low = restored
            if low < min(first, restored):
                raise Violation(f"{caller.request_id} cannot continue {name} after {restored} of {len(tags)} pages")
            found = pages[low - first : restored - first] if restored > low else page_ids()
            self._component_pages.pools["device", name].expect(found, tags[low:restored], caller.request_id)
            self._component_pages.counts["lent_components_filled"] += is_complete

    def expect_quiet(self, pages: dict[str, PageIds], holder: str) -> None:
        """Raise a Violation if something reads or writes these pages."""
        for name, ours in pages.items():
            self._component_pages.pools["device", name].expect_quiet(ours, holder)

    def compute(self, namespace: str, tokens: bytes, random: Random) -> dict[str, PageIds]:
        """Compute the component pages at the end of these tokens, of some components, as far as blocks are free."""
        size = self._settings.page_size
        end, tags = len(tokens) // size, self._component_pages.tags_of(namespace, tokens)
        chosen = [each for each in self._settings.components if end and random.random() < 0.9]
        taken = self._take({each.name: min(each.trailing_pages(size), end) for each in chosen}, random) or {}
        for name, pages in taken.items():
            for at, page in enumerate(pages, end - len(pages)):
                self._component_pages.pools["device", name].put(page, tags[name][at], "a computation")
        return taken


class LendingClient:
    """Makes one request after another, each in blocks of the host engine."""

    def __init__(
        self,
        world: LendingSurroundings,
        random: Random,
        sessions: list[tuple[str, bytes]],
        blocks: Blocks,
        component_blocks: ComponentBlocks,
    ) -> None:
        self._world = world
        self._random = random
        self._sessions = sessions
        self._session = 0
        self._blocks = blocks
        self._component_blocks = component_blocks
        self._offers: dict[int, tuple[PageIds, dict[str, PageIds], Callable[[], None]]] = {}

    def begin(self) -> None:
        """Make the next request, unless all were made."""
        world = self._world
        if not world.take_arrival():
            return
        self._session, namespace, tokens = draw_prompt(world, self._random, self._sessions)
        self._ask(namespace, tokens)

    def _ask(self, namespace: str, tokens: bytes, retry_s: float = RETRY_S) -> None:
        world, random = self._world, self._random
        lent = self._component_blocks.take(len(tokens), random)
        pages = None if lent is None else self._blocks.take(world.settings.pages_of(len(tokens)), random)
        if lent is not None and pages is None:
            self._component_blocks.free(lent)
        if pages is None or lent is None:
            # Later and later: a copy that hangs holds blocks for a thousand seconds.
            later_s = min(2 * retry_s, RETRY_MAX_S) if world.settings.components else RETRY_S
            world.schedule.after(retry_s, self._ask, namespace, tokens, later_s)
            return
        caller = Caller(world, self, world.new_id(), tokens, namespace)
        caller.pages, caller.lent_components = pages, lent
        # The host engine's own prefix cache has the first pages.
        caller.held = random.choice((0, 0, random.randint(0, len(caller.tags))))
        for at in range(caller.held):
            world.device.put(pages[at], caller.tags[at], f"the cache of {caller.request_id}")
        self._component_blocks.hold(caller)
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
        restored = world.settings.pages_of(command.restored_tokens)
        tags = caller.tags + caller.tail
        if command.restored_tokens not in (restored * page_size, len(caller.tokens)) or restored < caller.held:
            raise Violation(f"{command} of {len(caller.tokens)} tokens, {caller.held} pages of them held before")
        if sum(command.sources.values()) != command.restored_tokens or min(command.sources.values()) < 0:
            raise Violation(f"{command} has sources that are not {command.restored_tokens} tokens")
        if bool(command.cause) != (command.restored_tokens < len(caller.tokens)) and restored < len(tags):
            raise Violation(f"{command} has a cause, or none, although the prompt has {len(caller.tokens)} tokens")
        world.device.expect(caller.pages[:restored], tags[:restored], caller.request_id)
        self._component_blocks.check(caller, restored, is_complete=not command.cause)
        for at in range(restored, len(tags)):
            world.device.put(caller.pages[at], tags[at], f"the computation of {caller.request_id}")
        self._component_blocks.free(caller.lent_components)
        world.end(caller)
        world.schedule.after(world.delay() * 3, self._generate, caller)

    def failed(self, caller: Caller) -> None:
        """Take the pages back of a request that failed: they can be used again at once."""
        self._world.device.expect_quiet(caller.pages, caller.request_id)
        self._component_blocks.expect_quiet(caller.lent_components, caller.request_id)
        self._component_blocks.free(caller.lent_components)
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
            number = world.next_number()
            kept = tokens[: end * world.settings.page_size]
            component_pages = self._component_blocks.compute(caller.namespace, kept, self._random)
            self._offers[number] = (pages[first:end], component_pages, returned)
            world.offered_by[number] = self
            world.step(
                events.PagesOffered(
                    at_s=world.now_s,
                    offer=number,
                    keys=kept,
                    pages=tuple(pages[first:end]),
                    namespace=caller.namespace,
                    offered_components={name: tuple(ids) for name, ids in component_pages.items()},
                )
            )

    def offered(self, command: commands.ReportOffered) -> None:
        """Take the pages of an offer back."""
        pages, component_pages, returned = self._offers.pop(command.offer)
        self._world.device.expect_quiet(pages, command)
        self._component_blocks.expect_quiet(component_pages, f"{command}")
        if not set(command.components_declined) <= set(component_pages):
            raise Violation(f"{command} declines components that were not offered: {list(component_pages)}")
        self._world.component_pages.counts["components_offered"] += len(component_pages)
        self._world.component_pages.counts["components_declined"] += len(command.components_declined)
        self._component_blocks.free(component_pages)
        if min(command.written, command.present, command.declined) < 0 or (
            command.written + command.present + command.declined != len(pages)
        ):
            raise Violation(f"{command} of {len(pages)} pages")
        returned()
