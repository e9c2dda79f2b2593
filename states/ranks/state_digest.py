"""One number for each part of a core, which ranks compare at every vote: a divergence is named by its part.

The numbers roll over every step, which costs microseconds: pages that commands name, changes of state, evictions, the
counts of both pools and of the index. What a step does not show is looked at besides: a window of each free list at
every vote, which moves on, and the whole tree and both free lists at the vote in which ranks agree that they are idle.
Each component is a part of its own, with both of its tiers.
"""

from __future__ import annotations

import struct
import zlib
from operator import attrgetter
from typing import TYPE_CHECKING

from tidekv.states import commands

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidekv.states.commands import Command
    from tidekv.states.core import Core
    from tidekv.states.events import Event
    from tidekv.states.pages.page_pool import PagePool
    from tidekv.states.prefix.component_tier import ComponentTier
    from tidekv.states.prefix.node import Node, TierName
    from tidekv.states.types import PageIds

PARTS = ("events", "index", "device pool", "host pool", "requests", "rooms", "page tables")
"""Names of the compared parts; each component follows them."""
WINDOW_PAGES = 4096
"""Pages of a free list that one vote looks at."""
DEVICE_FIELD = "pages"
"""The one that names device pages. Lent ones are each rank's own, so only their number is compared."""
PAGE_FIELDS = ("pages", "host_pages", "reserve", "source_pages", "target_pages")
"""Fields of commands that name pages."""
ROOMS = (commands.SendPromise, commands.SendExtend, commands.SendAbort, commands.SendReceived)


