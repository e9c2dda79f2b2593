"""Processes of Python that have torch and transformers when they start.

Tests start many workers, and each spends two to five seconds of a core on the same imports. Here a server makes the
imports once per test run, and forks for each process. `executable()` is the path of a program that takes the place of
`sys.executable`: `[executable(), "-m", "examples.service", …]`. It passes on arguments, folder, environment, files and
signals, and ends as the process that it stands for, which has another process id. SIGKILL of the one ends the other;
SIGSTOP does not reach it. A process that such a process starts by its `sys.executable` comes from the server as well.

Not for tests of what a process imports, or of how the interpreter starts and which options it takes.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import io
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

from tests.support import warm_client
from tests.support.warm_client import FILES_MAX, HEAD, SAFE_PATH, UNBUFFERED

PRELOADED = (
    "nixl._api",
    "transformers.models.llama.modeling_llama",
    "uvicorn",
    "uvloop",
    "tidekv.engine.cli.main",
    "demo.model_prefill",
)
PUBLIC = ("DecodeEngine", "NixlTransport", "PrefillPeer", "open_storage")
"""Names whose use imports what they need."""
START_S = 240.0
OWNER_S = 1.0
"""Interval at which the server looks whether the test run still exists."""


def executable() -> str:
    """Return the path of the program, and start the server if this test run has none."""
    if "COVERAGE_PROCESS_CONFIG" in os.environ or "COVERAGE_PROCESS_START" in os.environ:
        return sys.executable  # Coverage begins when the interpreter starts.
    # A worker of xdist is a child of the run.
    owner = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    folder = Path(tempfile.gettempdir()) / f"tidekv-warm-{os.getuid()}-{owner}"
    folder.mkdir(mode=0o700, exist_ok=True)
    program = folder / "python"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_served(folder / "socket"):
            write_program(program, folder / "socket")
            with (folder / "log").open("w") as log:
                done = subprocess.run(
                    [sys.executable, "-m", __name__, folder, str(owner)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    timeout=START_S,
                    check=False,
                    start_new_session=True,
                )
            assert done.returncode == 0, (folder / "log").read_text()
    return str(program)


def is_served(place: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as line:
        return not line.connect_ex(str(place))


def write_program(path: Path, place: Path) -> None:
    constants = {"PYTHON": sys.executable, "PLACE": str(place), "VARIABLES": warm_client.variables()}
    lines = [
        f"#!{sys.executable} -IS",
        Path(warm_client.__file__).read_text(),
        *(f"{name} = {value!r}" for name, value in constants.items()),
        "end(main())",
    ]
    path.write_text("\n".join(lines) + "\n")
    path.chmod(0o700)


class Server:
    """Forks for each order until the test run has ended."""

    def __init__(self, listener: socket.socket, owner: int) -> None:
        self._listener = listener
        self._owner = owner
        self._lines: dict[int, socket.socket] = {}  # By process.
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(self._woken, False)
        self._looks = selectors.DefaultSelector()

    def serve(self) -> dict[str, Any] | None:
        """Return None when the test run has ended; in each forked process, return its order."""
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._wake)
        self._looks.register(self._listener, selectors.EVENT_READ)
        self._looks.register(self._woken, selectors.EVENT_READ)
        while os.path.exists(f"/proc/{self._owner}"):
            for key, _ in self._looks.select(OWNER_S):
                if key.fileobj is self._listener:
                    order = self._take()
                    if order is not None:
                        return order
                elif key.fileobj == self._woken:
                    os.read(self._woken, 4096)
                elif key.data in self._lines:
                    # Nothing is sent after the order: the client has been killed.
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(key.data, signal.SIGKILL)
                    self._looks.unregister(key.fileobj)
            self._reap()
        for pid in self._lines:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return None

    def _take(self) -> dict[str, Any] | None:
        line, _ = self._listener.accept()
        head, files, _, _ = socket.recv_fds(line, HEAD, FILES_MAX)
        if len(head) < HEAD:
            line.close()  # It was to see whether there is a server.
            return None
        text = b""
        while len(text) < int.from_bytes(head):
            part = line.recv(1 << 16)
            if not part:
                break  # The client has been killed.
            text += part
        if len(text) < int.from_bytes(head):
            for number in files:
                os.close(number)
            line.close()
            return None
        order: dict[str, Any] = json.loads(text)
        pid = os.fork()
        if not pid:
            self._leave(line)
            become(order, files)
            return order
        for number in files:
            os.close(number)
        self._lines[pid] = line
        self._looks.register(line, selectors.EVENT_READ, pid)
        with contextlib.suppress(OSError):  # The client has been killed, and so will be the process.
            line.sendall(b"%d\n" % pid)
        return None

    def _leave(self, line: socket.socket) -> None:
        """Close what is the server's, in the forked process."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._looks.close()
        for other in (self._listener, line, *self._lines.values()):
            other.close()
        os.close(self._woken)
        os.close(self._wake)

    def _reap(self) -> None:
        while self._lines:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            line = self._lines.pop(pid)
            with contextlib.suppress(KeyError):
                self._looks.unregister(line)
            with contextlib.suppress(OSError):
                line.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
            line.close()


