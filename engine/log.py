"""The engine's log, by structlog: an event in words, and fields with their values.

    LOG = engine_log("tidekv.engine")
    LOG.warning("the event loop was held up", held_up_ms=300, stack=…)
    log = LOG.bind(request_id=request.request_id, generation=request.generation, state=request.state.value)

The application configures the output. If it has configured structlog, its processors take every record. Otherwise
records go to the standard library's logger of that name, at its level, as "event: field=value …"; the fields are in
`record.tidekv` as well.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import structlog

from tidekv.states.events import WriterDead, WriterLost

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from structlog.typing import EventDict, WrappedLogger

    from tidekv.states.commands import Command
    from tidekv.states.core import Core
    from tidekv.states.events import Event
    from tidekv.states.request.request import Request

LAST = ("stack", "traceback")
"""Fields of several lines: they stand behind the others, on lines of their own."""


def engine_log(name: str, **bound: object) -> Any:  # Any: structlog's loggers take every field.
    """Return a logger with these fields bound. It can be made at import: the configuration is read at each record."""
    return structlog.wrap_logger(
        logging.getLogger(name), processors=[_hand_over], wrapper_class=structlog.stdlib.BoundLogger
    ).bind(**bound)


def request_fields(request: Request) -> dict[str, object]:
    """Return the fields to bind for a request of the core."""
    return {
        "request_id": request.request_id,
        "generation": request.generation,
        "state": request.state.value,
    }


def _hand_over(logger: WrappedLogger, method: str, fields: EventDict) -> tuple[tuple[str], dict[str, object]]:
    """Give a record to the application's structlog, or else make a record of the standard library of it."""
    if structlog.is_configured():
        getattr(structlog.get_logger(logger.name), method)(**fields)
        raise structlog.DropEvent
    if not logger.isEnabledFor(LEVELS.get(method, logging.ERROR)):
        raise structlog.DropEvent
    given: dict[str, object] = {}
    exc_info = fields.pop("exc_info", None) or (method == "exception")
    if exc_info:
        given["exc_info"] = exc_info
    event = str(fields.pop("event"))
    # `%` in values must not be taken for a format: the logger is given no arguments.
    return (event + _in_words(fields),), {"extra": {"tidekv": {"event": event, **fields}}, **given}


LEVELS = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error", "critical")}


def _in_words(fields: MutableMapping[str, object]) -> str:
    short = [f"{name}={_value(value)}" for name, value in fields.items() if name not in LAST]
    long = [f"\n{fields[name]}" for name in LAST if name in fields]
    return (": " if short else "") + " ".join(short) + "".join(long)


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    text = str(value)
    return repr(text) if isinstance(value, str) and (not text or " " in text) else text


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
