"""The Prometheus endpoint: a small HTTP server on its own thread, with bounds on connections, bytes and time.

One event loop on one thread answers every connection. At most `CONNECTIONS_MAX` connections are open; the oldest one
makes way for a new one, so clients that connect and stay silent cannot keep Prometheus out.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from tidekv.engine.log import engine_log, own_context
from tidekv.states.errors import InvalidConfig, TidekvError, cause_of
from tidekv.states.validation import host_and_port

LOG = engine_log("tidekv.engine")

CONNECTIONS_MAX: Final = 32
CONNECTION_S: Final = 5.0
"""Seconds from accepting a connection until its answer is written. It is closed then, whatever came of it."""
HEAD_BYTES_MAX: Final = 16 << 10
CLOSE_S: Final = 10.0

_PLAIN: Final = "text/plain; charset=utf-8"


class MetricsServer:
    """HTTP server of GET /metrics at `listen` ("host:port"; port 0: any free port), from construction until `close`.

    Any other path is 404, any other method 405. Each connection answers one request.
    """

    def __init__(
        self, listen: str, collector: Collector, *, option: str = "metrics.listen", connection_s: float = CONNECTION_S
    ) -> None:
        """Raises InvalidConfig, which names `option`, if the address cannot be listened at."""
        host, port = host_and_port(listen, option, InvalidConfig, any_port=True)
        self._registry = CollectorRegistry()
        self._registry.register(collector)
        self._connection_s = connection_s
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._listener = socket.create_server(address[:2], family=family, backlog=CONNECTIONS_MAX)
        except OSError as error:
            raise InvalidConfig(f"metrics cannot be served at {listen!r}: {cause_of(error)}") from error
        self.address = f"{listen.rpartition(':')[0]}:{self._listener.getsockname()[1]}"
        """Address of the listening socket, with the port that the system chose."""
        self._open: dict[asyncio.Task[None], None] = {}
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=own_context().run, args=(self._run,), name="tidekv-metrics", daemon=True)
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
            raise TidekvError(f"the metrics endpoint did not end within {CLOSE_S:g} s")

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
            # A scraper sends its request at once, so the oldest connection is one that stays silent or reads slowly.
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.cancel()
        task = self._loop.create_task(self._answer(reader, writer))
        self._open[task] = None

        def ended(task: asyncio.Task[None]) -> None:
            self._open.pop(task, None)
            # Here and not in the task, which may be cancelled before it begins. Abort and not close: a client that does
            # not read would keep the descriptor until its buffer is empty.
            writer.transport.abort()

        task.add_done_callback(ended)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(self._connection_s):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._response(head))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            # The client left, was too slow, or sent no request: its connection ends, and nothing else is affected.
            LOG.debug("a metrics connection ended", cause=repr(error))

    def _response(self, head: bytes) -> bytes:
        request, *lines = head.decode("latin-1").split("\r\n")
        words = request.split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/"):
            return _message("400 Bad Request", _PLAIN, b"this is not an HTTP request\n")
        method, target, _ = words
        if target.partition("?")[0] != "/metrics":
            return _message("404 Not Found", _PLAIN, b"metrics are at /metrics\n")
        if method != "GET":
            return _message("405 Method Not Allowed", _PLAIN, b"use GET\n", "Allow: GET")
        accept = next((line[7:].strip() for line in lines if line.lower().startswith("accept:")), "")
        try:
            encode, content_type = choose_encoder(accept if accept.isprintable() else "")
        except ValueError:
            # The client's header, which may be anything: not a defect to report.
            encode, content_type = choose_encoder("")
        try:
            return _message("200 OK", content_type, encode(self._registry))
        except Exception:
            # A bug of a collector must be visible to the operator, and must not end the endpoint.
            LOG.exception("metrics could not be collected")
            return _message("500 Internal Server Error", _PLAIN, b"metrics could not be collected; see the log\n")


def _message(status: str, content_type: str, body: bytes, *headers: str) -> bytes:
    lines = [
        f"HTTP/1.1 {status}",
        f"Content-Type: {content_type}",
        f"Content-Length: {len(body)}",
        "Connection: close",
        *headers,
    ]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body
