"""Log of rules that raise: the core records what it survives, and logs nothing itself."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidekv.states.commands import Command
    from tidekv.states.core import Core
    from tidekv.states.events import Event

LOG = logging.getLogger("tidekv.engine")


class RaiseLog:
    """Watcher that logs each raise of a step once, with its traceback."""

    def __init__(self, core: Core) -> None:
        self._state = core.state

    def stepped(self, event: Event, given: list[Command], error: str = "") -> None:
        """Log the raises of the step that the core has just made."""
        for raised in self._state.raises:
            pays = f"request {raised.request_id!r} falls back" if raised.request_id else "the engine goes on"
            LOG.error(
                "%s raised while the core took %s; %s:\n%s", raised.rule, type(event).__name__, pays, raised.detail
            )
