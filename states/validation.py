"""Validation of arguments and options: types with limits, and errors with the field, its value and the allowed values.

`check_fields` or `checked` validates every public structure, argument and option. Both convert with msgspec and raise
`InvalidRequest`, or `InvalidConfig` for settings, before anything is changed.
"""

from __future__ import annotations

import difflib
import functools
import ipaddress
import operator
import re
import types
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from tidekv.states.errors import InvalidConfig, InvalidRequest

COUNT_MAX: Final = 2**53 - 1
TOKEN_MAX: Final = 2**32 - 1
SECONDS_MAX: Final = 365 * 86_400
"""One year. Longer waits are mistakes, and much longer ones overflow the timers of event loops."""
VALUE_CHARS_MAX: Final = 60
"""Maximum characters of a refused value in an error."""
KNOWN_SHOWN_MAX: Final = 24
"""Maximum known names that an error lists beside the most similar one."""
_ADDRESS: Final = re.compile(r"(?: object)? at 0x[0-9a-fA-F]+")

REFUSALS: Final = (msgspec.ValidationError, OverflowError, UnicodeEncodeError)
"""Exceptions of msgspec for a value that is not of a type. UnicodeEncodeError stands for surrogates in text."""

Count: TypeAlias = Annotated[int, Meta(ge=0, le=COUNT_MAX)]
PositiveCount: TypeAlias = Annotated[int, Meta(ge=1, le=COUNT_MAX)]
ByteCount: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Seconds: TypeAlias = Annotated[float, Meta(gt=0, le=SECONDS_MAX)]
SecondsOrZero: TypeAlias = Annotated[float, Meta(ge=0, le=SECONDS_MAX)]
Amount: TypeAlias = Annotated[float, Meta(ge=0, le=1e18)]
Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
PositiveShare: TypeAlias = Annotated[float, Meta(gt=0, le=1)]
Text: TypeAlias = Annotated[str, Meta(pattern=r"\A[^\ud800-\udfff]*\Z", description="UTF-8 text")]
PlainText: TypeAlias = Annotated[
    str,
    Meta(pattern=r"\A[^\x00\ud800-\udfff]*\Z", description="UTF-8 text without NUL"),
]


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all settings. Raises InvalidConfig for a field of the wrong type or beyond its limits."""

    def __post_init__(self) -> None:
        check_fields(self, InvalidConfig)


def check_fields(instance: object, error: type[InvalidRequest] = InvalidRequest, *, where: str = "") -> None:
    """Raise `error` if a field of a structure or dataclass violates its annotation.

    `where` starts the error's text, for example "request 'r1': ".
    """
    owner: type[Any] = type(instance)
    form, classes = _checked_form(owner)  # type: ignore[arg-type]  # mypy checks the hash of instances, not of the class.
    try:
        msgspec.convert(instance, form, from_attributes=True)
    except REFUSALS:
        # The conversion above checks all fields in C. Only after a refusal is each field checked to find the wrong one.
        for name, kind in _hints(owner).items():  # type: ignore[arg-type]  # mypy checks the hash of instances, not of the class.
            checked(getattr(instance, name), kind, where + name, error)
        raise error(f"{where}{short(instance)} cannot be used") from None
    for name, kind in classes.items():
        checked(getattr(instance, name), kind, where + name, error)


def checked(value: object, kind: Any, what: str, error: type[InvalidRequest] = InvalidRequest) -> Any:
    """Return a value converted to a type, such as an int to float. Raises `error`, which names `what`.

    `kind` is `Any` because typing has no type for type expressions.
    """
    if _is_class(kind):
        if isinstance(value, kind):
            return value
        raise refusal(value, kind, what, error)
    try:
        return msgspec.convert(value, kind)
    except REFUSALS:
        raise refusal(value, kind, what, error) from None


def checked_first_token(token: object, vocabulary: int = 0) -> int:
    """Return a token id as an int, also of numpy and torch integers. Raises InvalidRequest.

    `vocabulary` is the number of ids; 0: all that have 32 bits.
    """
    end = vocabulary or TOKEN_MAX + 1
    try:
        number = -1 if isinstance(token, bool) else operator.index(token)  # type: ignore[arg-type]  # Checked by the call.
    except TypeError:
        number = -1
    if not 0 <= number < end:
        raise InvalidRequest(f"first_token must be an int from 0 to {end - 1}, not {short(token)}")
    return number


def refusal(value: object, kind: Any, what: str, error: type[InvalidRequest] = InvalidRequest) -> InvalidRequest:
    """Return the error for a value that is not of `kind`."""
    text = f"{what} must be {allowed(kind)}, not {short(value)}"
    meant = _similar(value, _words_of(kind)) if isinstance(value, str) else []
    return error(f"{text}; did you mean {meant[0]}?" if meant else text)


def unknown(
    name: str, known: Collection[str], what: str, error: type[InvalidRequest] = InvalidRequest
) -> InvalidRequest:
    """Return the error for an unknown name, with the known names, the most similar ones first.

    Of more than KNOWN_SHOWN_MAX names, only the most similar one is named if there is one.
    """
    meant = _similar(name, known)
    nearest = [f"did you mean {meant[0]}?"] if meant else []
    if not meant or len(known) <= KNOWN_SHOWN_MAX:
        nearest.append(f"allowed: {', '.join(dict.fromkeys([*meant, *known]))}")
    return error(f"there is no {what} {short(name)}; {' '.join(nearest)}")


def _similar(name: str, known: Collection[str]) -> list[str]:
    """Return the known names that resemble a name, the most similar one first."""
    # The same option in another group: only the last part of the path matches.
    return difflib.get_close_matches(name, known) or [
        other for other in known if other.rpartition(".")[2] == name.rpartition(".")[2]
    ]


def _words_of(kind: Any) -> list[str]:
    """Return the words that a type allows if it is a choice of words, with or without none."""
    if get_origin(kind) is Literal:
        return [word for word in get_args(kind) if isinstance(word, str)]
    return [word for each in get_args(kind) for word in _words_of(each)] if _is_union(kind) else []


def host_and_port(
    address: object, what: str, error: type[InvalidRequest] = InvalidRequest, *, any_port: bool = False
) -> tuple[str, int]:
    """Parse "host:port" or "[v6]:port". Raises `error` if it is malformed, or for port 0 without `any_port`."""
    parsed = _parsed_address(address) if isinstance(address, str) else None
    if parsed is None or not (any_port or parsed[1]):
        ports = "0 (any) to 65535" if any_port else "1 to 65535"
        raise error(
            f"{what} must be host:port such as 127.0.0.1:7000 or [::1]:7000, port {ports}, not {short(address)}"
        )
    return parsed


def is_loopback_host(host: str) -> bool:
    """Whether a host name or address is this machine's alone. Other names are not resolved: they count as elsewhere."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@functools.lru_cache(maxsize=1024)
