"""Options of storage engines: from a URI, a mapping or a file to checked values; wrong ones are refused by name."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol
from urllib.parse import unquote

from tidekv.states.errors import InvalidConfig, cause_of
from tidekv.states.validation import short, unknown

_UNITS: Final = {
    "": 1,
    "b": 1,
    **{unit: 1000 ** (power + 1) for power, unit in enumerate(("kb", "mb", "gb", "tb", "pb"))},
    **{unit: 1024 ** (power + 1) for power, unit in enumerate(("kib", "mib", "gib", "tib", "pib"))},
}
FORMS: Final = 'a JSON object such as {"capacity": "200GB"}, or @FILE with .json, .toml or .yaml'
_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


class UriOption(Protocol):
    """One option: parses its value, and describes what is allowed."""

    allowed: str

    def read(self, value: object) -> object | None:
        """Return the checked value, or None if it is not allowed."""


class Size:
    """A number of bytes: an int, or text such as 200GB (powers of 1000) or 64MiB (powers of 1024)."""

    def __init__(self, *, minimum_bytes: int = 1) -> None:
        self.minimum_bytes = minimum_bytes
        self.allowed = f"a size of at least {minimum_bytes} bytes, such as 1048576, 200GB or 64MiB"

    def read(self, value: object) -> int | None:
        """Return the bytes."""
        size_bytes = parse_size(value)
        return None if size_bytes is None or size_bytes < self.minimum_bytes else size_bytes


class Number:
    """A number between two bounds; whole if both bounds are ints."""

    def __init__(self, minimum: float, maximum: float) -> None:
        self.minimum, self.maximum = minimum, maximum
        self.whole = isinstance(minimum, int) and isinstance(maximum, int)
        self.allowed = f"{'an int' if self.whole else 'a number'} from {minimum} to {maximum}"

    def read(self, value: object) -> float | None:
        """Return the number, an int if both bounds are."""
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            return None
        try:
            number = int(value) if self.whole and not isinstance(value, float) else float(value)
        except ValueError:
            return None
        if self.whole and not isinstance(number, int):
            return None
        return number if self.minimum <= number <= self.maximum else None


class Choice:
    """One of a few words."""

    def __init__(self, *words: str) -> None:
        self.words = words
        self.allowed = "one of " + ", ".join(words)

    def read(self, value: object) -> str | None:
        """Return the word."""
        return value if isinstance(value, str) and value in self.words else None


def parse_size(value: object) -> int | None:
    """Return the bytes that an int or a text such as 200GB or 64MiB stands for; None if it is neither."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2].lower() not in _UNITS:
        return None
    return (
        int(float(match[1]) * _UNITS[match[2].lower()]) if "." in match[1] else int(match[1]) * _UNITS[match[2].lower()]
    )


def read_options(what: str, given: Mapping[str, object], allowed: Mapping[str, UriOption]) -> dict[str, object]:
    """Check options by name and value; InvalidConfig names the wrong one and what is allowed."""
    for name in given:
        if name not in allowed:
            raise InvalidConfig(f"{what}: {unknown(name, sorted(allowed), 'option')}")
    values: dict[str, object] = {}
    for name, value in given.items():
        checked = allowed[name].read(value)
        if checked is None:
            # A password that is written as a number has the wrong type, and is a password all the same.
            found = f"a {type(value).__name__}" if isinstance(allowed[name], Text) else short(value)
            raise InvalidConfig(f"{what}: option {name} must be {allowed[name].allowed}, not {found}")
        values[name] = checked
    return values


def read_extra_options(text: str) -> dict[str, object]:
    """Read options beside those in a URI: a JSON object, or @file in JSON, TOML or YAML. Passwords belong there.

    InvalidConfig names what cannot be read, and never repeats a value. Blocks: it may read a file.
    """
    if not text.startswith("@"):
        return _table(_json(text, f"the options must be {FORMS}"), "the options")
    path = Path(text[1:]).expanduser()
    try:
        content = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        cause = cause_of(error) if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InvalidConfig(f"options file {path} cannot be read: {cause}") from error
    if path.suffix == ".toml":
        try:
            return dict(tomllib.loads(content))
        except tomllib.TOMLDecodeError as error:
            raise InvalidConfig(f"options file {path} is not valid TOML: {error}") from error
    if path.suffix in (".yaml", ".yml"):
        return _table(_yaml(content, path), f"options file {path}")
    known = "" if path.suffix == ".json" else "; files that end in .toml, .yaml or .yml are read as such"
    return _table(_json(content, f"options file {path} is not valid JSON", known), f"options file {path}")


def _json(text: str, wrong: str, advice: str = "") -> object:
    try:
        found: object = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidConfig(f"{wrong}: {error.msg} (at line {error.lineno}, column {error.colno}){advice}") from error
    return found


def _yaml(text: str, path: Path) -> object:
    try:
        import yaml  # type: ignore[import-untyped]  # Its hints are a package of their own.
    except ImportError as error:
        raise InvalidConfig(
            f"options file {path} needs PyYAML: pip install 'tidekv[yaml]', or write JSON or TOML"
        ) from error
    try:
        found: object = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" (at line {mark.line + 1}, column {mark.column + 1})" if mark is not None else ""
        raise InvalidConfig(
            f"options file {path} is not valid YAML: {getattr(error, 'problem', 'unreadable')}{where}"
        ) from error
    return found


def _table(found: object, what: str) -> dict[str, object]:
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise InvalidConfig(f"{what} must be a table of names and values")
    return dict(found)


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
    """Any text that is not empty. A wrong value is never quoted: it may be a secret."""

    allowed = "a text that is not empty"

    def read(self, value: object) -> str | None:
        """Return the text."""
        return value if isinstance(value, str) and value and "\0" not in value else None


class Name:
    """A name that is part of keys and paths on a server."""

    allowed = "1 to 64 letters, digits, dots, dashes and underscores"

    def read(self, value: object) -> str | None:
        """Return the name."""
        valid = isinstance(value, str) and 0 < len(value) <= 64 and value.isascii()
        plain = valid and str(value).replace("_", "").replace("-", "").replace(".", "").isalnum()
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
    """The part of a URI between // and the path: credentials and servers."""

    username: str | None
    password: str | None
    servers: tuple[tuple[str, int], ...]

    @property
    def text(self) -> str:
        """The servers, safe for a log."""
        return ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.servers)


def read_authority(scheme: str, authority: str, *, default_port: int) -> Authority:
    """Parse `user:password@host:port,host:port`; InvalidConfig, without the password, if it is malformed."""
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
