"""Turns for an engine's threads beside a server's step loop.

While a request waits for remote KV and nothing else runs, vLLM and SGLang execute empty steps as fast as they can. That
thread then holds the interpreter lock for the whole switch interval of 5 ms, and each wake-up of a transfer's thread
costs that much: 10.6 ms for a round trip at the median. With an interval of 0.2 ms it costs 0.11 ms, and 0.03 ms if the
empty step sleeps, which also leaves the core to others.

The interval belongs to the interpreter, and several workers can share one: it is restored when the last of them has
no transfer under way.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Final

SWITCH_S: Final = 0.0002
EMPTY_STEP_S: Final = 0.0005


class SwitchInterval:
    """The interpreter's switch interval, short while any user wants it so. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: set[StepPacing] = set()
        self._usual_s = 0.0
        """The interval to restore; it counts while there are users."""

    def shorten(self, user: StepPacing) -> None:
        """Shorten the interval for `user`; an interval that is shorter already is kept. Idempotent."""
        with self._lock:
            if not self._users:
                self._usual_s = sys.getswitchinterval()
                if self._usual_s > SWITCH_S:
                    sys.setswitchinterval(SWITCH_S)
            self._users.add(user)

    def restore(self, user: StepPacing) -> None:
        """Restore the interval if `user` was the last one. Idempotent."""
        with self._lock:
            if user not in self._users:
                return
            self._users.remove(user)
            if not self._users:
                # The interpreter cuts the interval to whole microseconds: half of one keeps it from shrinking.
                sys.setswitchinterval(self._usual_s + 0.5e-6)


_INTERVAL: Final = SwitchInterval()


class StepPacing:
    """Shortens the switch interval while transfers are under way, and sleeps in empty steps. For one thread."""

    def after_step(self, *, is_empty: bool, is_transferring: bool) -> None:
        """End a step. Sleeps EMPTY_STEP_S if it computed nothing while a transfer is under way."""
        if is_transferring:
            _INTERVAL.shorten(self)
        else:
            _INTERVAL.restore(self)
        if is_empty and is_transferring:
            time.sleep(EMPTY_STEP_S)

    def close(self) -> None:
        """Restore the interval, unless another worker of the process still needs it short. Idempotent."""
        _INTERVAL.restore(self)
