"""A headless Chromium, driven over a pipe by its DevTools protocol: opens a page, moves a real mouse, takes pictures.

For tests of the HTML timeline and for pictures in the docs. It needs the browser that is installed, and nothing else.
"""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tidekv.states.errors import InvalidConfig, TransferFailed

NAMES = ("chromium", "chromium-browser", "google-chrome")
READ_BYTES = 1 << 16
END_S = 10.0
"""A browser that takes longer to end is killed."""
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
    "--remote-debugging-pipe",
)


def find_browser() -> str | None:
    """The path of an installed Chromium; None where there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def opened_page(url: str, *, width: int = 1200, height: int = 700, timeout_s: float = 60.0) -> Iterator[Page]:
    """Open a page in a browser of its own, which is closed at the end.

    Raises InvalidConfig where no browser is installed, TransferFailed where it does not answer within `timeout_s`.
    """
    executable = find_browser()
    if executable is None:
        raise InvalidConfig("no Chromium is installed: apt-get install chromium")
    with tempfile.TemporaryDirectory(prefix="tidekv-browser-", ignore_cleanup_errors=True) as profile:
        command_in, answer_out, process = _start(executable, profile)
        try:
            page = Page(command_in, answer_out, ends_at_s=time.monotonic() + timeout_s)
            page.open(url, width=width, height=height)
            yield page
        finally:
            # The end of its pipe is what ends it.
            os.close(command_in)
            os.close(answer_out)
            _end(process)


def _start(executable: str, profile: str) -> tuple[int, int, int]:
    """Start the browser: where to write commands, where to read answers, and its process id."""
    command_out, command_in = os.pipe()
    answer_out, answer_in = os.pipe()
    # It reads commands from descriptor 3 and writes answers to descriptor 4: neither may be in the way of the other.
    high_out, high_in = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (command_out, answer_in))
    try:
        process = os.posix_spawn(
            executable,
            [executable, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            os.environ,
            file_actions=[
                *((os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in range(3)),
                (os.POSIX_SPAWN_DUP2, high_out, 3),
                (os.POSIX_SPAWN_DUP2, high_in, 4),
            ],
        )
    except BaseException:
        os.close(command_in)
        os.close(answer_out)
        raise
    finally:
        for end in (command_out, answer_in, high_out, high_in):
            os.close(end)
    return command_in, answer_out, process


def _end(process: int) -> None:
    watched = os.pidfd_open(process)
    try:
        if not select.select([watched], [], [], END_S)[0]:
            os.kill(process, signal.SIGKILL)
    finally:
        os.close(watched)
        os.waitpid(process, 0)


class Page:
    """One page: coordinates are CSS pixels from its left top corner."""

    def __init__(self, command_in: int, answer_out: int, *, ends_at_s: float) -> None:
        self._in, self._out = command_in, answer_out
        self._ends_at_s = ends_at_s
        self._numbers = itertools.count(1)
        self._rest = b""
        self._session = ""

    def open(self, url: str, *, width: int, height: int) -> None:
        """Load a page, and wait until it is loaded."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._call("Page.enable")
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self._call("Page.navigate", url=url)
        while self._read().get("method") != "Page.loadEventFired":
            pass
        self.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def evaluate(self, expression: str) -> Any:  # Any: whatever JSON the page has.
        """The value of a JavaScript expression, awaited where it is a promise."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise TransferFailed(f"the page raised: {json.dumps(answer['exceptionDetails'])[:500]}")
        return answer["result"].get("value")

    def move(self, x: float, y: float) -> None:
        """Move the mouse there."""
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, x: float, y: float) -> None:
        """Press and release the left button there."""
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def drag(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """Press the left button, move, and release it."""
        mouse = {"button": "left", "buttons": 1, "clickCount": 1}
        self._call("Input.dispatchMouseEvent", type="mousePressed", x=x, y=y, **mouse)
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=to_x, y=to_y, **mouse)
        self._call("Input.dispatchMouseEvent", type="mouseReleased", x=to_x, y=to_y, **mouse)

    def turn_wheel(self, x: float, y: float, delta_y: float) -> None:
        """Turn the wheel there; less than 0 is away from the user."""
        self._call("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=delta_y)

    def type_text(self, text: str) -> None:
        """Type into what has the focus."""
        self._call("Input.insertText", text=text)

    def screenshot(self) -> bytes:
        """The page as PNG."""
        return base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"])

    def _call(self, method: str, **parameters: object) -> dict[str, Any]:  # Any: the protocol's JSON.
        number = next(self._numbers)
        message: dict[str, object] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._in, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                if "error" in answer:
                    raise TransferFailed(f"the browser refused {method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            wait_s = self._ends_at_s - time.monotonic()
            if wait_s <= 0 or not select.select([self._out], [], [], wait_s)[0]:
                raise TransferFailed("the browser does not answer")
            read = os.read(self._out, READ_BYTES)
            if not read:
                raise TransferFailed("the browser ended")
            self._rest += read
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message
