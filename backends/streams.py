"""Streams of a device: what is run on one happens in that order, and only a mark orders one behind another.

Copies that use several streams are written against `Streams`, so that the order that they ask for can be tested without
a GPU: on one, work that lacks a mark to wait for goes wrong rarely, and somewhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

# Higher than that of compute, which is 0. A gather is short and stands before a long crossing of the bus; on a GPU that
# is busy it would wait for whatever is queued there already.
PRIORITY = -1


class Mark(Protocol):
    """A point in the work of a stream."""

    def wait(self) -> None:
        """Block this thread, without spinning, until the stream has come there. Raises what the device reports."""

    def is_reached(self) -> bool:
        """Whether the stream has come there."""


class Stream(Protocol):
    """Work in order. Nothing here blocks for what the device still has to do."""

    def run(self, work: Callable[[], None]) -> None:
        """Let `work` enqueue on this stream: within it, the stream is the current one."""

    def mark(self) -> Mark:
        """Mark the point after all that was run so far."""

    def follow(self, mark: Mark) -> None:
        """Let nothing that is run from now on begin before `mark` is reached."""


class Streams(Protocol):
    """The streams of one device."""

    def current(self) -> Stream:
        """Return the stream that this thread enqueues on."""

    def make(self) -> Stream:
        """Return a new one."""


class InlineMark:
    """A point that was reached when it was marked."""

    def wait(self) -> None:
        """Return at once."""

    def is_reached(self) -> bool:
        """Always."""
        return True


class InlineStream:
    """The CPU as a stream: what is run is done."""

    def run(self, work: Callable[[], None]) -> None:
        """Do it."""
        work()

    def mark(self) -> InlineMark:
        """Everything that was run so far is done."""
        return InlineMark()

    def follow(self, mark: Mark) -> None:
        """Nothing to wait for."""
        assert mark.is_reached(), "a stream of another device"


class InlineStreams:
    """What a device without streams has."""

    def current(self) -> InlineStream:
        """The CPU."""
        return InlineStream()

    def make(self) -> InlineStream:
        """The CPU."""
        return InlineStream()


class CudaMark:
    """An event. Who waits for it sleeps in the driver until the device interrupts: no thread asks in a loop."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch has no types for it.
        self.event.record(stream)

    def wait(self) -> None:
        """Block this thread; the interpreter is free meanwhile."""
        self.event.synchronize()

    def is_reached(self) -> bool:
        """Ask the device."""
        return bool(self.event.query())  # type: ignore[no-untyped-call]  # As above.


class CudaStream:
    """One of torch's streams."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def run(self, work: Callable[[], None]) -> None:
        """Enqueue what `work` launches, on this stream and its device."""
        with torch.cuda.stream(self._stream):
            work()

    def mark(self) -> CudaMark:
        """Record an event."""
        return CudaMark(self._stream)

    def follow(self, mark: Mark) -> None:
        """Wait for an event, on the device."""
        assert isinstance(mark, CudaMark), "a mark of another device"
        self._stream.wait_event(mark.event)


class CudaStreams:
    """The streams of one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current(self) -> CudaStream:
        """The stream that this thread's work on the GPU goes to."""
        return CudaStream(torch.cuda.current_stream(self._device))

    def make(self) -> CudaStream:
        """A stream for copies, before compute where both wait."""
        stream = torch.cuda.Stream(self._device, priority=PRIORITY)  # type: ignore[no-untyped-call]  # As above.
        return CudaStream(stream)


def streams_of(device: torch.device) -> Streams:
    """Return the streams of a device."""
    return CudaStreams(device) if device.type == "cuda" else InlineStreams()
