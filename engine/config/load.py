"""Loading: merges sources into a checked configuration with the origin of each value.

defaults < file < environment < --set < flags of the command. All errors are found at once, before anything starts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Final

import msgspec

from tidekv.engine.config.options import Option, all_options, section_types
from tidekv.engine.config.sections import Configuration
from tidekv.engine.config.sources import (
    FILE_VARIABLE,
    Given,
    OptionError,
    from_environment,
    from_file,
    from_flags,
    from_settings,
)
from tidekv.states.errors import InvalidConfig
from tidekv.states.validation import checked, refusal

__all__ = ["DEFAULT", "Loaded", "OptionError", "gather", "load"]

DEFAULT: Final = "default"


class Loaded(msgspec.Struct, frozen=True):
    """A configuration, and the origin of each option by its path."""

    configuration: Configuration
    origins: Mapping[str, str]

    def value(self, path: str) -> object:
        """Return the value of an option by its path."""
        return attrgetter(path)(self.configuration)

    def is_given(self, path: str) -> bool:
        """Return whether a source gave the option."""
        return self.origins[path] != DEFAULT


def load(
    file: str | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    settings: Sequence[str] = (),
    flags: Mapping[str, tuple[str, object]] | None = None,
    defaults: Mapping[str, object] | None = None,
) -> Loaded:
    """Read and check a configuration. Raises InvalidConfig, which names every error. Blocks.

    `file` is TOML, YAML or JSON by its ending; without it, the variable TIDEKV_CONFIG may name one. `environment` is
    the process's own unless given. `settings` are "section.option=value". `flags` are those of a command, by option:
    the flag's name and its value, None where it was not given. `defaults` are a command's own.
    """
    loaded, errors = gather(file, environment=environment, settings=settings, flags=flags, defaults=defaults)
    refuse("the configuration cannot be used", errors)
    return loaded


def refuse(what: str, errors: Sequence[OptionError]) -> None:
    """Raise InvalidConfig if there are errors: a single one on the line of `what`, several on lines of their own."""
    if len(errors) == 1:
        raise InvalidConfig(f"{what}: {errors[0]}")
    if errors:
        raise InvalidConfig(f"{what}:\n" + "\n".join(f"  {error}" for error in errors))


def gather(
    file: str | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    settings: Sequence[str] = (),
    flags: Mapping[str, tuple[str, object]] | None = None,
    defaults: Mapping[str, object] | None = None,
) -> tuple[Loaded, list[OptionError]]:
    """As `load`, but return the errors with the configuration that remains without the wrong values."""
    environment = os.environ if environment is None else environment
    file = file or environment.get(FILE_VARIABLE)
    errors: list[OptionError] = []
    given = [Given(path, value, "default of the command") for path, value in (defaults or {}).items()]
    read = [from_file(file)] if file else []
    for values, wrong in (*read, from_environment(environment), from_settings(settings)):
        given += values
        errors += wrong
    given += from_flags(flags or {})
    # Later sources replace earlier ones; replaced values are not checked.
    last = {value.path: value for value in given}
    sections: dict[str, dict[str, object]] = {section: {} for section in section_types()}
    origins = dict.fromkeys(all_options(), DEFAULT)
    for path, value in last.items():
        option = all_options()[path]
        try:
            sections[option.section][option.name] = _typed(option, value)
        except InvalidConfig as error:
            errors.append(OptionError(value.origin, str(error)))
            continue
        origins[path] = value.origin
    built: dict[str, dict[str, object]] = {section: {} for section in ("", *section_types())}
    # Groups before the section that holds them.
    for section in reversed(list(section_types())):
        parent, _, name = section.rpartition(".")
        built[parent][name] = _section(section, sections[section], built[section], origins, errors)
    return Loaded(Configuration(**built[""]), origins), errors  # type: ignore[arg-type]  # Each is of the type of its section.


def _section(
    section: str,
    options: Mapping[str, object],
    groups: Mapping[str, object],
    origins: dict[str, str],
    errors: list[OptionError],
) -> msgspec.Struct:
    """Make a section. If that fails, leave out each option that is wrong on top of the defaults, or else all."""
    kind = section_types()[section]
    try:
        return kind(**groups, **options)
    except InvalidConfig as error:
        whole = str(error)
    right = {}
    for name, value in options.items():
        path = f"{section}.{name}"
        try:
            kind(**{name: value})
            right[name] = value
        except InvalidConfig as error:
            # Most begin with the name of the option, of which the path is the longer form.
            separator = " " if str(error).startswith(f"{name} ") else ": "
            errors.append(OptionError(origins[path], f"{path}{separator}{str(error).removeprefix(f'{name} ')}"))
            origins[path] = DEFAULT
    if len(right) == len(options):
        # Each option is valid by itself, but not their combination.
        errors.append(OptionError(f"section {section}", whole))
        right = {}
    try:
        return kind(**groups, **right)
    except InvalidConfig as error:
        errors.append(OptionError(f"section {section}", str(error)))
        return kind()


def _typed(option: Option, given: Given) -> object:
    """Convert a value to the type of its option. Raises InvalidConfig, which hides passwords."""
    value = given.value
    try:
        if given.is_text:
            assert isinstance(value, str), "text is text"
            value = _read_text(option, value)
        return checked(value, option.type, option.path, InvalidConfig)
    except (msgspec.ValidationError, msgspec.DecodeError, InvalidConfig):
        raise refusal(option.shown(given.value), option.type, option.path, InvalidConfig) from None


def _read_text(option: Option, text: str) -> object:
    if isinstance(option.default, dict):
        return msgspec.json.decode(text, type=option.type)
    if isinstance(option.default, tuple):
        return [part.strip() for part in text.split(",") if part.strip()]
    if option.default is None and not text:
        return None
    if isinstance(option.default, str):
        return text
    return msgspec.convert(text, option.type, strict=False)
