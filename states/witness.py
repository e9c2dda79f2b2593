"""Writes down in short what one step of a core did, so that two cores can be compared step by step.

The short form holds everything that somebody may ask about a step: the moves of requests, the commands with their pages
as a count and a checksum, what was evicted, and the books of both pools. A digest rolls over it and over what is not
worth a word (recency, the order of the free lists). Page keys never enter: a replay knows pages by other keys.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from tidekv.states import commands
from tidekv.states.node import Node, TierName
from tidekv.states.request import State

if TYPE_CHECKING:
    from tidekv.states.commands import Command
    from tidekv.states.core import Core

Short: TypeAlias = "tuple[object, ...]"

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

    moves: tuple[tuple[str, State], ...] | list[tuple[str, State]] = ()
    """Requests that changed state, in order, with the state that they came to."""
    commands: tuple[Short, ...] | list[Short] = ()
    """Name and fields of each command; pages as their count and checksum."""
    evicted: tuple[tuple[str, int, int], ...] | list[tuple[str, int, int]] = ()
    """Tier, pages and checksum of their ids, of every copy that left the index."""
    pools: tuple[int, ...] = ()
    """The numbers of POOL_NUMBERS; left out where they are those of the step before."""
    error: str = ""
    """The class of the error that the step raised."""


class Witness:
    """Watches one core from its first step on."""

    def __init__(self, core: Core) -> None:
        self.digest = 0
        """Over every answer so far."""
        self._core = core
        self._evicted: list[tuple[str, int, int]] = []
        self._pools: tuple[int, ...] = ()
        self._encode = msgspec.json.Encoder().encode
        core.books.index.on_evict.append(self._note_eviction)

    def answer(self, given: list[Command], error: str = "") -> bytes:
        """Encode as JSON what the step that has just been made did, and take it into the digest."""
        core = self._core
        books = core.books
        device, host, index = books.device, books.host, books.index
        device_tier, host_tier = index.device_tier, index.host_tier
        pools = (
            *device.counts,
            device_tier.protected,
            device_tier.receipts,
            *host.counts,
            host_tier.protected,
            host_tier.receipts,
        )
        changed = pools != self._pools
        evicted, self._evicted = self._evicted, []
        encoded = self._encode(
            Answer(
                core.moves or (),
                [_SHORT[type(command)](command) for command in given] if given else (),
                evicted or (),
                pools if changed else (),
                error,
            )
        )
        if changed:
            self._pools = pools
            self.digest = zlib.crc32(_HIDDEN(index.tree.tick, device.next_free, host.next_free), self.digest)
        self.digest = zlib.crc32(encoded, self.digest)
        return encoded

    def _note_eviction(self, node: Node, tier: TierName) -> None:
        pages = node.device if tier == "device" else node.host
        assert pages is not None
        self._evicted.append((tier, len(pages), zlib.crc32(pages)))


_HIDDEN = struct.Struct("<qqq").pack


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
