"""Component pages that the room of one request brings for several: those with the same prompt, before READY.

With `share_transfers`, requests with the same prompt at the same time share its full pages
(`tidekv.states.loads.shared_transfers`) and the component pages of its end. The first of them asks prefill for these:
it is the *sender*. The others, its *waiters*, are planned while the sender has its room, and ask prefill for no
component page. When everything of the sender's end is in place, each waiter copies it within the device pool, to pages
of its own, because a model writes to the pages of its end:

    room of the sender    ─ window pages, record ─▶ pages of the sender ─┬─ copy ─▶ pages of a waiter
                                                                         └─ copy ─▶ pages of another one

What device, host or storage have for a waiter comes from there; the copy has the rest. Ends are the same if all tokens
are, those of a partial last page (`RequestArrived.rest`) included, and the namespace.

The sender is READY when the copies have ended, since its model is about to write to their source. From the first copy
on, no further request joins it, so that it does not wait for requests that arrive later. If it leaves while copies are
under way, its component pages outlive it, as they do with copies to them.

A waiter does not fail with the sender. It asks its own prefill, by an extend (`tidekv.states.components.missing`):

- if the sender leaves before its end is in place (aborted, failed, moved to the next prefill). The oldest waiter is the
  next sender, and the others wait for it;
- if the sender's transfer stalls. A waiter that waits for nothing else waits at most `share_wait_s` while nothing
  lands. Then nothing joins that sender any more, and the waiter is the next one, for all that waited;
- if its copy fails or is late. After a late copy, which may still read the pages that the model of the sender is about
  to write to, the sender gets fresh pages as well, and asks its prefill for them.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from tidekv.states.commands import CopyPages
from tidekv.states.components.missing import LateComponentCopy
from tidekv.states.rollback import Rollback
from tidekv.states.types import page_ids

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidekv.states.components.missing import MissingPages
    from tidekv.states.core_state import CoreState
    from tidekv.states.events import Outcome
    from tidekv.states.records.request import Request, RequestComponents
    from tidekv.states.types import PageIds

End: TypeAlias = "tuple[str, int, bytes, bytes]"
"""Namespace, number of tokens, key of the last full page, and the tokens behind it. The other keys are compared."""


class SharedEndCopy:
    """Operation: a copy of one component's pages from the sender to a waiter. Both wait for it."""

    __slots__ = ("_shared", "component", "is_counted", "op", "positions", "sender", "waiter")

    def __init__(
        self,
        shared: SharedEnds,
        sender: RequestComponents,
        waiter: RequestComponents,
        component: str,
        positions: PageIds,
    ) -> None:
        self._shared = shared
        self.sender = sender
        self.waiter = waiter
        self.component = component
        self.positions = positions
        self.op = 0
        self.is_counted = False
        """Whether it was counted as late."""

    def ended(self, event: Outcome, error: str) -> None:
        """Count the copy as ended; after an error the waiter asks its own prefill."""
        self._shared.copied(self, error)

    def late(self) -> None:
        """Give both fresh pages: the copy may still read those of one and write those of the other."""
        self._shared.copy_is_late(self)

    def abandon(self) -> None:
        """Free the pages of those that have left. Safe to call again after a raise."""
        self._shared.settle(self)


class SharedEndWatch:
    """Operation: the watch of a waiter on its sender's transfer. It only ends by its deadline."""

    __slots__ = ("_shared", "progress", "waiter")

    def __init__(self, shared: SharedEnds, waiter: RequestComponents, progress: tuple[int, ...]) -> None:
        self._shared = shared
        self.waiter = waiter
        self.progress = progress
        """Progress of the sender when the watch began."""

    def ended(self, event: Outcome, error: str) -> None:
        """Never called: there is no command, hence no outcome."""

    def late(self) -> None:
        """Check whether anything has arrived meanwhile."""
        self._shared.is_late(self)

    def abandon(self) -> None:
        """Do nothing: the watch holds nothing."""


