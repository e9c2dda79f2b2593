"""What decode keeps in host memory and storage, for vLLM's own publisher of KV events.

    scheduler   request.block_hashes ──▶ names of the blocks, in each restore job and offer job
    worker      names, then what the engine's prefix index gains and loses ──▶ reports, with the output of a step
    scheduler   what all ranks have ──▶ take_events ──▶ vLLM's publisher, beside the events of vLLM's own blocks

Nothing of this exists unless vLLM's `--kv-events-config` enables events.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple  # vLLM's requests are not typed here.

from msgspec.structs import replace

from tidekv.backends.keys.namespaces import join_namespaces
from tidekv.backends.keys.page_keys import PageKeys
from tidekv.engine.integrations.vllm.handover.jobs import BlockNames
from tidekv.engine.integrations.vllm.handover.settings import Handover
from tidekv.engine.kv_events.content import KVContent
from tidekv.engine.kv_events.messages import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    KVEvent,
    Medium,
    stored_part,
)
from tidekv.engine.kv_events.server_names import PromptWords, ServerName, ServerNames
from tidekv.engine.kv_events.watcher import MakeEvents, ServerEvents
from tidekv.engine.log import engine_log

LOG = engine_log("tidekv.kv_events")
MAKES_WAITING_MAX: Final = 10_000
"""Maximum changes that wait for the thread that makes events of them; beyond that the engine compares all it has."""
EVENTS_WAITING_MAX: Final = 10_000
"""Maximum events that wait for a step of vLLM, which takes none while it is idle; beyond that as above."""


class BlockNaming:
    """Names the blocks of requests in jobs. `hash_of` makes of vLLM's hash what its events call a block."""

    def __init__(self, hash_of: Callable[[bytes], BlockHash], *, hashes_per_block: int) -> None:
        self._hash_of = hash_of
        self._hashes_per_block = hashes_per_block

    def of(self, request: Any, blocks: int) -> BlockNames:
        """Return the names of the first blocks of a request, as far as vLLM has hashed it."""
        # The hash of a block is that of its last part, which includes all before it.
        step = self._hashes_per_block
        hashes = request.block_hashes[step - 1 : blocks * step : step]
        adapter = request.lora_request
        return BlockNames(
            hashes=tuple(self._hash_of(one) for one in hashes),
            lora_id=None if adapter is None else adapter.lora_int_id,
            lora_name=None if adapter is None else adapter.lora_name,
            salt=request.cache_salt or None,
        )


class RankReport(NamedTuple):
    """What one rank has gained and lost since its last report, in order."""

    rank: int
    events: list[KVEvent]


class EventFeed:
    """Events of one rank's engine, for its worker to take: the engine's outlet. A thread makes them, until `close`."""

    def __init__(self, handover: Handover, *, kind: str) -> None:
        page_size = handover.block_size
        names = ServerNames(block_size=page_size, kind=kind, names_max=2 * handover.num_blocks)
        options = handover.settings.engine.kv_events
        self._content = KVContent(
            page_size=page_size,
            key_bytes=PageKeys(page_size, bigrams=handover.groups.bigram_keys).key_bytes,
            bigrams=handover.groups.bigram_keys,
            tokens=options.tokens,
            stored_pages_max=options.stored_pages,
            wording=names,
        )
        self._rank = handover.rank
        self._namespace = handover.settings.engine.namespace
        self._lock = threading.Lock()
        self._making = 0
        self._events: list[KVEvent] = []
        self._has_failed = False
        # One thread, so that names precede the pages that they are given to.
        self._thread = ThreadPoolExecutor(1, "tidekv-vllm-events")

    @property
    def server_events(self) -> ServerEvents:
        """What the engine takes."""
        return ServerEvents(self, self._content)

    @property
    def has_room(self) -> bool:
        """Whether the engine may publish."""
        with self._lock:
            return self._making < MAKES_WAITING_MAX and len(self._events) < EVENTS_WAITING_MAX

    def publish(self, make: MakeEvents, whole: MakeEvents) -> None:
        """Make events in the thread. vLLM's listeners begin with its own replay: `whole` is not asked for."""
        with self._lock:
            self._making += 1
        self._thread.submit(self._make, make)

    def name(self, namespace: str, tokens: bytes, names: BlockNames | None) -> None:
        """Take the names of a prompt's blocks, before the engine gets the prompt."""
        if names is None or not names.hashes:
            return
        joined = join_namespaces(self._namespace, namespace)
        words = PromptWords(names.lora_id, names.lora_name, names.salt)
        # One block is one page.
        pages = [ServerName((one,), words) for one in names.hashes]
        self.publish(lambda: self._content.name(joined, tokens, pages), tuple)

    def forget(self) -> None:
        """Withdraw all pages: none of them is found any more."""
        self.publish(self._content.forget_names, tuple)

    def again(self) -> None:
        """Publish all pages again: vLLM has told its listeners that nothing is left."""
        self.publish(self._content.again, tuple)

    def take(self) -> RankReport | None:
        """Return the events made since the last call; None without any."""
        if not self._events:  # Without the lock: what arrives just now is taken after the next step.
            return None
        with self._lock:
            events, self._events = self._events, []
        return RankReport(self._rank, events)

    def wait_made(self) -> None:
        """Wait until the events of all changes so far are made."""
        self._thread.submit(int).result()

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._thread.shutdown(cancel_futures=True)

    def _make(self, make: MakeEvents) -> None:
        events: list[KVEvent] = []
        try:
            if not self._has_failed:
                events = list(make())
        except Exception:
            # What listeners believe is what they were told: vLLM's own events go on.
            self._has_failed = True
            LOG.exception("events of host memory and storage stop: they could not be made")
        with self._lock:
            self._making -= 1
            self._events += events


