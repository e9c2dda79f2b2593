"""The simulation finds bugs: each of these was put into the core on purpose, and must be found within some seeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from simulation import SimulationFailed, simulate
from tidekv.states.backup.backups import Backup, Backups
from tidekv.states.core_state import CoreState
from tidekv.states.handover.rooms import Rooms
from tidekv.states.loads.loads import LoadCopy, Loads
from tidekv.states.loads.look_ahead import LookAhead
from tidekv.states.pages.prefill_quota import PrefillQuota
from tidekv.states.prefix.index import Node
from tidekv.states.prefix.namespace_shares import SharedEvictionQueue
from tidekv.states.records.ahead import Ahead, AheadRun
from tidekv.states.records.request import Load, Request, RoomRecord
from tidekv.states.records.stages import Stage
from tidekv.states.request.restore import Restore
from tidekv.states.types import PageIds, page_ids

Mutant = Callable[[pytest.MonkeyPatch], None]
REQUESTS = 120
SEEDS_MAX = 160
FIRST_SEEDS = {
    "a_chunk_of_a_foreign_rank_counts": 5,
    "a_failed_load_is_taken_for_a_good_one": 5,
    "a_late_fetch_gives_its_host_pages_back_at_once": 47,
    "a_room_is_known_by_its_request_alone": 5,
    "a_waiter_extends_beyond_its_own_prompt": 150,
    "an_extend_goes_to_pages_under_a_late_copy": 9,
    "look_ahead_forgets_its_host_pages": 9,
    "look_ahead_frees_host_pages_that_are_still_written": 23,
    "look_ahead_shows_pages_whose_read_failed": 9,
    "pages_are_published_before_their_copy": 4,
    "pages_that_failed_their_checksum_are_used": 3,
    "the_first_rank_that_drained_speaks_for_all": 7,
    "the_quota_of_a_prefill_is_not_asked": 4,
    "write_back_frees_a_device_page_before_its_copy": 17,
}
"""Where the search for a bug begins: runs of the seeds before do not find it, or late."""
MUTANTS: dict[str, Mutant] = {}


def mutant(plant: Mutant) -> Mutant:
    MUTANTS[plant.__name__] = plant
    return plant


@mutant
def pages_are_freed_without_quarantine(patch: pytest.MonkeyPatch) -> None:
    def leave(self: Rooms, room: RoomRecord, *, settled: bool) -> None:
        if not settled:
            original(self, room, settled=False)
            key = next(reversed(self._draining))
            self._settle(key)
        else:
            original(self, room, settled=True)

    original = Rooms.leave
    patch.setattr(Rooms, "leave", leave)


@mutant
def a_room_is_known_by_its_request_alone(patch: pytest.MonkeyPatch) -> None:
    def live(self: Rooms, request_id: str, generation: int) -> RoomRecord | None:
        return next((room for room in self if room.request.request_id == request_id), None)

    patch.setattr(Rooms, "live", live)


@mutant
def a_load_forgets_to_unlock(patch: pytest.MonkeyPatch) -> None:
    def unlock(self: Load, index: object) -> None:
        self.lock = None

    patch.setattr(Load, "unlock", unlock)


@mutant
def pages_are_published_before_their_copy(patch: pytest.MonkeyPatch) -> None:
    def begin_copy(self: Loads, first: int, nodes: list[Node], pages: PageIds, *, tier: str, by_layer: bool) -> Load:
        load = original(self, first, nodes, pages, tier=tier, by_layer=by_layer)
        for node in load.nodes:
            self._state.index.set_load(node, None)
        return load

    original = Loads.begin_copy
    patch.setattr(Loads, "begin_copy", begin_copy)


@mutant
def an_extend_goes_to_pages_under_a_late_copy(patch: pytest.MonkeyPatch) -> None:
    def copy_is_late(self: Loads, copy: LoadCopy) -> None:
        self._state.operations.pop(copy.load.op)
        self.fail(copy.load, "copy_failed")

    patch.setattr(Loads, "copy_is_late", copy_is_late)


@mutant
def pages_that_failed_their_checksum_are_used(patch: pytest.MonkeyPatch) -> None:
    original = Loads.fetched
    patch.setattr(Loads, "fetched", lambda self, load, valid: original(self, load, load.page_count))


@mutant
def host_pages_are_not_held_while_storage_reads_them(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Backups, "_pin", lambda self, backup, node: None)


@mutant
def an_outcome_counts_each_time_it_is_told(patch: pytest.MonkeyPatch) -> None:
    class Forever(dict[int, Any]):
        def pop(self, op: int, default: object = None) -> Any:  # Any: the owner of an operation.
            return self.get(op, default)

    original = CoreState.__init__

    def init(self: CoreState, settings: Any) -> None:  # Any: handed on.
        original(self, settings)
        self.operations = Forever()

    patch.setattr(CoreState, "__init__", init)


@mutant
def a_request_is_ready_without_the_first_token(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RoomRecord, "is_complete", property(lambda self: bool(self.aux_from)))


@mutant
def a_waiter_extends_beyond_its_own_prompt(patch: pytest.MonkeyPatch) -> None:
    def fill(self: Loads, load: Load) -> None:
        sender = self.sender_of(load)
        if sender is not None:
            load.waiters[sender] = load.page_count
        original(self, load)

    original = Loads.fill
    patch.setattr(Loads, "fill", fill)


@mutant
def a_late_fetch_gives_its_host_pages_back_at_once(patch: pytest.MonkeyPatch) -> None:
    def fetch_is_late(self: Loads, load: Load) -> None:
        self._state.operations.pop(load.op)
        self.fail(load, "fetch_late")

    patch.setattr(Loads, "fetch_is_late", fetch_is_late)


@mutant
def the_first_rank_that_drained_speaks_for_all(patch: pytest.MonkeyPatch) -> None:
    def drained(self: Rooms, request_id: str, generation: int, rank: int) -> None:
        if (request_id, generation) in self._draining and rank >= 0:
            self._settle((request_id, generation))

    patch.setattr(Rooms, "drained", drained)


@mutant
def a_request_keeps_its_own_page_where_the_cache_has_another(patch: pytest.MonkeyPatch) -> None:
    def keep(self: Restore, request: Request, keys: bytes) -> int:
        before = request.held.table
        count = original(self, request, keys)
        request.held.table = before
        return count

    original = Restore.keep
    patch.setattr(Restore, "keep", keep)


@mutant
def a_writer_out_of_reach_is_taken_for_dead(patch: pytest.MonkeyPatch) -> None:
    def leave(self: Rooms, room: RoomRecord, *, settled: bool) -> None:
        original(self, room, settled=settled)
        for key in self.left_to(room.writer):
            self.settle_unsent(*key)

    original = Rooms.leave
    patch.setattr(Rooms, "leave", leave)


@mutant
def a_chunk_of_a_foreign_rank_counts(patch: pytest.MonkeyPatch) -> None:
    def span_of(self: RoomRecord, event: Any) -> Any:  # Any: a chunk, and the span that it is for.
        return self.spans[event.span] if -len(self.spans) <= event.span < len(self.spans) else None

    patch.setattr(RoomRecord, "span_of", span_of)


@mutant
def a_failed_load_is_taken_for_a_good_one(patch: pytest.MonkeyPatch) -> None:
    original = Loads.copied
    patch.setattr(
        Loads,
        "copied",
        lambda self, load, error, **given: original(
            self, load, error if load.stage is Stage.RECLAIMING else "", **given
        ),
    )


@mutant
def who_waits_is_not_woken_by_freed_pages(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CoreState, "pages_were_freed", lambda self: None)


@mutant
def an_aborted_request_keeps_its_reserve(patch: pytest.MonkeyPatch) -> None:
    def leave(self: Restore, request: Request, *, settled: bool) -> None:
        request.held.reserve = page_ids()
        original(self, request, settled=settled)

    original = Restore.leave
    patch.setattr(Restore, "leave", leave)


@mutant
def write_back_frees_a_device_page_before_its_copy(patch: pytest.MonkeyPatch) -> None:
    def begin(self: Backups, backup: Backup) -> None:
        original(self, backup)
        if backup.copies_ahead and backup.lock is not None:
            self._state.index.unlock(backup.lock)
            backup.lock = None

    original = Backups._begin
    patch.setattr(Backups, "_begin", begin)


@mutant
def write_back_names_its_pages_by_the_leaf_alone(patch: pytest.MonkeyPatch) -> None:
    def keys_stored(self: Backups, op: int) -> tuple[str, bytes]:
        backup: Any = self._state.operations[op]  # Any: the owner of an operation.
        return backup.leaf.namespace, backup.leaf.edge

    patch.setattr(Backups, "keys_stored", keys_stored)


@mutant
def look_ahead_forgets_its_host_pages(patch: pytest.MonkeyPatch) -> None:
    def cut(self: LookAhead, ahead: Ahead, at: int) -> None:
        for run in ahead.runs[at:]:
            if not run.has_ended and self._state.operations.pop(run.op, None) is not None:
                self._end_read(run)
        del ahead.runs[at:]

    patch.setattr(LookAhead, "_cut", cut)


@mutant
def look_ahead_frees_host_pages_that_are_still_written(patch: pytest.MonkeyPatch) -> None:
    def cut(self: LookAhead, ahead: Ahead, at: int) -> None:
        for run in ahead.runs[at:]:
            if not run.has_ended and self._state.operations.pop(run.op, None) is not None:
                self._end_read(run)
            self._state.host.give_back(run.host_pages)
        del ahead.runs[at:]

    patch.setattr(LookAhead, "_cut", cut)


@mutant
def the_quota_of_a_prefill_is_not_asked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefillQuota, "admits", lambda self, prefill, pages: True)


@mutant
def the_quota_of_a_prefill_forgets_its_quarantine(patch: pytest.MonkeyPatch) -> None:
    original = Rooms.leave

    def leave(self: Rooms, room: RoomRecord, *, settled: bool) -> None:
        original(self, room, settled=settled)
        for left in self.quarantine:
            self._state.quota.discharge(left.prefill, left.charged)
            left.charged = 0

    patch.setattr(Rooms, "leave", leave)


@mutant
def a_namespace_keeps_the_count_of_pages_that_left(patch: pytest.MonkeyPatch) -> None:
    original = SharedEvictionQueue.count_pages
    patch.setattr(
        SharedEvictionQueue,
        "count_pages",
        lambda self, namespace, change: original(self, namespace, change) if change > 0 else None,
    )


@mutant
def look_ahead_shows_pages_whose_read_failed(patch: pytest.MonkeyPatch) -> None:
    original = LookAhead.read_ended

    def read_ended(self: LookAhead, request: Request, run: AheadRun, valid: int) -> None:
        original(self, request, run, len(run.host_pages))

    patch.setattr(LookAhead, "read_ended", read_ended)


@pytest.mark.parametrize("name", MUTANTS)
def test_the_simulation_finds_that(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name](monkeypatch)
    first = FIRST_SEEDS.get(name, 1)
    for seed in range(first, first + SEEDS_MAX):
        try:
            simulate(seed, REQUESTS, hints=False)
        except SimulationFailed:
            return
    pytest.fail(f"{SEEDS_MAX} seeds of {REQUESTS} requests did not notice that {name.replace('_', ' ')}")


def test_the_core_as_it_is_passes_the_same_seeds() -> None:
    for seed in range(1, 3):
        simulate(seed, REQUESTS)
