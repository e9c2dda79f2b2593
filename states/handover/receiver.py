"""What decode asked for in one room, and what prefill has said of it: every chunk is judged against its span.

Chunks of a span follow one another without gap or overlap and end exactly at its end, and the tails of components that
were asked for are said before the last chunk of span 0; control frames come in order, so anything else is a bug of the
peer. This file must never do I/O.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from tidekv.states.errors import LocalProtocolError, RemoteProtocolError


class _ExpectedSpan(msgspec.Struct):
    """One span: pages [first, end) are wanted, [first, cursor) have landed."""

    cursor: int
    end: int
    ended: bool = False


class ReceiverRoom:
    """One room at the receiving side."""

    def __init__(self, *, first: int, count: int, component_pages: Iterable[str] = ()) -> None:
        """Span 0 is pages [first, first + count) of the prompt; `component_pages` names the requested components."""
        self.has_aux = False
        self._component_pages = set(component_pages)
        """Components whose tail was asked for and is not here yet."""
        self._spans = {0: _ExpectedSpan(first, first + count)}

    def extend(self, span: int, first: int, count: int) -> None:
        """A further span is asked for. Raises LocalProtocolError for a number that was used."""
        if span in self._spans:
            raise LocalProtocolError(f"span {span} was asked for already")
        self._spans[span] = _ExpectedSpan(first, first + count)

    def land(self, *, span: int, first: int, count: int, last: bool) -> None:
        """Prefill says that a chunk is in place. Raises RemoteProtocolError, and then nothing is changed."""
        expected = self._spans.get(span)
        said = f"chunk [{first}, {first + count}) of span {span}"
        if expected is None:
            raise RemoteProtocolError(f"{said} was never asked for, or was refused")
        if expected.ended:
            raise RemoteProtocolError(f"{said} comes after the span's last one")
        if first != expected.cursor or first + count > expected.end:
            raise RemoteProtocolError(
                f"{said} does not follow in what is left of it: [{expected.cursor}, {expected.end})"
            )
        if last and first + count != expected.end:
            raise RemoteProtocolError(f"{said} is said to be the last; the span ends at {expected.end}")
        if last and span == 0 and self._component_pages:
            raise RemoteProtocolError(
                f"{said} is said to be the last; the tail of {min(self._component_pages)!r} was not sent"
            )
        expected.cursor += count
        expected.ended = last

    def land_component(self, component: str) -> None:
        """Prefill says that the tail of a component is in place. Raises RemoteProtocolError, and changes nothing."""
        if component not in self._component_pages:
            raise RemoteProtocolError(f"the tail of component {component!r} was not asked for, or was sent before")
        self._component_pages.remove(component)

    def refuse(self, span: int) -> None:
        """Prefill will not serve a span. Raises RemoteProtocolError for one that was not asked for or has begun."""
        expected = self._spans.get(span)
        if expected is None or expected.ended:
            raise RemoteProtocolError(f"span {span} is refused, but it was not asked for or is complete")
        del self._spans[span]
