"""Room for the new tokens of a READY request, from the pages that it holds in reserve.

    ready.pages     [0, length) has tokens or room for them; the last page may have room for more
    ready._reserve   page ids that are the request's already; growth takes them from the front

The core takes `GrowthTaken` afterwards: it counts the same pages off the front of the same queue, and refills it at the
back. So taking pages needs neither the core nor its loop, and the owner of a request may take them on a thread of its
own, if each taking is posted before the request is given back.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np

from tidekv.backends.keys.chain import TOKEN_BYTES, pack_tokens
from tidekv.states import events
from tidekv.states.errors import InvalidRequest, OutOfPages
from tidekv.states.validation import Count, checked

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tidekv.backends.keys.chain import Tokens
    from tidekv.engine.decode.driver import Driver
    from tidekv.engine.decode.pending_calls import LiveCall, PendingCalls
    from tidekv.engine.decode.rank_driver import RankDriver
    from tidekv.engine.decode.values import ReadyRequest


class Growth:
    """Growth of READY requests: pages are taken on the loop, and an event informs the core."""

    def __init__(self, calls: PendingCalls, front: Driver | RankDriver, *, page_size: int) -> None:
        self._calls = calls
        self._front = front
        self._page_size = page_size

    def grow(self, ready: ReadyRequest, tokens: int) -> list[int]:
        """See `DecodeEngine.grow`."""
        self._check(ready)
        needed = pages_needed(ready, tokens, page_size=self._page_size)
        if needed > len(ready._reserve) and ready.layers_in_place is None:
            self._tell(ready, 0, wanted=needed - len(ready._reserve))
        return self._take(ready, tokens, needed)

    def grow_many(self, batch: Iterable[ReadyRequest], tokens: int) -> list[ReadyRequest]:
        """See `DecodeEngine.grow_many`."""
        batch = list(batch)
        for ready in batch:
            self._check(ready)
            pages_needed(ready, tokens, page_size=self._page_size)
        short = []
        for ready in batch:
            try:
                self.grow(ready, tokens)
            except OutOfPages:
                short.append(ready)
        return short

    async def wait_grown(self, ready: ReadyRequest, tokens: int, *, hold_s: float) -> list[int]:
        """See `DecodeEngine.wait_grown`. `hold_s`: maximum seconds to wait for the callers of other ranks."""
        live = self._check(ready)
        needed = pages_needed(ready, tokens, page_size=self._page_size)
        # The first answer may be to growth posted before this request; a second one is not.
        for _ in range(2):
            if needed <= len(ready._reserve) or ready.layers_in_place is not None:
                break
            answers = live.reserves_given
            self._front.post(self._event(ready, 0, wanted=needed - len(ready._reserve)))

            def is_answered(answers: int = answers) -> bool:
                return not self._calls.holds(ready) or live.reserves_given > answers

            try:
                async with asyncio.timeout(hold_s):
                    await self._calls.wait_until(is_answered, request_id=ready.request_id)
            except TimeoutError:
                break
            self._calls.ready(ready)
        return self._take(ready, tokens, needed)

    def note(self, ready: ReadyRequest, page_count: int) -> None:
        """See `DecodeEngine.note_growth`."""
        checked(page_count, Count, "page_count")
        if not self._calls.holds(ready):
            return
        if ready.layers is not None and not ready.layers.is_complete:
            # Reported with READY. After a loss the caller has other pages, and these were never taken.
            ready.layers.grown += page_count
        else:
            self._front.post(self._event(ready, page_count))

    def _check(self, ready: ReadyRequest) -> LiveCall:
        """Return the call of a request that may grow. Raises InvalidRequest for an aborted request."""
        live = self._calls.ready(ready)
        if live.is_aborted:
            raise InvalidRequest(f"request {ready.request_id!r} was aborted: its pages are no longer yours")
        return live

    def _take(self, ready: ReadyRequest, tokens: int, needed: int) -> list[int]:
        if needed > len(ready._reserve):
            raise OutOfPages(
                f"request {ready.request_id!r} needs {needed} more device pages; {len(ready._reserve)} can be had"
            )
        if needed:
            # Before the pages are taken: a request that is lost while this is posted has not grown.
            self._tell(ready, needed)
        taken = grow_from_reserve(ready, tokens, page_size=self._page_size)
        assert taken is not None, "the posted pages are available"
        return taken

    def _tell(self, ready: ReadyRequest, page_count: int, *, wanted: int = 0) -> None:
        if ready.layers_in_place is not None:
            self.note(ready, page_count)
            return
        self._front.take_now(self._event(ready, page_count, wanted=wanted))
        # The request ended just now: its former pages must not be written to.
        self._calls.ready(ready)

    def _event(self, ready: ReadyRequest, page_count: int, *, wanted: int = 0) -> events.GrowthTaken:
        at_s, request_id = self._front.clock(), ready.request_id
        return events.GrowthTaken(at_s=at_s, request_id=request_id, page_count=page_count, wanted=wanted)


def pages_needed(ready: ReadyRequest, tokens: int, *, page_size: int) -> int:
    """Return the pages to add for `tokens` more tokens. Raises InvalidRequest if `tokens` is not a count."""
    if type(tokens) is not int or tokens < 0:  # Runs for each token: a valid count costs no more than this.
        checked(tokens, Count, f"request {ready.request_id!r}: tokens")
    return max(0, -(-(ready.length + tokens) // page_size) - len(ready.pages))


def grow_from_reserve(ready: ReadyRequest, tokens: int, *, page_size: int) -> list[int] | None:
    """Make room for `tokens` more tokens; returns the pages that this took, usually none.

    Returns None, having changed nothing, if the reserve has too few. One thread at a time may call it for a request.
    """
    needed = pages_needed(ready, tokens, page_size=page_size)
    if needed > len(ready._reserve):
        return None
    ready.length += tokens
    if not needed:
        return []
    taken = [ready._reserve.popleft() for _ in range(needed)]
    ready.pages = np.concatenate((ready.pages, np.array(taken, dtype=np.int32)))
    return taken


def pack_output(tokens: Tokens, *, vocabulary: int | None) -> bytes:
    """Return generated tokens, possibly none, as packed little-endian u32. Raises InvalidRequest."""
    try:
        is_empty = not len(tokens)
    except TypeError:
        is_empty = False  # No sequence; packing raises for it.
    return b"" if is_empty else pack_tokens(tokens, vocabulary=vocabulary)


def kept_tokens(ready: ReadyRequest, packed_output: bytes, *, page_size: int) -> int:
    """Return how many tokens of prompt and output have KV: all but the last of the output.

    Raises InvalidRequest for output that the request's pages have no room for.
    """
    tokens = (len(ready.packed_tokens) + len(packed_output)) // TOKEN_BYTES - (1 if packed_output else 0)
    if -(-tokens // page_size) > len(ready.pages):
        raise InvalidRequest(
            f"request {ready.request_id!r}: {tokens} tokens have KV, but its {len(ready.pages)} pages hold "
            f"{len(ready.pages) * page_size}; grow before writing"
        )
    return tokens