class StateDigest:
    """Watches one core from its first step on."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._events = self._moves = self._rooms = self._pages = self._index = 0
        self._device = self._host = 0
        components = core.state.components
        tiers = (
            () if components is None else tuple(zip(components.device.items(), components.host.values(), strict=True))
        )
        self.parts = PARTS + tuple(f"component {name}" for (name, _), _ in tiers)
        """Names of what is compared."""
        self._component_pages: dict[ComponentTier, int] = {
            tier: 0 for (_, device), host in tiers for tier in (device, host)
        }
        self._is_lent = core.settings.lends_device
        self._readers = _LENT_PAGES if self._is_lent else _PAGES
        core.state.index.on_evict.append(self._note_eviction)

    def stepped(self, event: Event, given: list[Command]) -> None:
        """The core has taken an event and gave these commands."""
        self._events = zlib.crc32(type(event).__name__.encode(), self._events)
        for request_id, state in self._core.moves:
            self._moves = zlib.crc32(f"{request_id} {state.value}".encode(), self._moves)
        for command in given:
            kind = type(command)
            self._events = zlib.crc32(kind.__name__.encode(), self._events)
            for read in self._readers[kind]:
                if kind in ROOMS:
                    self._rooms = zlib.crc32(read(command), self._rooms)
                else:
                    self._pages = zlib.crc32(read(command), self._pages)
            if self._component_pages:
                self._note_components(command)
        for tier, crc in self._component_pages.items():
            self._component_pages[tier] = zlib.crc32(_SIX.pack(*tier.pool.counts, tier.protected, tier.receipts), crc)
        shared = self._core.state
        tree, device, host = shared.index.tree, shared.index.device_tier, shared.index.host_tier
        self._index = zlib.crc32(
            _FIVE.pack(tree.tick, device.protected, device.receipts, host.protected, host.receipts), self._index
        )
        self._device = zlib.crc32(_FOUR.pack(*shared.device.counts), self._device)
        self._host = zlib.crc32(_FOUR.pack(*shared.host.counts), self._host)

    def numbers(self, turn: int, *, whole: bool) -> list[int]:
        """One number for each of `parts`, now; with `whole`, over everything there is."""
        shared = self._core.state
        index = self._index
        if whole:
            for node in shared.index.nodes():
                index = _crc_of(node, index)
        return [
            self._events,
            index,
            _crc_of_free(shared.device, self._device, turn, whole=whole),
            _crc_of_free(shared.host, self._host, turn, whole=whole),
            self._moves,
            self._rooms,
            self._pages,
            *self._numbers_of_components(turn, whole=whole),
        ]

    def _numbers_of_components(self, turn: int, *, whole: bool) -> list[int]:
        numbers = []
        for tier, crc in self._component_pages.items():
            crc = _crc_of_free(tier.pool, crc, turn, whole=whole)
            for node in tier.nodes() if whole else ():
                for position, page in tier.pages_of(node).items():
                    crc = zlib.crc32(_FOUR.pack(node.depth_pages, node.tick, position, page), crc)
            numbers.append(crc)
        # Both tiers of a component in one number.
        return [zlib.crc32(_ONE.pack(host), device) for device, host in zip(numbers[::2], numbers[1::2], strict=True)]

    def _note_components(self, command: Command) -> None:
        """The pages of components that a command names: those of a promise are of its room."""
        for part in getattr(command, "component_pages", None) or ():
            for pages in (_ONE.pack(len(part.pages)),) if self._is_lent else (part.pages, getattr(part, "own", b"")):
                if type(command) in ROOMS:
                    self._rooms = zlib.crc32(pages, zlib.crc32(_ONE.pack(part.first), self._rooms))
                else:
                    self._pages = zlib.crc32(pages, zlib.crc32(_ONE.pack(part.first), self._pages))

    def _note_eviction(self, node: Node, tier: TierName) -> None:
        pages = node.device if tier == "device" else node.host
        assert pages is not None
        self._index = zlib.crc32(pages, self._index)


def _crc_of_free(pool: PagePool, crc: int, turn: int, *, whole: bool) -> int:
    free = pool.free_pages
    if whole or len(free) <= WINDOW_PAGES:
        return zlib.crc32(free, crc)
    # The top of the stack is taken next: it is in every window, with as many of those that lie below.
    half = WINDOW_PAGES // 2
    at = turn * half % len(free)
    return zlib.crc32(free[at : at + half], zlib.crc32(free[-half:], crc))


def _crc_of(node: Node, crc: int) -> int:
    crc = zlib.crc32(node.edge, zlib.crc32(node.namespace.encode(), crc))
    for pages in (node.device, node.host):
        crc = zlib.crc32(b"none" if pages is None else pages, crc)
    return zlib.crc32(_FIVE.pack(node.depth_pages, node.anchored, node.host_anchored, node.served, node.tick), crc)


def _number_of(name: str) -> Callable[[Command], bytes]:
    return lambda command: _ONE.pack(len(getattr(command, name)))


def _number_of_lent(side: str) -> Callable[[Command], PageIds | bytes]:
    """Read one side of a copy: on the device, only the number of its pages."""

    def read(command: Command) -> PageIds | bytes:
        assert isinstance(command, commands.CopyPages)
        pages: PageIds = getattr(command, f"{side}_pages")
        return _ONE.pack(len(pages)) if getattr(command, side) == "device" else pages

    return read


def _readers(kind: type[Command], *, are_lent: bool) -> tuple[Callable[[Command], PageIds | bytes], ...]:
    if are_lent and kind is commands.CopyPages:
        return _number_of_lent("source"), _number_of_lent("target")
    names = [name for name in kind.__struct_fields__ if name in PAGE_FIELDS]
    return tuple(_number_of(name) if are_lent and name == DEVICE_FIELD else attrgetter(name) for name in names)


_KINDS = [kind for kind in vars(commands).values() if isinstance(kind, type) and issubclass(kind, commands.Command)]
_PAGES = {kind: _readers(kind, are_lent=False) for kind in _KINDS}
_LENT_PAGES = {kind: _readers(kind, are_lent=True) for kind in _KINDS}
_ONE = struct.Struct("<q")
_FOUR = struct.Struct("<4q")
_FIVE = struct.Struct("<5q")
_SIX = struct.Struct("<6q")
