"""Exceptions of rules that the core survives, as facts for the log, the metrics and the journal."""

from __future__ import annotations

import sys
import traceback
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from tidekv.states.records.request import Request

DISPATCHING: Final = (
    "tidekv.states.core",
    "tidekv.states.core_state",
    "tidekv.states.request.table",
)
"""Modules that call rules."""


class Raise(msgspec.Struct, frozen=True):
    """An exception that a rule raised, and that the core survived."""

    rule: str
    """The rule, as `Class.method`: one of the functions of this package."""
    request_id: str
    """The request that falls back; empty if the rule is of no single request."""
    error: str
    """The exception in one line."""
    detail: str
    """The traceback."""


def raise_of(request: Request | None) -> Raise:
    """Describe the exception that is being handled; `request` falls back."""
    error = sys.exception()
    assert error is not None, "raise_of was called outside of an except block"
    return Raise(
        rule=rule_of(error),
        request_id="" if request is None else request.request_id,
        error="".join(traceback.format_exception_only(error)).strip().splitlines()[-1],
        detail=traceback.format_exc(),
    )


def rule_of(error: BaseException) -> str:
    """Name the first function of the core below its dispatching that was running when `error` was raised."""
    name = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_globals.get("__name__", "")
        if module.startswith("tidekv.states."):
            name = frame.f_code.co_qualname
            if module not in DISPATCHING and "<lambda>" not in name:
                break
    return name
