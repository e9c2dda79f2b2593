"""Options of the `redis:` engine; `tidekv.backends.storage.redis` reads them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisOptions:
    """How a server is used.

    `capacity`: bytes of all pages of a namespace, with their headers. `chunk`: bytes of pages that one connection works
    on at a time, about. `part`: bytes that are given to, or taken from, the client at once: it copies them while it
    holds the interpreter. `prefix`: what all keys start with. `request_timeout_s`: how long one command may take, and
    so how long pages may stay with a server that hangs.
    """

    servers: tuple[tuple[str, int], ...]
    database: int = 0
    username: str | None = None
    password: str | None = None
    capacity: int = 10 * 1000**3
    chunk: int = 8 << 20
    part: int = 512 << 10
    connections: int = 2
    prefix: str = "tidekv"
    cluster: bool = False
    tls: bool = False
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_insecure: bool = False
    connect_timeout_s: float = 2.0
    request_timeout_s: float = 2.0
