"""What a journal's lines rest on: the event types, the short forms of commands, and the code of the core."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from functools import lru_cache
from pathlib import Path
from typing import get_args

from tidekv import states
from tidekv.states.events import AnyEvent, Event
from tidekv.states.inspect.step_record import BOOK_NUMBERS, COMMANDS, short_fields

PACKAGES = ("tidekv", "transitions", "msgspec", "torch", "nixl")
CHECKSUM_BYTES = 8


def event_types() -> tuple[type[Event], ...]:
    """Every event that a journal may hold, in the order of tidekv.states.events."""
    return get_args(AnyEvent)


@lru_cache(maxsize=1)
def schema_checksum() -> str:
    """Changes with every event type, field or short form."""
    words = [(kind.__name__, _fields(kind)) for kind in event_types()]
    words += [(kind.__name__, repr((kind.__struct_fields__, short_fields(kind)[1]))) for kind in COMMANDS]
    return _checksum(repr((words, BOOK_NUMBERS)).encode())


@lru_cache(maxsize=1)
def code_checksum() -> str:
    """Changes with every file of the core."""
    folder = Path(states.__path__[0])
    return _checksum(b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))))


@lru_cache(maxsize=1)
def package_versions() -> dict[str, str]:
    """Versions of Python and of the packages that matter to a run."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def _fields(kind: type[Event]) -> str:
    return ", ".join(f"{name}: {words}" for name, words in field_types(kind).items())


def field_types(kind: type) -> dict[str, str]:
    """The fields of a struct with their types as they are written, inherited ones first."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        found.update({name: str(words) for name, words in vars(base).get("__annotations__", {}).items()})
    return {name: words for name, words in found.items() if not name.startswith("__")}


def _checksum(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=CHECKSUM_BYTES).hexdigest()
