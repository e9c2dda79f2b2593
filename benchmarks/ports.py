"""Ports of 127.0.0.1 for servers that are started later."""

from __future__ import annotations

import os
import random
import socket
from collections import deque
from pathlib import Path
from typing import Final

HOST: Final = "127.0.0.1"
FIRST_PORT: Final = 1024
"""Lower ones need privileges."""
LAST_PORT: Final = 65_535
HELD_MAX: Final = 256
"""Ports that a process keeps other processes from choosing, the latest ones."""


def free_address() -> str:
    """Return `host:port` of a port that `free_port` returns."""
    return f"{HOST}:{free_port()}"


def free_port(count: int = 1) -> int:
    """Return the first of `count` ports of 127.0.0.1 in a row that are free, and that no earlier call has returned.

    A server binds its port minutes later, or again after a kill. Until then the kernel must not give the port to a
    connection, so ports are chosen at random among those that it never gives. Other processes that call this function
    do not get it before this process has ended or has asked for HELD_MAX more: they find its UDP port in use.
    """
    while True:
        first = random.choice(_never_given())
        wanted = range(first, first + count)
        if not _returned.isdisjoint(wanted) or not all(_is_free(port) for port in wanted):
            continue
        held = [_hold(port) for port in wanted]
        _held.extend(descriptor for descriptor in held if descriptor is not None)
        while len(_held) > HELD_MAX:
            os.close(_held.popleft())
        if None not in held:
            _returned.update(wanted)
            return first


_returned: Final = set[int]()
_held: Final = deque[int]()
"""File descriptors of UDP sockets, bound to the ports that were returned last."""


def _hold(port: int) -> int | None:
    """Bind the UDP port of this number until it is closed; None if it is in use. TCP servers do not notice."""
    with socket.socket(type=socket.SOCK_DGRAM) as holder:
        try:
            holder.bind((HOST, port))
        except (OSError, OverflowError):
            return None
        return holder.detach()


def _never_given(setting: Path = Path("/proc/sys/net/ipv4/ip_local_port_range")) -> range:
    """Return the larger range of ports outside those for outgoing connections; all ports if there is none outside."""
    lowest, highest = map(int, setting.read_text().split())
    outside = max(range(FIRST_PORT, lowest), range(highest + 1, LAST_PORT + 1), key=len)
    return outside or range(FIRST_PORT, LAST_PORT + 1)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((HOST, port))
        except (OSError, OverflowError):
            return False
    return True
