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
    """A Pollable that carries out a plan part by part, a few in flight: each check blocks for one part only.

    On shared memory NIXL copies while it posts, so one big request would keep the poller's thread from everybody else.

        post     makes the first part's request
        check    posts the request that is made, and makes the next part's

    While a part is posted others may run Python. Made beforehand, it is posted at the very beginning of its turn, and
    so right after the poller has woken the loop: the loop's work is then done beside the copy. A loop that was woken
    before the request is made would have the interpreter first, and the poller's thread, and so the link, would wait.
    """

    def __init__(self, agent: NixlAgent, plan: WritePlan, *, our_list: int, their_list: int) -> None:
        self._agent = agent
        self._plan = plan
        self._lists = (our_list, their_list)
        self._next = 0
        self._made: tuple[Request, int] | None = None
        self._in_flight: list[tuple[Request, int]] = []
        self._error: TransferFailed | None = None
        self._stopped = False
        self.bytes_done = 0

    @property
    def rounds(self) -> int:
        """Parts that are not posted yet: each takes one more round."""
        return self._plan.part_count - self._next + (self._made is not None)

    def stop(self) -> None:
        """Post nothing more; from any thread."""
        self._stopped = True

    def post(self) -> bool:
        """Make the first part ready; True where there is nothing to do."""
        self._make_next()
        return self._is_over()

    def check(self) -> bool:
        """Collect the parts that are in place and post one more; True when all is, TransferFailed when no part is in
        flight any more and one of them failed.
        """
        if self._in_flight:
            self._in_flight = [
                (request, size) for request, size in self._in_flight if not self._ended(request, request.check, size)
            ]
        if len(self._in_flight) < PARTS_IN_FLIGHT_MAX:
            self._post_made()
            self._make_next()
        return self._is_over()

    def release(self) -> None:
        """Nothing is left: every part was released at its own end."""
        assert not self._in_flight, "a write is released while parts of it are in flight"
        assert self._made is None, "a write is released while a part of it waits to be posted"

    def _is_over(self) -> bool:
        if self._in_flight or self._made is not None:
            return False
        if self._error is not None:
            raise self._error
        return True

    def _post_made(self) -> None:
        made, self._made = self._made, None
        if made is None:
            return
        request, size_bytes = made
        if self._stopped or self._error is not None:
            self._release(request)
        elif not self._ended(request, request.post, size_bytes):
            self._in_flight.append(made)

    def _make_next(self) -> None:
        if self._next == self._plan.part_count or self._stopped or self._error is not None:
            return
        part = self._plan.part(self._next)
        self._next += 1
        try:
            self._made = (self._agent.write_request(*self._lists, part), part.size_bytes)
        except TransferFailed as error:
            self._error = error

    def _ended(self, request: Request, ask: Callable[[], bool], size_bytes: int) -> bool:
        """Ask a part; account for it and release it where it has ended. Of several errors the first is kept."""
        try:
            if not ask():
                return False
            self.bytes_done += size_bytes
        except TransferFailed as error:
            self._error = self._error or error
        self._release(request)
        return True

    def _release(self, request: Request) -> None:
        try:
            request.release()
        except TransferFailed as error:
            self._error = self._error or error


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
