"""Options of the `mooncake:` engine; `tidekv.backends.storage.mooncake` reads them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeOptions:
    """How a store is used.

    `capacity`: bytes of the pages, with their headers, that this process keeps there; the store evicts by itself too.
    `clients`: processes that speak with the store, one call each at a time. `chunk`: bytes of one call, about; each
    client has so much memory registered. `host`: our own address, as the others reach it; found out if it is not given.
    `admin`: the master's HTTP address, the only way to list what is there. `request_timeout_s`: how long one call may
    take before its client is ended and replaced.
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
