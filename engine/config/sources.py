"""Sources of values: a file, environment variables, `--set`, flags. Each returns values with their origin."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tidekv.backends.storage.options import read_extra_options
from tidekv.engine.config.lines import option_lines
from tidekv.engine.config.options import PREFIX, all_options, refused, section_types
from tidekv.states.errors import InvalidConfig
from tidekv.states.validation import unknown

FILE_VARIABLE: Final = "TIDEKV_CONFIG"
SECRET_VARIABLE: Final = "TIDEKV_SECRET"
SECRET_PATH: Final = "transport.secret"
ON_THE_COMMAND_LINE: Final = (
    "the command line of a process can be read by every user of the machine: give the secret in the variable"
    f" {SECRET_VARIABLE}, or in a file named by transport.secret_file"
)
# Set by Kubernetes for a Service whose name begins with tidekv, for SGLang's backend, and by this project's tests.
_NOT_OURS: Final = re.compile(
    r"_SERVICE_(HOST|PORT)|_PORT$|_PORT_\d+_(TCP|UDP|SCTP)|^TIDEKV_(SGLANG$|STORAGE_KILLS|TEST_)"
)


class Given(NamedTuple):
    """A value and its origin. Text from the environment or a flag is not parsed yet."""

    path: str
    value: object
    origin: str
    is_text: bool = False


class OptionError(NamedTuple):
    """An error and the origin of the value."""

    origin: str
    what: str

    def __str__(self) -> str:
        return f"{self.what} ({self.origin})" if self.origin else self.what


def from_file(path: str) -> tuple[list[Given], list[OptionError]]:
    """Read a TOML, YAML or JSON file, by its suffix. The origin of a value is its file and line. Blocks."""
    try:
        tables = read_extra_options(f"@{path}")
        file = Path(path).expanduser()
        lines = option_lines(file.read_text(), file.suffix)
    except InvalidConfig as error:
        return [], [OptionError("", str(error))]
    place = _Place(path, lines)
    given: list[Given] = []
    errors: list[OptionError] = []
    for section, table in tables.items():
        if section not in section_types() or "." in section:
            errors.append(OptionError(place.of(section), str(unknown(section, top_sections(), "section"))))
        else:
            _take_table(section, table, place, given, errors)
    return given, errors


def from_environment(environment: Mapping[str, str]) -> tuple[list[Given], list[OptionError]]:
    """Read TIDEKV_SECTION_OPTION variables. An unknown TIDEKV_ variable is an error."""
    paths = {option.variable: path for path, option in all_options().items()}
    given: list[Given] = []
    errors: list[OptionError] = []
    for variable, value in sorted(environment.items()):
        if not variable.startswith(PREFIX) or variable == FILE_VARIABLE or _NOT_OURS.search(variable):
            continue
        path = SECRET_PATH if variable == SECRET_VARIABLE else paths.get(variable)
        if path is None:
            # Two underscores for one are other programs' way to write a section.
            near = difflib.get_close_matches(re.sub("_+", "_", variable), paths, 1, 0.85)
            guess = f"there is no option of this name; did you mean {near[0]}?" if near else refused(_guessed(variable))
            errors.append(OptionError(f"environment variable {variable}", str(guess)))
        else:
            given.append(Given(path, value, f"environment variable {variable}", is_text=True))
    return given, errors


def from_settings(settings: Sequence[str]) -> tuple[list[Given], list[OptionError]]:
    """Read the values of `--set`, each `section.option=value`. Returns what was given, and what is wrong with the rest.

    The secret is refused: a command line is visible to other users of the machine.
    """
    given: list[Given] = []
    errors: list[OptionError] = []
    for setting in settings:
        path, equals, value = setting.partition("=")
        if not equals:
            errors.append(OptionError(f"--set {path}", "give section.option=value"))
        elif path.strip() == SECRET_PATH:
            errors.append(OptionError(f"--set {SECRET_PATH}", ON_THE_COMMAND_LINE))
        else:
            _add(Given(path.strip(), value, f"--set {path.strip()}", is_text=True), given, errors)
    return given, errors


def from_flags(flags: Mapping[str, tuple[str, object]]) -> list[Given]:
    """Read flags of a command: by option, the flag's name and its value; None: not given."""
    return [Given(path, value, flag) for path, (flag, value) in flags.items() if value is not None]


def top_sections() -> list[str]:
    """Return the sections of a file, without the groups within them."""
    return [section for section in section_types() if "." not in section]


class _Place(NamedTuple):
    """A file, and the lines of its options by their paths."""

    file: str
    lines: Mapping[str, int]

    def of(self, path: str) -> str:
        """Return the file and the line of an option."""
        return f"{self.file}:{self.lines[path]}" if path in self.lines else self.file


def _take_table(section: str, table: object, place: _Place, given: list[Given], errors: list[OptionError]) -> None:
    if not isinstance(table, Mapping):
        errors.append(OptionError(place.of(section), f"section {section!r} must be a table of options"))
        return
    for name, value in table.items():
        path = f"{section}.{name}"
        if path in section_types():
            _take_table(path, value, place, given, errors)
        else:
            _add(Given(path, value, place.of(path)), given, errors)


def _add(value: Given, given: list[Given], errors: list[OptionError]) -> None:
    if value.path in all_options():
        given.append(value)
    else:
        errors.append(OptionError(value.origin, str(refused(value.path))))


def _guessed(variable: str) -> str:
    section, _, name = variable.removeprefix(PREFIX).lower().partition("_")
    return f"{section}.{name}"
