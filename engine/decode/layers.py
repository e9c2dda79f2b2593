"""Layers of a request that its caller may use: which are in place, and what happens when a source of them fails.

    wait(i) ──in place──▶ the caller computes layer i
            ──LayersLost──▶ the caller stops ──wait(0)──▶ its use has ended: `on_end`, then as above
                                             ──abort────▶ the same, and the request ends

The engine calls the other methods on its loop, as the core reports.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tidekv.states.errors import LayersLost

if TYPE_CHECKING:
    from collections.abc import Callable


class LayerProgress:
    """Layers in place of one request with `early`.

    `on_end` is called with the number of a use that has ended, `on_grown` with the pages that the caller has taken from
    the reserve before READY.
    """

    def __init__(
        self,
        request_id: str,
        *,
        layer_count: int,
        on_end: Callable[[int], None],
        on_grown: Callable[[int], None],
    ) -> None:
        self.in_place = 0
        """Number of leading layers of which all pages are in place. Any thread may read it."""
        self.is_complete = False
        """Whether the request is READY, and its caller knows all of its pages."""
        self.grown = 0
        """Pages taken from the reserve before the request was READY."""
        self._request_id = request_id
        self._layer_count = layer_count
        self._on_end = on_end
        self._on_grown = on_grown
        self._op = 0
        self._lost: str | None = None
        self._has_raised = False
        self._finish: Callable[..., None] | None = None
        self._failure: Exception | None = None
        self._waiters: list[asyncio.Future[None]] = []

    # --- The caller ---

    async def wait(self, layer: int) -> None:
        """Wait until a layer of all pages is in place; see `ReadyRequest.wait_layer`, which checks the layer."""
        if self._has_raised:
            self.end_use()
        while not self.is_complete:
            if self._lost is not None:
                cause, self._lost, self._has_raised = self._lost, None, True
                raise LayersLost(self._request_id, cause)
            if self._failure is not None:
                raise self._failure
            if layer < self.in_place:
                return
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    @property
    def is_used(self) -> bool:
        """Whether the caller may still use pages that the engine keeps for it, of a request that is not READY."""
        return self._op > 0

    def end_use(self) -> None:
        """End the caller's use of the pages: it has stopped. Does nothing if there is none."""
        self._lost, self._has_raised = None, False
        op, self._op = self._op, 0
        if op:
            self._on_end(op)
        finish, self._finish = self._finish, None
        if finish is not None:
            self._complete(finish, is_renewed=True)

    # --- The engine ---

    def begin(self, op: int, layers: int) -> None:
        """Record an early READY, use `op` of the pages."""
        self._op, self.grown = op, 0
        self.advance(layers)

    def advance(self, layers: int) -> None:
        """Record that the first layers are in place."""
        # The last one is in place with READY: from then on the pages can be given back. With pipeline stages a stage of
        # more layers may be further than this one's last.
        self.in_place = min(layers, self._layer_count - 1)
        self._wake()

    def lose(self, cause: str) -> None:
        """Record that a source of the pages has failed."""
        self.in_place = 0
        self._lost = cause
        self._wake()

    def complete(self, finish: Callable[..., None], *, ends_use: bool) -> None:
        """Record READY. `finish(is_renewed=…)` updates the caller's request: now, or, if the caller has not stopped yet
        after a loss, when it has. `is_renewed` tells whether the caller is to begin again. `ends_use`: READY of the
        pages in use, by which the core has ended the use.
        """
        if self._lost is not None or self._has_raised:
            self._finish = finish
        else:
            self._complete(finish, is_renewed=not self._op)
        if ends_use:
            # Its end is not reported: after the loss of a rank, another operation may have the number.
            self._op = 0
        self._wake()

    def _complete(self, finish: Callable[..., None], *, is_renewed: bool) -> None:
        finish(is_renewed=is_renewed)
        self.in_place, self.is_complete = self._layer_count, True
        if self.grown and not is_renewed:
            self._on_grown(self.grown)
        self.grown = 0

    def fail(self, error: Exception) -> None:
        """Record that the request has ended without READY, or that its pages are no longer the caller's."""
        self.in_place, self.is_complete, self._failure = 0, False, error
        self._finish = None
        self._wake()

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
