"""Reads that were begun ahead go on as loads: who waited for device pages has them now, and waits for the read.

AheadRun, under way         ──adopt──▶ a load that is FETCHING, by the same operation
AheadRun, landed, no parent ──adopt──▶ a load that is COPYING from the run's host pages, which are free after that
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidekv.states.load import Load, Stage
from tidekv.states.shapes import PageIds, page_ids
from tidekv.states.undo import Undo

if TYPE_CHECKING:
    from tidekv.states.core_state import CoreState
    from tidekv.states.loads import Loads
    from tidekv.states.lookahead import AheadRun
    from tidekv.states.node import Node


class Adoption:
    """Turns reads ahead into loads, and back."""

    def __init__(self, state: CoreState, loads: Loads) -> None:
        self._state = state
        self._loads = loads

    def adopt(self, run: AheadRun, parent: Node, keys: bytes, pages: PageIds, *, deadline_s: float) -> Load:
        """Make a read a load of a new child of `parent`, into `pages`, the caller's until now. `disown` undoes it."""
        state = self._state
        load = Load(first=run.first, tier="l3", stage=Stage.FETCHING)
        with Undo() as undo:
            undo.callback(self.disown, load, run)
            load.nodes.append(state.index.insert_pending(parent, run.request.namespace, keys, pages, load))
            load.host_pages = run.host_pages
            self._loads.hold(load)
            if run.is_landed:
                self._loads.start_copy(load)
            else:
                load.op = run.op
                load.begun_at_s, load.queued_pages = run.begun_at_s, run.queued_pages
                state.operations[load.op] = load
                state.set_deadline(load, state.now_s + deadline_s, op=load.op)
                state.storage.fetching[load] = len(pages)
            undo.keep()
        return load

    def disown(self, load: Load, run: AheadRun) -> None:
        """Undo an adoption, in the step that it was made in: the read is its request's again."""
        load.host_pages = page_ids()
        self._state.storage.fetching.pop(load, None)
        self._loads.abandon(load)
        if not run.is_landed:
            self._state.operations[run.op] = run
