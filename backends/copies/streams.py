"""Streams of a device: work on one stream runs in order, and only a mark orders one stream behind another.

Copies that use several streams are written against `Streams`, so that the order that they request can be tested without
a GPU: there, work that lacks a mark to wait for fails rarely, and somewhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

# Higher than that of compute, which is 0. A gather is short and precedes a long transfer over the bus; on a busy GPU it
# would otherwise wait for all queued work.
PRIORITY = -1


class Mark(Protocol):
    """A point in the work of a stream."""

    def wait(self) -> None:
        """Block this thread, without spinning, until the stream has reached the mark. Raises what the device
        reports.
        """

    def is_reached(self) -> bool:
        """Return whether the stream has reached the mark."""


class Stream(Protocol):
    """Work in order. Nothing here blocks for outstanding work of the device."""

    def run(self, work: Callable[[], None]) -> None:
        """Run `work` with this stream as the current one."""

    def mark(self) -> Mark:
        """Mark the point after all that was run so far."""

    def follow(self, mark: Mark) -> None:
        """Order all later work behind `mark`."""


class Streams(Protocol):
    """The streams of one device."""

    def current(self) -> Stream:
        """Return the stream that this thread enqueues on."""

    def make(self) -> Stream:
        """Return a new stream."""


class InlineMark:
    """A mark that was reached when it was made."""

    def wait(self) -> None:
        """Return at once."""

    def is_reached(self) -> bool:
        """Return True."""
        return True


class InlineStream:
    """The CPU as a stream: work is done when `run` returns."""

    def run(self, work: Callable[[], None]) -> None:
        """Call `work` on this thread; what it raises leaves here."""
        work()

    def mark(self) -> InlineMark:
        """Return a mark; everything that was run so far is done."""
        return InlineMark()

    def follow(self, mark: Mark) -> None:
        """Do nothing: every mark of the CPU is reached."""
        assert mark.is_reached(), "a stream of another device"


class InlineStreams:
    """The streams of a device without streams."""

    def current(self) -> InlineStream:
        """Return the CPU."""
        return InlineStream()

    def make(self) -> InlineStream:
        """Return the CPU."""
        return InlineStream()


class CudaMark:
    """An event. A waiting thread sleeps in the driver until the device interrupts, without polling."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch has no types for it.
        self.event.record(stream)

    def wait(self) -> None:
        """Block this thread; the interpreter is released meanwhile."""
        self.event.synchronize()

    def is_reached(self) -> bool:
        """Query the device."""
        return bool(self.event.query())  # type: ignore[no-untyped-call]  # As above.


class CudaStream:
    """One of torch's streams."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def run(self, work: Callable[[], None]) -> None:
        """Enqueue what `work` launches, on this stream and its device."""
        index = self._stream.device_index
        if torch.cuda.current_device() != index:
            with torch.cuda.stream(self._stream):
                work()
            return
        # torch's context looks the device up several times, which takes longer than the launch of a kernel.
        before = torch.cuda.current_stream(index)
        torch.cuda.set_stream(self._stream)
        try:
            work()
        finally:
            torch.cuda.set_stream(before)

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
        self._index = device.index  # A number, because torch looks up a device at each call.

    def current(self) -> CudaStream:
        """Return the stream of this thread's work on the GPU."""
        return CudaStream(torch.cuda.current_stream(self._index))

    def make(self) -> CudaStream:
        """Return a stream for copies, which go before compute if both wait."""
        stream = torch.cuda.Stream(self._device, priority=PRIORITY)  # type: ignore[no-untyped-call]  # As above.
        return CudaStream(stream)


def streams_of(device: torch.device) -> Streams:
    """Return the streams of a device."""
    return CudaStreams(device) if device.type == "cuda" else InlineStreams()


def own_stream(device: torch.device) -> AbstractContextManager[object]:
    """Within it this thread enqueues on a new stream, and not on one that other threads use."""
    if device.type != "cuda":
        return nullcontext()
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # As above.
    context: AbstractContextManager[object] = torch.cuda.stream(stream)
    return context
