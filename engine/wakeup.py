"""Single-producer, single-consumer wake-up of a thread by one lock, which is cheaper than a queue.

    producer:  append the item ──▶ ring
    consumer:  found nothing ──▶ wait ──▶ look again

A ring while the consumer is awake is kept, so no item appended before it is missed. Wake-ups may be spurious.
"""

from __future__ import annotations

import threading


class Bell:
    """Wakes one thread. Exactly one thread rings and one thread waits."""

    def __init__(self) -> None:
        self._silence = threading.Lock()
        self._silence.acquire()

    def ring(self) -> None:
        """Wake the consumer, or make its next wait return at once."""
        # Only this thread releases the lock. If it is free, an earlier ring has not been consumed yet and suffices.
        if self._silence.locked():
            self._silence.release()

    def wait(self, timeout_s: float | None = None) -> None:
        """Sleep until the bell rings, or at once if it rang since the last wait, at most for the timeout."""
        self._silence.acquire(timeout=-1 if timeout_s is None else timeout_s)
