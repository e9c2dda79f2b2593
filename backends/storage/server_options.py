"""Options that engines on servers share, beside those of options.py, and the server part of their URIs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from tidekv.states.errors import InvalidConfig

_YES: Final = frozenset({"1", "true", "yes", "on"})
_NO: Final = frozenset({"0", "false", "no", "off"})


class Flag:
    """Yes or no."""

    allowed = "true or false"

    def read(self, value: object) -> bool | None:
        """Return the flag."""
        if isinstance(value, bool):
            return value
        word = value.lower() if isinstance(value, str) else str(value)
        return True if word in _YES else False if word in _NO else None


class Text:
    """Any text that is not empty. What is wrong about it is never quoted: it may be a secret."""

    allowed = "a text that is not empty"

    def read(self, value: object) -> str | None:
        """Return the text."""
        return value if isinstance(value, str) and value and "\0" not in value else None


class Name:
    """A name that is part of keys and paths on a server."""

    allowed = "1 to 64 letters, digits, dots, dashes and underscores"

    def read(self, value: object) -> str | None:
        """Return the name."""
        good = isinstance(value, str) and 0 < len(value) <= 64 and value.isascii()
        plain = good and str(value).replace("_", "").replace("-", "").replace(".", "").isalnum()
        return str(value) if plain else None


class File:
    """The path of a file, read when the engine opens."""

    allowed = "the path of a file"

    def read(self, value: object) -> Path | None:
        """Return the path."""
        if isinstance(value, Path):
            return value
        return Path(value).expanduser() if isinstance(value, str) and value and "\0" not in value else None


@dataclass(frozen=True, slots=True)
class Authority:
    """The part of a URI between // and the path: who we are, and where the servers are."""

    username: str | None
    password: str | None
    servers: tuple[tuple[str, int], ...]

    @property
    def text(self) -> str:
        """The servers, fit for a log."""
        return ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.servers)


def read_authority(scheme: str, authority: str, *, default_port: int) -> Authority:
    """Read `user:password@host:port,host:port`; InvalidConfig, without the password, if it is not that."""
    who, at, where = authority.rpartition("@")
    username, colon, password = who.partition(":")
    servers = tuple(_server(scheme, server, default_port) for server in where.split(",") if server)
    if not servers:
        raise InvalidConfig(f"{scheme}: storage needs a server; write {scheme}://host:{default_port}")
    return Authority(
        username=unquote(username) or None if at else None,
        password=unquote(password) if colon else None,
        servers=servers,
    )


def _server(scheme: str, text: str, default_port: int) -> tuple[str, int]:
    if text.startswith("["):
        host, closed, rest = text[1:].partition("]")
        host = host if closed else ""
    else:
        host, colon, port = text.partition(":")
        rest = colon + port
    port = rest.removeprefix(":") or str(default_port)
    if (
        not host
        or "[" in host
        or "]" in host
        or (rest and not rest.startswith(":"))
        or not port.isdecimal()
        or not 0 < int(port) < 65536
    ):
        raise InvalidConfig(f"{scheme}: storage cannot read the server {text!r}; write host:port or [address]:port")
    return host, int(port)
