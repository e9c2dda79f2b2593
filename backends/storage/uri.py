"""From a URI to a storage engine: `memory:`, `file:/path`, `redis://host`, and whatever an installed package adds.

A package adds an engine by an entry point in the group `tidekv.storage`: its name is the scheme, its object a
`StorageFactory`. It is loaded only when a URI asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Final, Protocol
from urllib.parse import parse_qsl, unquote, urlsplit

from tidekv.backends.storage.base import Storage
from tidekv.backends.storage.extra_options import read_extra_options
from tidekv.backends.storage.file import open_file
from tidekv.backends.storage.memory import open_memory
from tidekv.backends.storage.mooncake import open_mooncake
from tidekv.backends.storage.redis import open_redis, open_redis_tls
from tidekv.backends.storage.s3 import open_s3
from tidekv.states.errors import InvalidConfig

ENTRY_POINT_GROUP: Final = "tidekv.storage"


class StorageFactory(Protocol):
    """Makes an engine from the parts of its URI, without touching anything yet; InvalidConfig if it cannot be."""

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

    Options come from the URI's query and from `options`, a mapping, a JSON object as text, or @file in JSON, TOML or
    YAML; one name in both, an unknown name or a wrong value is refused with InvalidConfig, which says what is allowed.
    Nothing is opened before `register`.
    """
    if isinstance(options, str):
        options = read_extra_options(options)
    scheme, colon, _ = uri.partition(":")
    if not colon or not scheme:
        raise InvalidConfig("a storage URI starts with a scheme, such as memory: or file:/var/lib/tidekv")
    try:
        parts = urlsplit(uri)
        query = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=True) if parts.query else []
    except ValueError as error:
        raise InvalidConfig(f"storage URI of scheme {scheme!r} cannot be read: {error}") from error
    if parts.fragment:
        raise InvalidConfig(f"storage URI of scheme {scheme!r} has a fragment (#…); write # in a path as %23")
    merged: dict[str, object] = {}
    for name, value in [*query, *(options or {}).items()]:
        if name in merged:
            raise InvalidConfig(f"storage option {name!r} is given twice")
        merged[name] = value
    factory = _factory(parts.scheme)
    return factory(authority=parts.netloc, path=unquote(parts.path), options=merged)


def _factory(scheme: str) -> StorageFactory:
    if scheme in BUILT_IN:
        return BUILT_IN[scheme]
    found = entry_points(group=ENTRY_POINT_GROUP)
    for entry in found.select(name=scheme):
        try:
            factory: StorageFactory = entry.load()
        except Exception as error:  # Whatever somebody else's module raises while it is imported.
            raise InvalidConfig(f"storage engine {scheme!r} ({entry.value}) cannot be loaded: {error}") from error
        return factory
    known = sorted({*BUILT_IN, *found.names})
    raise InvalidConfig(f"there is no storage engine {scheme!r}; there are {', '.join(known)}")