class SharedEnds:
    """Senders and waiters of one core."""

    def __init__(self, state: CoreState, missing: MissingPages, settle: Callable[[RequestComponents], None]) -> None:
        """`settle` is called with component pages of which a copy has ended: it lets their request move on, or frees
        them if the request has left and nothing else is in flight.
        """
        self._state = state
        self._missing = missing
        self._settle = settle
        self._senders: dict[End, RequestComponents] = {}
        self.watches: dict[RequestComponents, int] = {}
        """By waiter, the operation of its watch."""

    # --- The plan ---

    def sender_for(self, request: Request) -> RequestComponents | None:
        """The component pages of a request that prefill sends the same end, if `request` can share them."""
        end = self._end_of(request)
        if end is None:
            return None
        sender = self._senders.get(end)
        # The key of the last page does not tell what precedes it.
        if sender is None or sender.request is None or sender.request.keys != request.keys:
            return None
        return sender

    def join(self, waiter: RequestComponents, sender: RequestComponents, undo: Rollback) -> None:
        """Let the request of `waiter` wait for the end that the sender's room brings. `undo` reverts it."""
        undo.callback(self._part, waiter)
        waiter.join(sender)
        # Its end may be in place already.
        assert sender.request is not None
        self._state.request_changed(sender.request)

    def offer(self, request: Request, component_pages: RequestComponents, undo: Rollback) -> None:
        """Offer what the room of `request` is to bring to later requests with the same end. `undo` reverts it."""
        undo.callback(self._close, component_pages)
        self._open(request, component_pages)

    def _open(self, request: Request, component_pages: RequestComponents) -> None:
        """Let later requests with the same end join, if it can be shared."""
        end = self._end_of(request)
        if end is not None:
            component_pages.offer_end(end)
            self._senders[end] = component_pages

    def _end_of(self, request: Request) -> End | None:
        """The end of a prompt; None if it cannot be shared, or not all of its tokens are known."""
        settings = self._state.settings
        is_shared = (
            settings.share_transfers and request.cache and not request.restore_limit and not request.recompute.is_chosen
        )
        if not is_shared or (not request.rest and request.prompt_tokens % settings.page_size):
            return None
        return request.namespace, request.prompt_tokens, request.keys[-settings.key_bytes :], request.rest

    # --- Receiving ---

    def look(self, request: Request) -> None:
        """Hand over what a request's room has brought for others, and watch what it awaits itself.

        Call it before the request can become READY: from then on its caller writes to the pages that others copy.
        """
        if request.component_pages is not None:
            self.serve_waiters(request)
            self._state.run_guarded(partial(self.watch, request))

    def serve_waiters(self, request: Request) -> None:
        """Start the copies to the waiters of a request, if everything of its end is in place. Raises nothing but
        BrokenInvariant.
        """
        sender, room = request.component_pages, request.room
        if sender is None or sender.copies or room is None or not room.is_complete:
            return
        if not sender.waiters and not request.early.is_wanted:
            return
        # From here on nothing joins: a caller that begins early writes to these pages.
        self._close(sender)
        if sender.waiters:
            # No remote writer is left, and the pages stay until the copies have ended.
            sender.write_ended()
        for waiter in list(sender.waiters):
            ask = partial(self._ask_itself, waiter, "end_copy_failed")
            self._state.run_guarded(partial(self._copy, sender, waiter), recover=ask)

    def _copy(self, sender: RequestComponents, waiter: RequestComponents) -> None:
        state, pages = self._state, 0
        with Rollback() as undo:
            undo.callback(state.take_commands_back, len(state.out))
            for name, first in waiter.plan.received.items():
                at = first - sender.plan.firsts[name]
                source, target = sender.plan.tables[name][at:], waiter.plan.tables[name][at:]
                positions = page_ids(range(first, first + len(source)))
                copy = SharedEndCopy(self, sender, waiter, name, positions)
                op = copy.op = state.start_operation(copy, deadline_s=state.settings.copy_deadline_s)
                undo.callback(self._uncount, copy, op)
                sender.copy_began()
                waiter.copy_began()
                state.emit(
                    CopyPages(
                        op=op,
                        component=name,
                        source="device",
                        source_pages=source,
                        target="device",
                        target_pages=target,
                    )
                )
                pages += len(source)
            undo.keep()
        self._part(waiter)
        state.count("shared_component_pages", pages)

    def _uncount(self, copy: SharedEndCopy, op: int) -> None:
        copy.sender.copy_ended()
        copy.waiter.copy_ended()
        self._state.end_operation(op)

    def copied(self, copy: SharedEndCopy, error: str) -> None:
        """Record the end of a copy. After an error the waiter asks its prefill. After a raise, `settle` continues."""
        if error:
            self._state.count("copies_failed")
            self._missing.lost(copy.waiter, copy.component, copy.positions, "end_copy_failed")
        copy.sender.copy_ended()
        copy.waiter.copy_ended()
        self.settle(copy)

    def settle(self, copy: SharedEndCopy) -> None:
        """Let both requests of an ended copy move on, or free the pages of those that have left."""
        self._settle(copy.sender)
        self._settle(copy.waiter)

    def copy_is_late(self, copy: SharedEndCopy) -> None:
        """Give both requests of a copy fresh pages. The old ones stay until it ends. Can be called again.

        A sender of which another copy reads as well keeps its pages, and waits for both: one that ends would free them
        under the other.
        """
        if not copy.is_counted:
            copy.is_counted = True
            self._state.count("copies_late")
        is_read = self._has_other_reader(copy)
        going_on = [copy.waiter] if is_read else [copy.sender, copy.waiter]
        if any(held.request is not None for held in going_on):
            waiting = [(held, copy.positions) for held in going_on]
            kept = [copy.sender] if is_read else []
            self._missing.late(copy, copy.op, copy.component, waiting, "end_copy_late", kept=kept)

    def _has_other_reader(self, copy: SharedEndCopy) -> bool:
        """Whether another copy reads the same pages of the sender: one to another waiter, be it late or not."""
        for other in self._state.operations.values():
            match other:
                case SharedEndCopy(sender=copy.sender, component=copy.component) if other is not copy:
                    return True
                case LateComponentCopy(component=copy.component) if copy.sender in other.left:
                    return True
        return False

    # --- The ends ---

    def leave(self, component_pages: RequestComponents) -> None:
        """Detach component pages whose request is READY or about to leave. The oldest waiter that still waits asks its
        own prefill, and the others wait for it.
        """
        self._close(component_pages)
        self._part(component_pages)
        for first in component_pages.waiters:
            self._pass_on(component_pages, first, "end_sender_left")
            return

    def _pass_on(self, sender: RequestComponents, first: RequestComponents, cause: str) -> None:
        """Let a waiter ask its own prefill instead of the sender, and the other waiters wait for that."""
        self._state.count("shared_ends_passed_on")
        self._ask_itself(first, cause)
        for other in list(sender.waiters):
            self._part(other)
            other.join(first)
            if other.request is not None:
                # It watches its new sender from now on.
                self._state.request_changed(other.request)

    def _close(self, sender: RequestComponents) -> None:
        """Let no further request join."""
        if sender.end is not None and self._senders.get(sender.end) is sender:
            del self._senders[sender.end]
        sender.close_end()

    def _part(self, waiter: RequestComponents) -> None:
        """Detach a waiter from its sender."""
        waiter.part()
        self._state.operations.pop(self.watches.pop(waiter, 0), None)

    def _ask_itself(self, waiter: RequestComponents, cause: str) -> None:
        """Let a waiter ask its own prefill for what its sender was to bring, and be the next sender."""
        self._part(waiter)
        request = waiter.request
        if request is not None and waiter.plan.received:
            received = waiter.plan.receive_nothing()
            for name, first in received.items():
                self._missing.lost(waiter, name, range(first, request.page_count), cause)
            self._open(request, waiter)

    # --- The sender is slow ---

    def watch(self, request: Request) -> None:
        """Set a deadline if the request only waits for its sender."""
        waiter = request.component_pages
        if waiter is None or waiter.sender is None or waiter in self.watches:
            return
        if request.room is None or not request.room.is_complete or request.loads or waiter.copies:
            return
        # At most half of the remaining time, so that there is time to ask its own prefill.
        left_s = request.deadline_at_s - self._state.now_s
        self._watch(waiter, min(self._state.settings.share_wait_s, max(left_s / 2, 0.0)))

    def _watch(self, waiter: RequestComponents, wait_s: float) -> None:
        assert waiter.sender is not None
        watch = SharedEndWatch(self, waiter, _progress(waiter.sender))
        self.watches[waiter] = self._state.start_operation(watch, deadline_s=wait_s)

    def is_late(self, watch: SharedEndWatch) -> None:
        """Handle the end of a watch: if nothing has arrived since it began, the waiter asks its own prefill. Can be
        called again after an exception.
        """
        waiter = watch.waiter
        self._state.operations.pop(self.watches.pop(waiter, 0), None)
        if waiter.sender is None:
            return
        if _progress(waiter.sender) != watch.progress:
            self._watch(waiter, self._state.settings.share_wait_s)
            return
        sender = waiter.sender
        self._close(sender)
        self._pass_on(sender, waiter, "end_sender_slow")


def _progress(sender: RequestComponents) -> tuple[int, ...]:
    """The progress of a sender, which changes whenever something of its end may have arrived."""
    room = None if sender.request is None else sender.request.room
    if room is None:
        return ()
    missing = (span.pages_missing(room.ranks) for span in room.spans)
    return sender.copies, len(room.aux_from), *missing
