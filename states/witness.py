"""Writes down in short what one step of a core did, so that two cores can be compared step by step.

The short form holds everything that somebody may ask about a step: the moves of requests, the commands with their pages
as a count and a checksum, what was evicted, and the books of both pools. A digest rolls over those books and over what
is not worth a word (recency, the order of the free lists). Page keys never enter: a replay knows pages by other keys.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from tidekv.states import commands, events
from tidekv.states.node import Node, TierName

if TYPE_CHECKING:
    from tidekv.states.commands import Command
    from tidekv.states.core import Core
    from tidekv.states.events import Event
    from tidekv.states.request import State

Short: TypeAlias = "tuple[object, ...]"
Evictions: TypeAlias = "list[tuple[str, int, int]] | tuple[()]"
Noted: TypeAlias = "tuple[Event, list[Command], list[tuple[str, State]], Evictions, bytes, str]"
"""One step: event, commands, moves, evictions, books, error."""

POOL_NUMBERS = (
    "device_free",
    "device_owned",
    "device_cached",
    "device_draining",
    "device_protected",
    "device_receipts",
    "host_free",
    "host_owned",
    "host_cached",
    "host_draining",
    "host_protected",
    "host_receipts",
)
"""What `Answer.pools` counts: pages by condition, cached pages that are protected, and live locks or pins."""

OMITTED = ("detail",)
"""Fields of commands that are free text for people: two runs of one journal may word them differently."""


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one step did."""

    moves: tuple[tuple[str, str], ...] | list[tuple[str, str]] = ()
    """Requests that changed state, in order, with the state that they came to."""
    commands: tuple[Short, ...] | list[Short] = ()
    """Name and fields of each command; pages as their count and checksum."""
    evicted: Evictions = ()
    """Tier, pages and checksum of their ids, of every copy that left the index."""
    pools: tuple[int, ...] = ()
    """The numbers of POOL_NUMBERS; left out where they are those of the step before."""
    error: str = ""
    """The class of the error that the step raised."""


NOTHING = Answer()


class Witness:
    """Watches one core from its first step on.

    Two halves: `note` is called at every step and takes no more than what the next step may change; `answer`, which
    costs more, may be called later and elsewhere, once for every note and in their order.
    """

    def __init__(self, core: Core) -> None:
        self.digest = 0
        """Over the books, recency and free lists of every answer so far."""
        books = core.books
        self._core = core
        self._tree = books.index.tree
        # These lists live as long as the core; reaching them by its properties at every step would cost more than all
        # the rest of a note.
        self._device_counts, self._host_counts = books.device.counts, books.host.counts
        self._device_free, self._host_free = books.device.free_pages, books.host.free_pages
        self._device_tier, self._host_tier = books.index.device_tier, books.index.host_tier
        self._evicted: list[tuple[str, int, int]] = []
        self._books = b""
        self._pools: tuple[int, ...] = ()
        books.index.on_evict.append(self._note_eviction)

    def note(self, event: Event, given: list[Command], error: str = "") -> Noted:
        """Take the step that has just been made: nothing in the note changes any more.

        The books are left out where an event of the hand-over had no consequence: most are of that kind, and what they
        change in the books, if anything, shows at the next step.
        """
        moves = self._core.moves
        evicted: Evictions = ()
        books = b""
        if given or moves or type(event) not in _QUIET:
            device, host = self._device_tier, self._host_tier
            device_free, host_free = self._device_free, self._host_free
            books = _BOOKS(
                self._tree.tick,
                device_free[-1] if device_free else -1,
                host_free[-1] if host_free else -1,
                *self._device_counts,
                device.protected,
                device.receipts,
                *self._host_counts,
                host.protected,
                host.receipts,
            )
            if self._evicted:
                evicted, self._evicted = self._evicted, []
        return event, given, moves, evicted, books, error

    def answer(self, noted: Noted) -> Answer:
        """What a step did, in short."""
        _, given, moves, evicted, books, error = noted
        pools: tuple[int, ...] = ()
        if books and books != self._books:
            self._books = books
            self.digest = zlib.crc32(books, self.digest)
            now = _POOLS(books, _POOLS_AT)
            if now != self._pools:
                pools = self._pools = now
        if not (given or moves or evicted or pools or error):
            return NOTHING
        return Answer(
            # The value of an enum member is a slow property; its attribute is not.
            [(request_id, state._value_) for request_id, state in moves] if moves else (),
            [_SHORT[type(command)](command) for command in given] if given else (),
            evicted,
            pools,
            error,
        )

    def _note_eviction(self, node: Node, tier: TierName) -> None:
        pages = node.device if tier == "device" else node.host
        assert pages is not None
        self._evicted.append((tier, len(pages), zlib.crc32(pages)))


_BOOKS = struct.Struct("<15q").pack
_POOLS, _POOLS_AT = struct.Struct("<12q").unpack_from, 24
_QUIET = frozenset((events.ChunkLanded, events.AuxLanded, events.PromiseSent))


def short_fields(kind: type[Command]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The fields of a command in its short form: those written as they are, and those of pages."""
    annotations = {name: words for base in reversed(kind.__mro__) for name, words in _annotations(base).items()}
    names = [name for name in kind.__struct_fields__ if name not in OMITTED]
    pages = tuple(name for name in names if annotations[name] == "PageIds")
    return tuple(name for name in names if name not in pages), pages


def _annotations(kind: type) -> dict[str, str]:
    """As they are written: those of commands are strings."""
    return dict(vars(kind).get("__annotations__", {}))


def _reader(names: tuple[str, ...]) -> Callable[[Command], tuple[object, ...]]:
    if len(names) > 1:
        return attrgetter(*names)
    only = attrgetter(*names)
    return lambda command: (only(command),)


def _shortener(kind: type[Command]) -> Callable[[Command], Short]:
    name = kind.__name__
    plain, pages = short_fields(kind)
    read = _reader(plain)
    if not pages:
        return lambda command: (name, *read(command))
    read_pages = [attrgetter(field) for field in pages]
    if len(read_pages) == 1:
        only = read_pages[0]

        def shorten(command: Command) -> Short:
            ids = only(command)
            return (name, *read(command), len(ids), zlib.crc32(ids))

        return shorten

    def shorten_all(command: Command) -> Short:
        numbers: list[int] = []
        for take in read_pages:
            ids = take(command)
            numbers += (len(ids), zlib.crc32(ids))
        return (name, *read(command), *numbers)

    return shorten_all


COMMANDS = tuple(
    kind
    for kind in vars(commands).values()
    if isinstance(kind, type)
    and issubclass(kind, commands.Command)
    and kind not in (commands.Command, commands.Operation)
)
_SHORT = {kind: _shortener(kind) for kind in COMMANDS}
