"""A write on its way through NIXL: what the poller's thread posts, asks and releases.

Nothing here may be called from any other thread, but for `stop`. Nothing is cancelled: a stopped write posts no further
part and ends when the parts that are in flight have.
"""

from __future__ import annotations

from collections.abc import Callable

from tidekv.states.errors import TransferFailed
from tidekv.transports.nixl_agent import NixlAgent, Request
from tidekv.transports.nixl_plan import WritePlan

PARTS_IN_FLIGHT_MAX = 4


class PartedWrite:
    """A Pollable that carries out a plan part by part, a few in flight: each post or check blocks for one part only.

    On shared memory NIXL copies while it posts, so one big request would keep the poller's thread from everybody else.
    """

    def __init__(self, agent: NixlAgent, plan: WritePlan, *, our_list: int, their_list: int) -> None:
        self._agent = agent
        self._plan = plan
        self._lists = (our_list, their_list)
        self._next = 0
        self._in_flight: list[tuple[Request, int]] = []
        self._error: TransferFailed | None = None
        self._stopped = False
        self.bytes_done = 0

    @property
    def rounds(self) -> int:
        """Parts that are not posted yet: each takes one more round."""
        return self._plan.part_count - self._next

    def stop(self) -> None:
        """Post nothing more; from any thread."""
        self._stopped = True

    def post(self) -> bool:
        """Post the first part; True when that is all and it is in place."""
        return self._advance()

    def check(self) -> bool:
        """Collect the parts that are in place and post one more; True when all is, TransferFailed when no part is in
        flight any more and one of them failed.
        """
        self._collect()
        return self._advance()

    def release(self) -> None:
        """Nothing is left: every part was released at its own end."""
        assert not self._in_flight, "a write is released while parts of it are in flight"

    def _advance(self) -> bool:
        more = self._next < self._plan.part_count and not self._stopped and self._error is None
        if more and len(self._in_flight) < PARTS_IN_FLIGHT_MAX:
            self._post_next()
        if self._in_flight:
            return False
        if self._error is not None:
            raise self._error
        return self._stopped or self._next == self._plan.part_count

    def _post_next(self) -> None:
        part = self._plan.part(self._next)
        self._next += 1
        try:
            request = self._agent.write_request(*self._lists, part)
        except TransferFailed as error:
            self._error = error
            return
        if not self._ended(request, request.post, part.size_bytes):
            self._in_flight.append((request, part.size_bytes))

    def _collect(self) -> None:
        self._in_flight = [
            (request, size) for request, size in self._in_flight if not self._ended(request, request.check, size)
        ]

    def _ended(self, request: Request, ask: Callable[[], bool], size_bytes: int) -> bool:
        """Ask a part; account for it and release it where it has ended. Of several errors the first is kept."""
        try:
            if not ask():
                return False
            self.bytes_done += size_bytes
        except TransferFailed as error:
            self._error = self._error or error
        try:
            request.release()
        except TransferFailed as error:
            self._error = self._error or error
        return True


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
