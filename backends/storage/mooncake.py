"""The `mooncake:` engine: pages in a Mooncake Store, the memory of many machines under one master.

    mooncake://master:50051?protocol=rdma&device=mlx5_0&admin=http://master:9003

Mooncake knows no passwords: whoever reaches the master, or a store node, reads and replaces what is there. Checksums
and keys make a replaced page a miss, not a wrong one, unless somebody means it; use it in a closed network only.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Final

from tidekv.backends.storage.mooncake_options import MooncakeOptions
from tidekv.backends.storage.mooncake_pages import MooncakePages
from tidekv.backends.storage.options import Choice, Number, Option, Size, read_options
from tidekv.backends.storage.remote import Limits, RemoteStorage
from tidekv.backends.storage.server_options import Name, Text, read_authority
from tidekv.states.errors import InvalidConfig

DEFAULT_PORT: Final = 50051

OPTIONS: Final[Mapping[str, Option]] = {
    "capacity": Size(),
    "chunk": Size(minimum_bytes=1 << 12),
    "clients": Number(1, 4),
    "prefix": Name(),
    "protocol": Choice("tcp", "rdma"),
    "device": Text(),
    "host": Text(),
    "metadata": Text(),
    "admin": Text(),
    "connect_timeout_s": Number(0.05, 60.0),
    "request_timeout_s": Number(0.05, 60.0),
}


def open_mooncake(*, authority: str, path: str, options: Mapping[str, object]) -> RemoteStorage:
    """Make the engine of a `mooncake:` URI."""
    if importlib.util.find_spec("mooncake") is None:
        raise InvalidConfig("mooncake: storage needs mooncake-transfer-engine-non-cuda; install tidekv[mooncake]")
    settings = read_mooncake_options(authority, path, options)
    host, port = settings.master
    limits = Limits(capacity_bytes=settings.capacity, chunk_bytes=settings.chunk, lanes=settings.clients)
    return RemoteStorage(f"mooncake://{host}:{port}?prefix={settings.prefix}", lambda: MooncakePages(settings), limits)


def read_mooncake_options(authority: str, path: str, given: Mapping[str, object]) -> MooncakeOptions:
    """Check options; InvalidConfig names the one that is wrong, and what is allowed."""
    where = read_authority("mooncake", authority, default_port=DEFAULT_PORT)
    if where.username or where.password or len(where.servers) != 1 or path.strip("/"):
        raise InvalidConfig("mooncake: storage is at one master, without password or path; write mooncake://host:50051")
    values = read_options("the mooncake: engine", given, OPTIONS)
    settings = MooncakeOptions(
        master=where.servers[0],
        **values,  # type: ignore[arg-type]  # Each option has checked the type of its value.
    )
    if settings.admin is not None and not settings.admin.startswith(("http://", "https://")):
        raise InvalidConfig("mooncake: option admin must be the master's HTTP address, such as http://host:9003")
    return settings
