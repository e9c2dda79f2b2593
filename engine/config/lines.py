"""Lines of a TOML, YAML or JSON file on which its options are, for errors. The file has been read without an error."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Final

_JSON_TOKEN: Final = re.compile(r'("(?:[^"\\]|\\.)*")(\s*:)?|[{}\[\]]')


def option_lines(text: str, suffix: str) -> dict[str, int]:
    """Return the line of each table and option by its path, such as `engine.storage.write`. Lines start at 1."""
    if suffix == ".toml":
        pairs = _toml(text)
    elif suffix in (".yaml", ".yml"):
        pairs = _yaml(text)
    else:
        pairs = _json(text)
    lines: dict[str, int] = {}
    for path, line in pairs:
        lines.setdefault(path, line)
    return lines


def _toml(text: str) -> Iterator[tuple[str, int]]:
    # tomllib has no positions. A statement ends with the first line up to which it can be parsed, since no part of a
    # multi-line value is valid by itself.
    header, statement, first = "", "", 1
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        first = first if statement else number
        statement += line
        try:
            tables = tomllib.loads(header + statement)
        except tomllib.TOMLDecodeError:
            continue
        for path in _paths(tables):
            yield path, first
        if statement.lstrip().startswith("["):
            header = statement
        statement = ""


def _paths(table: Mapping[str, object], within: str = "") -> Iterator[str]:
    for name, value in table.items():
        yield within + name
        if isinstance(value, Mapping):
            yield from _paths(value, f"{within}{name}.")


def _yaml(text: str) -> Iterator[tuple[str, int]]:
    import yaml  # type: ignore[import-untyped]  # Its hints are a package of their own.

    tables = [("", yaml.compose(text, Loader=yaml.SafeLoader))]
    while tables:
        within, table = tables.pop()
        for name, value in table.value:
            path = f"{within}{name.value}"
            yield path, name.start_mark.line + 1
            if isinstance(value, yaml.MappingNode):
                tables.append((f"{path}.", value))


def _json(text: str) -> Iterator[tuple[str, int]]:
    within: list[str] = []
    name = ""
    for token in _JSON_TOKEN.finditer(text):
        if token[0] in "{[":
            within.append(name)
            name = ""
        elif token[0] in "}]":
            within.pop()
        elif token[2]:
            name = json.loads(token[1])
            path = ".".join([*(outer for outer in within if outer), name])
            yield path, text.count("\n", 0, token.start()) + 1
