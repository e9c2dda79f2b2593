"""The receiving side of a room: the requested spans, and the check of every reported chunk against them.

Chunks of a span follow one another without gap or overlap and end exactly at its end. The component pages that were
requested are reported before the last chunk of span 0. Control frames arrive in order, so anything else is a bug of the
peer. Performs no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from tidekv.states.errors import LocalProtocolError, RemoteProtocolError


class _ExpectedSpan(msgspec.Struct):
    """One requested span: pages [first, cursor) have landed, [cursor, end) have not."""

    cursor: int
    end: int
    ended: bool = False


class ReceiverRoom:
    """The receiving side of one room."""

    def __init__(self, *, first: int, count: int, component_pages: Iterable[str] = ()) -> None:
        """Span 0 is pages [first, first + count) of the prompt; `component_pages` names the requested components."""
        self.has_aux = False
        self._component_pages = set(component_pages)
        """Requested components that have not landed yet."""
        self._spans = {0: _ExpectedSpan(first, first + count)}

    def extend(self, span: int, first: int, count: int) -> None:
        """Request a further span. Raises LocalProtocolError if the number was used before."""
        if span in self._spans:
            raise LocalProtocolError(f"span {span} was requested already")
        self._spans[span] = _ExpectedSpan(first, first + count)

    def land(self, *, span: int, first: int, count: int, last: bool) -> None:
        """Accept prefill's report of a chunk. Raises RemoteProtocolError, and then changes nothing."""
        expected = self._spans.get(span)
        chunk = f"chunk [{first}, {first + count}) of span {span}"
        if expected is None:
            raise RemoteProtocolError(f"{chunk} was never requested, or was refused")
        if expected.ended:
            raise RemoteProtocolError(f"{chunk} comes after the span's last one")
        if first != expected.cursor or first + count > expected.end:
            raise RemoteProtocolError(f"{chunk} does not continue at its cursor: [{expected.cursor}, {expected.end})")
        if last and first + count != expected.end:
            raise RemoteProtocolError(f"{chunk} is marked as the last; the span ends at {expected.end}")
        if last and span == 0 and self._component_pages:
            raise RemoteProtocolError(
                f"{chunk} is marked as the last; the pages of {min(self._component_pages)!r} were not sent"
            )
        expected.cursor += count
        expected.ended = last

    def land_component(self, component: str) -> None:
        """Accept prefill's report of a component's pages. Raises RemoteProtocolError, and then changes nothing."""
        if component not in self._component_pages:
            raise RemoteProtocolError(f"the pages of component {component!r} were not requested, or were sent before")
        self._component_pages.remove(component)

    def refuse(self, span: int) -> None:
        """Remove a span that prefill refuses. Raises RemoteProtocolError if it was not requested or is complete."""
        expected = self._spans.get(span)
        if expected is None or expected.ended:
            raise RemoteProtocolError(f"span {span} is refused, but was not requested or is complete")
        del self._spans[span]
