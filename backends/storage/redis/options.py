"""Options of the `redis:` and `valkey:` engine: pages on a Redis or Valkey server or cluster, shared by its clients.

    redis://user:password@host:6379/0?capacity=50GB      rediss:// and valkeys:// speak TLS
    valkey://a:6379,b:6379?cluster=true

The server needs no set-up. `capacity` bounds a namespace: a sorted set keeps the order of use for all processes
together, and a process that stores a page removes those beyond the bound. The server may also evict by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tidekv.backends.storage.options import (
    Authority,
    File,
    Flag,
    Name,
    Number,
    Size,
    Text,
    UriOption,
    read_options,
)
from tidekv.states.errors import InvalidConfig

DEFAULT_PORT: Final = 6379

OPTIONS: Final[Mapping[str, UriOption]] = {
    "capacity": Size(),
    "chunk": Size(minimum_bytes=1 << 12),
    "part": Size(minimum_bytes=1 << 12),
    "connections": Number(1, 4),
    "prefix": Name(),
    "username": Text(),
    "password": Text(),
    "cluster": Flag(),
    "tls": Flag(),
    "tls_ca": File(),
    "tls_cert": File(),
    "tls_key": File(),
    "tls_insecure": Flag(),
    "connect_timeout_s": Number(0.05, 60.0),
    "request_timeout_s": Number(0.05, 60.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisOptions:
    """Settings of one server.

    `capacity`: maximum bytes of all pages of a namespace, with their headers. `chunk`: approximate bytes of pages that
    one connection works on at a time. `part`: bytes that are passed to, or taken from, the client at once: it copies
    them while it holds the interpreter. `prefix`: prefix of all keys. `request_timeout_s`: seconds that one command may
    take, and so how long pages may stay with a server that hangs.
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


def read_redis_options(where: Authority, path: str, given: Mapping[str, object]) -> RedisOptions:
    """Check options; InvalidConfig names the wrong one, and what is allowed."""
    values = read_options("the redis: engine", given, OPTIONS)
    database = path.strip("/") or "0"
    if not database.isdecimal():
        raise InvalidConfig(f"redis: storage names its database by a number, redis://host/0, not {path!r}")
    for name in ("username", "password"):
        in_uri = getattr(where, name)
        if in_uri is not None and values.setdefault(name, in_uri) != in_uri:
            raise InvalidConfig(f"redis: the {name} is given twice, in the URI and as an option")
    settings = RedisOptions(
        servers=where.servers,
        database=int(database),
        **values,  # type: ignore[arg-type]  # Each option has checked the type of its value.
    )
    if settings.username is not None and settings.password is None:
        raise InvalidConfig("redis: a username needs a password")
    if not settings.tls and (settings.tls_ca or settings.tls_cert or settings.tls_key or settings.tls_insecure):
        raise InvalidConfig("redis: the tls_… options need tls=true, or a rediss:// URI")
    if (settings.tls_cert is None) != (settings.tls_key is None):
        raise InvalidConfig("redis: tls_cert and tls_key go together")
    if settings.cluster and settings.database:
        raise InvalidConfig("redis: a cluster has no database but 0")
    return settings
