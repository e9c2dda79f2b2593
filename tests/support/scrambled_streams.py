"""Streams of a device that a test advances in random orders, so that work without a mark to wait for goes wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from tidekv.backends.copies.streams import Mark, Stream


class ScrambledStreams:
    """A device with streams that the test advances, one at a time, at random: what has no mark to wait for
    goes wrong."""

    def __init__(self, seed: int, *, may_wait: bool = False) -> None:
        """`may_wait`: what is tested may block for a mark, which advances the streams until it is reached."""
        self.chance = random.Random(seed)
        self.may_wait = may_wait
        self.streams: list[ScrambledStream] = []
        self.lane = self.make()

    def current(self) -> Stream:
        return self.lane

    def make(self) -> ScrambledStream:
        self.streams.append(ScrambledStream(self))
        return self.streams[-1]

    def finish(self, until: Mark | None = None) -> None:
        """Do what was enqueued, each stream in order, all of them in none; up to a mark, if there is one."""
        while (until is None or not until.is_reached()) and any(stream.queue for stream in self.streams):
            able = [stream for stream in self.streams if stream.queue and stream.may_advance()]
            assert able, "every stream waits for another"
            self.chance.choice(able).advance()


class ScrambledStream:
    """Work and waits, in order."""

    def __init__(self, device: ScrambledStreams) -> None:
        self.device = device
        self.queue: list[Callable[[], None] | ScrambledMark] = []
        self.enqueued = self.done = 0

    def run(self, work: Callable[[], None]) -> None:
        self._put(work)

    def mark(self) -> ScrambledMark:
        return ScrambledMark(self, self.enqueued)

    def follow(self, mark: Mark) -> None:
        assert isinstance(mark, ScrambledMark)
        self._put(mark)

    def may_advance(self) -> bool:
        first = self.queue[0]
        return not isinstance(first, ScrambledMark) or first.is_reached()

    def advance(self) -> None:
        work = self.queue.pop(0)
        if not isinstance(work, ScrambledMark):
            work()
        self.done += 1

    def _put(self, item: Callable[[], None] | ScrambledMark) -> None:
        self.queue.append(item)
        self.enqueued += 1


@dataclass(eq=False)
class ScrambledMark:
    """A point in a stream's work."""

    stream: ScrambledStream
    position: int

    def wait(self) -> None:
        assert self.stream.device.may_wait, "nothing that enqueues may block"
        self.stream.device.finish(self)

    def is_reached(self) -> bool:
        return self.stream.done >= self.position
