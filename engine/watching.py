"""Interface of what watches the core: journal, metrics, KV events, spans."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tidekv.states.commands import Command
    from tidekv.states.events import Event


class Watcher(Protocol):
    """Receives every step of the core: the journal, the metrics."""

    def stepped(self, event: Event, given: list[Command], error: str = "") -> None:
        """The core has taken an event and gave these commands, of which only those of RESTORED were started; the core
        is as the step left it. Never blocks, never raises. `error` is the class of the error that the step raised.
        """
