"""The simulation finds bugs of components: each of these was put into the core on purpose, must be found, and named."""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from simulation import SimulationFailed, simulate
from simulation.components import draw_components
from tidekv.states.component_specs import ComponentPages
from tidekv.states.components import storage
from tidekv.states.components.backups import ComponentBackups
from tidekv.states.components.request_components import ComponentRestore
from tidekv.states.components.shared_ends import SharedEnds
from tidekv.states.components.storage import ComponentStorage
from tidekv.states.handover.rooms import Rooms
from tidekv.states.prefix.component_index import ComponentIndex
from tidekv.states.prefix.component_tier import ComponentTier
from tidekv.states.prefix.node import Node, TierName
from tidekv.states.records.reads import ComponentFetch
from tidekv.states.records.request import Request, RequestComponents, RoomRecord
from tidekv.states.types import page_ids

Mutant = Callable[[pytest.MonkeyPatch], None]
REQUESTS = 120
SEEDS_MAX = 160
MUTANTS: dict[str, tuple[Mutant, str, int]] = {}


def mutant(words: str, *, first_seed: int = 1) -> Callable[[Mutant], Mutant]:
    """`words` is the error of a run that finds it. Runs of seeds before `first_seed` did not find it."""

    def enter(plant: Mutant) -> Mutant:
        MUTANTS[plant.__name__] = (plant, words, first_seed)
        return plant

    return enter


@mutant(r"to which room .* still writes|which is being written|is free|is being written by", first_seed=3)
def components_are_freed_without_quarantine(patch: pytest.MonkeyPatch) -> None:
    def leave(self: Rooms, room: RoomRecord, *, settled: bool) -> None:
        original(self, room, settled=settled)
        for draining in self.quarantine:
            components = self._state.components
            if components is not None:
                components.settle(draining.component_pages)
                draining.component_pages = {name: page_ids() for name in draining.component_pages}

    original = Rooms.leave
    patch.setattr(Rooms, "leave", leave)


@mutant(r"holds \d+ instead of", first_seed=18)
def a_shared_record_is_not_cloned(patch: pytest.MonkeyPatch) -> None:
    original = ComponentRestore._copy

    def copy(
        self: ComponentRestore, component_pages: RequestComponents, name: str, source: TierName, *rest: Any
    ) -> None:  # Any: handed on.
        if source == "host":
            original(self, component_pages, name, source, *rest)

    patch.setattr(ComponentRestore, "_copy", copy)


@mutant(r"is free|to which .* still writes|waits for|is being written|is being read", first_seed=41)
def pages_are_freed_while_a_copy_writes_to_them(patch: pytest.MonkeyPatch) -> None:
    def leave(self: ComponentRestore, request: Request) -> None:
        if request.component_pages is not None:
            self.give_up(request.component_pages)
            request.component_pages.request = None
            request.component_pages = None

    patch.setattr(ComponentRestore, "leave", leave)


