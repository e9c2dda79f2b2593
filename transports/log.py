"""The log, by structlog: an event in words, and fields with their values.

    LOG = engine_log("tidekv.engine")
    LOG.warning("the event loop stalls", stalled_ms=300, where=…)
    log = LOG.bind(request_id=request_id, generation=generation)

The application configures the output. If it has configured structlog, its processors take every record. Otherwise
records go to the standard library's logger of that name, at its level, as "event: field=value …"; the fields are in
`record.tidekv` as well.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import structlog

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from structlog.typing import EventDict, WrappedLogger

LAST = ("stack", "traceback")
"""Fields of several lines: they stand behind the others, on lines of their own."""


def engine_log(name: str, **bound: object) -> Any:  # Any: structlog's loggers take every field.
    """Return a logger with these fields bound. It can be made at import: the configuration is read at each record."""
    return structlog.wrap_logger(
        logging.getLogger(name), processors=[_hand_over], wrapper_class=structlog.stdlib.BoundLogger
    ).bind(**bound)


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
