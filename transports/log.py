"""The log, by structlog: an event in words, and fields with their values.

    LOG = engine_log("tidekv.engine")
    LOG.warning("the event loop stalls", stalled_ms=300, where=…)
    log = LOG.bind(request_id=request_id, generation=generation)

The application configures the output. If it has configured structlog, its wrapper class and its processors take every
record, with `logger`, `level` and `instance` among the fields. Otherwise records go to the standard library's logger of
that name, as "event: field=value …"; the fields are in `record.tidekv` as well. In both cases the level of the standard
library's logger holds, and the call site of a record is the line that logs it.

An exception is given as text, in the field `exception`. `exc_info` would have its frames, and formatters that render
the local variables of frames would write prompts to the log.

Records belong to an engine, not to the caller that happened to wake it: see `own_context`.
"""

from __future__ import annotations

import logging
import sys
import traceback
import types
from contextvars import Context, ContextVar
from typing import TYPE_CHECKING, Any, Final, TypeVar

import structlog

from tidekv.states.validation import printable, printable_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator, Mapping

    from structlog.typing import EventDict, WrappedLogger

LAST = ("stack", "traceback", "exception")
"""Fields of several lines: they stand behind the others, on lines of their own."""
LEVELS: Final = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}
T = TypeVar("T")
_INSTANCE: ContextVar[str] = ContextVar("tidekv_instance", default="")


def engine_log(name: str, **bound: object) -> EngineLog:
    """Return a logger with these fields bound. It can be made at import: the configuration is read at each record."""
    return EngineLog(name, bound)


class EngineLog:
    """A logger of structlog by the configuration of the application, or of the standard library without one.

    Its methods are properties: they return the method of the logger in use, so that the caller calls that directly and
    is the call site of the record.
    """

    __slots__ = ("_bound", "name")

    def __init__(self, name: str, bound: Mapping[str, object]) -> None:
        self.name = name
        self._bound = dict(bound)

    def bind(self, **fields: object) -> EngineLog:
        """Return a logger with these fields as well."""
        return EngineLog(self.name, {**self._bound, **fields})

    def takes(self, level: str) -> bool:
        """Whether records of that level go anywhere; a configured structlog may still drop them."""
        if structlog.is_configured():
            return _level_of(self.name) <= LEVELS[level]
        return logging.getLogger(self.name).isEnabledFor(LEVELS[level])

    @property
    def debug(self) -> Callable[..., None]:
        """Log at this level: `log.debug("event in words", field=value)`."""
        return self._method("debug")

    @property
    def info(self) -> Callable[..., None]:
        """As `debug`."""
        return self._method("info")

    @property
    def warning(self) -> Callable[..., None]:
        """As `debug`."""
        return self._method("warning")

    @property
    def error(self) -> Callable[..., None]:
        """As `debug`."""
        return self._method("error")

    @property
    def critical(self) -> Callable[..., None]:
        """As `debug`."""
        return self._method("critical")

    @property
    def exception(self) -> Callable[..., None]:
        """Log at level error, with the traceback of the exception that is being handled."""
        return self._method("error", exc_info=True)

    def _method(self, level: str, **more: object) -> Callable[..., None]:
        if not self.takes(level):
            return _drop
        fields = {**self._bound, **more}
        if not structlog.is_configured():
            return _StandardMethod(logging.getLogger(self.name), level, fields)
        given = structlog.get_config()
        wrapper_class = given["wrapper_class"]
        if issubclass(wrapper_class, structlog.stdlib.AsyncBoundLogger):
            # Its methods are coroutine functions, and it can be made on a running loop only.
            wrapper_class = structlog.stdlib.BoundLogger
        bound: Any = structlog.wrap_logger(  # Any: of the class that the application has chosen.
            given["logger_factory"](self.name),
            processors=[_completed(self.name, level), *given["processors"]],
            wrapper_class=wrapper_class,
            context_class=given["context_class"],
        ).bind(**fields)
        method: Callable[..., None] = getattr(bound, level)
        return method


class _StandardMethod:
    """A method of a logger of the standard library that takes fields."""

    __slots__ = ("_fields", "_level", "_logger")

    def __init__(self, logger: logging.Logger, level: str, fields: dict[str, object]) -> None:
        self._logger = logger
        self._level = LEVELS[level]
        self._fields = fields

    def __call__(self, event: str, **fields: object) -> None:
        given = _with_text({**self._fields, **fields})
        if instance := _INSTANCE.get():
            given.setdefault("instance", instance)
        # `%` in values must not be taken for a format: the logger is given no arguments.
        text, extra = event + _in_words(given), {"tidekv": {"event": event, **given}}
        self._logger.log(self._level, text, extra=extra, stacklevel=2)


def _drop(event: str, **fields: object) -> None:
    """Take a record that goes nowhere."""


def _completed(name: str, level: str) -> Callable[[WrappedLogger, str, EventDict], EventDict]:
    """Return the processor in front of those of the application."""

    def complete(logger: WrappedLogger, method: str, fields: EventDict) -> EventDict:
        given = {**_with_text(dict(fields)), "logger": name, "level": level}
        if instance := _INSTANCE.get():
            given.setdefault("instance", instance)
        return given

    return complete


def _with_text(fields: dict[str, object]) -> dict[str, object]:
    """Return the fields with the traceback as text instead of an exception."""
    error = fields.pop("exc_info", None)
    if error is True:
        error = sys.exc_info()[1]
    if isinstance(error, BaseException):
        fields["exception"] = "".join(traceback.format_exception(error)).rstrip()
    return fields


def _level_of(name: str) -> int:
    """Return the level that was set for a logger of tidekv, INFO if none was.

    The root's is not asked: a structlog that does not write to the standard library leaves it at WARNING. No logger is
    made here: those that structlog makes of the standard library have a class of its own, which finds call sites.
    """
    while name:
        logger = logging.root.manager.loggerDict.get(name)
        if isinstance(logger, logging.Logger) and logger.level:
            return logger.level
        name = name.rpartition(".")[0]
    return logging.INFO


def _in_words(fields: Mapping[str, object]) -> str:
    short = [f"{name}={_value(value)}" for name, value in fields.items() if name not in LAST]
    long = [f"\n{printable_lines(str(fields[name]))}" for name in LAST if name in fields]
    return (": " if short else "") + " ".join(short) + "".join(long)


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, str) and (not value or " " in value or not value.isprintable()):
        return repr(value)
    return printable(value)


# --- Contexts ---


def own_context(instance: str = "") -> Context:
    """Return a context of an engine: it has no variable of a caller, and names the instance in records.

    A task or a callback inherits the context of the code that makes it. Those of an engine outlive the request that
    woke them, and would put its trace id on the records of others. Without `instance` it is that of the current
    context.
    """
    context = Context()
    context.run(_INSTANCE.set, instance or _INSTANCE.get())
    return context


@types.coroutine
def run_in(context: Context, work: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:  # Any: what event loops exchange.
    """Await a coroutine with its steps in a context, in the task of the caller, whose cancellation it takes."""
    step: Callable[[Any], Any] = work.send
    given: Any = None
    while True:
        try:
            waits_for = context.run(step, given)
        except StopIteration as ended:
            result: T = ended.value
            return result
        try:
            given = yield waits_for
            step = work.send
        except BaseException as error:  # A cancellation, or the end of this generator: the coroutine takes both.
            step, given = work.throw, error
