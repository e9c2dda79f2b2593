"""Turns for the connector's threads beside vLLM's step loop.

While a request waits for remote KV and nothing else runs, vLLM executes empty steps as fast as it can. Its thread then
holds the interpreter lock for the whole switch interval of 5 ms, and each wake-up of a transfer's thread costs that
much: 10.6 ms for a round trip at the median. With an interval of 0.2 ms it costs 0.11 ms, and 0.03 ms if the empty
step sleeps, which also leaves the core to others.
"""

from __future__ import annotations

import sys
import time
from typing import Final

SWITCH_S: Final = 0.0002
EMPTY_STEP_S: Final = 0.0005


class StepPacing:
    """Shortens the switch interval while transfers are under way, and sleeps in empty steps. For one thread."""

    def __init__(self) -> None:
        self._usual_s: float | None = None
        """The interval to restore; None while it is not shortened."""

    def after_step(self, *, is_empty: bool, is_transferring: bool) -> None:
        """End a step. Sleeps EMPTY_STEP_S if it computed nothing while a transfer is under way."""
        if is_transferring != (self._usual_s is not None):
            self._set(is_short=is_transferring)
        if is_empty and is_transferring:
            time.sleep(EMPTY_STEP_S)

    def close(self) -> None:
        """Restore the interval. Idempotent."""
        self._set(is_short=False)

    def _set(self, *, is_short: bool) -> None:
        if is_short:
            self._usual_s = sys.getswitchinterval()
            if self._usual_s > SWITCH_S:
                sys.setswitchinterval(SWITCH_S)
        elif self._usual_s is not None:
            # The interpreter cuts the interval to whole microseconds: half of one keeps it from shrinking each time.
            sys.setswitchinterval(self._usual_s + 0.5e-6)
            self._usual_s = None
