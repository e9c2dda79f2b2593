"""The `redis:` and `valkey:` engine: pages on a Redis or Valkey server or cluster, shared by all who reach it.

    redis://user:password@host:6379/0?capacity=50GB      rediss:// and valkeys:// speak TLS
    valkey://a:6379,b:6379?cluster=true

The server needs no set-up. What a namespace holds is bounded by `capacity`: a sorted set keeps the order of use for all
processes together, and who stores a page removes what is beyond the bound. A server that evicts by itself is fine too.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Final

from tidekv.backends.storage.options import Number, Option, Size, read_options
from tidekv.backends.storage.redis_options import RedisOptions
from tidekv.backends.storage.redis_pages import RedisPages
from tidekv.backends.storage.remote import Limits, RemoteStorage
from tidekv.backends.storage.server_options import Authority, File, Flag, Name, Text, read_authority
from tidekv.states.errors import InvalidConfig

DEFAULT_PORT: Final = 6379

OPTIONS: Final[Mapping[str, Option]] = {
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


def open_redis(*, authority: str, path: str, options: Mapping[str, object]) -> RemoteStorage:
    """Make the engine of a `redis:` or `valkey:` URI."""
    return _open(authority, path, options, tls=False)


def open_redis_tls(*, authority: str, path: str, options: Mapping[str, object]) -> RemoteStorage:
    """Make the engine of a `rediss:` or `valkeys:` URI."""
    return _open(authority, path, options, tls=True)


def _open(authority: str, path: str, options: Mapping[str, object], *, tls: bool) -> RemoteStorage:
    if importlib.util.find_spec("glide_sync") is None:
        raise InvalidConfig("redis: storage needs valkey-glide-sync; install tidekv[redis]")
    where = read_authority("redis", authority, default_port=DEFAULT_PORT)
    settings = read_redis_options(where, path, {"tls": tls, **options} if tls else options)
    if tls and not settings.tls:
        raise InvalidConfig("redis: a rediss:// or valkeys:// URI speaks TLS; leave tls=false out, or write redis://")
    scheme = "rediss" if settings.tls else "redis"
    uri = f"{scheme}://{where.text}/{settings.database}?prefix={settings.prefix}"
    limits = Limits(capacity_bytes=settings.capacity, chunk_bytes=settings.chunk, lanes=settings.connections)
    return RemoteStorage(uri, lambda: RedisPages(settings), limits)


def read_redis_options(where: Authority, path: str, given: Mapping[str, object]) -> RedisOptions:
    """Check options; InvalidConfig names the one that is wrong, and what is allowed."""
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