class PublishedBlocks:
    """The blocks that are published: those that every rank has. Makes one stream of the reports of all ranks.

    A block is in host memory if all ranks have it there, and in storage if all have it somewhere and some of them have
    it in storage. So a block that is published has the one before it published, as at each rank, and what a rank loses
    puts no block in another place.
    """

    def __init__(self, ranks: int) -> None:
        self._in_host = [1 << (2 * rank) for rank in range(ranks)]
        self._in_storage = [2 << (2 * rank) for rank in range(ranks)]
        self._all_host, self._all_storage = sum(self._in_host), sum(self._in_storage)
        self._held: dict[BlockHash, int] = {}

    def clear(self) -> None:
        """Take that listeners know of no block. The ranks report again what they have."""
        self._held.clear()

    def take(self, reports: Iterable[RankReport]) -> list[KVEvent]:
        """Return the events for what ranks have reported."""
        return [event for report in reports for one in report.events for event in self._changed(report.rank, one)]

    def _changed(self, rank: int, event: KVEvent) -> list[KVEvent]:
        assert not isinstance(event, AllBlocksCleared), "only vLLM says that"
        bit = (self._in_host if event.medium == "CPU" else self._in_storage)[rank]
        # Consecutive blocks with the same change are one event.
        runs: list[tuple[int, int, tuple[Medium, ...], tuple[Medium, ...]]] = []
        for at, block in enumerate(event.block_hashes):
            was = self._held.get(block, 0)
            now = was | bit if isinstance(event, BlockStored) else was & ~bit
            if now:
                self._held[block] = now
            else:
                self._held.pop(block, None)
            before, after = self._media(was), self._media(now)
            added = tuple(medium for medium in after if medium not in before)
            removed = tuple(medium for medium in before if medium not in after)
            if runs and runs[-1][1:] == (at, added, removed):
                runs[-1] = (runs[-1][0], at + 1, added, removed)
            else:
                runs.append((at, at + 1, added, removed))
        return [each for run in runs for each in _events_of(event, *run)]

    def _media(self, held: int) -> tuple[Medium, ...]:
        found: list[Medium] = []
        if held & self._all_host == self._all_host:
            found.append("CPU")
        if held & self._all_storage and (held | held >> 1) & self._all_host == self._all_host:
            found.append("STORAGE")
        return tuple(found)


def _events_of(
    event: BlockStored | BlockRemoved, first: int, end: int, added: Sequence[Medium], removed: Sequence[Medium]
) -> list[KVEvent]:
    """Return the events of a run of blocks of an event: what is new first."""
    events: list[KVEvent] = []
    for medium in added:
        assert isinstance(event, BlockStored), "what a rank loses adds no place"
        events.append(replace(stored_part(event, first, end), medium=medium))
    events += [BlockRemoved(event.block_hashes[first:end], medium, event.group_idx) for medium in removed]
    return events