def become(order: dict[str, Any], files: list[int]) -> None:
    """Take over what the client was given: files, folder, environment, signals and arguments."""
    high = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 2 * FILES_MAX) for number in files]
    for number in files:
        os.close(number)
    for number, target in zip(high, order["files"], strict=True):
        os.dup2(number, target)
        os.close(number)
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in order["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    is_unbuffered = bool(os.environ.get(UNBUFFERED))
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  # They live as long as the process.
    for name, number in (("stdout", 1), ("stderr", 2)):
        raw = open(number, "wb", 0 if is_unbuffered else -1, closefd=False)  # noqa: SIM115
        errors = "backslashreplace" if number == 2 else None
        stream = io.TextIOWrapper(raw, errors=errors, line_buffering=number == 2, write_through=is_unbuffered)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.executable = order["client"]


def run(order: dict[str, Any]) -> None:
    """Run a module, code or a file as `__main__`."""
    first, *rest = order["arguments"]
    # In place of the folder in which the server runs.
    del sys.path[0]
    is_path_safe = first == SAFE_PATH
    if is_path_safe:
        first, *rest = rest
    own = {"-c": "", "-m": order["folder"]}.get(first, str(Path(first).resolve().parent))
    sys.path[:0] = [] if is_path_safe else [own]
    if first == "-c":
        sys.argv[:] = ["-c", *rest[1:]]
        sys.modules["__main__"] = module = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), module.__dict__)
    elif first == "-m":
        sys.argv[:] = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = [first, *rest]
        runpy.run_path(first, run_name="__main__")


def main(folder: Path, owner: int) -> dict[str, Any] | None:
    """Import, listen, and go to the background: `executable` waits for the end of the first process."""
    # Libraries keep files open; the numbers of those that processes get must be free.
    kept = [os.open(os.devnull, os.O_RDONLY) for _ in range(FILES_MAX)]
    for name in PRELOADED:
        importlib.import_module(name)
    package = importlib.import_module("tidekv")
    for name in PUBLIC:
        getattr(package, name)
    place = folder / "socket"
    place.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(place))
    listener.listen(64)
    for number in kept:
        os.close(number)
    if os.fork():
        os._exit(0)
    # What all processes have is never looked at again, so that its memory stays shared.
    gc.collect()
    gc.freeze()
    order = Server(listener, owner).serve()
    if order is None:
        shutil.rmtree(folder, ignore_errors=True)
    return order


if __name__ == "__main__":
    job = main(Path(sys.argv[1]), int(sys.argv[2]))
    if job is not None:
        # Not within the server's functions: the interpreter ends as after any other program.
        run(job)
