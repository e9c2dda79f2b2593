"""Serves metrics to Prometheus over HTTP, on a thread of its own."""

from __future__ import annotations

import threading
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server

from tidekv.engine.metrics.collector import MetricsCollector
from tidekv.states.errors import InvalidConfig
from tidekv.states.validation import host_and_port


class MetricsServer:
    """GET /metrics at `listen` ("host:port"; port 0: any). Started at once."""

    def __init__(self, listen: str, collector: MetricsCollector) -> None:
        """Raises InvalidConfig for an address that cannot be listened at."""
        host, port = host_and_port(listen, "metrics.listen", InvalidConfig, any_port=True)
        registry = CollectorRegistry()
        registry.register(collector)
        self._server: WSGIServer
        self._thread: threading.Thread
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise InvalidConfig(f"metrics cannot be served at {listen!r}: {error}") from error
        self.address = f"{listen.rpartition(':')[0]}:{self._server.server_port}"
        """Where it listens."""

    def close(self) -> None:
        """Stop, and wait for the thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
