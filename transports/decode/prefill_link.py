"""The link from a decode worker to one prefill address: dialled, checked, kept alive, and lost at most once.

The owner of the link handles the messages; this module only decides whether the other end is reachable.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from tidekv.states.errors import (
    InvalidConfig,
    InvalidRequest,
    LinkClosed,
    LocalProtocolError,
    PeerMismatch,
    PrefillCause,
    RemoteProtocolError,
    TidekvError,
)
from tidekv.transports import base, process, wire
from tidekv.transports.control import handshake
from tidekv.transports.control.peer_backoff import is_violation
from tidekv.transports.log import engine_log
from tidekv.transports.tasks import OwnedTasks

LOG = engine_log("tidekv.transports")

T = TypeVar("T")
Part = TypeVar("Part")
"""The part of a room at a link; the type belongs to the owner of the link."""


class LinkOwner(Protocol[Part]):
    """Callbacks of a link's owner. Called on the loop."""

    def link_violated(self, link: PrefillLink[Part]) -> None:
        """The peer broke the protocol; `link_refused` or `link_lost` follows."""
        ...

    def link_opened(self, link: PrefillLink[Part], theirs: wire.Hello) -> None:
        """Both Hellos were accepted: messages may be sent."""
        ...

    def link_refused(self, link: PrefillLink[Part], cause: str) -> None:
        """The link could not be opened, and no message was sent. The last call for this link."""
        ...

    def rooms_of(self, link: PrefillLink[Part]) -> list[tuple[str, int]]:
        """Return the rooms that prefill must keep: request ids and generations."""
        ...

    def take(self, link: PrefillLink[Part], message: wire.AnyMessage) -> None:
        """Handle a message. Raises RemoteProtocolError to end the link."""
        ...

    def link_lost(self, link: PrefillLink[Part], cause: str) -> None:
        """The open link has ended; the peer's process may be alive. The last call for this link."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTimes:
    """Seconds after which the ends of a link take each other for lost. Raises InvalidConfig."""

    lease_s: float = 10.0
    """The lease of our rooms at prefill."""
    heartbeat_s: float = 0.5
    """The interval of pings."""
    missed_s: float = 2.0
    """The silence after which a link is lost."""
    late_s: float = 30.0
    """That silence if the peer answers that its event loop is stalled."""

    def __post_init__(self) -> None:
        if not (0 < self.heartbeat_s <= self.missed_s <= self.lease_s <= wire.SECONDS_MAX) or (
            self.heartbeat_s >= self.lease_s
        ):
            raise InvalidConfig(
                f"heartbeat_s {self.heartbeat_s} ≤ missed_s {self.missed_s} ≤ lease_s {self.lease_s} ≤"
                f" {wire.SECONDS_MAX:g} and heartbeat_s < lease_s do not all hold, or heartbeat_s is not positive"
            )

    @property
    def beats_max(self) -> int:
        """Intervals of silence after which a link is lost."""
        return math.ceil(self.missed_s / self.heartbeat_s)

    @property
    def late_beats_max(self) -> int:
        """Those after which it is lost though the peer answers that it is stalled."""
        return math.ceil(self.late_s / self.heartbeat_s)


class PrefillLink(Generic[Part]):
    """One link, from dialling to its end; it is never opened twice."""

    def __init__(
        self,
        address: str,
        owner: LinkOwner[Part],
        *,
        clock: Callable[[], float],
        times: LinkTimes,
        counts: Counter[str],
    ) -> None:
        self.address = address
        self.theirs: wire.Hello | None = None
        self.rank_links: dict[Part, None] = {}
        """Parts of rooms at this link, in the order of their promises. The owner maintains them."""
        self._owner = owner
        self._clock = clock
        self._times = times
        self._beats_missed = 0
        self._late_beats = 0
        self._counts = counts
        self._link: base.Link | None = None
        self._dialled: base.Link | None = None
        """The link before its Hellos are checked."""
        self._is_lost = False

    @property
    def is_open(self) -> bool:
        """True if both Hellos were accepted and the link is not known to be lost."""
        return self.theirs is not None and not self._is_lost

    async def run(self, transport: base.Transport, ours: wire.Hello, tasks: OwnedTasks) -> None:
        """Dial, shake hands, and deliver messages until the link ends. Its owner gets the messages, and the cause of
        its end.
        """
        try:
            link, theirs = await self._within_silence(self._greet(transport, ours))
        except TidekvError as error:
            self._report_violation(error)
            self._owner.link_refused(self, cause_of(error).words(str(error)))
            return
        except BaseException:
            # Cancelled: the handshake may have completed in the same loop iteration, and its link must be closed.
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
                self._beats_missed = self._late_beats = 0
                self._owner.take(self, message)
        except (LinkClosed, RemoteProtocolError) as error:
            cause = str(error)
            self._report_violation(error)
            is_gone = isinstance(error, LinkClosed) and process.is_gone(theirs.process)
            self._lose((PrefillCause.PROCESS_GONE if is_gone else cause_of(error)).words(cause))
        finally:
            beat.cancel()
            await link.close(cause)

    def send(self, message: wire.Message) -> None:
        """Send a message; a closed link only counts it."""
        try:
            self.send_or_raise(message)
        except LinkClosed:
            # `run` receives the same error and reports the end of the link, which decides about its rooms.
            self._counts["messages_unsent"] += 1

    def send_or_raise(self, message: wire.Message) -> None:
        """Send a message. Raises LinkClosed, and LocalProtocolError for a message that is too large."""
        if self._link is None:
            raise LinkClosed(f"there is no link to {self.address} yet")
        self._link.send(message)

    async def _within_silence(self, work: Coroutine[object, object, T]) -> T:
        """Await `work`, for at most the time that a peer may be silent. Raises DialFailed after that.

        A peer that accepts the connection and sends nothing must not block the waiting requests longer than one that
        falls silent later.
        """
        task = asyncio.ensure_future(work)
        try:
            # Beats and not one long timeout, as in `_beat`: if our loop was blocked, waiting frames are read first.
            for _ in range(self._times.beats_max + 1):
                await asyncio.wait([task], timeout=self._times.heartbeat_s)
                if task.done():
                    return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task])
        if not task.cancelled():
            # It ended in spite of the cancellation: with a link, or with an error of its own.
            return task.result()
        raise base.DialFailed(
            PrefillCause.SILENT,
            f"{self.address} did not complete the handshake within {self._times.beats_max * self._times.heartbeat_s} s",
        )

    async def _greet(self, transport: base.Transport, ours: wire.Hello) -> tuple[base.Link, wire.Hello]:
        link = self._dialled = await transport.dial(self.address)
        try:
            link.send(ours)
            theirs = await handshake.receive_hello(link)
            handshake.check_hello(ours, theirs)
            if ours.instance == theirs.instance:
                raise PeerMismatch(
                    field="instance (this process dialled itself)", ours=ours.instance, theirs="the same"
                )
            transport.check_metadata(theirs.instance, theirs.metadata)
            link.mark_greeted()
        except BaseException as error:
            await link.close(str(error))
            raise
        return link, theirs

    async def _beat(self, link: base.Link) -> None:
        """Send pings, and end the link after `beats_max` beats without a message.

        A peer whose process answers that its event loop is stalled is late: its beats count from zero,
        `late_beats_max` in all since its last message.
        """
        # Beats and not seconds: if our own loop was blocked, the peer's frames wait in the socket and are read first.
        while not self._is_lost:
            # The first question is one beat before the end: a loop that turns again then has a beat for its message.
            if self._beats_missed >= self._times.beats_max and await self._is_late(link):
                continue
            if self._beats_missed > self._times.beats_max:
                cause = f"{self.address} was silent for {self._times.beats_max * self._times.heartbeat_s} s"
                self._lose(PrefillCause.SILENT.words(cause))
                await link.close(cause)
                return
            self._beats_missed += 1
            # Without rooms one empty ping is sent: it shows that this side is alive.
            for rooms in batches(self._owner.rooms_of(self), wire.ROOMS_NAMED_MAX) or [()]:
                self.send(wire.Ping(sent_at=self._clock(), rooms=rooms))
            await asyncio.sleep(self._times.heartbeat_s)

    async def _is_late(self, link: base.Link) -> bool:
        """Whether the peer's process says that its event loop is stalled; its missed beats are forgiven then."""
        assert self.theirs is not None, "beats follow both Hellos"
        if not self.theirs.liveness_key or self._late_beats >= self._times.late_beats_max:
            return False
        asked_after = self._beats_missed
        stalled_s = await link.stalled_s(self.theirs.liveness_key, within_s=self._times.heartbeat_s)
        if stalled_s is None or stalled_s < self._times.heartbeat_s or self._beats_missed < asked_after:
            return False
        if not self._late_beats:
            self._counts["links_late"] += 1
            LOG.warning("the event loop of prefill stalls", peer=self.address, stalled_s=round(stalled_s, 3))
        self._late_beats += self._beats_missed
        self._beats_missed = 0
        return True

    def _report_violation(self, error: TidekvError) -> None:
        if is_violation(error):
            self._owner.link_violated(self)

    def _lose(self, cause: str) -> None:
        if not self._is_lost:
            self._is_lost = True
            self._owner.link_lost(self, cause)


def cause_of(error: TidekvError) -> PrefillCause:
    """Return the cause for the embedder if this error ended a link, or prevented one."""
    match error:
        case base.DialFailed():
            return error.cause
        case PeerMismatch():
            return PrefillCause.MISMATCH
        case RemoteProtocolError():
            return PrefillCause.PROTOCOL_ERROR
        case InvalidRequest() | LocalProtocolError():
            # A message that no frame can hold will not fit at the next attempt either.
            return PrefillCause.MISCONFIGURED
        case LinkClosed():
            return PrefillCause.LOST
    return PrefillCause.FAILED


def batches(rooms: list[tuple[str, int]], size: int) -> list[tuple[tuple[str, int], ...]]:
    """Split rooms into tuples of at most `size`."""
    return [tuple(rooms[first : first + size]) for first in range(0, len(rooms), size)]
