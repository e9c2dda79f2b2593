"""Wording of errors in the use of the command line: `tidekv: WHAT IS WRONG; see 'tidekv COMMAND --help'`, on one line.

Parsing is Typer's. Its exceptions say which parameter is wrong; the words for it are made here, from the types of the
commands and by the same functions as those of wrong configuration, so that Typer's own wording is never shown.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any, Final, get_args, get_type_hints

import typer
from msgspec import Meta

from tidekv.states.errors import InvalidRequest, TidekvError
from tidekv.states.validation import allowed, printable_lines, short, unknown

WRONG_USE: Final = 2
INTERRUPTED: Final = 130
"""What shells report for a process that ended by SIGINT."""

# Typer exports only this one of the usage errors. Their base is click's own class in older versions of Typer, and that
# of a copy of click within Typer in newer ones.
_UsageError: Final[type[Exception]] = typer.BadParameter.__bases__[0]


def run_app(app: typer.Typer, words: Sequence[str]) -> int:
    """Run a command line and return its exit code. Prints one line on stderr for a user error; a bug raises."""
    command = typer.main.get_command(app)
    try:
        code = command.main(list(words), prog_name="tidekv", standalone_mode=False)
    except typer.Abort:
        return INTERRUPTED
    except TidekvError as error:
        hint = _hint(command, words) if isinstance(error, InvalidRequest) else ""
        print(f"tidekv: {printable_lines(str(error))}{hint}", file=sys.stderr)
        return WRONG_USE
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            # Its text was the help, which Typer has printed.
            return WRONG_USE
        print(f"tidekv: {_words_for(error, _named(command, words)[0], words)}{_hint(command, words)}", file=sys.stderr)
        return WRONG_USE
    return code or 0


def _words_for(error: Any, command: Any, words: Sequence[str]) -> str:  # Any: classes that Typer does not export.
    match type(error).__name__:
        case "NoSuchOption":
            return str(unknown(error.option_name, _option_names(command), "option"))
        case "BadOptionUsage":
            takes_none = any(word.startswith(f"{error.option_name}=") for word in words)
            return f"{error.option_name} takes no value" if takes_none else f"{error.option_name} needs a value"
        case "MissingParameter":
            name = error.param.metavar or error.param.name.upper()
            return f"{name} is missing: {error.param.help.rstrip('.')}"
        case "BadParameter" if error.param is not None and error.param.name in _kinds(command):
            given = _given(error.param.opts, words)
            instead = "" if given is None else f", not {short(given)}"
            return f"{error.param.opts[-1]} must be {_kinds(command)[error.param.name]}{instead}"
    name = _unknown_command(command, words)
    if name is not None:
        return str(unknown(name, list(command.commands), "command"))
    if hasattr(command, "commands"):
        return f"no command is given; allowed: {', '.join(command.commands)}"
    text = " ".join(error.format_message().split()).rstrip(".")
    return text[:1].lower() + text[1:]


def _kinds(command: Any) -> dict[str, str]:
    """Return the allowed values by parameter, from the annotations of the command."""
    found = {}
    for name, hint in get_type_hints(command.callback, include_extras=True).items():
        kind, *notes = get_args(hint) if hasattr(hint, "__metadata__") else (hint,)
        given = [part for part in get_args(kind) if part is not type(None)]
        kind = given[0] if given and type(None) in get_args(kind) else kind
        for note in notes:
            if kind in (int, float) and (note.min is not None or note.max is not None):
                kind = Annotated[kind, Meta(ge=note.min, le=note.max)]
        if kind is not None:
            found[name] = allowed(kind)
    return found


def _option_names(command: Any) -> list[str]:
    return [name for parameter in command.params for name in _all_names(parameter) if name.startswith("--")] + [
        "--help"
    ]


def _all_names(parameter: Any) -> list[str]:
    return [*parameter.opts, *parameter.secondary_opts]


def _given(names: Sequence[str], words: Sequence[str]) -> str | None:
    """Return the last value given for an option in the words of a command line."""
    found = None
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in names:
            found = value if equals else "".join(words[at + 1 : at + 2])
    return found


def _named(command: Any, words: Sequence[str]) -> tuple[Any, str]:
    """Return the command that the words name within a group, as far as they name one, and its full name."""
    path = "tidekv"
    for word in words:
        within = getattr(command, "commands", {})
        if word in within:
            command, path = within[word], f"{path} {word}"
    return command, path


def _unknown_command(command: Any, words: Sequence[str]) -> str | None:
    """Return the word that stands where a command of a group is missing."""
    if not hasattr(command, "commands"):
        return None
    names = command.name, *command.commands
    return next((word for word in words if not word.startswith("-") and word not in names), None)


def _hint(command: Any, words: Sequence[str]) -> str:
    return f"; see '{_named(command, words)[1]} --help'"
