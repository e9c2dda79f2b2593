"""Simulated host engines: callers that own the device pages, lend them for a restore, and offer what they computed.

The host engine has blocks and a prefix cache of its own. It reuses a block as soon as a call has given it back, so a
write or read of the core after that is found by the simulated pool.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from simulation.callers import ALPHABET
from simulation.memory import Violation
from tidekv.states import commands, events
from tidekv.states.ranks.vote_items import LOST_RANK
from tidekv.states.types import PageIds, page_ids

if TYPE_CHECKING:
    from collections.abc import Callable

    from simulation.callers import Caller
    from simulation.components import SimulatedComponents
    from simulation.rank import Rank
    from tidekv.states.settings import CoreSettings

RETRY_S = 0.01
"""Seconds after which a request without free blocks tries again."""
RETRY_MAX_S = 2.0
ENDS_SHARE = 0.15
"""Share of the requests of which only the last pages are offered: what they continue may be in no tier."""


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

    def hold(self, caller: Caller) -> None:
        """Fill the pages at positions that the host engine's cache holds."""
        for name, pages in caller.lent_components.items():
            tags = caller.component_tags[name]
            first = len(tags) - len(pages)
            for at in range(first, caller.held):
                pool = self._component_pages.pools["device", name]
                pool.put(pages[at - first], tags[at], f"the cache of {caller.request_id}")

    def check(self, caller: Caller, restored: int, *, is_complete: bool) -> None:
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


