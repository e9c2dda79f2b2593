"""Storage engines by URI: `memory:`, `file:/path`, `redis://host`, and those of installed packages.

A package adds an engine by an entry point in the group `tidekv.storage`: its name is the scheme, its object a
`StorageFactory`. It is loaded only when a URI names it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Final, Protocol
from urllib.parse import parse_qsl, unquote

from tidekv.backends.storage.base import Storage
from tidekv.backends.storage.file.engine import open_file
from tidekv.backends.storage.memory import open_memory
from tidekv.backends.storage.mooncake.pages import open_mooncake
from tidekv.backends.storage.options import read_extra_options
from tidekv.backends.storage.redis.pages import open_redis, open_redis_tls
from tidekv.backends.storage.s3.pages import open_s3
from tidekv.states.errors import InvalidConfig
from tidekv.states.validation import Text, checked, unknown

ENTRY_POINT_GROUP: Final = "tidekv.storage"

# RFC 3986, appendix B, with the scheme required. Not urlsplit: since CVE-2025-0938 it refuses `a,[::1]:7000`, and not
# every Python has that change.
_URI: Final = re.compile(
    r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*):(?://(?P<authority>[^/?#]*))?(?P<path>[^?#]*)(?:\?(?P<query>[^#]*))?(?P<rest>#.*)?",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class UriParts:
    """A storage URI, split and not yet decoded. What is absent is empty."""

    scheme: str
    authority: str
    path: str
    query: str


def split_uri(uri: str) -> UriParts:
    """Split a storage URI. Raises InvalidConfig if it has no scheme, or a fragment."""
    parts = _URI.fullmatch(uri)
    if parts is None:
        raise InvalidConfig("a storage URI starts with a scheme, such as memory: or file:/var/lib/tidekv")
    scheme = parts["scheme"].lower()
    if parts["rest"] is not None:
        raise InvalidConfig(f"storage URI of scheme {scheme!r} has a fragment (#…); write # in a path as %23")
    return UriParts(scheme=scheme, authority=parts["authority"] or "", path=parts["path"], query=parts["query"] or "")


class StorageFactory(Protocol):
    """Makes an engine from the parts of its URI, without opening anything. Raises InvalidConfig."""

    def __call__(self, *, authority: str, path: str, options: Mapping[str, object]) -> Storage: ...


BUILT_IN: Final[Mapping[str, StorageFactory]] = {
    "memory": open_memory,
    "file": open_file,
    "redis": open_redis,
    "rediss": open_redis_tls,
    "valkey": open_redis,
    "valkeys": open_redis_tls,
    "s3": open_s3,
    "mooncake": open_mooncake,
}


def open_storage(uri: str, options: Mapping[str, object] | str | None = None) -> Storage:
    """Make the engine that a URI names; its owner registers a pool with it, and closes it.

    Options come from the URI's query and from `options`: a mapping, a JSON object as text, or @file in JSON, TOML or
    YAML. A name in both, an unknown name or a wrong value raises InvalidConfig, which names what is allowed. Nothing is
    opened before `register`.
    """
    checked(uri, Text, "storage URI", InvalidConfig)
    if isinstance(options, str):
        options = read_extra_options(options)
    elif options is not None and not isinstance(options, Mapping):
        # Never the value itself: it may hold a password.
        raise InvalidConfig(f"storage options must be a mapping, JSON text or @file, not {type(options).__name__}")
    parts = split_uri(uri)
    try:
        query = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=True) if parts.query else []
    except ValueError as error:
        raise InvalidConfig(f"storage URI of scheme {parts.scheme!r} cannot be read: {error}") from error
    merged: dict[str, object] = {}
    for name, value in [*query, *(options or {}).items()]:
        if name in merged:
            raise InvalidConfig(f"storage option {name!r} is given twice")
        merged[name] = value
    factory = _factory(parts.scheme)
    return factory(authority=parts.authority, path=unquote(parts.path), options=merged)


def _factory(scheme: str) -> StorageFactory:
    if scheme in BUILT_IN:
        return BUILT_IN[scheme]
    found = entry_points(group=ENTRY_POINT_GROUP)
    for entry in found.select(name=scheme):
        try:
            factory: StorageFactory = entry.load()
        except Exception as error:  # A foreign module may raise anything while it is imported.
            raise InvalidConfig(f"storage engine {scheme!r} ({entry.value}) cannot be loaded: {error}") from error
        return factory
    known = sorted({*BUILT_IN, *found.names})
    raise unknown(scheme, known, "storage engine", InvalidConfig)
