"""Every option that there is, with its type, default, unit and effect, as the types and their docstrings say."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Mapping
from typing import Final, NamedTuple

import msgspec

from tidekv.engine.configuration.sections import Configuration
from tidekv.states.errors import InvalidConfig
from tidekv.states.settings import CoreSettings

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
    "journal_tokens": "",
    "l1": "a size",
    "l2": "a size",
    "vocabulary": "token ids",
    "queue_max": "requests",
    "scan_max": "requests",
    "passes_max": "times",
    "hits_min": "prompts",
    "segments_max": "files",
    "breaker_failures": "failures",
    "attempts_per_prefill": "times",
}
# Options of the engine whose docstring stands at another one, or at none.
_EFFECTS: Final = {
    "default_deadline_s": "How long a request may take that brings no deadline of its own; then it fails.",
    "prefetch_base_s": 'With prefetch "timeout": how long a fetch from storage may take, whatever its length.',
    "write_hits_min": 'With write "selective": pages that were part of so many prompts are put in storage.',
    "breaker_backoff_s": "The first probe of storage that was left alone comes after this.",
    "breaker_backoff_max_s": "Each further probe waits twice as long as the one before, up to this.",
    "query_deadline_s": "How long storage may take to say what it holds; then it counts as a miss.",
    "copy_deadline_s": "A copy between device and host that takes longer counts as failed; its pages are quarantined.",
    "share_transfers": "Requests with a common prefix share its transfer, before the first of them is READY. Not with "
    "components.",
    "share_wait_s": "A request that waits for another one's transfer alone waits so long while nothing of it lands; "
    "then its own prefill is asked.",
    "lease_s": "Seconds for which prefill keeps a room's pages after the last ping of this worker that names it, if "
    "its own `prefill.lease_s` is not shorter.",
    "heartbeat_s": "How often each peer is told that this worker lives.",
    "journal_segments_max": "So many of the newest files of a journal are kept; 0: all. Without the first, there is "
    "no replay.",
    "close_deadline_s": "How long closing waits for what is in flight before it is cut off.",
}


class Option(NamedTuple):
    """One option, by the name of its section and its own."""

    section: str
    name: str
    type: object
    default: object
    effect: str
    unit: str

    @property
    def path(self) -> str:
        """Its name in full, as `--set` and mistakes have it."""
        return f"{self.section}.{self.name}"

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return f"{PREFIX}{self.section}_{self.name}".upper()

    @property
    def is_secret(self) -> bool:
        """Whether its value is never shown."""
        return self.name == "secret"

    def shown(self, value: object) -> object:
        """Return the value as it may be shown: passwords are hidden."""
        if self.is_secret:
            return HIDDEN if value else ""
        if self.name == "options" and isinstance(value, Mapping):
            return {name: HIDDEN if _is_password(name) else kept for name, kept in value.items()}
        if isinstance(value, str):
            return re.sub(r"(://[^/@:]*):[^/@]*@", rf"\1:{HIDDEN}@", value)
        return value


@functools.cache
def section_types() -> Mapping[str, type[msgspec.Struct]]:
    """The struct of each section."""
    return {field.name: field.type for field in msgspec.structs.fields(Configuration)}


@functools.cache
def all_options() -> Mapping[str, Option]:
    """Every option by its path, section by section, in the order of the types."""
    found = {}
    for section, kind in section_types().items():
        words = docstrings_of(kind)
        if section == "engine":
            words = {**docstrings_of(CoreSettings), **words, **_EFFECTS}
        for field in msgspec.structs.fields(kind):
            default = field.default
            if field.default_factory is not msgspec.NODEFAULT:
                default = field.default_factory()
            option = Option(section, field.name, field.type, default, words.get(field.name, ""), _unit_of(field.name))
            found[option.path] = option
    return found


@functools.cache
def docstrings_of(kind: type) -> Mapping[str, str]:
    """The docstrings of a class's fields: the texts that stand below them in the source, in one line each."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not base.__module__.startswith("tidekv."):
            continue
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(definition, ast.ClassDef), "a class's source is a class"
        for node, below in zip(definition.body, definition.body[1:], strict=False):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(below, ast.Expr):
                assert isinstance(below.value, ast.Constant), "what stands alone in a class is a docstring"
                found[node.target.id] = " ".join(str(below.value.value).split())
    return found


def defaults_of(section: str) -> msgspec.Struct:
    """Return a section as it is when nothing is given."""
    return section_types()[section]()


def check_section(section: str, values: Mapping[str, object]) -> msgspec.Struct:
    """Make a section of checked values. Raises InvalidConfig."""
    made = section_types()[section](**values)
    if section == "engine":
        # Some bounds belong to the core, which there is none of yet: sizes that are allowed stand in for its own.
        from tidekv.engine.config import EngineConfig

        assert isinstance(made, EngineConfig), "that is its type"
        made.core_settings(page_size=1, device_pages=1, host_pages=0)
    return made


def text_of(kind: object) -> str:
    """Name a type in words that people use for configuration."""
    text = re.sub(r"typing\.|collections\.abc\.", "", kind.__name__ if isinstance(kind, type) else str(kind))
    if text.startswith("Literal["):
        return " or ".join(word.strip("'\" ") for word in text[8:-1].split(","))
    known = {"str": "text", "int": "whole number", "float": "number", "bool": "true or false", "str | None": "text"}
    if text in known:
        return known[text]
    if text.startswith("Sequence["):
        return "list of text"
    return "text or whole number" if text in ("str | int", "int | str") else "table"


def _unit_of(name: str) -> str:
    fitting = [suffix for suffix in _UNITS if name.endswith(suffix)]
    return _UNITS[max(fitting, key=len)] if fitting else ""


def _is_password(name: str) -> bool:
    return any(word in name.lower() for word in ("password", "secret", "token", "key"))


def refused(path: str) -> InvalidConfig:
    """The error for an option that does not exist, with the one that was probably meant."""
    import difflib

    known = all_options()
    meant = difflib.get_close_matches(path, known, n=1)
    if not meant:
        name = path.rpartition(".")[2]
        meant = [other for other in known if other.rpartition(".")[2] == name]
    return InvalidConfig(f"there is no option {path!r}" + (f"; did you mean {meant[0]}?" if meant else ""))
