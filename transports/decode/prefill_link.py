"""The link from a decode worker to one prefill address: dialled, greeted, kept alive, and lost at most once.

What a message means is its owner's business; this file knows only whether the other end is there.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Generic, Protocol, TypeVar

from tidekv.states.errors import (
    InvalidRequest,
    LinkClosed,
    PeerMismatch,
    PrefillCause,
    RemoteProtocolError,
    TidekvError,
)
from tidekv.transports import base, process
from tidekv.transports.control import handshake as hello
from tidekv.transports.control import wire
from tidekv.transports.control.peer_backoff import is_offence
from tidekv.transports.tasks import OwnedTasks

T = TypeVar("T")
Part = TypeVar("Part")
"""Part of a room at a link: the type belongs to the owner of the link."""


class LinkOwner(Protocol[Part]):
    """Who hears of a link."""

    def link_offended(self, link: PrefillLink[Part]) -> None:
        """The peer broke the protocol on it; its end is told next."""
        ...

    def link_opened(self, link: PrefillLink[Part], theirs: wire.Hello) -> None:
        """The peer is who it should be: messages may be said."""
        ...

    def link_refused(self, link: PrefillLink[Part], cause: str) -> None:
        """It could not be opened: nothing was said. Nothing comes after this."""
        ...

    def rooms_of(self, link: PrefillLink[Part]) -> list[tuple[str, int]]:
        """The rooms that prefill is to keep: request ids and generations."""
        ...

    def take(self, link: PrefillLink[Part], message: wire.AnyMessage) -> None:
        """A message came. Raises RemoteProtocolError to end the link."""
        ...

    def link_lost(self, link: PrefillLink[Part], cause: str) -> None:
        """It was open and is not any more; the peer may live. Nothing comes after this."""
        ...


class PrefillLink(Generic[Part]):
    """One link, from dialling to its end; it is never opened twice."""

    def __init__(
        self,
        address: str,
        owner: LinkOwner[Part],
        *,
        clock: Callable[[], float],
        heartbeat_s: float,
        beats_max: int,
        counts: Counter[str],
    ) -> None:
        self.address = address
        self.theirs: wire.Hello | None = None
        self.rank_links: dict[Part, None] = {}
        """Parts of rooms at this link, in the order of their promises. The owner keeps them."""
        self._owner = owner
        self._clock = clock
        self._heartbeat_s = heartbeat_s
        self._beats_max = beats_max
        self._beats_missed = 0
        self._counts = counts
        self._link: base.Link | None = None
        self._dialled: base.Link | None = None
        """A link whose Hellos are not judged yet."""
        self._is_lost = False

    @property
    def is_open(self) -> bool:
        """Both Hellos were judged, and the link is not known to be lost."""
        return self.theirs is not None and not self._is_lost

    async def run(self, transport: base.Transport, ours: wire.Hello, tasks: OwnedTasks) -> None:
        """Live: from dialling to the end of the link."""
        try:
            link, theirs = await self._within_silence(self._greet(transport, ours))
        except TidekvError as error:
            self._judge(error)
            self._owner.link_refused(self, cause_of(error).words(str(error)))
            return
        except BaseException:
            # Cancelled: the handshake may have ended in the same turn of the loop.
            if self._dialled is not None:
                await self._dialled.close("decode is shutting down")
            raise
        self._link, self.theirs = link, theirs
        beat = tasks.spawn(self._beat(link), name=f"heartbeat to {self.address}")
        cause = "decode is shutting down"
        try:
            self._owner.link_opened(self, theirs)
            while True:
                message = await link.receive()
                self._beats_missed = 0
                self._owner.take(self, message)
        except (LinkClosed, RemoteProtocolError) as error:
            cause = str(error)
            self._judge(error)
            is_gone = isinstance(error, LinkClosed) and process.is_gone(theirs.process)
            self._lose((PrefillCause.PROCESS_GONE if is_gone else cause_of(error)).words(cause))
        finally:
            beat.cancel()
            await link.close(cause)

    def say(self, message: wire.Message) -> None:
        """Send, as far as the link still takes it: what becomes of its rooms is decided where its end is heard of."""
        try:
            self.say_or_raise(message)
        except LinkClosed:
            self._counts["messages_unsent"] += 1

    def say_or_raise(self, message: wire.Message) -> None:
        """Send. Raises LinkClosed, and LocalProtocolError for a message that is too large."""
        if self._link is None:
            raise LinkClosed(f"there is no link to {self.address} yet")
        self._link.send(message)

    async def _within_silence(self, work: Coroutine[object, object, T]) -> T:
        """Do `work` unless it takes longer than a peer may be silent. Raises TransferFailed then.

        It counts beats like `_beat`, and for the same reason. A peer that accepts the connection and sends nothing must
        not hold the requests that wait for it any longer than one that falls silent later.
        """
        task = asyncio.ensure_future(work)
        try:
            for _ in range(self._beats_max + 1):
                await asyncio.wait([task], timeout=self._heartbeat_s)
                if task.done():
                    return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task])
        if not task.cancelled():
            # It ended while it was being cancelled: with a link, or with an error of its own.
            return task.result()
        raise base.DialFailed(
            PrefillCause.SILENT,
            f"{self.address} did not complete the handshake within {self._beats_max * self._heartbeat_s} s",
        )

    async def _greet(self, transport: base.Transport, ours: wire.Hello) -> tuple[base.Link, wire.Hello]:
        link = self._dialled = await transport.dial(self.address)
        try:
            link.send(ours)
            theirs = await hello.receive_hello(link)
            hello.check_hello(ours, theirs)
            transport.check_metadata(theirs.instance, theirs.metadata)
            link.mark_greeted()
        except BaseException as error:
            await link.close(str(error))
            raise
        return link, theirs

    async def _beat(self, link: base.Link) -> None:
        """Ping, and count the beats in which nothing came. Beats, not seconds: where our own loop stood still, the
        peer's frames wait in the socket and must be read first.
        """
        while not self._is_lost:
            if self._beats_missed > self._beats_max:
                cause = f"{self.address} was not heard of for {self._beats_max * self._heartbeat_s} s"
                self._lose(PrefillCause.SILENT.words(cause))
                await link.close(cause)
                return
            self._beats_missed += 1
            # A ping without rooms as well: it shows that this side lives.
            for rooms in batches(self._owner.rooms_of(self), wire.ROOMS_NAMED_MAX) or [()]:
                self.say(wire.Ping(sent_at=self._clock(), rooms=rooms))
            await asyncio.sleep(self._heartbeat_s)

    def _judge(self, error: TidekvError) -> None:
        if is_offence(error):
            self._owner.link_offended(self)

    def _lose(self, cause: str) -> None:
        if not self._is_lost:
            self._is_lost = True
            self._owner.link_lost(self, cause)


def cause_of(error: TidekvError) -> PrefillCause:
    """Why a prefill cannot serve us, if this error ended its link, or kept it from being opened."""
    match error:
        case base.DialFailed():
            return error.cause
        case PeerMismatch():
            return PrefillCause.MISMATCH
        case RemoteProtocolError():
            return PrefillCause.PROTOCOL_ERROR
        case InvalidRequest():
            return PrefillCause.MISCONFIGURED
        case LinkClosed():
            return PrefillCause.LOST
    return PrefillCause.FAILED


def batches(rooms: list[tuple[str, int]], size: int) -> list[tuple[tuple[str, int], ...]]:
    """Rooms in tuples of at most `size`."""
    return [tuple(rooms[first : first + size]) for first in range(0, len(rooms), size)]
