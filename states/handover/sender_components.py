"""What prefill sends of components for one room: the tails that decode asked for, each whole and once.

A tail is the last pages of a prompt in a component's own pool, up to the prompt's end: of a window those that cover it,
of a state one record. Decode says where each begins for it; what it has of a window already it does not ask for, and a
tail of no pages asks for nothing. Prefill has a tail only when it has computed the whole prompt, so it is handed over
at once; it is written in parts, and said when the last of them is in place.

The last chunk of span 0 is what decode waits for, so that must never be said before all tails that were asked for are.
This file must never do I/O and never know time.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from tidekv.states.components.specs import TailPages
from tidekv.states.errors import InvalidRequest, RemoteProtocolError
from tidekv.states.types import PageIds


class TailAsked(msgspec.Struct, frozen=True):
    """What decode wants of one component: pages at positions [first, first + page_count) of the prompt, the last of
    which is the prompt's last page. No pages: it has all that it needs.
    """

    component: str
    first: int
    page_count: int


class TailPart(msgspec.Struct, frozen=True):
    """Pages of one component at positions from `first` on, ours and decode's."""

    component: str
    first: int
    our_pages: PageIds
    their_pages: PageIds


class _Tail(msgspec.Struct):
    """One tail: of its pages `posted` are being written or in place, `landed` are in place."""

    asked: TailPages
    ours: PageIds | None = None
    posted: int = 0
    landed: int = 0
    is_said: bool = False

    @property
    def is_here(self) -> bool:
        return self.landed == len(self.asked.pages)


class SenderTails:
    """The tails of one room at the sending side."""

    def __init__(self, asked: Iterable[TailPages], *, page_count: int) -> None:
        """Take over what decode asked for of a prompt of so many pages. Raises RemoteProtocolError where that
        contradicts itself.
        """
        self._tails: dict[str, _Tail] = {}
        for tail in asked:
            name, count = tail.component, len(tail.pages)
            if name in self._tails:
                raise RemoteProtocolError(f"decode asks twice for the tail of component {name!r}")
            if count and tail.first + count != page_count:
                raise RemoteProtocolError(
                    f"decode gave {count} pages for the tail of component {name!r} at positions from {tail.first} on,"
                    f" which does not end with the prompt of {page_count} pages"
                )
            if len(set(tail.pages)) != count:
                raise RemoteProtocolError(f"decode names a page of component {name!r} twice: a content would be lost")
            self._tails[name] = _Tail(tail)

    @property
    def asked(self) -> dict[str, TailAsked]:
        """What was asked for, by component."""
        return {name: TailAsked(name, of.asked.first, len(of.asked.pages)) for name, of in self._tails.items()}

    @property
    def unsent(self) -> list[str]:
        """Components whose tail was asked for and not handed over yet."""
        return [name for name, tail in self._tails.items() if tail.asked.pages and tail.ours is None]

    @property
    def are_here(self) -> bool:
        """Whether everything that was asked for is in place."""
        return all(tail.is_here for tail in self._tails.values())

    def send(self, component: str, pages: PageIds) -> None:
        """Prefill has the tail of a component: one page for each position that was asked for.

        Repeating it is harmless, and so is handing over what nobody asked for. Raises InvalidRequest, and then nothing
        is changed.
        """
        tail = self._tails.get(component)
        if tail is None:
            known = ", ".join(map(repr, self._tails)) or "none"
            raise InvalidRequest(f"there is no component {component!r}: this worker has {known}")
        asked = tail.asked
        if not asked.pages:
            return
        if len(pages) != len(asked.pages):
            raise InvalidRequest(
                f"{len(pages)} pages of component {component!r} were given; decode asks for {len(asked.pages)}, at"
                f" positions [{asked.first}, {asked.first + len(asked.pages)})"
            )
        if tail.ours not in (None, pages):
            raise InvalidRequest(f"the tail of component {component!r} was sent before, as other pages")
        tail.ours = pages[:]

    def can_write(self) -> bool:
        """True where `next_part` has something."""
        return any(tail.ours is not None and tail.posted < len(tail.ours) for tail in self._tails.values())

    def next_part(self, *, pages_max: int) -> TailPart | None:
        """The next write, of at most so many pages; it is in flight from now on, until `settle`."""
        for name, tail in self._tails.items():
            if tail.ours is not None and tail.posted < len(tail.ours):
                part = slice(tail.posted, tail.posted + pages_max)
                first = tail.asked.first + tail.posted
                ours, theirs = tail.ours[part], tail.asked.pages[part]
                tail.posted += len(ours)
                return TailPart(name, first, ours, theirs)
        return None

    def land(self, part: TailPart) -> None:
        """A part is in place."""
        self._tails[part.component].landed += len(part.our_pages)

    def take_said(self) -> list[str]:
        """Components whose tail decode can be told of now; each is given out once."""
        here = [name for name, tail in self._tails.items() if tail.asked.pages and tail.is_here and not tail.is_said]
        for name in here:
            self._tails[name].is_said = True
        return here
