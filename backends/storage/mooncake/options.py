"""Options of the `mooncake:` engine: pages in a Mooncake Store, the memory of many machines under one master.

    mooncake://master:50051?protocol=rdma&device=mlx5_0&admin=http://master:9003

Mooncake has no passwords: every process that reaches the master, or a store node, can read and replace what is there.
Checksums and keys turn an accidentally replaced page into a miss, but do not stop an attacker: use it in a closed
network only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tidekv.backends.storage.options import Choice, Name, Number, Size, Text, UriOption, read_authority, read_options
from tidekv.states.errors import InvalidConfig

DEFAULT_PORT: Final = 50051

OPTIONS: Final[Mapping[str, UriOption]] = {
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


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeOptions:
    """Settings of one store.

    `capacity`: maximum bytes of the pages, with their headers, that this process keeps there; the store evicts by
    itself too. `clients`: processes that call the store, one call each at a time. `chunk`: approximate bytes of one
    call; each client registers that much memory. `host`: our own address, as the others reach it; detected if it is not
    given. `admin`: the master's HTTP address, the only way to list what is there. `request_timeout_s`: seconds that one
    call may take before its client is ended and replaced.
    """

    master: tuple[str, int]
    capacity: int = 10 * 1000**3
    chunk: int = 8 << 20
    clients: int = 2
    prefix: str = "tidekv"
    protocol: str = "tcp"
    device: str = ""
    host: str | None = None
    metadata: str = "P2PHANDSHAKE"
    admin: str | None = None
    connect_timeout_s: float = 2.0
    request_timeout_s: float = 5.0


def read_mooncake_options(authority: str, path: str, given: Mapping[str, object]) -> MooncakeOptions:
    """Check options; InvalidConfig names the wrong one, and what is allowed."""
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