def _parsed_address(address: str) -> tuple[str, int] | None:
    # Cached, since requests name the same few prefill workers again and again.
    host, _, port = address.rpartition(":")
    if not (port.isascii() and port.isdigit() and len(port) <= 5) or int(port) > 65535 or not _is_host(host):
        return None
    return host.removeprefix("[").removesuffix("]"), int(port)


def _is_host(host: str) -> bool:
    if host.startswith("[") and host.endswith("]"):
        try:
            ipaddress.IPv6Address(host[1:-1].partition("%")[0])
        except ValueError:
            return False
        return True
    try:
        # Refuses empty labels, labels too long for a resolver, and text that cannot be encoded.
        host.encode("idna")
    except UnicodeError:
        return False
    return re.search(r"[\s\x00-\x1f\[\]:/@,]", host) is None and host != ""


def printable(value: object) -> str:
    """Return a value that came from outside as text for a terminal or a log: on one line, control characters escaped as
    Python does. Line breaks would forge records, and ESC and its like command a terminal.
    """
    text = str(value)
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def printable_lines(text: str) -> str:
    """Return a text of several lines as `printable` does, with its line breaks."""
    return text if text.isprintable() else "\n".join(map(printable, text.split("\n")))


def short(value: object) -> str:
    """Return a value's repr for an error, cut to VALUE_CHARS_MAX. An object without a repr of its own is its type."""
    try:
        text = repr(value) if isinstance(value, str) else _ADDRESS.sub("", repr(value))
    except Exception:  # A caller's own repr that raises, or an int with more digits than Python converts.
        text = f"<{type(value).__name__}>"
    return text if len(text) <= VALUE_CHARS_MAX else f"{text[: VALUE_CHARS_MAX - 1]}…"


@functools.cache
def allowed(kind: Any) -> str:
    """Describe the values that a type allows, for an error."""
    if kind is None or kind is type(None):
        return "none"
    if get_origin(kind) is Annotated:
        base, *notes = get_args(kind)
        return _with_limits(allowed(base), [note for note in notes if isinstance(note, Meta)])
    if get_origin(kind) is Literal:
        *words, last = map(str, get_args(kind))
        return f"{', '.join(words)} or {last}" if words else last
    if _is_union(kind):
        return " or ".join(allowed(each) for each in get_args(kind))
    if get_origin(kind) in (list, tuple, Sequence):
        inner = [each for each in get_args(kind) if each is not Ellipsis]
        return f"a list of {allowed(inner[0])}" if inner else "a list"
    if get_origin(kind) in (dict, Mapping) or kind is dict:
        return "a table"
    known = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
    return known.get(kind) or f"a {kind.__name__}"


def _with_limits(words: str, notes: Iterable[Meta]) -> str:
    for note in notes:
        if note.description:
            return note.description
        if note.gt is not None:
            words += f" above {note.gt:,}"
        if note.ge is not None and note.le is not None and note.le < COUNT_MAX:
            words += f" from {note.ge:,} to {note.le:,}"
        elif note.ge is not None:
            words += f", {note.ge:,} or more"
        elif note.le is not None:
            words += f", at most {note.le:,}"
    return words


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, types.UnionType)


def _is_class(kind: Any) -> bool:
    """Whether `kind` is a class to check with isinstance. msgspec would convert a mapping to it instead."""
    return isinstance(kind, type) and kind not in (str, int, float, bool, dict, list, tuple)


@functools.cache
def _hints(owner: type[Any]) -> dict[str, Any]:
    """Return the checked fields with their types. Fields of type `Any` are validated elsewhere."""
    names: Iterable[str] = getattr(owner, "__struct_fields__", ()) or getattr(owner, "__dataclass_fields__", ())
    hints = get_type_hints(owner, include_extras=True)
    return {name: hints[name] for name in names if hints[name] is not Any}


@functools.cache
def _checked_form(owner: type[Any]) -> tuple[type[msgspec.Struct], dict[str, Any]]:
    """Return a structure of the owner's plain fields, and the other fields with their classes.

    The structure is needed because msgspec does not check an instance of the owner itself.
    """
    hints = _hints(owner)  # type: ignore[arg-type]  # mypy checks the hash of instances, not of the class.
    plain = [(name, kind) for name, kind in hints.items() if not _is_class(kind)]
    form = msgspec.defstruct(f"Checked{owner.__name__}", plain, kw_only=True)
    return form, {name: kind for name, kind in hints.items() if _is_class(kind)}
