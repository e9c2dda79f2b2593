"""The program in place of Python that has `warm_python` start a process; see there. Needs the standard library only.

`warm_python` writes it to a file, below a first line and the constants `PYTHON` (path of the real one), `PLACE` (the
socket) and `VARIABLES` (PYTHON… variables of the server).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys

PYTHON, PLACE = sys.executable, ""
VARIABLES: dict[str, object] = {}
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
FILES_MAX = 192
"""Numbers of files that a process may get from its parent; the server leaves them free."""
UNBUFFERED = "PYTHONUNBUFFERED"
SAFE_PATH = "-P"
"""Option with which the program's own folder is not looked at for modules."""
HEAD = 4
"""Bytes that have the length of an order."""


def variables() -> dict[str, object]:
    """Return the variables that Python reads when it starts, which the server has read already."""
    # The first one is followed by the server.
    found: dict[str, object] = {
        name: value for name, value in os.environ.items() if name.startswith("PYTHON") and name != UNBUFFERED
    }
    # The same path a second time changes nothing.
    found["PYTHONPATH"] = list(dict.fromkeys(os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    return found


def is_warm(arguments: list[str]) -> bool:
    """Return whether the server can start this: a module, code or a file, without options of Python but -P."""
    arguments = arguments[1:] if arguments[:1] == [SAFE_PATH] else arguments
    if not arguments or variables() != VARIABLES:
        return False
    return not arguments[0].startswith("-") or (arguments[0] in ("-m", "-c") and len(arguments) > 1)


def inherited() -> list[int]:
    """Return the open files that the parent has passed on."""
    found = []
    for number in map(int, os.listdir("/proc/self/fd")):
        # The folder itself is closed by now.
        with contextlib.suppress(OSError):
            os.fstat(number)
            found.append(number)
    return sorted(found)


def main() -> int:
    """Run a process as Python would, and return its exit code, or minus the signal that ended it."""
    arguments = sys.argv[1:]
    files = inherited()
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if not is_warm(arguments) or files[-1] >= FILES_MAX:
            raise OSError
        line.connect(PLACE)
    except OSError:
        os.execv(PYTHON, [PYTHON, *arguments])
    pid, waiting = 0, []

    def forward(number: int, frame: object) -> None:
        if not pid:
            waiting.append(number)
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    # A background job of a shell ignores SIGINT, and so must its child.
    ignored = [number for number in FORWARDED if signal.getsignal(number) is signal.SIG_IGN]
    for number in FORWARDED:
        if number not in ignored:
            signal.signal(number, forward)
    order = {
        "arguments": arguments,
        "folder": os.getcwd(),
        "environment": dict(os.environ),
        "files": files,
        "ignored": [int(number) for number in ignored],
        "client": sys.argv[0],
    }
    text = json.dumps(order).encode()
    socket.send_fds(line, [len(text).to_bytes(HEAD)], files)
    line.sendall(text)
    answers = line.makefile()
    pid = int(answers.readline() or 0)
    while waiting:
        forward(waiting.pop(0), None)
    # Held here they would be open for longer than the process lives.
    for file in files:
        os.close(file)
    return int(answers.readline() or -signal.SIGKILL)


def end(code: int) -> None:
    """End this process as the other one has ended."""
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code & 255)
