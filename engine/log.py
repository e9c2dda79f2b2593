"""What the engine logs of its core, and the fields that records of a request have.

`tidekv.transports.log` has the logger, which transports use as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tidekv.states.events import WriterDead, WriterLost
from tidekv.transports.log import engine_log

if TYPE_CHECKING:
    from tidekv.states.commands import Command
    from tidekv.states.core import Core
    from tidekv.states.events import Event
    from tidekv.states.request.request import Request

__all__ = ["CoreLog", "engine_log", "request_fields"]


def request_fields(request: Request) -> dict[str, object]:
    """Return the fields to bind for a request of the core."""
    return {
        "request_id": request.request_id,
        "generation": request.generation,
        "state": request.state.value,
    }


class CoreLog:
    """Logs what a running core survives or changes by itself: rules that raise, the storage breaker, lost peers."""

    def __init__(self, core: Core, name: str = "tidekv.engine") -> None:
        self._log = engine_log(name)
        self.follow(core)

    def follow(self, core: Core) -> None:
        """Log of this core from now on; it has taken no event."""
        self._core = core
        self._breaker_is_open = False
        core.state.raise_watchers.append(self._note_raise)

    def of_command(self, command: Command) -> Any:  # Any: a logger of structlog, see `engine_log`.
        """Return a logger with the command, and with the fields of its request if it is of one that lives."""
        log = self._log.bind(command=type(command).__name__)
        op, request_id = getattr(command, "op", None), getattr(command, "request_id", None)
        if op is not None:
            log = log.bind(op=op)
        request = None if request_id is None else self._core.request(request_id)
        if request is not None:
            return log.bind(**request_fields(request))
        return log if request_id is None else log.bind(request_id=request_id)

    def end_turn(self) -> None:
        """Log a change of the storage breaker. Call it when the core has taken the events of a turn."""
        is_open = self._core.storage.is_open
        if is_open != self._breaker_is_open:
            self._breaker_is_open = is_open
            if is_open:
                self._log.warning("storage is not used until a probe succeeds: the breaker opened")
            else:
                self._log.info("storage is used again: the breaker closed")

    def note_event(self, event: Event) -> None:
        """Log the loss of a peer, if that is what the event reports."""
        if type(event) is WriterLost:
            self._log.warning("a prefill peer is unreachable: its rooms fail", peer=event.writer, cause=event.cause)
        elif type(event) is WriterDead:
            self._log.info("a prefill peer is dead: its pages are free", peer=event.writer)

    def _note_raise(self, request: Request | None) -> None:
        log = self._log.bind(rule=self._core.state.raises[-1].rule)
        if request is None:
            log.error("a rule of the core raised, the core goes on", exc_info=True)
        else:
            log = log.bind(**request_fields(request))
            log.error("a rule of the core raised, the request falls back", exc_info=True)
