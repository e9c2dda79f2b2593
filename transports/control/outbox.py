"""What is said on one link until it is written: one system call for all of a turn.

In each call the kernel wakes the peer up, which then often runs at once, in our place. So frames that nobody waits for
have none of their own: they go with the next that somebody waits for, or after a moment, and always in order.
"""

from __future__ import annotations

import asyncio

PATIENCE_S = 0.002
"""So long a frame that nobody waits for may wait for others."""


class Outbox:
    """The frames of one stream. Every method is called on the loop."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._frames: list[bytes] = []
        self._frames_bytes = 0
        self._is_called = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting_bytes(self) -> int:
        """Bytes that the peer, or our own kernel, has not taken yet."""
        return self._writer.transport.get_write_buffer_size() + self._frames_bytes

    def put(self, frame: bytes, *, is_urgent: bool) -> None:
        """Have a frame written in this turn of the loop, or, where it is not urgent, with the next that is."""
        self._frames.append(frame)
        self._frames_bytes += len(frame)
        if self._is_called:
            return
        if is_urgent:
            self._is_called = True
            asyncio.get_running_loop().call_soon(self.write)
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(PATIENCE_S, self.write)

    def write(self) -> None:
        """Write everything now."""
        frames = self._frames
        self.clear()
        if frames:
            self._writer.writelines(frames)

    def clear(self) -> None:
        """Write nothing of what waits."""
        self._frames, self._frames_bytes, self._is_called = [], 0, False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
