"""Writes in progress through NIXL: the requests that the poller's thread posts, checks and releases.

Only `Lane.enter` and `Lane.stop` may be called from another thread. Nothing is cancelled: a stopped write posts no
further part and ends when its parts in flight have ended.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from tidekv.states.errors import TransferFailed
from tidekv.transports.base import Ended, StreamTurn
from tidekv.transports.nixl.agent import NixlAgent, NixlRequest
from tidekv.transports.nixl.plan import Part, WritePlan, joined

REQUESTS_IN_FLIGHT_MAX = 4


class Lane:
    """Queue of our writes to one peer's pool, a `Stream`: parts of waiting writes are joined into one request.

        waiting   A of parts a0 a1 a2, B of b0, C of c0
        requests  [a0], then [b0 c0] if both together are small enough, [a1], [a2]

    On shared memory NIXL copies while it posts, so one big request would block the poller's thread for all other users:
    a write goes part by part, and every waiting write has one turn before any has its next. Code that runs between two
    copies finds its caches evicted, so every line of it is expensive: joined small writes pay for it once.

    A request that fails fails every write with a part in it: NIXL does not report which page it was.
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
        """Queue a write behind the waiting ones. Call on the event loop, then wake the drive."""
        self._waiting.append(write)

    def stop(self, write: PartedWrite) -> None:
        """Post nothing more of a write. Call on the event loop, then wake the drive."""
        write.is_stopped = True
        self._any_dead = True

    def advance(self, resolve: Callable[[Ended], None]) -> StreamTurn:
        """Collect the requests in flight, then post at most one: other streams have their turn between two posts.

        Ended writes are passed to `resolve` before a post, which may block.
        """
        if self._in_flight:
            self._in_flight = [joint for joint in self._in_flight if not self._is_over(joint, joint.request.check)]
        if self._any_dead:
            self._any_dead = False
            self._drop_dead()
        has_moved = bool(self._ended)
        if has_moved:
            self._resolve(resolve)
        if len(self._in_flight) < REQUESTS_IN_FLIGHT_MAX:
            joint, self._made = self._made or self._make(), None
            if joint is not None:
                has_moved = True
                if not self._is_over(joint, joint.request.post):
                    self._in_flight.append(joint)
                # Made now and not in the next turn: once the loop is awake, this thread would have to wait for the GIL.
                self._made = self._make()
            if self._ended:
                has_moved = True
                self._resolve(resolve)
        if self.is_empty:
            return StreamTurn.EMPTY
        return StreamTurn.MOVED if has_moved else StreamTurn.WAITING

    @property
    def is_empty(self) -> bool:
        """True if no write waits, and no request is made or in flight."""
        return not (self._waiting or self._made or self._in_flight)

    def _resolve(self, resolve: Callable[[Ended], None]) -> None:
        ended, self._ended = self._ended, []
        resolve(ended)

    def _drop_dead(self) -> None:
        """End the waiting writes that were stopped or have failed."""
        if self._made is not None and not all(write.is_live for write in self._made.writes):
            self._unmake(self._made)
        for write in list(self._waiting):  # A copy: the event loop appends at any time, and the body removes.
            if not write.is_live:
                self._waiting.remove(write)
                self._end(write)

    def _end(self, write: PartedWrite) -> None:
        """Queue a write's end for `resolve`, unless parts of it are in flight or it was queued before."""
        if not write.parts_in_flight and not write.is_over:
            write.is_over = True
            self._ended.append((write.future, write.error))

    def _take(self) -> tuple[list[PartedWrite], list[Part]]:
        """Take the next part of the first waiting write, and of the writes behind it as far as they fit into one
        request.
        """
        writes: list[PartedWrite] = []
        parts: list[Part] = []
        rest: list[PartedWrite] = []
        size_bytes = weight = 0
        while self._waiting:
            # Removed only once its part is taken: a write that does not fit stays first for the next request.
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
        # Behind all others: each waiting write has one part in turn.
        if rest:
            self._waiting.extend(rest)
        return writes, parts

    def _make(self) -> _Joint | None:
        """Make the next request, if a write waits."""
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
        """Release a request that was not posted, and put its writes back at the head of the queue."""
        self._made = None
        for write, part in zip(reversed(joint.writes), reversed(joint.parts), strict=True):
            if write.return_part(part):
                self._waiting.remove(write)
            self._waiting.appendleft(write)
        try:
            joint.request.release()
        except TransferFailed as error:
            joint.writes[0].fail(error)

    def _is_over(self, joint: _Joint, progress: Callable[[], bool]) -> bool:
        """Post or check a request by `progress`; release it and settle its writes if it has ended.

        The first of several errors is kept.
        """
        error: TransferFailed | None = None
        try:
            if not progress():
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
                # One copy per write: raising an exception adds the raiser's traceback to it.
                error = _copy_of(error)
            if write.settle_part(part.size_bytes if done else 0):
                self._end(write)


class _Joint(NamedTuple):
    """A request, and the writes and parts in it, pairwise."""

    request: NixlRequest
    writes: list[PartedWrite]
    parts: list[Part]


class PartedWrite:
    """A plan carried out part by part, in turns with the other writes of its lane; `future` is resolved at its end.

    The constructor makes the first part on the event loop, in parallel with copies of other writes; the poller's thread
    could make it only between copies.
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
        """True while further parts may be posted."""
        return not self.is_stopped and self.error is None

    def next_part(self) -> Part:
        """Return the part to post next; there must be one left."""
        part = self._made
        if part is None:
            part = self._made = self.plan.part(self.plan.part_count - self._left)
        return part

    def take_part(self) -> bool:
        """Mark the part of `next_part` as posted. Returns True if further parts are left."""
        self._made = None
        self._left -= 1
        self.parts_in_flight += 1
        return self._left > 0

    def return_part(self, part: Part) -> bool:
        """Undo `take_part` for a part that was not posted. Returns True if further parts were left behind it."""
        others = self._left > 0
        self._made = part
        self._left += 1
        self.parts_in_flight -= 1
        return others

    def fail(self, error: TransferFailed) -> None:
        """Post nothing more, and end with this error unless there is an earlier one."""
        if self.error is None:
            self.error = error

    def settle_part(self, size_bytes: int) -> bool:
        """Record the end of a posted part, with its bytes in place. Returns True if the write has ended with it."""
        self.parts_in_flight -= 1
        self.bytes_done += size_bytes
        return not self.parts_in_flight and (not self._left or not self.is_live)


def _copy_of(error: TransferFailed) -> TransferFailed:
    """Return an equal error of its own, with `error` as its cause."""
    copy = type(error)(*error.args)
    copy.__cause__ = error
    return copy
