"""A client of a Mooncake Store in its own process, which serves one `MooncakeLink`.

It is run by its path, so that it loads nothing but Mooncake; it must import nothing of tidekv. A process is needed
because the library holds the interpreter while it starts and, for a second, while it ends; its calls can hang for 30 s
and cannot be cancelled; and a failed check of its own aborts. In a child process none of that stops an event loop, and
the child can be killed.

    arguments  the descriptors of a socket and of the memory that both share
    socket     frames, both ways: length, four bytes little-endian, and as much JSON
    memory     slots of one size; the values of a call are in the first ones
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any

LENGTH = struct.Struct("<I")
LOCAL_BUFFER_BYTES = 16 << 20


def receive(connection: socket.socket) -> Any:  # Any: JSON.
    """Return the next frame, None at the end of the stream."""
    head = _receive_bytes(connection, LENGTH.size)
    return None if not head else json.loads(_receive_bytes(connection, LENGTH.unpack(head)[0]))


def send(connection: socket.socket, frame: object) -> None:
    """Send a frame."""
    body = json.dumps(frame).encode()
    connection.sendall(LENGTH.pack(len(body)) + body)


def _receive_bytes(connection: socket.socket, count: int) -> bytes:
    body = b""
    while len(body) < count:
        part = connection.recv(count - len(body))
        if not part:
            return b""
        body += part
    return body


class Client:
    """The store, and the memory that it reads and writes."""

    def __init__(self, hello: dict[str, Any], memory: mmap.mmap) -> None:  # Any: JSON; MooncakeLink sends it.
        from mooncake.store import MooncakeDistributedStore

        self._store = MooncakeDistributedStore()
        code = self._store.setup(
            hello["host"],
            hello["metadata"],
            0,
            LOCAL_BUFFER_BYTES,
            hello["protocol"],
            hello["device"],
            hello["master"],
        )
        if code:
            raise ConnectionError(f"the store's client could not be set up with master {hello['master']}: {code}")
        self._slot_bytes: int = hello["slot_bytes"]
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        code = self._store.register_buffer(self._address, len(memory))
        if code:
            raise ConnectionError(f"the store's client did not take {len(memory)} bytes of memory: {code}")

    def exist(self, names: list[str]) -> list[int]:
        return list(self._store.batch_is_exist(names))

    def read(self, names: list[str], size: int) -> list[int]:
        return list(self._store.batch_get_into(names, self._addresses(names), [size] * len(names)))

    def write(self, names: list[str], size: int) -> list[int]:
        # A plain put on a name that exists keeps the old bytes and still reports success.
        return list(self._store.batch_upsert_from(names, self._addresses(names), [size] * len(names)))

    def remove(self, names: list[str]) -> list[int]:
        return list(self._store.batch_remove(names, True))

    def remove_matching(self, pattern: str) -> int:
        return int(self._store.remove_by_regex(pattern, True))

    def _addresses(self, names: list[str]) -> list[int]:
        return [self._address + slot * self._slot_bytes for slot in range(len(names))]


def main() -> None:
    """Serve one link until it closes the socket."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    memory = mmap.mmap(int(sys.argv[2]), 0)
    hello = receive(connection)
    try:
        client = Client(hello, memory)
    except Exception as error:  # Sent to the link, which raises its own error.
        send(connection, {"error": str(error), "import": isinstance(error, ImportError)})
        return
    send(connection, {})
    calls: dict[str, Callable[..., object]] = {
        "exist": client.exist,
        "read": client.read,
        "write": client.write,
        "remove": client.remove,
        "remove_matching": client.remove_matching,
    }
    while (call := receive(connection)) is not None:
        name, *arguments = call
        send(connection, calls[name](*arguments))
    # The store's own shutdown takes a second; the master notices a client that is gone.
    os._exit(0)


if __name__ == "__main__":
    main()
