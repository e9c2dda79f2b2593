"""Writes on their way through NIXL: what the poller's thread posts, asks and releases.

Nothing here may be called from any other thread, but for `stop` and `Lane.enter`. Nothing is cancelled: a stopped write
posts no further part and ends when the parts that are in flight have.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from tidekv.states.errors import TransferFailed
from tidekv.transports.nixl_agent import NixlAgent, Request
from tidekv.transports.nixl_plan import Part, WritePlan, joined

REQUESTS_IN_FLIGHT_MAX = 4


class Lane:
    """The way of our writes to one peer's pool: parts of those that wait for one another go as one request.

        waiting   A of parts a0 a1 a2, B of b0, C of c0
        requests  [a0], then [b0 c0] where both together are small enough, [a1], [a2]

    On shared memory NIXL copies while it posts, so one big request would keep the poller's thread from everybody else:
    a write goes part by part, and each one that waits has its turn before any has its next. What is done between two
    copies finds caches that the copies have emptied, and takes about a fifth of a millisecond for a part of any size.
    Joined, small writes pay for that once.

    A request that fails is the failure of each write that has a part in it: NIXL does not say which page it was.
    """

    def __init__(self, agent: NixlAgent, *, our_list: int, their_list: int) -> None:
        """Both are prepared lists of the agent, which must outlive the last write."""
        self._agent = agent
        self._lists = (our_list, their_list)
        self._waiting: deque[PartedWrite] = deque()
        self._made: _Joint | None = None
        self._in_flight: list[_Joint] = []
        self._untold: set[PartedWrite] = set()

    def enter(self, write: PartedWrite) -> None:
        """Let a write that was submitted have its turns, after those who wait already; on the event loop.

        So it is found by the request that is made while others are being told, before the poller has taken it up.
        """
        self._waiting.append(write)

    def advance(self, write: PartedWrite) -> None:
        """Collect what was posted in this write's turns, and post where the next turn is this write's.

        The poller asks every write once a round, and tells of those that have ended before it asks one that has parts
        left. A write that has ended with another's request learns of it only when it is asked. Whoever waits for it
        should be told before the next post, which may block: where one was not asked yet, the post waits, for one
        round.
        """
        if self._in_flight:
            self._in_flight = [
                joint
                for joint in self._in_flight
                if joint.writes[0] is not write or not self._ended(joint, joint.request.check)
            ]
        if not self._is_turn_of(write):
            return
        if self._untold and not self._untold <= {write}:
            self._untold.clear()
        elif len(self._in_flight) < REQUESTS_IN_FLIGHT_MAX:
            joint, self._made = self._made or self._make(), None
            if joint is not None and not self._ended(joint, joint.request.post):
                self._in_flight.append(joint)
            self._made = self._make()

    def is_next(self, write: PartedWrite) -> bool:
        """True if the request that is made already is posted in a turn of this write."""
        return self._made is not None and self._made.writes[0] is write

    def tell(self, write: PartedWrite) -> None:
        """The poller learns that a write has ended."""
        self._untold.discard(write)

    def _is_turn_of(self, write: PartedWrite) -> bool:
        """True if a write is the first of what is posted next, from which those are taken that want no more."""
        if self._made is not None:
            if self._made.writes[0] is not write:
                return False
            if all(each.is_live for each in self._made.writes):
                return True
            self._unmake(self._made)
        while self._waiting and not self._waiting[0].has_part:
            self._waiting.popleft()
        return bool(self._waiting) and self._waiting[0] is write

    def _take(self) -> tuple[list[PartedWrite], list[Part]]:
        """The next part of the first that waits, and of those behind it as far as they fit."""
        writes: list[PartedWrite] = []
        parts: list[Part] = []
        rest: list[PartedWrite] = []
        size_bytes = descriptors = 0
        while self._waiting:
            write = self._waiting[0]
            part = write.next_part()
            if part is not None:
                size_bytes += part.size_bytes
                descriptors += len(part.ours)
                if parts and not write.plan.may_join(size_bytes, descriptors):
                    break
                if write.take_part():
                    rest.append(write)
                writes.append(write)
                parts.append(part)
            self._waiting.popleft()
        if rest:
            self._waiting.extend(rest)
        return writes, parts

    def _make(self) -> _Joint | None:
        """Make the next request, if anybody waits. Right after a post it takes some 30 us; made later, once the poller
        has woken the loop, it took 230 to 440 us, nearly all of them waiting.
        """
        writes, parts = self._take()
        if not parts:
            return None
        try:
            return _Joint(self._agent.write_request(*self._lists, joined(parts)), writes, parts)
        except TransferFailed as error:
            self._settle(writes, parts, done=False, error=error)
            return None

    def _unmake(self, joint: _Joint) -> None:
        """Give a request back that was not posted; its writes are again the first that wait."""
        self._made = None
        for write, part in zip(reversed(joint.writes), reversed(joint.parts), strict=True):
            if write.return_part(part):
                self._waiting.remove(write)
            self._waiting.appendleft(write)
        try:
            joint.request.release()
        except TransferFailed as error:
            joint.writes[0].fail(error)

    def _ended(self, joint: _Joint, ask: Callable[[], bool]) -> bool:
        """Ask a request; release it where it has ended, and tell its writes. Of several errors the first is kept."""
        error: TransferFailed | None = None
        try:
            if not ask():
                return False
        except TransferFailed as raised:
            error = raised
        done = error is None
        try:
            joint.request.release()
        except TransferFailed as raised:
            error = error or raised
        self._settle(joint.writes, joint.parts, done=done, error=error)
        return True

    def _settle(
        self, writes: list[PartedWrite], parts: list[Part], *, done: bool, error: TransferFailed | None
    ) -> None:
        own = error
        for write, part in zip(writes, parts, strict=True):
            if write.settle_part(part.size_bytes if done else 0, own):
                self._untold.add(write)
            # Each has an error of its own: whoever raises one writes its way into it.
            own = error and _again(error)


class _Joint(NamedTuple):
    """A request, and whose parts are in it. It is posted in the turn of the first, who asks for it from then on."""

    request: Request
    writes: list[PartedWrite]
    parts: list[Part]


class PartedWrite:
    """A Pollable that carries out a plan part by part, in turns with the others of its lane.

    Its first part is made with it, on the event loop: that works beside the copies of others, and this thread between.
    """

    __slots__ = ("_error", "_in_flight", "_lane", "_left", "_made", "_stopped", "bytes_done", "plan")

    def __init__(self, lane: Lane, plan: WritePlan) -> None:
        self.plan = plan
        self.bytes_done = 0
        self._lane = lane
        self._made: Part | None = plan.part(0)
        self._left = plan.part_count
        self._in_flight = 0
        self._error: TransferFailed | None = None
        self._stopped = False

    @property
    def rounds(self) -> int:
        """Posts that are to be made in turns of this write, at least: each takes one more round, and may block."""
        return self._left + self._lane.is_next(self)

    @property
    def has_part(self) -> bool:
        """True while there is something to post."""
        return self._left > 0 and self.is_live

    @property
    def is_live(self) -> bool:
        """True unless nothing more of it may be posted."""
        return not self._stopped and self._error is None

    def stop(self) -> None:
        """Post nothing more; from any thread."""
        self._stopped = True

    def post(self) -> bool:
        """Posts nothing yet, so that all that is new is taken up before the first post, which may block."""
        return False

    def check(self) -> bool:
        """Take a turn; True when all is in place, TransferFailed once nothing is in flight and a part has failed."""
        if self._in_flight or self.has_part:
            self._lane.advance(self)
            if self._in_flight or self.has_part:
                return False
        self._lane.tell(self)
        if self._error is not None:
            raise self._error
        return True

    def release(self) -> None:
        """Nothing is left: every request was released at its own end."""
        assert not self._in_flight, "a write is released while parts of it are in flight"

    def next_part(self) -> Part | None:
        """The part that is posted next, for the lane, or None where nothing more is."""
        if not self.has_part:
            return None
        part = self._made
        if part is None:
            part = self._made = self.plan.part(self.plan.part_count - self._left)
        return part

    def take_part(self) -> bool:
        """The lane posts the part of `next_part`; True where that was not the last."""
        self._made = None
        self._left -= 1
        self._in_flight += 1
        return self._left > 0

    def return_part(self, part: Part) -> bool:
        """A part that was taken was not posted; True where others wait behind it."""
        others = self._left > 0
        self._made = part
        self._left += 1
        self._in_flight -= 1
        return others

    def fail(self, error: TransferFailed) -> None:
        """Post nothing more, and tell this unless something else is to be told."""
        if self._error is None:
            self._error = error

    def settle_part(self, size_bytes: int, error: TransferFailed | None) -> bool:
        """A part that was taken has ended: so much of it is in place. Of several errors the first is kept. True where
        that was the end of the write.
        """
        self._in_flight -= 1
        self.bytes_done += size_bytes
        if error is not None:
            self.fail(error)
        return not (self._in_flight or self.has_part)


class Probe:
    """A Pollable that reads one byte of a peer into memory that nobody uses, to hear whether NIXL still finds the peer.

    Reading disturbs nobody and leaves nothing behind at the peer, as a notification that it never takes would.
    """

    rounds = 0

    def __init__(self, agent: NixlAgent, *, our_list: int, their_list: int) -> None:
        self._agent = agent
        self._lists = (our_list, their_list)
        self._request: Request | None = None

    def post(self) -> bool:
        """Post the read. Raises PeerDisconnected."""
        self._request = self._agent.read_request(*self._lists)
        return self._request.post()

    def check(self) -> bool:
        """True when the byte is here. Raises PeerDisconnected."""
        assert self._request is not None, "a probe is asked before it is posted"
        return self._request.check()

    def release(self) -> None:
        """Give the read back."""
        if self._request is not None:
            self._request.release()


def _again(error: TransferFailed) -> TransferFailed:
    """The same error for somebody else."""
    again = type(error)(*error.args)
    again.__cause__ = error
    return again
