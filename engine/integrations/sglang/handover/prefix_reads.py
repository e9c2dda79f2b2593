"""Reads of what decode has of a prompt, before SGLang's prefill computes the rest.

begin ──▶ wait for decode's promise, which names what it has ──▶ pages behind those of the tree ──▶ read ──▶ the tree

SGLang's thread calls everything, and asks again in each pass of its loop; nothing here waits but `end`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from tidekv.engine.config.engine_config import EngineConfig
from tidekv.engine.log import engine_log
from tidekv.engine.thread.prefill_thread import PrefillThread, PrefixRead
from tidekv.states.errors import InvalidRequest, TidekvError

LOG = engine_log("tidekv.sglang")


class PrefixPlace(Protocol):
    """Where the prefix of one prompt goes."""

    namespace: str
    """That of the prompt's pages."""

    def missing_tokens(self) -> int:
        """Return the tokens of full pages that prefill lacks, of those that it would not compute in any case."""

    def reserve(self, end: int, least: int) -> tuple[int, list[int]] | None:
        """Take pages for the tokens up to `end` that prefill lacks. Returns how many leading tokens it has, and the
        pages of the prefix; None, with nothing taken, if it lacks fewer than `least`, or has no room.
        """

    def keep(self, tokens: int) -> None:
        """Let SGLang find the prefix of `tokens` tokens, and take the other pages back."""

    def abandon(self) -> None:
        """Take no page back: something may still write to them."""


@dataclass(slots=True, eq=False)
class Reading:
    """The prefix of one prompt."""

    name: str
    packed: bytes = field(repr=False)
    place: PrefixPlace
    until_s: float
    """When decode's promise is not waited for any more."""
    have_tokens: int = 0
    read: PrefixRead | None = None


class PrefixReads:
    """The reads of one prefill server."""

    def __init__(self, thread: PrefillThread, config: EngineConfig, clock: Callable[[], float]) -> None:
        """`config`: that of the engine that reads."""
        self._thread = thread
        self._wait_s = config.cache_peers.wait_s
        self._least = max(config.storage.prefetch_threshold_tokens, 1)
        self._clock = clock

    def begin(self, name: str, packed: bytes, place: PrefixPlace) -> Reading | None:
        """Begin with the prompt of a hand-over that was opened; None if prefill lacks too little of it."""
        if place.missing_tokens() < self._least:
            return None
        return Reading(name, packed, place, self._clock() + self._wait_s)

    def poll(self, reading: Reading) -> bool:
        """Whether the reading is over: prefill has what it could read, or reads nothing."""
        if reading.read is None:
            promised = self._thread.promised(reading.name)
            if promised is None and self._clock() < reading.until_s:
                return False
            if not promised or not self._start(reading, promised):
                return True
        assert reading.read is not None, "it was started"
        if not reading.read.is_done:
            return False
        self._take(reading, reading.read)
        return True

    def end(self, reading: Reading) -> None:
        """End a reading that is not over, whatever has come. Waits for a copy into its pages."""
        if reading.read is None:
            return
        try:
            self._thread.end_read(reading.read)
        except TidekvError as error:
            self._abandon(reading, error)
        else:
            self._take(reading, reading.read)

    def _start(self, reading: Reading, promised: int) -> bool:
        reserved = reading.place.reserve(promised, self._least)
        if reserved is None:
            return False
        reading.have_tokens, pages = reserved
        try:
            reading.read = self._thread.read_prefix(
                reading.name, pages, reading.have_tokens, tokens=reading.packed, namespace=reading.place.namespace
            )
        except TidekvError as error:
            LOG.warning("what decode has is not read", request_id=reading.name, cause=str(error))
            reading.place.keep(reading.have_tokens)
            return False
        return True

    def _take(self, reading: Reading, read: PrefixRead) -> None:
        try:
            tokens = read.tokens
        except InvalidRequest as error:
            LOG.warning("what decode has is not read", request_id=reading.name, cause=str(error))
            tokens = reading.have_tokens
        except Exception as error:
            # The reader has ended, or has a defect: something may still write to the pages.
            self._abandon(reading, error)
            return
        reading.place.keep(tokens)

    def _abandon(self, reading: Reading, error: Exception) -> None:
        LOG.error("pages are lost until the next start: a read of them did not end", cause=str(error))
        reading.place.abandon()
