"""What a router makes of a stream of KV events, and which of its rules the stream breaks.

The rules are those of the published consumers, and of the format: see docs/kv-events.md. Nothing here does I/O.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import msgspec

from tidekv.engine.kv_events.messages import BATCH_BYTES_MAX, BATCH_EVENTS_MAX
from tidekv.engine.kv_events.names import DYNAMO_SALT

Fault = Literal[
    "unreadable", "fields", "signed hash", "orphan", "stored twice", "not stored", "gap", "limits", "no fence",
    "silence", "replay", "probe",
]  # fmt: skip
MEDIA: Final = ("GPU", "CPU", "STORAGE")
FENCE: Final = 2**64 - 1
EXAMPLES_MAX: Final = 3
FULL_KINDS: Final = (None, "full_attention", "mla_attention")
NEEDED: Final = {
    "BlockStored": {
        "type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
    },
    "BlockRemoved": {"type", "block_hashes", "medium"},
    "AllBlocksCleared": {"type"},
}  # fmt: skip


class PublishedPrompt(NamedTuple):
    """A cached prompt as the stream tells it: its tokens, its names, and how far each tier reaches, in tokens."""

    tokens: tuple[int, ...]
    salt: str
    lora_name: str
    reach: tuple[int, int, int]
    """On the device; on the device or in host memory; in any tier."""
    end: int
    """Hash of its last page."""


class _Page(msgspec.Struct):
    parent: int | None
    tokens: list[int]
    next_token: int | None
    """The token behind the page, with EAGLE keys."""
    salt: str
    lora_name: str
    media: set[str] = msgspec.field(default_factory=set)


class EventIndex:
    """Pages by hash, as a router keeps them. `faults` counts broken rules, with examples."""

    def __init__(self) -> None:
        self.pages: dict[int, _Page] = {}
        self.faults: dict[Fault, list[str]] = defaultdict(list)
        self.last: int | None = None
        """The number of the last batch, if any had one."""
        self.groups: dict[int | None, str | None] = {}

    def note(self, fault: Fault, example: str) -> None:
        """Count a broken rule."""
        self.faults[fault].append(example)

    def take(self, number: int, payload: bytes) -> None:
        """Apply a batch in the order of the wire; `number` is FENCE for one without a number."""
        if number != FENCE:
            if self.last is not None and number != self.last + 1:
                self.note("gap", f"batch {number} after {self.last}")
            self.last = number
        where = "a fence" if number == FENCE else f"batch {number}"
        try:
            batch: Any = msgspec.msgpack.decode(payload)
            events = batch[1]
            if len(events) > BATCH_EVENTS_MAX or len(payload) > BATCH_BYTES_MAX:
                self.note("limits", f"{where}: {len(events)} events, {len(payload)} bytes")
            for event in events:
                self._apply(where, event)
        except (msgspec.DecodeError, TypeError, KeyError, IndexError, ValueError) as error:
            self.note("unreadable", f"{where}: {type(error).__name__}: {error}")

    def same_as(self, other: EventIndex) -> bool:
        """Whether both know the same pages in the same media."""
        mine = {name: page.media for name, page in self.pages.items() if page.media}
        return mine == {name: page.media for name, page in other.pages.items() if page.media}

    def prompts(self, count: int) -> list[PublishedPrompt]:
        """Return up to `count` prompts that end with a page after which none is known, the longest ones first."""
        parents = {page.parent for page in self.pages.values() if page.media}
        found = []
        for name, page in self.pages.items():
            if page.media and name not in parents and (prompt := self._prompt(name)) is not None:
                found.append(prompt)
        return sorted(found, key=lambda prompt: -len(prompt.tokens))[:count]

    def reach(self, prompt: PublishedPrompt) -> tuple[int, int, int] | None:
        """Return how far the tiers reach now for a prompt that was known before, or None if it is not known."""
        again = self._prompt(prompt.end)
        return None if again is None else again.reach

    def _prompt(self, name: int) -> PublishedPrompt | None:
        chain: list[_Page] = []
        at: int | None = name
        while at is not None:
            page = self.pages.get(at)
            if page is None or not page.tokens or len(chain) > len(self.pages):
                return None
            chain.append(page)
            at = page.parent
        chain.reverse()
        reach = []
        for tiers in (MEDIA[:1], MEDIA[:2], MEDIA):
            tokens = 0
            for page in chain:
                if page.media.isdisjoint(tiers):
                    break
                tokens += len(page.tokens)
            reach.append(tokens)
        tokens_of = [token for page in chain for token in page.tokens]
        if chain[-1].next_token is not None:
            tokens_of.append(chain[-1].next_token)
        first = chain[0]
        return PublishedPrompt(tuple(tokens_of), first.salt, first.lora_name, (reach[0], reach[1], reach[2]), name)

    def _apply(self, where: str, event: Mapping[str, Any]) -> None:
        kind = event["type"]
        if kind not in NEEDED or not NEEDED[kind] <= event.keys():
            missing = sorted(NEEDED.get(kind, {"a known type"}) - event.keys())
            self.note("fields", f"{where}: {kind} without {', '.join(missing)}")
            return
        if kind == "AllBlocksCleared":
            self.pages.clear()
            return
        names: list[int] = event["block_hashes"]
        parent: int | None = event.get("parent_block_hash")
        if any(not isinstance(name, int) or name < 0 for name in (*names, *([] if parent is None else [parent]))):
            self.note("signed hash", f"{where}: {kind}")
        group = event.get("group_idx")
        if kind == "BlockStored":
            self.groups[group] = event.get("kv_cache_spec_kind")
        if self.groups.get(group) not in FULL_KINDS:
            return  # Windows and states: how far a prompt is restored does not depend on them.
        if kind == "BlockStored":
            self._store(where, event, names, parent)
        else:
            self._remove(where, event["medium"], names)

    def _store(self, where: str, event: Mapping[str, Any], names: Sequence[int], parent: int | None) -> None:
        medium, size = event["medium"], event["block_size"]
        above = None if parent is None else self.pages.get(parent)
        if parent is not None:
            media = set() if above is None else above.media
            if not media or (medium == "GPU" and "GPU" not in media):
                there = "in " + " and ".join(sorted(media)) if media else "nowhere"
                self.note("orphan", f"{where}: {len(names)} pages in {medium}, the one before them is {there}")
        pairs = event["token_ids"]
        is_paired = bool(pairs) and not isinstance(pairs[0], int)
        tokens = [pair[0] for pair in pairs] if is_paired else list(pairs)
        if tokens and len(tokens) != size * len(names):
            self.note("fields", f"{where}: {len(tokens)} tokens for {len(names)} pages of {size}")
        salt, lora_name = ("", event["lora_name"] or "") if above is None else (above.salt, above.lora_name)
        keys = (event.get("extra_keys") or [None])[0]
        if parent is None and keys:
            salt = str(keys[0]).removeprefix(DYNAMO_SALT)
        for at, name in enumerate(names):
            page = self.pages.get(name)
            if page is None:
                part = tokens[at * size : (at + 1) * size]
                behind = pairs[(at + 1) * size - 1][1] if is_paired else None
                page = self.pages[name] = _Page(parent, part, behind, salt, lora_name)
            if medium in page.media:
                self.note("stored twice", f"{where}: a page in {medium}")
            page.media.add(medium)
            parent = name

    def _remove(self, where: str, medium: str, names: Sequence[int]) -> None:
        for name in names:
            page = self.pages.get(name)
            if page is None or medium not in page.media:
                self.note("not stored", f"{where}: a page in {medium}")
                continue
            page.media.discard(medium)
