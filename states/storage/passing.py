"""Pages that pass through host memory: from device pages of the embedder to storage, and host memory keeps none.

A host page joins the tree only below the host pages before it. So pages of an offer (`tidekv.states.backup.offers`)
whose prefix host memory does not have, and those that it has no room for, are copied to host pages which are free again
after their put. That goes batch by batch, up to BATCHES_MAX at once, and the next batch is copied during the put:

    look up ──▶ copy ──▶ put ─┐
                copy ──▶ put ─┤
                          …   └──▶ touch

If there is more than a batch, storage is asked first, and what it has from the first page on is not copied. After the
puts the whole prompt is touched, so that storage evicts its end before its beginning.

A passage reads the embedder's pages until its last copy has ended. After `hold_s` no further copy begins, and the rest
is given up; so it is after a failure, and while the circuit breaker is open. What is given up is not stored, and costs
nothing else: a cache tier never fails a request.

Ownership. A batch owns its host pages, from before the copy until the put has ended. They count in `store_host_share`,
and take the place of pages that are evicted: at most BATCHES_MAX batches of a passage.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tidekv.states.commands import CopyPages, StorePages
from tidekv.states.events import PagesStored
from tidekv.states.rollback import Rollback
from tidekv.states.storage.circuit_breaker import STORE
from tidekv.states.types import FULL, PageIds, page_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tidekv.states.core_state import CoreState
    from tidekv.states.events import Outcome, PagesOffered
    from tidekv.states.storage.admission import StorageAdmission

BATCHES_MAX = 2
"""Maximum batches of a passage at once: one is copied while another is put."""
PUT_DEADLINE_S = 60.0


class PassedBatch:
    """Operation: the copy of some pages to host memory, then their put; without pages, only a question to storage."""

    __slots__ = ("_passages", "asked", "first", "host_pages", "is_copying", "op", "passage")

    def __init__(self, passages: Passages, passage: Passage, first: int, host_pages: PageIds, asked: int = 0) -> None:
        self._passages = passages
        self.passage = passage
        self.first = first
        """Position of its first page in the prompt."""
        self.host_pages = host_pages
        """Host pages that it owns."""
        self.asked = asked
        """Number of pages that storage is only asked for."""
        self.is_copying = False
        self.op = 0

    def ended(self, event: Outcome, error: str) -> None:
        """Put what was copied; give the host pages back after the put."""
        if self.is_copying:
            self._passages.copied(self, error)
        else:
            self._passages.stored(self, event)

    def late(self) -> None:
        """Count the copy or the put as late. It keeps its pages until it ends."""
        self._passages.is_late(self)

    def abandon(self) -> None:
        """Give the host pages back, and give up what has not been copied."""
        self._passages.drop(self)


class Passage:
    """Operation: the time within which pages of one group begin to pass through host memory; it owns nothing."""

    __slots__ = (
        "_passages",
        "batches",
        "begun",
        "device_pages",
        "end",
        "first",
        "group",
        "keys",
        "namespace",
        "on_read",
        "op",
        "passed",
        "puts",
    )

    def __init__(self, passages: Passages, event: PagesOffered, group: str, first: int, pages: PageIds) -> None:
        self._passages = passages
        self.namespace, self.keys = event.namespace, event.keys
        self.group = group
        self.first = first
        """Position of the first page in the prompt."""
        self.device_pages = pages
        self.begun = 0
        """Number of pages whose copy has begun, or that storage has."""
        self.end = len(pages)
        """Number of pages that were not given up."""
        self.passed = 0
        """Number of pages that were copied, or found in storage."""
        self.batches: dict[PassedBatch, None] = {}
        self.puts = 0
        """Puts begun, after which the prompt is to be touched."""
        self.on_read: Callable[[], None] | None = None
        """To be called once nothing reads the embedder's pages any more."""
        self.op = 0

    @property
    def reads(self) -> bool:
        """Whether a copy reads pages of the embedder, or may still begin."""
        return self.begun < self.end or any(batch.is_copying for batch in self.batches)

    def ended(self, event: Outcome, error: str) -> None:
        """Never called: no command has this operation's number."""

    def late(self) -> None:
        """Give up what has not been copied."""
        self._passages.give_up(self)

    def abandon(self) -> None:
        """Never called, see `ended`."""


