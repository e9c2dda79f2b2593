"""List of all options with type, default, unit and effect, from the types and their docstrings."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

import msgspec

from tidekv.engine.config.sections import Configuration
from tidekv.states.errors import InvalidConfig
from tidekv.states.validation import unknown

PREFIX: Final = "TIDEKV_"
HIDDEN: Final = "********"

_UNITS: Final = {
    "_s": "seconds",
    "_us": "microseconds",
    "_s_max": "seconds",
    "_share": "a share",
    "_ahead": "a share of each pool",
    "_pages_max": "pages",
    "_bytes": "bytes",
    "_pages": "pages",
    "_tokens": "tokens",
    "_tokens_min": "tokens",
    "_pages_in_flight_max": "pages",
    "_pages_per_s": "pages a second",
    "_per_ki_token_s": "seconds for each 1,024 tokens",
    "page_size": "tokens",
    "l1": "a size",
    "l2": "a size",
    "vocabulary": "token ids",
    "queue_max": "requests",
    "running_max": "requests",
    "hits_min": "prompts",
    "segments_max": "files",
    "breaker_failures": "failures",
    "attempts": "times",
    "kept_batches": "batches",
}


class Option(NamedTuple):
    """One option, identified by its section and its name."""

    section: str
    name: str
    type: object
    default: object
    effect: str
    unit: str

    @property
    def path(self) -> str:
        """Its full name, as in `--set` and in error messages."""
        return f"{self.section}.{self.name}"

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return f"{PREFIX}{self.path.replace('.', '_')}".upper()

    @property
    def is_secret(self) -> bool:
        """Whether its value is hidden."""
        return self.name == "secret"

    def shown(self, value: object) -> object:
        """Return the value for display: passwords are hidden."""
        if self.is_secret:
            return HIDDEN if value else ""
        if self.name == "options":
            if not isinstance(value, Mapping):
                return HIDDEN
            return {name: HIDDEN if _is_password(name) else kept for name, kept in value.items()}
        if isinstance(value, str):
            return re.sub(r"(://[^/@:]*):[^/@]*@", rf"\1:{HIDDEN}@", value)
        return value


@functools.cache
def section_types() -> Mapping[str, type[msgspec.Struct]]:
    """The struct of each section by its path; a group of the engine's options is a section within "engine"."""
    return dict(_sections_within("", Configuration))


def _sections_within(path: str, kind: type[msgspec.Struct]) -> Iterator[tuple[str, type[msgspec.Struct]]]:
    for field in msgspec.structs.fields(kind):
        if is_section(field.type):
            yield f"{path}{field.name}", field.type
            yield from _sections_within(f"{path}{field.name}.", field.type)


def is_section(kind: object) -> bool:
    """Return whether a field is a group of options instead of an option."""
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


@functools.cache
def all_options() -> Mapping[str, Option]:
    """Return every option by its path, section by section, in the order of the types."""
    found = {}
    for section, kind in section_types().items():
        effects = docstrings_of(kind)
        for field in msgspec.structs.fields(kind):
            if is_section(field.type):
                continue
            default = field.default
            if field.default_factory is not msgspec.NODEFAULT:
                default = field.default_factory()
            effect = effects.get(field.name, "")
            option = Option(section, field.name, field.type, default, effect, _unit_of(field.name))
            found[option.path] = option
    return found


@functools.cache
def docstrings_of(kind: type) -> Mapping[str, str]:
    """Return the docstrings of a class's fields, the strings below them in the source, in one line each."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not base.__module__.startswith("tidekv."):
            continue
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(definition, ast.ClassDef), "a class's source is a class"
        for node, below in zip(definition.body, definition.body[1:], strict=False):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(below, ast.Expr):
                assert isinstance(below.value, ast.Constant), "an expression in a class is a docstring"
                found[node.target.id] = " ".join(str(below.value.value).split())
    return found


def _unit_of(name: str) -> str:
    fitting = [suffix for suffix in _UNITS if name.endswith(suffix)]
    return _UNITS[max(fitting, key=len)] if fitting else ""


def _is_password(name: str) -> bool:
    return any(word in name.lower() for word in ("password", "secret", "token", "key"))


def refused(path: str) -> InvalidConfig:
    """Return the error for an option that does not exist, with the closest existing one, or those of its section."""
    error = unknown(path, all_options(), "option", InvalidConfig)
    section = path.rpartition(".")[0]
    if "did you mean" not in str(error):
        within = [option for option in all_options() if option.rpartition(".")[0] == section]
        known = ", ".join(within or [f"{top}.…" for top in section_types()])
        error = InvalidConfig(f"there is no option {path!r}; allowed: {known}")
    return error  # type: ignore[return-value]  # Of the class given.
