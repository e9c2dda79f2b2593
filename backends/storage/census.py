"""What an engine may offer beyond `Storage`, for tools: which namespaces are at its place, and which pages."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

from tidekv.states.errors import StorageFailed

_PUBLISHED: Final = 2


@dataclass(frozen=True, slots=True)
class Holding:
    """One namespace at a place. `page_bytes` is None where the place does not tell."""

    namespace: bytes
    page_bytes: int | None
    pages: int


@runtime_checkable
class Census(Protocol):
    """An engine that tells what there is. StorageFailed if it cannot be asked."""

    async def holdings(self) -> list[Holding]:
        """Return every namespace at the engine's place; needs no pool."""

    def listed(self) -> AsyncIterator[Sequence[bytes]]:
        """Return the page keys of the engine's namespace, in parts; needs a pool. Pages may go meanwhile."""


def file_holdings(root: Path) -> list[Holding]:
    """Return the namespaces of a directory of the `file:` engine. Blocks, and changes nothing."""
    path = root / "index.sqlite"
    if not path.is_file():
        raise StorageFailed(
            f"{root} is no storage directory: it has no index.sqlite; an engine that serves from it makes one anew"
        )
    try:
        with contextlib.closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as db:
            rows = db.execute(
                "SELECT n.digest, n.page_bytes, (SELECT COUNT(*) FROM slots s WHERE s.namespace=n.id AND s.state=?) "
                "FROM namespaces n ORDER BY n.digest",
                (_PUBLISHED,),
            ).fetchall()
    except sqlite3.Error as error:
        raise StorageFailed(f"{path} cannot be read: {error}") from error
    return [Holding(namespace=digest, page_bytes=page_bytes, pages=pages) for digest, page_bytes, pages in rows]


def as_namespace(text: str) -> bytes | None:
    """Return the namespace that a name on a server means, None if it is none."""
    try:
        namespace = bytes.fromhex(text)
    except ValueError:
        return None
    return namespace if len(namespace) == 32 else None
