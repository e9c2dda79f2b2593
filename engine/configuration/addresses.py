"""Addresses of workers, as people write them."""

from __future__ import annotations

from tidekv.states.errors import InvalidConfig


def check_address(address: str, *, what: str, any_port: bool) -> None:
    """Refuse what is no host:port, with InvalidConfig; an IPv6 host is in brackets."""
    host, colon, port = address.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    number = int(port) if port.isascii() and port.isdigit() else -1
    if not colon or not bare or (":" in bare and bare == host) or not (0 if any_port else 1) <= number <= 65535:
        example = "127.0.0.1:7000 or [::1]:7000"
        raise InvalidConfig(f"{what} must be host:port, such as {example}, not {address!r}")