class Passages:
    """All passages of a core."""

    def __init__(self, state: CoreState, storage: StorageAdmission) -> None:
        self._state = state
        self._storage = storage
        self._live: dict[Passage, None] = {}

    def __iter__(self) -> Iterator[Passage]:
        return iter(self._live)

    def reserve(self, keys: bytes) -> int:
        """Host pages to leave to a passage of full pages of a prompt; 0 if they may not pass."""
        return BATCHES_MAX * self._batch_pages(FULL) if self._may_pass(FULL, keys) else 0

    def begin(self, event: PagesOffered, group: str, first: int, pages: PageIds) -> Passage | None:
        """Let pages of a group pass, those from position `first` of the prompt on. None if they may not be stored."""
        if not self._may_pass(group, event.keys):
            return None
        passage = Passage(self, event, group, first, pages)
        self._live[passage] = None
        self._state.run_guarded(partial(self._begin, passage, event.hold_s), recover=partial(self.give_up, passage))
        return passage

    def _begin(self, passage: Passage, hold_s: float) -> None:
        passage.op = self._state.start_operation(passage, deadline_s=hold_s)
        if len(passage.device_pages) > self._batch_pages(passage.group):
            self._put(PassedBatch(self, passage, passage.first, page_ids(), len(passage.device_pages)))
        self._go_on(passage)

    def take_over(self, event: PagesOffered, first: int, host_pages: PageIds) -> bool:
        """Put full pages that were copied already, and own them from now on. False if they may not be stored."""
        if not self._may_pass(FULL, event.keys):
            return False
        passage = Passage(self, event, FULL, first, page_ids())
        self._put(PassedBatch(self, passage, first, host_pages))
        self._state.count("pages_passed", len(host_pages))
        self._live[passage] = None
        return True

    def _may_pass(self, group: str, keys: bytes) -> bool:
        settings = self._state.settings
        # Nothing is known of how many prompts they were part of.
        is_rare = settings.write == "selective" and settings.write_hits_min > 0
        is_short = len(keys) // settings.key_bytes * settings.page_size < settings.write_tokens_min
        return self._is_usable(group) and self._batch_pages(group) > 0 and not is_rare and not is_short

    def _is_usable(self, group: str) -> bool:
        return self._storage.is_usable if group == FULL else self._storage.keeps_components

    def _batch_pages(self, group: str) -> int:
        state = self._state
        pool = state.host
        if group != FULL:
            assert state.components is not None
            pool = state.components.host[group].pool
        return min(state.settings.fetch_run_pages, pool.total, max(pool.total // (2 * BATCHES_MAX), 1))

    # --- Steps ---

    def look(self) -> None:
        """Begin the copies that waited for host pages."""
        self._state.passages_were_tried()
        for passage in [*self._live]:
            self._state.run_guarded(partial(self._go_on, passage), recover=partial(self.give_up, passage))

    def _go_on(self, passage: Passage) -> None:
        """Begin the copies that are due, and end what is over. Can be called again after an exception."""
        while passage.begun < passage.end and len(passage.batches) < BATCHES_MAX and not self._is_asking(passage):
            if not self._is_usable(passage.group):
                passage.end = passage.begun
            elif not self._copy(passage, min(passage.end - passage.begun, self._batch_pages(passage.group))):
                self._state.passage_waits()
                break
        if passage.begun == passage.end:
            self._state.end_operation(passage.op)
        if passage.on_read is not None and not passage.reads:
            passage.on_read()
            passage.on_read = None
        if passage.batches or passage.reads:
            return
        puts, passage.puts = passage.puts, 0
        if puts > 1 and self._is_usable(passage.group):
            pages = len(passage.keys) // self._state.settings.key_bytes
            first = 0 if passage.group == FULL else passage.first
            self._put(PassedBatch(self, passage, first, page_ids(), pages - first))
        else:
            self._live.pop(passage, None)

    def _is_asking(self, passage: Passage) -> bool:
        return any(batch.asked for batch in passage.batches)

    def _copy(self, passage: Passage, count: int) -> bool:
        """Begin the copy of the next `count` pages. False if there are too few host pages."""
        state = self._state
        host_pages = self._take(passage.group, count)
        if host_pages is None:
            return False
        with Rollback() as undo:
            undo.callback(self._give_back, passage.group, host_pages)
            batch = PassedBatch(self, passage, passage.first + passage.begun, host_pages)
            batch.op = state.start_operation(batch, deadline_s=state.settings.copy_deadline_s)
            undo.callback(state.operations.pop, batch.op)
            state.emit(
                CopyPages(
                    op=batch.op,
                    component=passage.group,
                    source="device",
                    source_pages=passage.device_pages[passage.begun : passage.begun + count],
                    target="host",
                    target_pages=host_pages,
                )
            )
            batch.is_copying = True
            passage.batches[batch] = None
            passage.begun += count
            undo.keep()
        return True

    def _take(self, group: str, count: int) -> PageIds | None:
        state = self._state
        if group != FULL:
            assert state.components is not None
            return state.components.take("host", group, count)
        batches = [batch for passage in self._live if passage.group == FULL for batch in passage.batches]
        held = sum(len(batch.host_pages) for batch in batches)
        share = state.settings.store_host_share * state.settings.host_pages
        # One batch may always pass: otherwise pins could keep storage from everything.
        if held and state.index.host_protected + held + count > share:
            return None
        if state.host.free + state.index.host_evictable < count or state.make_host_room(count) < count:
            return None
        return state.host.take(count)

    def _put(self, batch: PassedBatch) -> None:
        state = self._state
        with Rollback() as undo:
            op = state.start_operation(batch, deadline_s=PUT_DEADLINE_S)
            undo.callback(state.operations.pop, op)
            state.emit(
                StorePages(
                    op=op,
                    request_number=0,
                    host_pages=batch.host_pages,
                    asked=batch.asked,
                    component=batch.passage.group,
                    first=batch.first,
                )
            )
            batch.op = op
            batch.passage.batches[batch] = None
            undo.keep()

    def copied(self, batch: PassedBatch, error: str) -> None:
        """Put the copied pages, and copy the next ones. After a raise, `drop` ends the batch."""
        passage, count = batch.passage, len(batch.host_pages)
        batch.is_copying = False
        if error or not self._is_usable(passage.group):
            self.drop(batch)
            return
        self._put(batch)
        passage.puts += 1
        passage.passed += count
        self._state.count("pages_passed", count)
        # Not in the recovery of this batch, whose pages the put reads.
        self._state.run_guarded(partial(self._go_on, passage), recover=partial(self.give_up, passage))

    def stored(self, batch: PassedBatch, event: Outcome) -> None:
        """Take an answer or the end of a put. After a raise, `drop` ends the batch."""
        state, passage, count = self._state, batch.passage, len(batch.host_pages)
        stored = max(0, min(self._storage.store_ended(event), count + batch.asked))
        has_failed = not isinstance(event, PagesStored) or bool(event.error)
        if batch.asked and not has_failed and passage.begun == 0:
            passage.begun = passage.passed = min(stored, passage.end)
        if isinstance(event, PagesStored):
            written = max(0, min(event.written, count))
            state.count("pages_stored" if passage.group == FULL else "component_pages_stored", written)
            state.count("l2_damaged", int(event.intact is not None))
        state.count("pages_passed_lost", 0 if batch.asked else count - stored)
        if has_failed:
            passage.end = passage.begun
        self._end(batch)

    def is_late(self, batch: PassedBatch) -> None:
        """Count a late copy or put."""
        self._state.count("backups_late")
        if not batch.is_copying:
            self._storage.note(STORE, failed=True)

    def give_up(self, passage: Passage) -> None:
        """Begin no further copy. Can be called again after an exception."""
        passage.end = passage.begun
        self._go_on(passage)

    def drop(self, batch: PassedBatch) -> None:
        """End a batch that failed. Can be called again after an exception."""
        batch.is_copying = False
        batch.passage.end = batch.passage.begun
        if batch.host_pages:
            self._state.count("backups_failed")
        self._end(batch)

    def _end(self, batch: PassedBatch) -> None:
        self._give_back(batch.passage.group, batch.host_pages)
        batch.host_pages = page_ids()
        self._state.operations.pop(batch.op, None)
        batch.passage.batches.pop(batch, None)
        self._state.pages_were_freed()
        self._go_on(batch.passage)

    def _give_back(self, group: str, host_pages: PageIds) -> None:
        state = self._state
        if group == FULL:
            state.host.give_back(host_pages)
        else:
            assert state.components is not None
            state.components.give_back({group: host_pages}, "host")
