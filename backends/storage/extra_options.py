"""Options beside those in a URI: a JSON object, or @file in JSON, TOML or YAML. Passwords belong there."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

from tidekv.states.errors import InvalidConfig


def read_extra_options(text: str) -> dict[str, object]:
    """Read options; InvalidConfig says what cannot be read, and never repeats a value. Blocks: it may read a file."""
    if not text.startswith("@"):
        return _table(_json(text, "the options"), "the options")
    path = Path(text[1:]).expanduser()
    try:
        content = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"options file {path} cannot be read: {error}") from error
    if path.suffix == ".toml":
        try:
            return dict(tomllib.loads(content))
        except tomllib.TOMLDecodeError as error:
            raise InvalidConfig(f"options file {path} is no TOML: {error}") from error
    if path.suffix in (".yaml", ".yml"):
        return _table(_yaml(content, path), f"options file {path}")
    return _table(_json(content, f"options file {path}"), f"options file {path}")


def _json(text: str, what: str) -> object:
    try:
        found: object = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidConfig(
            f'{what} must be a JSON object such as {{"capacity": "200GB"}}, or @file.json, @file.toml, @file.yaml: '
            f"{error.msg} in line {error.lineno}, column {error.colno}"
        ) from error
    return found


def _yaml(text: str, path: Path) -> object:
    try:
        import yaml  # type: ignore[import-untyped]  # Its hints are a package of their own.
    except ImportError as error:
        raise InvalidConfig(f"options file {path} needs PyYAML; install it, or write JSON or TOML") from error
    try:
        found: object = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark is not None else ""
        raise InvalidConfig(
            f"options file {path} is no YAML: {getattr(error, 'problem', 'unreadable')}{where}"
        ) from error
    return found


def _table(found: object, what: str) -> dict[str, object]:
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise InvalidConfig(f"{what} must be a table of names and values")
    return dict(found)
