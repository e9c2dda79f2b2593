"""Adoption of reads that were begun ahead: a planned request waits for them as loads.

AheadRun, under way         ──adopt──▶ a load that is FETCHING, by the same operation
AheadRun, landed, no parent ──adopt──▶ a load that is COPYING from the run's host pages, which are free after that
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidekv.states.loads.loads import LoadFetch
from tidekv.states.request.request import AheadRun, Load, Stage
from tidekv.states.types import PageIds, page_ids

if TYPE_CHECKING:
    from tidekv.states.core_state import CoreState, Operation
    from tidekv.states.loads.loads import Loads
    from tidekv.states.prefix.node import Node
    from tidekv.states.storage.admission import StorageUse
    from tidekv.states.rollback import Undo


class Adoption:
    """Turns reads ahead into loads, and back."""

    def __init__(self, state: CoreState, storage: StorageUse, loads: Loads) -> None:
        self._state = state
        self._storage = storage
        self._loads = loads

    def adopt(self, run: AheadRun, parent: Node, keys: bytes, pages: PageIds, *, deadline_s: float, undo: Undo) -> Load:
        """Make a read a load of a new child of `parent`, into `pages`, the caller's until now. `undo` takes it back."""
        state = self._state
        load = Load(first=run.first, tier="l3", stage=Stage.FETCHING)
        undo.callback(self._disown, load, run, None if run.is_landed else state.operations[run.op])
        load.nodes.append(state.index.insert_pending(parent, run.request.namespace, keys, pages, load))
        load.host_pages = run.host_pages
        self._loads.hold(load)
        if run.is_landed:
            self._loads.start_copy(load)
        else:
            load.op = run.op
            load.begun_at_s, load.queued_pages = run.begun_at_s, run.queued_pages
            fetch = state.operations[load.op] = LoadFetch(self._loads, self._storage, load)
            state.set_deadline(fetch, state.now_s + deadline_s, op=load.op)
            self._storage.fetching[load] = len(pages)
        return load

    def _disown(self, load: Load, run: AheadRun, read: Operation | None) -> None:
        """Undo an adoption, in the step that it was made in: the read is its request's again."""
        load.host_pages = page_ids()
        self._storage.fetching.pop(load, None)
        self._loads.abandon(load)
        if read is not None:
            # The very same object: its deadline is still in the heap.
            self._state.operations[run.op] = read
