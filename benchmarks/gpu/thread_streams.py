"""Streams without a GPU: each is a thread, so that work without a mark to wait for really comes too early.

As with CUDA, what a stream runs is enqueued, and the caller goes on. `run` itself executes a copy's program at once, in
the calling thread, with this stream as the current one; what that program runs is enqueued.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tidekv.backends.copies.streams import Mark


class ThreadMark:
    """A point in the work of a thread."""

    def __init__(self, stream: ThreadStream) -> None:
        self._reached = threading.Event()
        self._stream = stream
        stream.enqueue(self._reached.set)

    def wait(self) -> None:
        """Block until the stream is here. Raises the first error of its work."""
        self._reached.wait()
        if self._stream.error is not None:
            raise self._stream.error

    def is_reached(self) -> bool:
        """Return whether the stream is here."""
        return self._reached.is_set()


class ThreadStream:
    """One thread and its queue."""

    def __init__(self, streams: ThreadStreams) -> None:
        self.error: BaseException | None = None
        self._streams = streams
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="stand-in stream", daemon=True)
        self._thread.start()

    def run(self, work: Callable[[], None]) -> None:
        """Run a copy's program now, or enqueue a part of it."""
        if self._streams.is_within_run():
            self.enqueue(work)
        else:
            with self._streams.running(self):
                work()

    def mark(self) -> ThreadMark:
        """Mark the point after all that was enqueued so far."""
        return ThreadMark(self)

    def follow(self, mark: Mark) -> None:
        """Order all later work behind `mark`."""
        self.enqueue(mark.wait)

    def enqueue(self, work: Callable[[], object]) -> None:
        """Add work."""
        self._queue.put(work)

    def stop(self) -> None:
        """Finish what was enqueued, and end the thread."""
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except BaseException as error:  # As a device reports it: at the next mark.
                self.error = self.error or error


class ThreadStreams:
    """The streams of a device that is stood in for."""

    def __init__(self) -> None:
        self._local = threading.local()
        self._all: list[ThreadStream] = []
        self._default = self.make()

    def current(self) -> ThreadStream:
        """Return the stream that this thread enqueues on."""
        stream: ThreadStream = getattr(self._local, "stream", self._default)
        return stream

    def make(self) -> ThreadStream:
        """Return a new stream."""
        self._all.append(ThreadStream(self))
        return self._all[-1]

    @contextmanager
    def using(self, stream: ThreadStream) -> Iterator[None]:
        """Make a stream the current one of this thread."""
        before = self.current()
        self._local.stream = stream
        try:
            yield
        finally:
            self._local.stream = before

    @contextmanager
    def running(self, stream: ThreadStream) -> Iterator[None]:
        """Execute a copy's program on a stream."""
        self._local.is_within_run = True
        try:
            with self.using(stream):
                yield
        finally:
            self._local.is_within_run = False

    def is_within_run(self) -> bool:
        """Whether this thread executes a copy's program."""
        return getattr(self._local, "is_within_run", False)

    def synchronize(self) -> None:
        """Wait until every stream is idle."""
        for stream in list(self._all):
            stream.mark().wait()

    def close(self) -> None:
        """End all threads."""
        for stream in self._all:
            stream.stop()
