"""Writes on their way through NIXL: what the poller's thread posts, asks and releases.

Nothing here may be called from any other thread, but for `Lane.enter` and `Lane.stop`. Nothing is cancelled: a stopped
write posts no further part and ends when the parts that are in flight have.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from tidekv.states.errors import TransferFailed
from tidekv.transports.base import Ended, Turn
from tidekv.transports.nixl.agent import NixlAgent, Request
from tidekv.transports.nixl.plan import Part, WritePlan, joined

REQUESTS_IN_FLIGHT_MAX = 4


class Lane:
    """The way of our writes to one peer's pool, a `Stream`: parts of those that wait together go as one request.

        waiting   A of parts a0 a1 a2, B of b0, C of c0
        requests  [a0], then [b0 c0] where both together are small enough, [a1], [a2]

    On shared memory NIXL copies while it posts, so one big request would keep the poller's thread from everybody else:
    a write goes part by part, and each one that waits has its turn before any has its next. What is done between two
    copies finds caches that the copies have emptied, so that each line costs: joined, small writes pay for it once.

    A request that fails is the failure of each write that has a part in it: NIXL does not say which page it was.
    """

    def __init__(self, agent: NixlAgent, *, our_list: int, their_list: int) -> None:
        """Both are prepared lists of the agent, which must outlive the last write."""
        self._agent = agent
        self._lists = (our_list, their_list)
        self._waiting: deque[PartedWrite] = deque()
        self._made: _Joint | None = None
        self._in_flight: list[_Joint] = []
        self._ended: Ended = []
        self._any_dead = False

    def enter(self, write: PartedWrite) -> None:
        """Let a write have its turns, after those who wait already; on the event loop, and wake the drive after it."""
        self._waiting.append(write)

    def stop(self, write: PartedWrite) -> None:
        """Post nothing more of a write; on the event loop, and wake the drive after it."""
        write.is_stopped = True
        self._any_dead = True

    def advance(self, tell: Callable[[Ended], None]) -> Turn:
        """Collect what was posted, and post the next request. At most one: others have their turn between two.

        Whoever waits for what has ended is told before a post, which may block.
        """
        if self._in_flight:
            self._in_flight = [joint for joint in self._in_flight if not self._is_over(joint, joint.request.check)]
        if self._any_dead:
            self._any_dead = False
            self._drop_dead()
        has_moved = bool(self._ended)
        if has_moved:
            self._tell(tell)
        if len(self._in_flight) < REQUESTS_IN_FLIGHT_MAX:
            joint, self._made = self._made or self._make(), None
            if joint is not None:
                has_moved = True
                if not self._is_over(joint, joint.request.post):
                    self._in_flight.append(joint)
                # Later, once the loop has been woken, this thread would have to wait for the interpreter.
                self._made = self._make()
            if self._ended:
                has_moved = True
                self._tell(tell)
        if self.is_empty:
            return Turn.EMPTY
        return Turn.MOVED if has_moved else Turn.WAITING

    @property
    def is_empty(self) -> bool:
        """True if nothing waits, is made or is in flight."""
        return not (self._waiting or self._made or self._in_flight)

    def _tell(self, tell: Callable[[Ended], None]) -> None:
        ended, self._ended = self._ended, []
        tell(ended)

    def _drop_dead(self) -> None:
        """End those that wait though nothing more of them may be posted."""
        if self._made is not None and not all(write.is_live for write in self._made.writes):
            self._unmake(self._made)
        for write in list(self._waiting):
            if not write.is_live:
                self._waiting.remove(write)
                self._end(write)

    def _end(self, write: PartedWrite) -> None:
        """Have a write told of its end, unless parts of it are in flight or it was told."""
        if not write.parts_in_flight and not write.is_over:
            write.is_over = True
            self._ended.append((write.future, write.error))

    def _take(self) -> tuple[list[PartedWrite], list[Part]]:
        """The next part of the first that waits, and of those behind it as far as they fit."""
        writes: list[PartedWrite] = []
        parts: list[Part] = []
        rest: list[PartedWrite] = []
        size_bytes = weight = 0
        while self._waiting:
            write = self._waiting[0]
            if write.is_live:
                part = write.next_part()
                size_bytes += part.size_bytes
                weight += len(part.ours) * write.plan.weight
                if parts and not write.plan.may_join(size_bytes, weight):
                    break
                if write.take_part():
                    rest.append(write)
                writes.append(write)
                parts.append(part)
            else:
                self._end(write)
            self._waiting.popleft()
        if rest:
            self._waiting.extend(rest)
        return writes, parts

    def _make(self) -> _Joint | None:
        """Make the next request, if anybody waits."""
        if not self._waiting:
            return None
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

    def _is_over(self, joint: _Joint, ask: Callable[[], bool]) -> bool:
        """Ask a request; release it where it has ended, and settle its writes. Of several errors the first is kept."""
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
        for write, part in zip(writes, parts, strict=True):
            if error is not None:
                self._any_dead = True
                write.fail(error)
                # Each has an error of its own: whoever raises one writes its way into it.
                error = _again(error)
            if write.settle_part(part.size_bytes if done else 0):
                self._end(write)


class _Joint(NamedTuple):
    """A request, and whose parts are in it."""

    request: Request
    writes: list[PartedWrite]
    parts: list[Part]


class PartedWrite:
    """A plan that is carried out part by part, in turns with the others of its lane; `future` hears of its end.

    Its first part is made with it, on the event loop: that works beside the copies of others, and this thread between.
    """

    __slots__ = ("_left", "_made", "bytes_done", "error", "future", "is_over", "is_stopped", "parts_in_flight", "plan")

    def __init__(self, plan: WritePlan, future: asyncio.Future[None]) -> None:
        self.plan = plan
        self.future = future
        self.bytes_done = 0
        self.parts_in_flight = 0
        self.error: TransferFailed | None = None
        self.is_stopped = False
        self.is_over = False
        self._made: Part | None = plan.part(0)
        self._left = plan.part_count

    @property
    def is_live(self) -> bool:
        """True unless nothing more of it may be posted."""
        return not self.is_stopped and self.error is None

    def next_part(self) -> Part:
        """The part that is posted next; there must be one left."""
        part = self._made
        if part is None:
            part = self._made = self.plan.part(self.plan.part_count - self._left)
        return part

    def take_part(self) -> bool:
        """The lane posts the part of `next_part`; True where that was not the last."""
        self._made = None
        self._left -= 1
        self.parts_in_flight += 1
        return self._left > 0

    def return_part(self, part: Part) -> bool:
        """A part that was taken was not posted; True where others wait behind it."""
        others = self._left > 0
        self._made = part
        self._left += 1
        self.parts_in_flight -= 1
        return others

    def fail(self, error: TransferFailed) -> None:
        """Post nothing more, and tell this unless something else is to be told."""
        if self.error is None:
            self.error = error

    def settle_part(self, size_bytes: int) -> bool:
        """A part that was taken has ended: so much of it is in place. True where that was the end of the write."""
        self.parts_in_flight -= 1
        self.bytes_done += size_bytes
        return not self.parts_in_flight and (not self._left or not self.is_live)


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
