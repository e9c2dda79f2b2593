"""Signs of life of a worker whose event loop is stalled: datagrams that a thread of its own answers.

A link and its seals, possibly with TLS, belong to the event loop, so no thread can answer on them. The thread has a
socket of its own instead, on the UDP port with the number of the listener, and a key that the listener's Hello names:
it is as secret as the link that carried it. An answer says for how long the loop has not turned. It never replaces a
message of the link: a loop that turns while its link is silent has lost the link.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Final

KEY_BYTES: Final = 32
TURN_S: Final = 0.1
"""Interval in seconds at which the loop notes that it turns."""
_NONCE_BYTES: Final = 16
_MAC_BYTES: Final = 32
_ASK_BYTES: Final = _NONCE_BYTES + _MAC_BYTES
_STALL: Final = struct.Struct("<d")
_READS_MAX: Final = 64
"""Datagrams that are read for one answer: those of others are ignored, up to this number."""


class LivenessThread:
    """Answers questions for signs of life of one event loop. Made, started and closed on that loop."""

    def __init__(self) -> None:
        self.key = secrets.token_bytes(KEY_BYTES)
        self._turned_at = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None
        self._sockets: list[socket.socket] = []
        self._end, self._ended = socket.socketpair()
        self._thread = threading.Thread(target=self._answer_all, name="tidekv liveness", daemon=True)

    def start(self, listening: Sequence[socket.socket]) -> None:
        """Answer at the UDP ports with the addresses of these listening sockets. Raises OSError if one is taken; the
        thread is closed then.
        """
        try:
            for one in listening:
                answering = socket.socket(one.family, socket.SOCK_DGRAM)
                self._sockets.append(answering)
                if one.family is socket.AF_INET6:
                    # The IPv4 address of the same port has a socket of its own.
                    answering.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                answering.setblocking(False)
                answering.bind(one.getsockname())
        except OSError:
            self._close_sockets()
            raise
        self._note_turn()
        self._thread.start()

    def close(self) -> None:
        """End the thread, which takes no time: it never waits for anything but datagrams."""
        if self._timer is not None:
            self._timer.cancel()
        if self._thread.is_alive():
            self._end.send(b"\0")
            self._thread.join()
        self._close_sockets()

    def _close_sockets(self) -> None:
        for one in (*self._sockets, self._end, self._ended):
            one.close()

    def _note_turn(self) -> None:
        self._turned_at = time.monotonic()
        self._timer = asyncio.get_running_loop().call_later(TURN_S, self._note_turn)

    def _answer_all(self) -> None:
        with selectors.DefaultSelector() as selector:
            for one in (*self._sockets, self._ended):
                selector.register(one, selectors.EVENT_READ, one)
            while True:
                for ready, _ in selector.select():
                    if ready.data is self._ended:
                        return
                    self._answer(ready.data)

    def _answer(self, answering: socket.socket) -> None:
        try:
            question, asker = answering.recvfrom(_ASK_BYTES + 1)
            nonce = question[:_NONCE_BYTES]
            if len(question) == _ASK_BYTES and hmac.compare_digest(question[_NONCE_BYTES:], _mac(self.key, nonce, b"")):
                stalled = _STALL.pack(time.monotonic() - self._turned_at)
                # Shorter than the question, so that a forged sender receives less than it costs.
                answering.sendto(stalled + _mac(self.key, nonce, stalled), asker)
        except OSError:
            # The asker is gone, or its network: it asks again, or believes that we are dead.
            return


async def stalled_s(host: str, port: int, key: bytes, *, within_s: float) -> float | None:
    """Return for how many seconds the event loop of the worker that listens at `host` has not turned; None: no process
    answered within `within_s` seconds.
    """
    loop = asyncio.get_running_loop()
    nonce = secrets.token_bytes(_NONCE_BYTES)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.setblocking(False)
        try:
            async with asyncio.timeout(within_s):
                # Connected, since uvloop has no sendto; and only that address is heard.
                asking.connect((host, port))
                await loop.sock_sendall(asking, nonce + _mac(key, nonce, b""))
                for _ in range(_READS_MAX):
                    answer = await loop.sock_recv(asking, _STALL.size + _MAC_BYTES + 1)
                    stalled, mac = answer[: _STALL.size], answer[_STALL.size :]
                    if hmac.compare_digest(mac, _mac(key, nonce, stalled)):
                        return max(float(_STALL.unpack(stalled)[0]), 0.0)
        except OSError:  # TimeoutError is one.
            return None
    return None


def _mac(key: bytes, nonce: bytes, answer: bytes) -> bytes:
    return hmac.digest(key, nonce + answer, "sha256")
