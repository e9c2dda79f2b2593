"""Options of storage engines: from a URI's query or a mapping to checked values, refused by name where wrong."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, Protocol

from tidekv.states.errors import InvalidConfig

_UNITS: Final = {
    "": 1,
    "b": 1,
    **{unit: 1000 ** (power + 1) for power, unit in enumerate(("kb", "mb", "gb", "tb", "pb"))},
    **{unit: 1024 ** (power + 1) for power, unit in enumerate(("kib", "mib", "gib", "tib", "pib"))},
}
_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


class Option(Protocol):
    """One option: how to read its value, and what is allowed, in words."""

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
    """Return the bytes that an int or a text such as 200GB or 64MiB means; None if it means none."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2].lower() not in _UNITS:
        return None
    return (
        int(float(match[1]) * _UNITS[match[2].lower()]) if "." in match[1] else int(match[1]) * _UNITS[match[2].lower()]
    )


def read_options(what: str, given: Mapping[str, object], allowed: Mapping[str, Option]) -> dict[str, object]:
    """Check options by name and value; InvalidConfig says which is wrong and what is allowed."""
    for name in given:
        if name not in allowed:
            raise InvalidConfig(f"{what} has no option {name!r}; it has {', '.join(sorted(allowed)) or 'none'}")
    values: dict[str, object] = {}
    for name, value in given.items():
        checked = allowed[name].read(value)
        if checked is None:
            raise InvalidConfig(f"{what}: option {name} must be {allowed[name].allowed}, not {value!r}")
        values[name] = checked
    return values
