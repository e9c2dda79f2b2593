"""The Prometheus endpoint."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from tidekv.engine.http_server import CONNECTION_S, HttpRequest, HttpResponse, HttpServer
from tidekv.engine.log import engine_log

LOG = engine_log("tidekv.engine")
PATH: Final = "/metrics"


class MetricsServer:
    """HTTP server of GET /metrics at `listen` ("host:port"; port 0: any free port), from construction until `close`.

    Any other path is 404, any other method 405.
    """

    def __init__(
        self, listen: str, collector: Collector, *, option: str = "metrics.listen", connection_s: float = CONNECTION_S
    ) -> None:
        """Raises InvalidConfig, which names `option`, if the address cannot be listened at."""
        self._registry = CollectorRegistry()
        self._registry.register(collector)
        self._server = HttpServer(listen, self._answer, option=option, what="metrics", connection_s=connection_s)
        self.address = self._server.address
        """Address of the listening socket, with the port that the system chose."""

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return self._server.connections

    def close(self) -> None:
        """Stop listening, close every connection and wait for the thread. Raises TidekvError if it does not end."""
        self._server.close()

    async def _answer(self, request: HttpRequest) -> HttpResponse:
        if request.path != PATH:
            return HttpResponse(HTTPStatus.NOT_FOUND, b"metrics are at /metrics\n")
        if request.method != "GET":
            return HttpResponse(HTTPStatus.METHOD_NOT_ALLOWED, b"use GET\n", headers=("Allow: GET",))
        return exposition(self._registry, request)


def exposition(registry: CollectorRegistry, request: HttpRequest) -> HttpResponse:
    """Return all metrics of a registry, in the format that the request accepts."""
    accept = request.headers.get("accept", "")
    try:
        encode, content_type = choose_encoder(accept if accept.isprintable() else "")
    except ValueError:
        # The client's header, which may be anything: not a defect to report.
        encode, content_type = choose_encoder("")
    try:
        return HttpResponse(HTTPStatus.OK, encode(registry), content_type)
    except Exception:
        # A bug of a collector must be visible to the operator, and must not end the endpoint.
        LOG.exception("metrics could not be collected")
        text = b"metrics could not be collected; see the log\n"
        return HttpResponse(HTTPStatus.INTERNAL_SERVER_ERROR, text)
