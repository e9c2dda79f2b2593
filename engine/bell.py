"""What a thread sleeps by until somebody has something for it: one lock, and so cheaper than a queue.

    ringing thread:   put it where it is found ──▶ ring
    sleeping thread:  found nothing ──▶ wait ──▶ look again

A ring while nobody sleeps is kept, so nothing that was put before it is missed; a sleeper may wake for nothing.
"""

from __future__ import annotations

import threading


class Bell:
    """Wakes one thread. Rung by one thread only, waited for by one only."""

    def __init__(self) -> None:
        self._silence = threading.Lock()
        self._silence.acquire()

    def ring(self) -> None:
        """Wake the other thread, or keep it from its next sleep."""
        # Nobody else gives the lock up, so where it is free now nobody has heard the ring before.
        if self._silence.locked():
            self._silence.release()

    def wait(self, timeout_s: float | None = None) -> None:
        """Sleep until the bell is rung, if it was not since the last time, or until the timeout has passed."""
        self._silence.acquire(timeout=-1 if timeout_s is None else timeout_s)
