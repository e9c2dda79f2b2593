"""Live view of an engine below the progress bars of a run: a thread polls its metrics, as `tidekv top` does."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Self

from rich.console import Group, RenderableType
from rich.text import Text

from tidekv.engine.trace.top import Sample, scrape, show
from tidekv.states.errors import InvalidRequest

POLL_S = 1.0
"""Maximum seconds of a poll."""
CLOSE_S = 5.0
"""Maximum seconds that closing a view waits for its last poll."""


class LiveView:
    """Live view of one engine after another. A context manager that owns the polling thread."""

    def __init__(self, *, interval_s: float = 0.5) -> None:
        self.looked = threading.Event()
        """Set after every successful poll; the waiting caller clears it."""
        self._interval_s = interval_s
        self._address: str | None = None
        self._before: Sample | None = None
        self._before_s = 0.0
        self._looking = threading.Lock()
        """Held for a poll, so that an earlier one cannot replace the picture of the last one."""
        self._picture: RenderableType = Text("no engine is running yet", style="dim")
        self._wake = threading.Event()
        self._is_closing = False
        self._thread = threading.Thread(target=self._follow, name="tidekv-live", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_closing = True
        self._wake.set()
        # The thread ends after its current poll, whose scrape has a deadline.
        self._thread.join(CLOSE_S)

    def watch(self, address: str | None) -> None:
        """Poll the metrics at this address from now on.

        None polls once more, so that the picture that stays is that of now, and stops. It blocks for up to twice
        POLL_S: call it while the engine still serves metrics, and not on its event loop.
        """
        if address is None:
            self._look()
        with self._looking:
            self._address, self._before = address, None
        if address is not None:
            self._wake.set()

    def below(self, progress: RenderableType) -> RenderableType:
        """Return the current picture."""
        return Group(progress, self._picture)

    def _follow(self) -> None:
        while True:
            self._wake.wait(self._interval_s)
            self._wake.clear()
            if self._is_closing:
                return
            self._look()

    def _look(self) -> None:
        with self._looking:
            if self._address is None:
                return
            try:
                now, now_s = scrape(self._address, timeout_s=POLL_S), time.monotonic()
            except InvalidRequest:
                return  # The engine has just ended or is busy: the next poll decides.
            self._picture = show(now, self._before, now_s - self._before_s)
            self._before, self._before_s = now, now_s
            self.looked.set()
