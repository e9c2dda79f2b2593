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

CLOSE_S = 5.0
"""Maximum seconds that closing a view waits for its last poll."""


class LiveView:
    """Live view of one engine after another. A context manager that owns the polling thread."""

    def __init__(self, *, interval_s: float = 0.5) -> None:
        self.looked = threading.Event()
        """Set after every successful poll; the waiting caller clears it."""
        self._interval_s = interval_s
        self._address: str | None = None
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
        """Poll the metrics at this address from now on. None stops polling; the last picture stays."""
        self._address = address
        if address is not None:
            self._wake.set()

    def below(self, progress: RenderableType) -> RenderableType:
        """Return the current picture."""
        return Group(progress, self._picture)

    def _follow(self) -> None:
        before: Sample | None = None
        before_s = 0.0
        seen = ""
        while True:
            self._wake.wait(self._interval_s)
            self._wake.clear()
            if self._is_closing:
                return
            address = self._address
            if address is None:
                continue
            try:
                now, now_s = scrape(address, timeout_s=1.0), time.monotonic()
            except InvalidRequest:
                continue  # The engine has just ended or is busy: the next poll decides.
            same = before if seen == address else None
            self._picture = show(now, same, now_s - before_s)
            before, before_s, seen = now, now_s, address
            self.looked.set()
