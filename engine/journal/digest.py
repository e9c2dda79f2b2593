"""Digests of a core's decisions and state, to compare two cores event by event and part by part.

`StepDigest` rolls one 64-bit number over the moves, commands and evictions of each covered step of a core, and at the
end of each covered turn over how many there were in all and the pools of each part of its state. Page keys are
excluded: a journal holds other keys than its run had.
"""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from xxhash import xxh3_64_intdigest

from tidekv.engine.journal.format import whole_text
from tidekv.states.commands import ReportFailed, ReportFinished, ReportReady, ReportRestored, ReportRetracted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidekv.states.commands import Command
    from tidekv.states.core import Core
    from tidekv.states.pages.page_pool import PagePool
    from tidekv.states.prefix.component_tier import ComponentTier
    from tidekv.states.prefix.node import Node, TierName
    from tidekv.states.prefix.tiers import Tier
    from tidekv.states.records.loan import Loan
    from tidekv.states.records.stages import State

COVERED_TURNS = 8
"""One turn in so many is covered, and each from its first raise or error on: a replay that goes another way is
found at most so many turns later. Digests of every turn cost a third of a journal; of one in eight, less than encoding
its events, so that a larger number saves little more.
"""
STATE_PARTS = ("steps", "index", "device pool", "host pool")
"""Parts of the state with a digest after each covered turn; each tier of each component follows."""
POOL_NUMBERS = ("free", "owned", "cached", "draining", "protected", "receipts", "next")
"""Numbers of a pool: pages by state, cached pages that must stay, locks and pins, the next free page (-1: none)."""
_pack_pool = struct.Struct("<7q").pack
_pack_number = struct.Struct("<q").pack
_pack_steps = struct.Struct("<3q").pack
# Pages are arrays, which msgspec cannot encode.
_encode = msgspec.msgpack.Encoder(enc_hook=bytes).encode

WITH_FALLBACKS = (ReportReady, ReportFinished, ReportRestored, ReportRetracted)
WITH_TEXTS = frozenset({ReportFailed, *WITH_FALLBACKS})
"""Commands that may hold texts of exceptions."""


class Followed(NamedTuple):
    """Effects of one event."""

    moves: list[tuple[str, State]]
    commands: list[Command]
    evicted: list[tuple[str, int, int]]
    """Tier, page count and CRC-32 of the page ids of each copy that left the index."""


class StepDigest:
    """Rolling digest of one core from its first step on. Call `stepped` after each step, `end_turn` after each
    covered turn.
    """

    def __init__(self, core: Core) -> None:
        self.value = 0
        """The rolling digest."""
        self._moved = self._given = self._left = 0
        """Moves, commands and evictions of all steps."""
        self._core = core
        index, components = core.state.index, core.state.components
        self._tree = index.tree
        self._pools: list[tuple[PagePool, Tier | ComponentTier]] = [
            (core.state.device, index.device_tier),
            (core.state.host, index.host_tier),
        ]
        names = list(STATE_PARTS)
        if components is not None:
            self._pools += [(tier.pool, tier) for tier in components.tiers]
            names += [f"component {name} ({side})" for name in components.components for side in ("device", "host")]
        self.parts = tuple(names)
        """Names of the parts of the state, in the order of `end_turn`."""
        self._evicted: list[tuple[str, int, int]] = []
        index.on_evict.append(self._note_eviction)

    def stepped(self, commands: Sequence[Command], *, is_covered: bool = True) -> int:
        """Add the core's last step; returns its check (see `TurnLine.checks`)."""
        moves, evicted = self._core.moves, self._evicted
        self._moved += len(moves)
        self._given += len(commands)
        if evicted:
            self._left += len(evicted)
            self._evicted = []
        if not (is_covered and (moves or commands or evicted)):
            return 0
        for command in commands:
            if type(command) in WITH_TEXTS:
                # Texts of exceptions differ between a run and its replay, which raises again in their place.
                commands = [_without_texts(command) for command in commands]
                break
        self.value = value = xxh3_64_intdigest(_encoded((moves, commands, evicted)), self.value)
        return value & 0xFFFF

    def followed(self, commands: list[Command]) -> Followed:
        """Return the effects of the core's last step. Call it before `stepped`."""
        return Followed(self._core.moves, commands, list(self._evicted))

    def end_turn(self) -> list[int]:
        """Add the pools of all parts; returns 16 bits of each part (see `parts`)."""
        value = xxh3_64_intdigest(_pack_steps(self._moved, self._given, self._left), self.value)
        found = [value & 0xFFFF]
        value = xxh3_64_intdigest(_pack_number(self._tree.tick), value)
        found.append(value & 0xFFFF)
        for pool, tier in self._pools:
            free = pool.free_pages
            numbers = _pack_pool(*pool.counts, tier.protected, tier.receipts, free[-1] if free else -1)
            value = xxh3_64_intdigest(numbers, value)
            found.append(value & 0xFFFF)
        self.value = value
        return found

    def pools(self) -> dict[str, dict[str, int]]:
        """Return the numbers of each part, by name."""
        steps = {"moves": self._moved, "commands": self._given, "evictions": self._left}
        found = {self.parts[0]: steps, self.parts[1]: {"tick": self._tree.tick}}
        for name, (pool, tier) in zip(self.parts[2:], self._pools, strict=True):
            free = pool.free_pages
            numbers = (*pool.counts, tier.protected, tier.receipts, free[-1] if free else -1)
            found[name] = dict(zip(POOL_NUMBERS, numbers, strict=True))
        return found

    def _note_eviction(self, node: Node, tier: TierName) -> None:
        pages = node.device if tier == "device" else node.host
        assert pages is not None
        self._evicted.append((tier, len(pages), zlib.crc32(pages)))


