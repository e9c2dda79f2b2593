"""What an engine may offer beyond `Storage`: one more engine of the same place, for pages of another size.

An engine holds pages of one pool, all of one size. A window's pages and a state's records have sizes of their own, so
each component has an engine of its own beside that of the full pages, with a namespace of its own: records of different
components can never be taken for each other. Nothing is padded, and no engine has to know of components.

The `capacity` of `file:` is that of the directory, which all of them share. Of the other engines each has its own.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from tidekv.backends.storage.base import Storage


@runtime_checkable
class Siblings(Protocol):
    """An engine that can be opened once more."""

    def sibling(self) -> Storage:
        """Make another engine of the same place and options; its owner registers a pool with it, and closes it."""
