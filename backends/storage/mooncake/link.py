"""One client of a Mooncake Store, in a child process, and the memory shared with it. Everything here blocks.

Measured with version 0.3.13: an object that was stored may be evicted at once; the health check returns 0 while the
master is dead; setting up without a master takes 90 s; a call to a master or node that hangs takes 30 s.
"""

from __future__ import annotations

import mmap
import os
import re
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from tidekv.backends.storage.mooncake import child as mooncake_child
from tidekv.backends.storage.mooncake.options import MooncakeOptions
from tidekv.backends.storage.remote import ServerFailed
from tidekv.states.errors import InvalidConfig

# Busy: another client stores the object now. An expired lease means that the bytes may have been replaced while they
# were read; a failed transfer, that the node that had them is gone. Both count as missing.
_CAUSES: Final = {
    -200: "full",
    -600: "foreign",
    # Another client began to write the same object before this one ended.
    -601: "busy",
    -703: "busy",
    -704: "missing",
    -707: "missing",
    -800: "missing",
    -900: "unreachable",
    -901: "timeout",
}


class MooncakeLink:
    """A client with memory for a batch: `values` are its slots. The child is started when it is needed, and restarted
    after a failure.
    """

    def __init__(self, options: MooncakeOptions, *, slots: int, slot_bytes: int) -> None:
        self._options = options
        self._slot_bytes = slot_bytes
        self._memory_file = os.memfd_create("tidekv-mooncake")
        os.ftruncate(self._memory_file, slots * slot_bytes)
        memory = memoryview(mmap.mmap(self._memory_file, slots * slot_bytes))
        self.values = [memory[slot * slot_bytes : (slot + 1) * slot_bytes] for slot in range(slots)]
        self._child: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None

    def start(self) -> None:
        """Start the child and connect. ServerFailed if the store is not there, InvalidConfig if it cannot be."""
        if self._child is not None:
            return
        host = self._own_address()
        ours, theirs = socket.socketpair()
        environment = {
            # The library writes a page about each connection; what matters is in its answers.
            "GLOG_minloglevel": "3",
            "MC_RPC_TIMEOUT_MS": str(round(self._options.request_timeout_s * 1000)),
            **os.environ,
        }
        program = Path(mooncake_child.__file__).resolve()
        with theirs:
            self._child = subprocess.Popen(
                [sys.executable, "-I", program, str(theirs.fileno()), str(self._memory_file)],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno(), self._memory_file],
                env=environment,
            )
        self._connection = ours
        options = self._options
        hello = {
            "host": options.host or host,
            "metadata": options.metadata,
            "protocol": options.protocol,
            "device": options.device,
            "master": f"{options.master[0]}:{options.master[1]}",
            "slot_bytes": self._slot_bytes,
        }
        answer = self._ask(hello, timeout_s=options.connect_timeout_s + options.request_timeout_s)
        if "error" in answer:
            self.close()
            if answer["import"]:
                raise InvalidConfig(
                    f"mooncake: its library does not load ({answer['error']}); Debian has what it needs: "
                    "apt-get install libibverbs1 libnuma1 libcurl4"
                )
            raise ServerFailed("unreachable", answer["error"])

    def exist(self, names: Sequence[str]) -> list[bool]:
        """Return which objects are there."""
        codes = self._call("exist", list(names))
        _raise_first(code for code in codes if code < -1)
        return [code == 1 for code in codes]

    def read(self, names: Sequence[str], size: int) -> list[int | str]:
        """Read objects of up to `size` bytes into the first slots. Returns the bytes read, or the cause of a miss, for
        each.
        """
        return [cause_of(code) or code for code in self._call("read", list(names), size)]

    def write(self, names: Sequence[str], size: int) -> list[str]:
        """Store `size` bytes of each of the first slots, replacing what was there. Returns a cause for each, empty for
        success.
        """
        return [cause_of(code) for code in self._call("write", list(names), size)]

    def remove(self, names: Sequence[str]) -> list[bool]:
        """Remove objects; True for each that was there. A read at the same time finds a wrong checksum."""
        codes = self._call("remove", list(names))
        _raise_first(code for code in codes if code and cause_of(code) != "missing")
        return [code == 0 for code in codes]

    def remove_below(self, prefix: str) -> int:
        """Remove all objects whose names start with `prefix`; returns how many there were."""
        count = int(self._call("remove_matching", f"^{re.escape(prefix)}.*"))
        _raise_first([count] if count < 0 else [])
        return count

    def names_below(self, prefix: str) -> list[str] | None:
        """Return the names of all objects that start with `prefix`, None if the master's HTTP address is not known."""
        if self._options.admin is None:
            return None
        address = self._options.admin.rstrip("/") + "/get_all_keys"
        try:
            with urllib.request.urlopen(address, timeout=self._options.request_timeout_s) as answer:
                names = answer.read().decode().split("\n")
        except (OSError, ValueError) as error:
            raise ServerFailed("unreachable", f"the master does not list its keys at {address}: {error}") from error
        return [name for name in names if name.startswith(prefix)]

    def close(self) -> None:
        """Kill the child, and close the socket."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._child = None

    def __del__(self) -> None:
        self.close()
        os.close(self._memory_file)

    def _call(self, name: str, *arguments: object) -> Any:  # Any: codes, as the child's method returns them.
        self.start()
        return self._ask([name, *arguments], timeout_s=self._options.request_timeout_s)

    def _ask(self, frame: object, *, timeout_s: float) -> Any:  # Any: the child's JSON.
        assert self._connection is not None and self._child is not None
        self._connection.settimeout(timeout_s)
        try:
            mooncake_child.send(self._connection, frame)
            answer = mooncake_child.receive(self._connection)
        except TimeoutError:
            # The call cannot be cancelled. What the child still reads or writes is memory that only the next child
            # uses.
            self.close()
            raise ServerFailed("timeout", f"the store gave no answer in {timeout_s} s") from None
        except OSError as error:
            self.close()
            raise ServerFailed("unreachable", f"the store's client is gone: {error}") from error
        if answer is None:
            code = self._child.wait()
            self.close()
            raise ServerFailed("unreachable", f"the store's client ended with exit code {code}")
        return answer

    def _own_address(self) -> str:
        """Check that the master is reachable, and return our address on the way to it."""
        try:
            with socket.create_connection(self._options.master, timeout=self._options.connect_timeout_s) as connection:
                return str(connection.getsockname()[0])
        except OSError as error:
            host, port = self._options.master
            raise ServerFailed("unreachable", f"no master at {host}:{port}: {error}") from error


def cause_of(code: int) -> str:
    """Return the word for one of the store's codes, an empty string for success."""
    return "" if code >= 0 else _CAUSES.get(code, "refused")


def _raise_first(codes: Iterable[int]) -> None:
    for code in codes:
        raise ServerFailed(cause_of(code), f"the store answered {code}")