def _encoded(followed: Sequence[object]) -> bytes:
    try:
        return _encode(followed)
    except UnicodeEncodeError:
        # The journal, and so a replay, has a question mark for a lone surrogate.
        return _encode(whole_text(msgspec.to_builtins(followed, enc_hook=bytes, builtin_types=(bytes,))))


def _without_texts(command: Command) -> Command:
    if type(command) is ReportFailed:
        return msgspec.structs.replace(command, detail="")
    if type(command) is ReportRestored and command.detail:
        command = msgspec.structs.replace(command, detail="")
    if isinstance(command, WITH_FALLBACKS) and command.fallbacks:
        fallbacks = tuple(msgspec.structs.replace(fallback, error="") for fallback in command.fallbacks)
        return msgspec.structs.replace(command, fallbacks=fallbacks)
    return command


def final_state(core: Core) -> dict[str, int]:
    """Return checksums of index, pools and requests, and every number of `Core.statistics`. O(tree).

    Page keys and namespaces are excluded: a journal holds others than its run had.
    """
    return {
        "crc_index": _index(core),
        "crc_device": _pool(core.state.device),
        "crc_host": _pool(core.state.host),
        "crc_requests": _requests(core),
        **_components(core),
        **core.statistics(),
    }


def _index(core: Core) -> int:
    crc = 0
    pack, pack_id = struct.Struct("<13q").pack, struct.Struct("<q").pack
    for node in core.state.index.nodes():
        assert node.parent is not None
        numbers = pack(
            node.node_id,
            node.parent.node_id,
            node.page_count,
            node.depth_pages,
            node.tick,
            node.hits,
            node.anchored,
            node.guarded,
            node.host_anchored,
            node.host_guarded,
            node.priority,
            (node.load is not None) + 2 * node.is_reclaiming + 4 * node.stored,
            node.renewed,
        )
        crc = zlib.crc32(numbers, crc)
        crc = zlib.crc32(b"" if node.device is None else node.device, crc)
        crc = zlib.crc32(b"" if node.host is None else node.host, crc)
    # Without their names, which a journal does not have either.
    for root in core.state.index.tree.roots.values():
        crc = zlib.crc32(pack_id(root.node_id), crc)
    return crc


def _components(core: Core) -> dict[str, int]:
    """Return a checksum of component pools and of the component pages of each node."""
    index = core.state.components
    if index is None:
        return {}
    sums = {}
    for name in index.components:
        for tier in (index.device[name], index.host[name]):
            crc = _pool(tier.pool)
            for node in index.index.nodes():
                held = sorted(tier.pages_of(node).items())
                crc = zlib.crc32(repr((node.node_id, held, tier.is_guarded(node))).encode(), crc)
            sums[f"crc_{name}_{tier.name}"] = crc
    return sums


def _pool(pool: PagePool) -> int:
    conditions = bytes(pool.condition(page) for page in range(pool.total))
    return zlib.crc32(pool.free_pages, zlib.crc32(conditions))


def _requests(core: Core) -> int:
    crc = 0
    for request in core.state.requests.values():
        words = (
            request.request_id,
            request.state.value,
            request.generation,
            request.attempts.count,
            request.attempts.first,
            request.admission.retry_at_s,
            request.fallbacks.raised,
            request.admission.charged,
            request.held.matched,
            request.held.promised,
            list(request.held.own),
            list(request.held.table),
            list(request.held.reserve),
            request.sources.pages,
            [(load.first, load.page_count, load.stage.value) for load in request.loads],
            *_words_of_lent(request.lent),
        )
        crc = zlib.crc32(repr(words).encode(), crc)
    return crc


def _words_of_lent(lent: Loan | None) -> tuple[object, ...]:
    if lent is None:
        return ()
    components = [(name, list(pages.pages), pages.restored) for name, pages in lent.components.items()]
    return list(lent.full.pages), lent.full.restored, components
