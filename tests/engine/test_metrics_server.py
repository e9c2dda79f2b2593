"""The metrics endpoint against clients that are silent, slow, wrong or many."""

from __future__ import annotations

import contextlib
import http.client
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client.core import GaugeMetricFamily

from tidekv.engine.http_server import CONNECTIONS_MAX, HEAD_BYTES_MAX
from tidekv.engine.metrics.server import MetricsServer
from tidekv.states.errors import InvalidConfig


class OneGauge:
    """A collector of one value, or one that raises."""

    def __init__(self) -> None:
        self.raises = False

    def collect(self) -> Iterator[GaugeMetricFamily]:
        if self.raises:
            raise ValueError("no value")
        yield GaugeMetricFamily("tide_height", "How high.", value=7)


@contextlib.contextmanager
def serving(**options: float) -> Iterator[MetricsServer]:
    server = MetricsServer("127.0.0.1:0", OneGauge(), **options)
    try:
        yield server
    finally:
        server.close()


def get(address: str, path: str = "/metrics", method: str = "GET") -> tuple[int, str]:
    connection = http.client.HTTPConnection(address, timeout=60)
    with contextlib.closing(connection):
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def connected(address: str) -> socket.socket:
    host, port = address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=60)


def test_metrics_are_at_one_path_by_one_method() -> None:
    with serving() as server:
        assert get(server.address) == (200, "# HELP tide_height How high.\n# TYPE tide_height gauge\ntide_height 7.0\n")
        assert get(server.address, "/metrics?x=1")[0] == 200
        for path in ("/", "/metric", "/metrics/", "/favicon.ico"):
            assert get(server.address, path)[0] == 404
        assert get(server.address, method="POST")[0] == 405


def test_silent_connections_are_bounded_and_do_not_keep_a_scraper_out() -> None:
    with serving(connection_s=600.0) as server, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connected(server.address)) for _ in range(3 * CONNECTIONS_MAX)]
        assert get(server.address)[0] == 200
        assert server.connections <= CONNECTIONS_MAX
        # The oldest made way: its end reads as the end of the stream, or as a reset.
        with contextlib.suppress(ConnectionError):
            assert silent[0].recv(1) == b""


@pytest.mark.parametrize("sent", [b"", b"GET /metrics HTTP/1.1\r\nHost:"])
def test_a_connection_ends_at_its_deadline_whatever_it_has_sent(sent: bytes) -> None:
    with serving(connection_s=0.05) as server, connected(server.address) as silent:
        silent.sendall(sent)
        with contextlib.suppress(ConnectionError):
            assert silent.recv(1) == b""


def test_a_client_that_never_reads_does_not_stop_the_end() -> None:
    with serving(connection_s=600.0) as server, connected(server.address) as greedy:
        greedy.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert get(server.address)[0] == 200


@pytest.mark.parametrize("sent", [b"\r\n\r\n", b"hello\r\n\r\n", b"\x00\xff\xfe\r\n\r\n", b"GET /metrics\r\n\r\n"])
def test_what_is_no_request_is_refused(sent: bytes) -> None:
    with serving() as server, connected(server.address) as odd:
        odd.sendall(sent)
        assert odd.recv(100).startswith(b"HTTP/1.1 400 ")


def test_a_head_that_is_too_long_ends_the_connection() -> None:
    with serving(connection_s=600.0) as server, connected(server.address) as odd:
        with contextlib.suppress(ConnectionError):
            odd.sendall(b"x" * (8 * HEAD_BYTES_MAX))
            assert odd.recv(1) == b""
        assert get(server.address)[0] == 200


def test_a_collector_that_raises_is_an_error_of_the_server_and_it_goes_on() -> None:
    gauge = OneGauge()
    server = MetricsServer("127.0.0.1:0", gauge)
    with contextlib.closing(server):
        gauge.raises = True
        assert get(server.address)[0] == 500
        gauge.raises = False
        assert get(server.address)[0] == 200


def test_scrapes_at_once_are_all_answered() -> None:
    with serving() as server, ThreadPoolExecutor(8) as threads:
        assert {status for status, _ in threads.map(get, [server.address] * 24)} == {200}


@pytest.mark.parametrize("listen", ["127.0.0.1", "127.0.0.1:x", "127.0.0.1:99999", ":1", "256.0.0.1:0", "127.0.0.1:-1"])
def test_an_address_that_cannot_be_listened_at_is_refused(listen: str) -> None:
    with pytest.raises(InvalidConfig, match="metrics"):
        MetricsServer(listen, OneGauge())


@pytest.mark.parametrize(
    "accept", [b"\0", b"application/openmetrics-text\0", b"a;q=\xff", b";;,=", b"text/plain; version=\n"]
)
def test_a_header_of_any_bytes_gets_an_answer_in_the_default_format(
    accept: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with serving() as server, connected(server.address) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\nAccept: " + accept + b"\r\n\r\n")
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain")
    assert b"\0" not in head
    assert b"tide_height 7.0" in body
    assert not caplog.records
