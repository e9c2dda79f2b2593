"""One connection to a Redis or Valkey server, for one thread at a time, by Valkey GLIDE's blocking client.

Its asyncio client is not used: that one connects on the event loop's thread, blocking it, and all its clients of a
process share one pipe that the first loop reads, so they hang when that loop ends. A blocking command releases the
interpreter, can read into our memory, and works beside any loop.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Final, cast

import glide_sync
from glide_shared import exceptions
from glide_sync import ClusterScanCursor, GlideClient, GlideClusterClient

from tidekv.backends.storage.redis.options import RedisOptions
from tidekv.backends.storage.remote import ServerFailed
from tidekv.states.errors import InvalidConfig, cause_of

SCAN_KEYS: Final = 1000

# Codes of the server, or the client, about one value, or about us; anything else is classified by the type of the
# error.
_CODES: Final = {
    "WRONGTYPE": "foreign",
    "exceeds buffer capacity": "foreign",
    "OOM": "full",
    "WRONGPASS": "refused",
    "NOAUTH": "refused",
    "NOPERM": "refused",
}


class RedisLink:
    """A connection that is made at its first use; after that the client reconnects by itself. Blocks."""

    def __init__(self, options: RedisOptions) -> None:
        self._options = options
        self._client: GlideClient | GlideClusterClient | None = None

    def call(self, *words: bytes) -> object:
        """Run one command. Raises ServerFailed if it fails."""
        try:
            return self._connected().custom_command(list(words))
        except exceptions.GlideError as error:
            raise _failed(error) from error

    def start_of(self, key: bytes, count: int) -> bytes:
        """Return the first `count + 1` bytes of a value, fewer if it is shorter, none without one. Raises
        ServerFailed.
        """
        answer = self.call(b"GETRANGE", key, b"0", str(count).encode())
        return answer if isinstance(answer, bytes) else b""

    def batch(self, commands: Sequence[Sequence[bytes]]) -> list[object]:
        """Run commands in one batch. Returns an answer for each: a ServerFailed for one that failed alone."""
        if not commands:
            return []
        client = self._connected()
        try:
            if isinstance(client, GlideClusterClient):
                cluster_batch = glide_sync.ClusterBatch(is_atomic=False)
                for words in commands:
                    cluster_batch.custom_command(list(words))
                answers = client.exec(cluster_batch, raise_on_error=False)
            else:
                batch = glide_sync.Batch(is_atomic=False)
                for words in commands:
                    batch.custom_command(list(words))
                answers = client.exec(batch, raise_on_error=False)
        except exceptions.GlideError as error:
            raise _failed(error) from error
        return [_failed(one) if isinstance(one, exceptions.GlideError) else one for one in answers or []]

    def read(self, key: bytes, into: memoryview) -> int | None:
        """Read a value into memory; returns its length, or None if there is none. A value that is too long is
        foreign.
        """
        try:
            answer = self._connected().get(key, buffer=into)
        except exceptions.GlideError as error:
            raise _failed(error) from error
        return None if answer is None else int(answer)

    def pop_least(self, key: bytes, count: int) -> list[bytes]:
        """Remove and return the members of a sorted set with the lowest scores."""
        try:
            return list(self._connected().zpopmin(key, count))
        except exceptions.GlideError as error:
            raise _failed(error) from error

    def scan(self, pattern: bytes, cursor: object | None) -> tuple[object | None, list[bytes]]:
        """Return some keys of the pattern, and the cursor of the next call: None at the end. Begin with None."""
        client = self._connected()
        try:
            if isinstance(client, GlideClusterClient):
                begin = ClusterScanCursor()  # type: ignore[no-untyped-call]  # Valkey GLIDE left its hints out.
                at, keys = client.scan(begin if cursor is None else cast(ClusterScanCursor, cursor), pattern, SCAN_KEYS)
                over = cast(ClusterScanCursor, at).is_finished()
                return (None if over else at), cast("list[bytes]", keys)
            following, found = client.scan(b"0" if cursor is None else cast(bytes, cursor), pattern, SCAN_KEYS)
            return (None if following == b"0" else following), cast("list[bytes]", found)
        except exceptions.GlideError as error:
            raise _failed(error) from error

    def close(self) -> None:
        """Disconnect."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def _connected(self) -> GlideClient | GlideClusterClient:
        if self._client is None:
            try:
                self._client = _connect(self._options)
            except exceptions.GlideError as error:
                # The client calls all that fails a timeout.
                cause = _why_unreachable(self._options)
                raise ServerFailed("unreachable", cause) if cause else _failed(error) from error
        return self._client


def _why_unreachable(options: RedisOptions) -> str:
    """Return why the first server that cannot be reached is not, in the system's words; empty if all can be."""
    for host, port in options.servers:
        try:
            socket.create_connection((host, port), timeout=options.connect_timeout_s).close()
        except OSError as error:
            return f"{host}:{port}: {cause_of(error)}"
    return ""


def _connect(options: RedisOptions) -> GlideClient | GlideClusterClient:
    # It would print warnings to standard output; what matters is in the errors. A log that is set up already stays.
    glide_sync.Logger.init(glide_sync.LogLevel.OFF)
    addresses = [glide_sync.NodeAddress(host, port) for host, port in options.servers]
    credentials = None if options.password is None else glide_sync.ServerCredentials(options.password, options.username)
    tls = _tls(options) if options.tls else None
    connect_timeout_ms = round(options.connect_timeout_s * 1000)
    request_timeout_ms = round(options.request_timeout_s * 1000)
    # A server that is back is found within two seconds.
    again = glide_sync.BackoffStrategy(num_of_retries=5, factor=50, exponent_base=2, jitter_percent=20)
    if options.cluster:
        return GlideClusterClient.create(
            glide_sync.GlideClusterClientConfiguration(
                addresses,
                use_tls=options.tls,
                credentials=credentials,
                request_timeout=request_timeout_ms,
                reconnect_strategy=again,
                client_name="tidekv",
                advanced_config=glide_sync.AdvancedGlideClusterClientConfiguration(connect_timeout_ms, tls),
            )
        )
    return GlideClient.create(
        glide_sync.GlideClientConfiguration(
            addresses,
            use_tls=options.tls,
            credentials=credentials,
            request_timeout=request_timeout_ms,
            reconnect_strategy=again,
            database_id=options.database,
            client_name="tidekv",
            advanced_config=glide_sync.AdvancedGlideClientConfiguration(connect_timeout_ms, tls),
        )
    )


def _tls(options: RedisOptions) -> glide_sync.TlsAdvancedConfiguration:
    try:
        ca, certificate, key = (
            None if path is None else path.read_bytes() for path in (options.tls_ca, options.tls_cert, options.tls_key)
        )
    except OSError as error:
        raise InvalidConfig(f"redis: a file of the tls_… options cannot be read: {cause_of(error)}") from error
    return glide_sync.TlsAdvancedConfiguration(
        use_insecure_tls=options.tls_insecure or None,
        root_pem_cacerts=ca,
        client_cert_pem=certificate,
        client_key_pem=key,
    )


def _failed(error: exceptions.GlideError) -> ServerFailed:
    words = str(error)
    for code, cause in _CODES.items():
        if code in words:
            return ServerFailed(cause, words)
    if isinstance(error, exceptions.TimeoutError):
        return ServerFailed("timeout", words)
    if isinstance(error, (exceptions.ConnectionError, exceptions.ClosingError)):
        return ServerFailed("unreachable", words)
    return ServerFailed("refused", words)