class HostEngine:
    """The host engine of one rank, from the start of its process on.

    The host engines of all ranks serve the same requests, in blocks that each draws for itself.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._blocks = Blocks(rank.settings.device_pages)
        self._component_blocks = ComponentBlocks(rank.settings, rank.component_pages)
        self._offers: dict[int, tuple[PageIds, dict[str, PageIds], Callable[[], None]]] = {}
        self._number = 0
        self._waiting: set[int] = set()

    @property
    def is_quiet(self) -> bool:
        """Whether no offer is under way."""
        return not self._offers

    def ask(self, caller: Caller, retry_s: float = RETRY_S) -> None:
        """Lend pages for a request, as soon as enough are free."""
        rank, script = self._rank, caller.script
        if not rank.is_live(caller):
            self._waiting.discard(script.number)
            return
        if rank.is_solo:
            # No call is taken while a rank is lost.
            self._waiting.discard(script.number)
            rank.end(caller, LOST_RANK)
            return
        self._waiting.add(script.number)
        # In the same order on all ranks: otherwise two ranks may wait for blocks that each other's request has there.
        is_next = script.number == min(self._waiting)
        lent = self._component_blocks.take(len(script.tokens), rank.random) if is_next else None
        pages = None if lent is None else self._blocks.take(rank.settings.pages_of(len(script.tokens)), rank.random)
        if lent is not None and pages is None:
            self._component_blocks.free(lent)
        if pages is None or lent is None:
            # Later and later: a copy that hangs holds blocks for minutes.
            rank.schedule.after(retry_s, self.ask, caller, min(2 * retry_s, RETRY_MAX_S))
            return
        self._waiting.remove(script.number)
        caller.pages, caller.lent_components = pages, lent
        caller.held = self._held(caller)
        for at in range(caller.held):
            rank.device.put(pages[at], caller.tags[at], f"the cache of {caller.request_id}")
        self._component_blocks.hold(caller)
        rank.arrive(caller)

    def _held(self, caller: Caller) -> int:
        """Return how many leading pages the caches of the host engines hold; one rank may have another number."""
        script, random, most = caller.script, self._rank.world.random, len(caller.tags)
        held = script.once("held", lambda: random.choice((0, 0, random.randint(0, most))))
        return min(held + script.strikes("rank_holds_more", self._rank.number), most)

    def failed(self, caller: Caller) -> None:
        """Take the pages back of a request that failed: they can be used again at once."""
        self._rank.device.expect_quiet(caller.pages, caller.request_id)
        self._component_blocks.expect_quiet(caller.lent_components, caller.request_id)
        self._component_blocks.free(caller.lent_components)
        self._blocks.free(caller.pages)

    # --- Commands of the core ---

    def restored(self, command: commands.ReportRestored) -> None:
        """Take the pages back: check what is in place, compute the rest, generate, and offer pages."""
        rank, caller = self._rank, self._rank.caller(command.request_id)
        page_size = rank.settings.page_size
        rank.device.expect_quiet(caller.pages, caller.request_id)
        restored = rank.settings.pages_of(command.restored_tokens)
        tags = caller.tags + caller.tail
        if command.restored_tokens not in (restored * page_size, len(caller.tokens)) or restored < caller.held:
            raise Violation(f"{command} of {len(caller.tokens)} tokens, {caller.held} pages of them held before")
        if sum(command.sources.values()) != command.restored_tokens or min(command.sources.values()) < 0:
            raise Violation(f"{command} has sources that are not {command.restored_tokens} tokens")
        if bool(command.cause) != (command.restored_tokens < len(caller.tokens)) and restored < len(tags):
            raise Violation(f"{command} has a cause, or none, although the prompt has {len(caller.tokens)} tokens")
        rank.check_cause(caller, command.cause, command.detail)
        rank.device.expect(caller.pages[:restored], tags[:restored], caller.request_id)
        self._component_blocks.check(caller, restored, is_complete=not command.cause)
        for at in range(restored, len(tags)):
            rank.device.put(caller.pages[at], tags[at], f"the computation of {caller.request_id}")
        self._component_blocks.free(caller.lent_components)
        # With the same tokens on all ranks, however far each had come when the request ended.
        outcome = f"partial: {command.cause}" if command.cause else "READY"
        rank.end(caller, f"{outcome}, {command.restored_tokens} tokens")
        rank.schedule.after(rank.delay() * 3, self._generate, caller)

    # --- After the restore ---

    def _generate(self, caller: Caller) -> None:
        rank, script, size = self._rank, caller.script, self._rank.settings.page_size
        random = rank.world.random
        output = script.once("output", lambda: bytes(random.choices(ALPHABET, k=random.randint(0, 3 * size))))
        tokens = script.tokens + output
        more = self._blocks.take(rank.settings.pages_of(len(tokens)) - len(caller.pages), rank.random)
        if more is None:
            tokens, more = script.tokens, page_ids()
        script.kept = tokens
        pages, tags = caller.pages + more, rank.tags_of(script.namespace, tokens)
        for at in range(len(caller.tags), len(tags)):
            rank.device.put(pages[at], tags[at], f"decoding of {script.request_id}")
        rank.flush_with(script)
        if not tags or script.hits("pages_are_not_offered"):
            self._blocks.free(pages)
            return
        # In one offer, or chunk by chunk, of which the later ones follow copies that are under way.
        cut = script.once("cut", lambda: random.choice((0, random.randrange(len(tags)))))
        self._offer(caller, tokens, pages, len(tags), cut if cut < len(tags) else 0)

    def _offer(self, caller: Caller, tokens: bytes, pages: PageIds, count: int, cut: int) -> None:
        rank, script, left = self._rank, caller.script, [1 + bool(cut)]

        def returned() -> None:
            left[0] -= 1
            if not left[0]:
                self._blocks.free(pages)

        parts = ((0, cut), (cut, count)) if cut else ((0, count),)
        if Random(f"offered {script.number}").random() < ENDS_SHARE:
            parts, left[0] = parts[1:] or ((count // 2, count),), 1
        for first, end in parts:
            self._number += 1
            kept = tokens[: end * rank.settings.page_size]
            # Seeded by the request, so that all ranks offer the same components.
            random = Random(f"offered {script.number} {end}")
            component_pages = self._component_blocks.compute(script.namespace, kept, random)
            # Some give up what waits for room in host memory before anything else can end.
            hold_s = random.choice((0.001, 0.1, 5.0))
            self._offers[self._number] = (pages[first:end], component_pages, returned)
            rank.tell(
                events.PagesOffered(
                    at_s=rank.now_s,
                    offer=self._number,
                    keys=kept,
                    pages=tuple(pages[first:end]),
                    namespace=script.namespace,
                    offered_components={name: tuple(ids) for name, ids in component_pages.items()},
                    hold_s=hold_s,
                )
            )
        rank.look_for_refusals()

    def offered(self, command: commands.ReportOffered) -> None:
        """Take the pages of an offer back."""
        pages, component_pages = self._take_back(command.offer)
        if not set(command.components_declined) <= set(component_pages):
            raise Violation(f"{command} declines components that were not offered: {list(component_pages)}")
        counts = self._rank.component_pages.counts
        counts["components_offered"] += len(component_pages)
        counts["components_declined"] += len(command.components_declined)
        parts = (command.written, command.present, command.passed, command.declined)
        if min(parts) < 0 or sum(parts) != len(pages):
            raise Violation(f"{command} of {len(pages)} pages")

    def declined(self, offer: events.PagesOffered) -> None:
        """Take back the pages of an offer that not all ranks have made."""
        if offer.offer:
            self._take_back(offer.offer)

    def _take_back(self, offer: int) -> tuple[PageIds, dict[str, PageIds]]:
        pages, component_pages, returned = self._offers.pop(offer)
        self._rank.device.expect_quiet(pages, f"offer {offer}")
        self._component_blocks.expect_quiet(component_pages, f"offer {offer}")
        self._component_blocks.free(component_pages)
        returned()
        return pages, component_pages
