"""The receiving side of a room: the requested spans, and the check of every reported chunk against them.

Chunks of a span follow one another without gap or overlap and end exactly at its end. Span 0 of each component that was
requested ends before the last chunk of span 0 of the full pages. Control frames arrive in order, so anything else is a
bug of the peer. Performs no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tidekv.states.errors import LocalProtocolError, RemoteProtocolError
from tidekv.states.types import FULL


class _ExpectedSpan(msgspec.Struct):
    """One requested span: pages [first, cursor) have arrived, [cursor, end) have not."""

    cursor: int
    end: int
    ended: bool = False


class ReceiverRoom:
    """The receiving side of one room."""

    def __init__(self, *, first: int, count: int, component_pages: Mapping[str, tuple[int, int]] | None = None) -> None:
        """Span 0 is pages [first, first + count) of the prompt. `component_pages` has the same two numbers of span 0 of
        each component that is requested.
        """
        self.has_aux = False
        self._spans = {(FULL, 0): _ExpectedSpan(first, first + count)}
        for name, (at, pages) in (component_pages or {}).items():
            self._spans[name, 0] = _ExpectedSpan(at, at + pages)
        self._component_of: dict[int, str] = {}
        """Component of each further span."""

    def extend(self, span: int, first: int, count: int, component: str = FULL) -> None:
        """Request a further span. Raises LocalProtocolError if the number was used before."""
        if span == 0 or span in self._component_of:
            raise LocalProtocolError(f"span {span} was requested already")
        self._component_of[span] = component
        self._spans[component, span] = _ExpectedSpan(first, first + count)

    def receive(self, *, span: int, first: int, count: int, last: bool, component: str = FULL) -> None:
        """Accept prefill's report of a chunk. Raises RemoteProtocolError, and then changes nothing."""
        expected, end = self._spans.get((component, span)), first + count
        wrong = ""
        if expected is None:
            wrong = "was never requested, or was refused"
        elif expected.ended:
            wrong = "comes after the span's last one"
        elif first != expected.cursor or end > expected.end:
            wrong = f"does not continue at its cursor: [{expected.cursor}, {expected.end})"
        elif last and end != expected.end:
            wrong = f"is marked as the last; the span ends at {expected.end}"
        elif last and (component, span) == (FULL, 0) and (missing := self._missing_component):
            wrong = f"is marked as the last; the pages of {missing!r} were not sent"
        else:
            expected.cursor, expected.ended = end, last
        if wrong:
            of = "" if component == FULL else f" of component {component!r}"
            raise RemoteProtocolError(f"chunk [{first}, {end}) of span {span}{of} {wrong}")

    @property
    def _missing_component(self) -> str:
        """A component of which span 0 has not ended; empty if there is none."""
        missing = (name for (name, span), each in self._spans.items() if span == 0 and name != FULL and not each.ended)
        return min(missing, default="")

    def refuse(self, span: int) -> None:
        """Remove a span that prefill refuses; 0 is that of the full pages. Raises RemoteProtocolError if it was not
        requested or is complete.
        """
        key = (self._component_of.get(span, FULL), span)
        expected = self._spans.get(key)
        if expected is None or expected.ended:
            raise RemoteProtocolError(f"span {span} is refused, but was not requested or is complete")
        del self._spans[key]
