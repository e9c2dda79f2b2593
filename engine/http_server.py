"""A small HTTP server on its own thread, with bounds on connections, bytes and time.

One event loop on one thread answers every connection. At most `CONNECTIONS_MAX` connections are open; the oldest one
makes way for a new one, so clients that connect and stay silent cannot keep others out. Each connection answers one
request.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Final, NamedTuple

from tidekv.engine.log import engine_log, own_context
from tidekv.states.errors import InvalidConfig, TidekvError, cause_of
from tidekv.states.validation import host_and_port

LOG = engine_log("tidekv.engine")

CONNECTIONS_MAX: Final = 32
CONNECTION_S: Final = 5.0
"""Seconds from accepting a connection until its answer is written. It is closed then, whatever came of it."""
HEAD_BYTES_MAX: Final = 16 << 10
CLOSE_S: Final = 10.0

PLAIN: Final = "text/plain; charset=utf-8"


class HttpRequest(NamedTuple):
    """One request. Names of headers are lower-case; `path` has no query."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    body: bytes = b""


class HttpResponse(NamedTuple):
    """One answer."""

    status: HTTPStatus
    body: bytes
    content_type: str = PLAIN
    headers: tuple[str, ...] = ()


class HttpServer:
    """Serves `answer` at `listen` ("host:port"; port 0: any free port), from construction until `close`.

    `answer` runs on the server's loop; what it raises is logged, and answered by 500. `refuse` may answer before the
    body is read. `what` names the server in errors. Without `body_bytes_max`, bodies are refused.
    """

    def __init__(
        self,
        listen: str,
        answer: Callable[[HttpRequest], Awaitable[HttpResponse]],
        *,
        option: str,
        what: str,
        connection_s: float = CONNECTION_S,
        body_bytes_max: int = 0,
        refuse: Callable[[HttpRequest], HttpResponse | None] = lambda request: None,
    ) -> None:
        """Raises InvalidConfig, which names `option`, if the address cannot be listened at."""
        host, port = host_and_port(listen, option, InvalidConfig, any_port=True)
        self._answer_to = answer
        self._refuse = refuse
        self._what = what
        self._connection_s = connection_s
        self._body_bytes_max = body_bytes_max
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._listener = socket.create_server(address[:2], family=family, backlog=CONNECTIONS_MAX)
        except OSError as error:
            raise InvalidConfig(f"{what} cannot be served at {listen!r}: {cause_of(error)}") from error
        self.address = f"{listen.rpartition(':')[0]}:{self._listener.getsockname()[1]}"
        """Address of the listening socket, with the port that the system chose."""
        self._open: dict[asyncio.Task[None], None] = {}
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=own_context().run, args=(self._run,), name=f"tidekv-{what}", daemon=True)
        self._thread.start()

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return len(self._open)

    def close(self) -> None:
        """Stop listening, close every connection and wait for the thread. Raises TidekvError if it does not end."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            raise TidekvError(f"the endpoint of {self._what} did not end within {CLOSE_S:g} s")

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._accept, sock=self._listener, limit=HEAD_BYTES_MAX)
        await self._stopping.wait()
        server.close()
        tasks = list(self._open)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_S)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= CONNECTIONS_MAX:
            # A client sends its request at once, so the oldest connection is one that stays silent or reads slowly.
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.cancel()
        task = self._loop.create_task(self._serve_one(reader, writer))
        self._open[task] = None

        def ended(task: asyncio.Task[None]) -> None:
            self._open.pop(task, None)
            # Here and not in the task, which may be cancelled before it begins. Abort and not close: a client that does
            # not read would keep the descriptor until its buffer is empty.
            writer.transport.abort()

        task.add_done_callback(ended)

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(self._connection_s):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(_packed(await self._response(head, reader)))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            # The client left, was too slow, or sent no request: its connection ends, and nothing else is affected.
            LOG.debug("an HTTP connection ended", server=self._what, cause=repr(error))

    async def _response(self, head: bytes, reader: asyncio.StreamReader) -> HttpResponse:
        first, *lines = head.decode("latin-1").split("\r\n")
        words = first.split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/"):
            return HttpResponse(HTTPStatus.BAD_REQUEST, b"this is not an HTTP request\n")
        method, target, _ = words
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        path, _, query = target.partition("?")
        request = HttpRequest(method, path, query, headers)
        # Before the body, so that a client without a token takes no memory.
        if (refused := self._refuse(request)) is not None:
            return refused
        length = headers.get("content-length", "0")
        if not length.isascii() or not length.isdecimal() or "transfer-encoding" in headers:
            return HttpResponse(HTTPStatus.LENGTH_REQUIRED, b"send the body with a Content-Length\n")
        # Its digits are bounded by the head's.
        bytes_max = self._body_bytes_max if method == "POST" else 0
        if int(length) > bytes_max:
            text = f"the body has at most {bytes_max} bytes\n"
            return HttpResponse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, text.encode())
        body = await reader.readexactly(int(length))
        try:
            return await self._answer_to(request._replace(body=body))
        except Exception:
            # A bug of a handler must be visible to the operator, and must not end the endpoint.
            LOG.exception("an HTTP request could not be answered", server=self._what, path=path)
            return HttpResponse(HTTPStatus.INTERNAL_SERVER_ERROR, b"this could not be answered; see the log\n")


def _packed(answer: HttpResponse) -> bytes:
    lines = [
        f"HTTP/1.1 {answer.status.value} {answer.status.phrase}",
        f"Content-Type: {answer.content_type}",
        f"Content-Length: {len(answer.body)}",
        "Connection: close",
        *answer.headers,
    ]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + answer.body
