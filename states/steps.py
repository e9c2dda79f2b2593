"""Triggers of the request machine that the core itself pulls. They follow from events and are never journalled."""

from __future__ import annotations

from tidekv.states.events import Event


class Granted(Event, frozen=True, kw_only=True):
    """There is room for the request: match, lock and reserve were done, all or nothing."""


class PlanDue(Event, frozen=True, kw_only=True):
    """All that the plan depends on is known."""


class Progressed(Event, frozen=True, kw_only=True):
    """Something that the request waited for has come."""


class PagesLost(Event, frozen=True, kw_only=True):
    """Pages that the request was to share belong to somebody's writer now; it starts over on others."""

    cause: str


class DeadlinePassed(Event, frozen=True, kw_only=True):
    """The caller's deadline has come before the request was ready."""


class TransitionRaised(Event, frozen=True, kw_only=True):
    """A rule of this request raised; nothing was changed by it. `detail` is the traceback."""

    detail: str
