"""What the engine logs of its core and of its requests, and the fields that records of a request have.

`tidekv.transports.log` has the logger, which transports use as well.
"""

from __future__ import annotations

import logging
from contextvars import Context
from typing import TYPE_CHECKING, TypeAlias, get_args

from tidekv.states.commands import (
    ReportDropped,
    ReportFailed,
    ReportFinished,
    ReportReady,
    ReportRestored,
    ReportRetracted,
)
from tidekv.states.events import RequestArrived, WriterDead, WriterLost
from tidekv.transports.log import EngineLog, engine_log, own_context, run_in

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidekv.states.commands import Command
    from tidekv.states.core import Core
    from tidekv.states.events import Event
    from tidekv.states.records.request import Request

End: TypeAlias = ReportReady | ReportRestored | ReportFailed | ReportFinished | ReportRetracted | ReportDropped
ENDS = get_args(End)
"""Commands that end the wait of a request, or the request."""

__all__ = ["CoreLog", "EngineLog", "engine_log", "own_context", "request_fields", "run_in"]


def request_fields(request: Request) -> dict[str, object]:
    """Return the fields to bind for a request of the core."""
    return {
        "request_id": request.request_id,
        "generation": request.generation,
        "state": request.state.value,
    }


class LoggedRequest:
    """A live request in the log: the context of its caller, and how long it has waited in each state."""

    __slots__ = ("_arrived_at_s", "_context", "_since_s", "_state", "_waits_s")

    def __init__(self, context: Context, *, at_s: float) -> None:
        self._context = context
        self._arrived_at_s = self._since_s = at_s
        self._state = ""
        self._waits_s: dict[str, float] = {}

    def move(self, state: str, at_s: float) -> None:
        """Note the state that the request is in from now on."""
        if self._state:
            self._waits_s[self._state] = self._waits_s.get(self._state, 0.0) + at_s - self._since_s
        self._state, self._since_s = state, at_s

    def log(self, log: EngineLog, what: str, **fields: object) -> None:
        """Log the request's arrival or end, with its caller's trace id if that has one."""
        # A copy: a context cannot be entered twice, and the caller may be in it.
        self._context.copy().run(log.info, what, **fields)

    def waits(self, at_s: float) -> dict[str, object]:
        """Return the milliseconds since its arrival, and in each state."""
        return {
            "after_ms": round((at_s - self._arrived_at_s) * 1e3, 1),
            "waits_ms": {state: round(waited_s * 1e3, 1) for state, waited_s in self._waits_s.items()},
        }


class CoreLog:
    """Logs the requests of a running core, and what it survives or changes by itself: rules that raise, the storage
    breaker, lost peers. A watcher of the driver.
    """

    def __init__(self, core: Core, name: str = "tidekv.engine", *, instance: str = "") -> None:
        self.context_of: Callable[[str], Context] = lambda request_id: Context()
        """Returns the context of the caller of a request that arrives."""
        self._log = engine_log(name, instance=instance) if instance else engine_log(name)
        self._requests: dict[str, LoggedRequest] = {}
        self._is_silent = False
        """Records of requests are not made any more: the application's configuration raises."""
        self.follow(core)

    def follow(self, core: Core) -> None:
        """Log of this core from now on; it has taken no event."""
        self._core = core
        self._requests.clear()
        self._breaker_is_open = False
        core.state.raise_watchers.append(self._note_raise)

    def stepped(self, event: Event, given: list[Command], error: str = "") -> None:
        """Log the requests that arrived and ended by the core's last step, at level info."""
        arrived = type(event) is RequestArrived and not error and self._log.takes("info")
        if not (arrived or self._requests) or self._is_silent:
            return
        try:
            if arrived:
                assert isinstance(event, RequestArrived)
                self._note_arrival(event)
            for request_id, state in self._core.moves:
                if (request := self._requests.get(request_id)) is not None:
                    request.move(state._value_, event.at_s)
            for command in given:
                if isinstance(command, ENDS):
                    self._note_end(command, event.at_s)
        except Exception as raised:
            # A processor or a renderer of the application. It must not end the engine, whose watcher this is.
            self._is_silent = True
            self._requests.clear()
            fallback = logging.getLogger(self._log.name)
            fallback.error("the log's configuration raised: requests are not logged any more", exc_info=raised)

    def _note_arrival(self, event: RequestArrived) -> None:
        request = self._requests[event.request_id] = LoggedRequest(self.context_of(event.request_id), at_s=event.at_s)
        fields = {"request_id": event.request_id, "tokens": event.prompt_tokens, "prefills": list(event.prefills)}
        request.log(self._log, "a request arrived", **fields)

    def _note_end(self, command: End, at_s: float) -> None:
        request = self._requests.get(command.request_id)
        if request is None:
            return
        log = self._log.bind(request_id=command.request_id)
        if isinstance(command, ReportReady):
            request.log(log, "a request is ready", sources=command.sources, **request.waits(at_s))
            return
        del self._requests[command.request_id]
        if isinstance(command, ReportRestored):
            fields = {"tokens_in_place": command.restored_tokens, "cause": command.cause, "sources": command.sources}
            request.log(log, "a request was restored", **fields, **request.waits(at_s))
        elif isinstance(command, ReportFailed):
            request.log(log, "a request failed", cause=command.cause, **request.waits(at_s))
        elif isinstance(command, ReportFinished):
            request.log(log, "a request has finished", pages_new_in_cache=command.inserted, **request.waits(at_s))
        elif isinstance(command, ReportRetracted):
            request.log(log, "a request was retracted", pages_held=command.held_pages, **request.waits(at_s))
        else:
            request.log(log, "a request was aborted after it had been ready", **request.waits(at_s))

    def of_command(self, command: Command) -> EngineLog:
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
