"""A file of a user of tidekv, generated from the public API: once as it should be, and once with an error in each line.

Covered are the names of `tidekv`, attributes and methods of public classes, and parameters and results of public calls.
Arguments that a line is not about have the type Any, so a line has the one error that was planted in it.
"""

from __future__ import annotations

import ast
import enum
import inspect
import textwrap
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import tidekv

HEAD = '''"""Calls the public API."""

from typing import Any

import tidekv


class Wrong:
    """Fits no parameter."""


def use(any_: Any, wrong: Wrong, {owners}) -> None:
    """Use everything."""
'''

FREE = "any_name"
"""Stands for the names that `**name` takes."""


@dataclass(frozen=True, slots=True)
class Line:
    """A statement and the same with an error in it."""

    right: str
    wrong: str
    word: str
    """The report of a type checker has this in it; empty if only its place counts."""


def misspelt(name: str) -> str:
    """Return the name with a letter lost."""
    return name[:-2] + name[-1]


def file_of(statements: list[str]) -> tuple[str, int]:
    """Return the text of a file of these statements, and the number of the line of the first one."""
    owners = ", ".join(f"{owner_of(name)}: tidekv.{name}" for name, _ in classes())
    head = HEAD.format(owners=owners)
    return head + "".join(f"    {each}\n" for each in statements), head.count("\n") + 1


def lines() -> Iterator[Line]:
    """Yield a line for each public name, attribute, parameter, result and choice of the API."""
    for name in tidekv.__all__:
        yield Line(f"_ = tidekv.{name}", f"_ = tidekv.{misspelt(name)}", misspelt(name))
    for name, kind in classes():
        owner = owner_of(name)
        for attribute in sorted(attributes(kind)):
            yield Line(
                f"_ = {owner}.{attribute}", f"_ = {owner}.{attribute[:-1]}_{attribute[-1]}", attribute[:-1] + "_"
            )
        for attribute in sorted(attributes(kind) - methods(kind).keys()):
            read = f"{owner}_{attribute}"
            yield Line(f"{read}: object = {owner}.{attribute}", f"{read}: Wrong = {owner}.{attribute}", "")
        if issubclass(kind, enum.Enum):
            continue
        if not is_protocol(kind):
            yield from call_lines(f"tidekv.{name}", kind)
        for method, function in sorted(methods(kind).items()):
            yield from call_lines(f"{owner}.{method}", function)
    for name in tidekv.__all__:
        value = getattr(tidekv, name)
        if inspect.isfunction(value):
            yield from call_lines(f"tidekv.{name}", value)
        elif not isinstance(value, type) and name != "__version__":  # An alias of a type.
            yield Line(f"an_{name}: tidekv.{name} = any_", f"an_{name}: tidekv.{name} = wrong", "")


def call_lines(target: str, function: Callable[..., object]) -> Iterator[Line]:
    """Yield lines for each parameter of a call, and for its result."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # An error without parameters of its own.
    parameters = [
        each
        for each in signature.parameters.values()
        if each.name != "self" and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    keywords = [each.name for each in signature.parameters.values() if each.kind is each.VAR_KEYWORD]
    named = {each.name: each.annotation for each in parameters}
    required = [each.name for each in parameters if each.default is each.empty]
    for name in keywords:
        named |= unpacked(function, name)

    has_result = inspect.iscoroutinefunction(function) or signature.return_annotation not in (None, "None")
    taken = "_ = " if has_result or isinstance(function, type) else ""

    def call(**changed: str) -> str:
        given = dict.fromkeys(required, "any_") | changed
        return f"{target}({', '.join(f'{name}={value}' for name, value in given.items())})"

    for name, annotation in named.items():
        right = f"{taken}{call(**{name: 'any_'})}"
        if FREE not in named:
            yield Line(right, f"{taken}{call(**{name + '_x': 'any_'})}", f"{name}_x")
        if annotation not in (object, "object"):
            yield Line(right, f"{taken}{call(**{name: 'wrong'})}", "Wrong")
        for choice in choices(annotation):
            yield Line(
                f"{taken}{call(**{name: repr(choice)})}",
                f"{taken}{call(**{name: repr(misspelt(choice))})}",
                misspelt(choice),
            )
    if taken and signature.return_annotation != "T":
        result = f"from_{target.replace('.', '_')}"
        yield Line(f"{result}: object = {call()}", f"{result}: Wrong = {call()}", "")


def classes() -> Iterator[tuple[str, type[object]]]:
    """Yield public classes with their names."""
    for name in tidekv.__all__:
        value = getattr(tidekv, name)
        if isinstance(value, type):
            yield name, value


def owner_of(name: str) -> str:
    """Return the name of the parameter that has an instance of this class."""
    return f"a_{name}"


def is_protocol(kind: type[object]) -> bool:
    return bool(getattr(kind, "_is_protocol", False))


def ours(kind: type[object]) -> Iterator[type[object]]:
    """Yield a class and its bases, as far as they are tidekv's."""
    return (base for base in kind.__mro__ if base.__module__.startswith("tidekv."))


def methods(kind: type[object]) -> dict[str, Callable[..., object]]:
    """Return the public methods of a class, inherited ones included."""
    found: dict[str, Callable[..., object]] = {}
    for base in reversed([*ours(kind)]):
        for name in vars(base):
            if not name.startswith("_") and inspect.isroutine(getattr(kind, name)):
                found[name] = getattr(kind, name)
    return found


def attributes(kind: type[object]) -> set[str]:
    """Return the public attributes of an instance: methods, properties, fields, and those that `__init__` sets."""
    found: set[str] = set()
    for base in ours(kind):
        found |= {name for name in vars(base) if not hasattr(object, name)}
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(base)))):
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                found |= {
                    each.attr
                    for each in ast.walk(node)
                    if isinstance(each, ast.Attribute)
                    and isinstance(each.ctx, ast.Store)
                    and isinstance(each.value, ast.Name)
                    and each.value.id == "self"
                }
    return {name for name in found if not name.startswith("_")}


def unpacked(function: Callable[..., object], name: str) -> dict[str, object]:
    """Return the keys of `**name: Unpack[…]` with their types; otherwise one key, which stands for any name."""
    annotation = typing.get_type_hints(function, include_extras=True)[name]
    keys = typing.get_args(annotation)
    return typing.get_type_hints(keys[0]) if keys else {FREE: annotation}


def choices(annotation: object) -> Iterator[str]:
    """Yield the allowed values of a parameter, if it has some."""
    if typing.get_origin(annotation) is typing.Literal:
        yield from (each for each in typing.get_args(annotation) if len(each) > 2)
