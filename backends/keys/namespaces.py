"""Names of a cache namespace: of the engine, of the request and of its adapter, joined to one text and taken apart.

A joined text begins with a mark that no given name may contain, and each name but the last has its length before it, so
different names never join to the same text.
"""

from __future__ import annotations

from typing import Final, NamedTuple

MARK: Final = "\0"
"""Begins joined names; `PlainText` refuses it in the names of callers."""
SEEDED: Final = f"{MARK}="
"""Begins a namespace that is known by the start of its page keys only; its hexadecimal digits follow."""
SEED_BYTES: Final = 32


class NamespaceNames(NamedTuple):
    """What a namespace consists of. `salt` is the request's namespace, or the engine's if the request has none."""

    salt: str = ""
    lora_name: str = ""


def join_namespaces(engine: str, request: str, lora_name: str = "") -> str:
    """Return the namespace of a request, with its adapter, within that of its engine.

    A request that names the engine's namespace is in that one: a router knows one salt for both.
    """
    salt = f"{MARK}{len(engine)}:{engine}{request}" if engine and request and engine != request else engine or request
    return f"{MARK}{MARK}{len(lora_name)}:{lora_name}{salt}" if lora_name else salt


def namespace_of_seed(seed: bytes) -> str:
    """Return a namespace whose `namespace_seed` is `seed`: 32 bytes, or none for the namespace without a name."""
    return f"{SEEDED}{seed.hex()}" if seed else ""


def split_namespace(namespace: str) -> NamespaceNames:
    """Return the names in a joined text. The engine's is left out if the request has one: it is the same for all pages
    of an engine. A namespace that is known by its seed has that as its salt.
    """
    if namespace.startswith(SEEDED):
        return NamespaceNames(namespace[len(SEEDED) :])
    lora_name = ""
    if namespace.startswith(MARK * 2):
        lora_name, namespace = _first(namespace[2:])
    if namespace.startswith(MARK):
        _, namespace = _first(namespace[1:])
    return NamespaceNames(namespace, lora_name)


def is_namespace(text: str) -> bool:
    """Whether a text, which another worker may have sent, is a namespace as it is joined here."""
    try:
        if text.startswith(SEEDED):
            return len(bytes.fromhex(text[len(SEEDED) :])) == SEED_BYTES
        return MARK not in "".join(split_namespace(text))
    except ValueError:
        return False


def _first(text: str) -> tuple[str, str]:
    length, _, rest = text.partition(":")
    if (count := int(length)) > len(rest):
        raise ValueError(f"a name of {count} characters has {len(rest)}")
    return rest[:count], rest[count:]
