"""Writes down in short what one step of a core did, so that two cores can be compared step by step.

The short form holds everything that somebody may ask about a step: the moves of requests, the commands with their pages
as a checksum, what was evicted, and at one step of some the books: both pools, locks, recency, and which page is taken
next. Page keys never enter: a replay knows pages by other keys.

It is made at every step of a running engine, on its loop. So it only keeps what the next step may change, as plain
values that an encoder takes as they are, elsewhere and later.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from tidekv.states import commands, events
from tidekv.states.commands import ReportFailed
from tidekv.states.prefix.node import Node, TierName
from tidekv.states.request.request import State

if TYPE_CHECKING:
    from tidekv.states.commands import Command
    from tidekv.states.core import Core
    from tidekv.states.events import Event
    from tidekv.states.types import PageIds

Evictions: TypeAlias = "list[tuple[str, int, int]] | tuple[()]"
Moves: TypeAlias = "list[tuple[str, State]] | tuple[()]"
BookPlace: TypeAlias = "list[int] | tuple[object, str] | PageIds"

BOOK_NUMBERS = (
    "tick",
    "device_next",
    "host_next",
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
"""Numbers in `StepResult.books`: recency, the next free page of each pool (-1: none), and for each pool its
pages by condition, cached pages that are protected, and live locks or pins. Behind them, for each component and each
of its tiers, first on the device, the same as of a pool: `COMPONENT_NUMBERS`.
"""
COMPONENT_NUMBERS = ("next", "free", "owned", "cached", "draining", "protected", "receipts")

BOOKS_EVERY = 16
"""The books are written at one of so many steps. At every step they would cost as much as all the rest of a note; what
a step does to them shows in its moves, commands and evictions, or else a few steps later.
"""
NO_BOOKS: tuple[int, ...] = ()

OMITTED = ("detail", "fallbacks")
"""Fields of commands that are free text for people: two runs of one journal may word them differently. They are empty
in the short form.
"""


class StepResult(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one step did. Encoded as the values of its fields, in order."""

    moves: Moves = ()
    """Requests that changed state, in order, with the state that they came to."""
    commands: list[Command] | tuple[()] = ()
    """Name and fields of each command; pages as their checksum."""
    evicted: Evictions = ()
    """Tier, pages and checksum of their ids, of every copy that left the index."""
    books: tuple[int, ...] = ()
    """The numbers of BOOK_NUMBERS, at every step whose number is a multiple of BOOKS_EVERY."""
    error: str = ""
    """The class of the error that the step raised."""


NOTHING = StepResult()


class StepNotes(msgspec.Struct, array_like=True, gc=False):
    """One step. Whoever encodes it may change it: nobody else has it. Encoded as the values of its fields, in order."""

    seq: int
    """Counted from 0, without gaps."""
    took: Event
    state: State | None
    """Where the event's request is now; None for events of no request, and where the request is over."""
    gave: StepResult
    same_pages: int = 0
    """So many pages of the event's keys were left out by whoever encodes it."""


class StepRecorder:
    """Watches one core from its first step on."""

    def __init__(self, core: Core) -> None:
        self.events = 0
        """Steps that were noted so far."""
        books = core.state
        self._core = core
        self.requests = books.requests
        """The core's live requests, by name: the core's own, to be read."""
        # Numbers come from where they are kept: an attribute, a list of counts, or the last of a list of pages (-1: it
        # is empty). These live as long as the core; reaching them by its properties would cost more than all else here.
        device, host = books.index.device_tier, books.index.host_tier
        self.book_places: tuple[BookPlace, ...] = (
            (books.index.tree, "tick"),
            books.device.free_pages,
            books.host.free_pages,
            *_places_of(books.device.counts, device),
            *_places_of(books.host.counts, host),
        )
        """Where `all_books` finds its numbers, in order."""
        components = books.components
        for tier in () if components is None else components.tiers:
            self.book_places += (tier.account.free_pages, *_places_of(tier.account.counts, tier))
        self.evicted: list[tuple[str, int, int]] = []
        """What has left the index since the last step that was taken."""
        books.index.on_evict.append(self.note_eviction)

    def note(self, event: Event, given: list[Command], error: str = "") -> StepNotes:
        """Take the step that has just been made: nothing in the note changes any more."""
        seq = self.events
        self.events = seq + 1
        kind = type(event)
        state: State | None = None
        if kind in OF_REQUESTS:
            request = self.requests.get(event.request_id)  # type: ignore[attr-defined]  # All kinds of that set have one.
            if request is not None:
                state = request.state
        moves = self._core.moves
        books = NO_BOOKS if seq % BOOKS_EVERY else self.all_books()
        if not (given or moves or self.evicted or books or error):
            return StepNotes(seq, event, state, NOTHING)
        evicted: Evictions = ()
        if self.evicted:
            evicted = self.evicted.copy()
            self.evicted.clear()
        for command in given:
            if type(command) is ReportFailed or getattr(command, "fallbacks", None):
                given = [_without_words(command) for command in given]
                break
        return StepNotes(seq, event, state, StepResult(moves, given, evicted, books, error))

    def all_books(self) -> tuple[int, ...]:
        """The books as they are now: see BOOK_NUMBERS."""
        books: list[int] = []
        for place in self.book_places:
            if isinstance(place, list):
                books += place
            elif isinstance(place, tuple):
                books.append(getattr(*place))
            else:
                books.append(place[-1] if place else -1)
        return tuple(books)

    def note_eviction(self, node: Node, tier: TierName) -> None:
        """A copy of a node's pages leaves the index."""
        pages = node.device if tier == "device" else node.host
        assert pages is not None
        self.evicted.append((tier, len(pages), zlib.crc32(pages)))


def _places_of(counts: list[int], tier: object) -> tuple[BookPlace, ...]:
    return counts, (tier, "protected"), (tier, "receipts")


OF_REQUESTS = frozenset(
    kind
    for kind in vars(events).values()
    if isinstance(kind, type) and issubclass(kind, events.Event) and "request_id" in kind.__struct_fields__
)
"""The events that are of one request."""


encode_pages = zlib.crc32
"""Pages in short: the CRC-32 of their ids. An encoder of answers needs it as its `enc_hook`, which it asks for pages
alone: what is neither pages nor plain is a TypeError.
"""


def _without_words(command: Command) -> Command:
    if type(command) is ReportFailed:
        return msgspec.structs.replace(command, detail="")
    return msgspec.structs.replace(command, fallbacks=()) if getattr(command, "fallbacks", None) else command


def short_fields(kind: type[Command]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The fields of a command in its short form: those written as they are, and those of pages."""
    annotations = {name: words for base in reversed(kind.__mro__) for name, words in _annotations(base).items()}
    names = [name for name in kind.__struct_fields__ if name not in OMITTED]
    pages = tuple(name for name in names if annotations[name] == "PageIds")
    return tuple(name for name in names if name not in pages), pages


def _annotations(kind: type) -> dict[str, str]:
    """As they are written: those of commands are strings."""
    return dict(vars(kind).get("__annotations__", {}))


COMMANDS = tuple(
    kind
    for kind in vars(commands).values()
    if isinstance(kind, type)
    and issubclass(kind, commands.Command)
    and kind not in (commands.Command, commands.Operation)
)