@mutant(r"KeyError|holds|is not the end of what is needed", first_seed=7)
def a_window_with_a_hole_is_taken_for_whole(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(storage, "gap", lambda first, end, here: max((at + 1 for at in here), default=first))


@mutant(r"to which .* still writes|is being written by|which is free|holds \d+ instead of|holds garbage", first_seed=7)
def a_loaded_window_uses_pages_that_prefill_writes(patch: pytest.MonkeyPatch) -> None:
    def promise(self: ComponentRestore, request: Request) -> tuple[ComponentPages, ...]:
        held = request.component_pages
        return tuple(
            ComponentPages(one.component, one.first, held.own[one.component][: len(one.pages)])
            for one in original(self, request)
        )

    original = ComponentRestore.promise
    patch.setattr(ComponentRestore, "promise", promise)


@mutant(r"which holds garbage|holds 0 instead of|is free|is being read|changed while")
def the_source_of_a_tail_backup_is_not_locked(patch: pytest.MonkeyPatch) -> None:
    original = ComponentBackups.begin

    def begin(self: ComponentBackups, leaf: Node) -> None:
        before = set(self._state.operations)
        original(self, leaf)
        for op in set(self._state.operations) - before:
            backup: Any = self._state.operations[op]  # Any: the owner of an operation.
            self._index.unlock(backup.lock)
            backup.lock = None

    patch.setattr(ComponentBackups, "begin", begin)


@mutant(r"holds \d+ instead of|holds garbage", first_seed=64)
def a_failed_copy_of_a_tail_is_taken_for_a_good_one(patch: pytest.MonkeyPatch) -> None:
    original = ComponentRestore.copied
    patch.setattr(ComponentRestore, "copied", lambda self, component_pages, error: original(self, component_pages, ""))


@mutant(r"holds 0 instead of|is being written by|which is being written or read", first_seed=44)
def a_request_is_ready_before_its_tails_are_copied(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Request, "waits_for_components", property(lambda self: False))


@mutant(
    r"is not guarded by|guards reach into|has pages outside|pages kept|counted|not such a receipt|owned to cached",
    first_seed=7,
)
def a_split_forgets_the_tails_above_it(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ComponentTier, "split", lambda self, upper, lower: None)


@mutant(r"has no full pages in this tier")
def a_page_that_is_evicted_leaves_its_components(patch: pytest.MonkeyPatch) -> None:
    original = ComponentIndex.__init__

    def init(self: ComponentIndex, index: Any, *rest: Any, **named: Any) -> None:  # Any: handed on.
        original(self, index, *rest, **named)
        index.on_evict.remove(self._full_copy_goes)

    patch.setattr(ComponentIndex, "__init__", init)


@mutant(r"holds garbage|holds 0 instead of", first_seed=63)
def a_tail_that_storage_brought_in_part_is_taken_for_whole(patch: pytest.MonkeyPatch) -> None:
    original = ComponentStorage.fetched
    patch.setattr(
        ComponentStorage, "fetched", lambda self, held, fetch, valid: original(self, held, fetch, len(fetch.positions))
    )


@mutant(r"which is free|is being written by|still writes|host .* pages are owned", first_seed=279)
def host_pages_are_freed_while_storage_writes_to_them(patch: pytest.MonkeyPatch) -> None:
    def give_up(self: ComponentStorage, component_pages: RequestComponents, fetch: ComponentFetch) -> None:
        self._storage.fetch_over(fetch)
        self._state.operations.pop(fetch.op)
        self.copied(component_pages, fetch)
        component_pages.copy_ended()

    patch.setattr(ComponentStorage, "_give_up", give_up)


@mutant(r"holds garbage|holds \d+ instead of|changed while|which is being read|is being written by")
def others_copy_an_end_before_it_is_in_place(patch: pytest.MonkeyPatch) -> None:
    def serve_waiters(self: SharedEnds, request: Request) -> None:
        sender = request.component_pages
        for waiter in [] if sender is None else list(sender.waiters):
            self._copy(sender, waiter)

    patch.setattr(SharedEnds, "serve_waiters", serve_waiters)


@mutant(r"changed while|which is being read|being written or read|is free|waits for \d+ copies|pages are owned")
def a_request_is_ready_while_others_copy_its_end(patch: pytest.MonkeyPatch) -> None:
    def copy(self: SharedEnds, sender: RequestComponents, waiter: RequestComponents) -> None:
        before = sender.copies
        original(self, sender, waiter)
        sender.copies = before

    original = SharedEnds._copy
    patch.setattr(SharedEnds, "_copy", copy)


@pytest.mark.parametrize("name", MUTANTS)
def test_the_simulation_finds_and_names_that(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, words, first_seed = MUTANTS[name]
    plant(monkeypatch)
    for seed in range(first_seed, first_seed + SEEDS_MAX):
        if draw_components(Random(f"components {seed}"), 1):
            try:
                simulate(seed, REQUESTS, hints=False)
            except SimulationFailed as failure:
                assert re.search(words, failure.what), failure.what
                return
    pytest.fail(f"{SEEDS_MAX} seeds of {REQUESTS} requests did not notice that {name.replace('_', ' ')}")
