"""The host engine of one simulated rank, which lends device pages of its own for each request, and offers others.

The host engines of all ranks serve the same requests, in blocks that each draws for itself. What a block holds and who
may write to it is checked by the simulated pool, from the moment at which a call has given it back.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Protocol

import msgspec

from simulation.lending_callers import RETRY_S, Blocks, ComponentBlocks
from simulation.memory import Violation
from simulation.rank_callers import RankCaller
from simulation.surroundings import RankSurroundings
from tidekv.states import commands, events
from tidekv.states.ranks.vote_items import LOST_RANK
from tidekv.states.types import PageIds, page_ids

if TYPE_CHECKING:
    from simulation.rank_callers import Script

OWN_FIELDS: dict[type[events.Event | commands.Command], dict[str, object]] = {
    events.RequestArrived: {"lent_pages": (), "lent_components": {}},
    events.PagesOffered: {"pages": (), "offered_components": {}, "offer": 0},
    commands.SendPromise: {"pages": page_ids(), "component_pages": None},
    commands.SendExtend: {"pages": page_ids()},
    commands.ReportOffered: {"offer": 0},
}
"""Fields in which the same event or command differs between ranks, with an empty value."""


def without_own_fields(item: events.Event | commands.Command) -> events.Event | commands.Command:
    """Return what must be the same on all ranks."""
    if isinstance(item, commands.CopyPages):
        item = msgspec.structs.replace(
            item,
            source_pages=page_ids() if item.source == "device" else item.source_pages,
            target_pages=page_ids() if item.target == "device" else item.target_pages,
        )
    empty = OWN_FIELDS.get(type(item))
    return item if empty is None else msgspec.structs.replace(item, **empty)


class LendingRank(RankSurroundings, Protocol):
    """Interface of the rank for its host engine."""

    is_solo: bool

    def arrive(self, caller: RankCaller, lent_pages: PageIds, held_pages: int) -> None:
        """Post the arrival of a request."""
        ...

    def end(self, request_id: str, end: str) -> None:
        """Note the end of a request."""
        ...


class RankLender:
    """The host engine of one rank, from the start of its process on."""

    def __init__(self, rank: LendingRank) -> None:
        self._rank = rank
        settings = rank.world.settings
        self._page_size = settings.page_size
        self._pages_of = settings.pages_of
        self._blocks = Blocks(settings.device_pages)
        self._component_blocks = ComponentBlocks(settings, rank.component_pages)
        self._offers: dict[int, tuple[PageIds, dict[str, PageIds]]] = {}
        self._number = 0
        self._waiting: set[int] = set()

    @property
    def is_quiet(self) -> bool:
        """Whether no offer is under way."""
        return not self._offers

    def ask(self, caller: RankCaller) -> None:
        """Lend pages for a request, as soon as enough are free."""
        rank, script = self._rank, caller.script
        if rank.callers.get(script.request_id) is not caller:
            self._waiting.discard(int(script.request_id[1:]))
            return
        if rank.is_solo:
            # No call is taken while a rank is lost.
            rank.end(script.request_id, LOST_RANK)
            return
        order = int(script.request_id[1:])
        self._waiting.add(order)
        # In the same order on all ranks: otherwise two ranks may wait for blocks that each other's request has there.
        is_next = order == min(self._waiting)
        pages = self._blocks.take(self._pages_of(len(script.tokens)), rank.random) if is_next else None
        lent = None if pages is None else self._component_blocks.take(len(script.tokens), rank.random)
        if pages is not None and lent is None:
            self._blocks.free(pages)
        if pages is None or lent is None:
            rank.after(RETRY_S, self.ask, caller)
            return
        self._waiting.remove(order)
        held = held_by(script, rank.number, len(caller.tags))
        for at in range(held):
            rank.device.put(pages[at], caller.tags[at], f"the cache of {script.request_id}")
        caller.pages, caller.held, caller.lent_components = pages, held, lent
        self._component_blocks.hold(caller)
        rank.arrive(caller, pages, held)

    def leave(self, caller: RankCaller) -> None:
        """Take back pages without contents that count."""
        self._rank.device.expect_quiet(caller.pages, "a request that has ended")
        self._component_blocks.expect_quiet(caller.lent_components, "a request that has ended")
        self._blocks.free(caller.pages)
        self._component_blocks.free(caller.lent_components)

    def restored(self, caller: RankCaller, command: commands.ReportRestored) -> None:
        """Take the pages back: check what is in place, and compute the rest."""
        rank, size, request_id = self._rank, self._page_size, command.request_id
        tags = caller.tags + caller.tail
        restored = self._pages_of(command.restored_tokens)
        if command.restored_tokens not in (restored * size, len(caller.tokens)) or restored < caller.held:
            raise Violation(f"{command} of {len(caller.tokens)} tokens, {caller.held} pages of them held before")
        if sum(command.sources.values()) != command.restored_tokens:
            raise Violation(f"{command} has sources that are not {command.restored_tokens} tokens")
        rank.device.expect_quiet(caller.pages, request_id)
        rank.device.expect(caller.pages[:restored], tags[:restored], request_id)
        self._component_blocks.check(caller, restored, is_complete=not command.cause)
        for at in range(restored, len(tags)):
            rank.device.put(caller.pages[at], tags[at], f"the computation of {request_id}")
        self._component_blocks.free(caller.lent_components)
        # The same on all ranks, however far each had come when the request ended.
        rank.end(request_id, f"restored {command.restored_tokens}")
        rank.after(rank.delay(), self._generate, caller)

    def _generate(self, caller: RankCaller) -> None:
        rank, script = self._rank, caller.script
        tokens = script.tokens + script.output
        more = self._blocks.take(self._pages_of(len(tokens)) - len(caller.pages), rank.random)
        if more is None:
            tokens, more = script.tokens, page_ids()
        pages, tags = caller.pages + more, rank.tags(tokens)
        for at in range(len(caller.tags), len(tags)):
            rank.device.put(pages[at], tags[at], f"decoding of {script.request_id}")
        if not tags or script.retracts:
            # A request that would be retracted with pages of the engine's own leaves nothing here.
            self._blocks.free(pages)
            return
        self._number += 1
        keys = tokens[: len(tags) * self._page_size]
        # The same components on all ranks.
        component_pages = self._component_blocks.compute("", keys, Random(f"offered {script.request_id}"))
        self._offers[self._number] = (pages, component_pages)
        rank.receive(
            events.PagesOffered(
                at_s=0.0,
                offer=self._number,
                keys=keys,
                pages=tuple(pages[: len(tags)]),
                offered_components={name: tuple(ids) for name, ids in component_pages.items()},
            )
        )
        rank.after(2.5, rank.look_for_refusals)

    def offered(self, command: commands.ReportOffered) -> None:
        """Take the pages of an offer back."""
        pages, component_pages = self._offers.pop(command.offer)
        self._rank.device.expect_quiet(pages, command)
        self._component_blocks.expect_quiet(component_pages, f"{command}")
        self._blocks.free(pages)
        self._component_blocks.free(component_pages)

    def declined(self, offer: events.PagesOffered) -> None:
        """Take the pages of an offer back that not all ranks have made."""
        if offer.offer:
            pages, component_pages = self._offers.pop(offer.offer)
            self._blocks.free(pages)
            self._component_blocks.free(component_pages)


def held_by(script: Script, rank: int, pages: int) -> int:
    """Return how many leading pages the caches of the host engines hold; one rank may have another number."""
    random = Random(f"held {script.request_id}")
    held = random.choice((0, 0, random.randint(0, pages)))
    return held + 1 if rank and script.holds_more_on == rank and held < pages else held
