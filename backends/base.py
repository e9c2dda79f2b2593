"""The polling interface between backends and the driver. No backend spins, or blocks the loop, by itself.

NIXL transfers and file I/O have no descriptor that a loop could wait on: they have to be polled. Each is a `Pollable`;
the driver's poller is the only thread that touches it between `submit` and the outcome.
"""

from __future__ import annotations

import asyncio
from typing import Protocol


class Pollable(Protocol):
    """One operation that is started once, polled until it is over, and then released.

    All calls come from one thread, which is not the event loop's. `post` and `check` may raise; that ends the operation
    like a True does, so an implementation raises only if nothing is in flight any more. `release` is called exactly
    once after the end, never before it.
    """

    @property
    def rounds(self) -> int:
        """Number of checks to do without a pause: 0, or the length of a list that advances only while it is polled."""

    def post(self) -> bool:
        """Start; returns True if it is already over."""

    def check(self) -> bool:
        """Return True once it is over."""

    def release(self) -> None:
        """Release what the operation holds."""


class Poller(Protocol):
    """Drives operations to their end."""

    def submit(self, pollable: Pollable) -> asyncio.Future[None]:
        """Start an operation and drive it to its end. Call it on the loop's thread.

        The future has the outcome: None, or what `post`, `check` or `release` raised. Cancelling the future abandons
        the outcome, not the operation: it is still driven to its end and released then.
        """
