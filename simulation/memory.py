"""Simulated pools: each page holds a tag instead of bytes, and records its writer.

The tag of page i of a prompt stands for the whole prefix up to and including page i: two pages have the same tag if and
only if their bytes would be equal. Every access is checked: no write to a page that is being written by another writer
or read, no read of garbage, and no change of a page while it is read.
"""

from __future__ import annotations

from tidekv.states.errors import TidekvError
from tidekv.states.pages.page_pool import LentPool, PagePool, PageState
from tidekv.states.types import PageIds

GARBAGE = 0
LAYERS = 4
"""Layers of the simulated model."""


class Violation(TidekvError):
    """The simulation observed a state that must never occur."""


class Contents:
    """Assigns tags: equal to equal prefixes, different to different ones."""

    def __init__(self) -> None:
        self._tags: dict[tuple[int | str, bytes], int] = {}

    def tag(self, before: int | str, key: bytes) -> int:
        """Return the tag of the page with this key after the page with tag `before` (first page: the namespace)."""
        return self._tags.setdefault((before, key), len(self._tags) + 1)

    def tags(self, namespace: str, keys: bytes, key_bytes: int) -> list[int]:
        """Return the tags of a prompt's full pages."""
        tags: list[int] = []
        before: int | str = namespace
        for start in range(0, len(keys), key_bytes):
            before = self.tag(before, keys[start : start + key_bytes])
            tags.append(before)
        return tags


class SimulatedPool:
    """The pages of one pool."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self._is_lent = isinstance(pool, LentPool)
        self.tags = [GARBAGE] * pool.total
        self.flipped: set[int] = set()
        """Pages of which a bit has flipped since they were written: what their tags stand for, but for that bit."""
        self._writers: dict[int, tuple[object, int]] = {}
        self._readers: dict[int, int] = {}
        self._users: dict[int, str] = {}
        """Pages that a caller with an early READY may write to."""
        self._layers: dict[int, tuple[int, int]] = {}
        """Tag and number of leading layers in place, of pages that are written layer by layer."""

    def begin_use(self, pages: PageIds, who: str) -> None:
        """Let a caller write to these pages until `end_use`: nothing else may."""
        for page in pages:
            self._require_unused(page, who)
            self._require_taken(page, who)
            self._users[page] = who

    def end_use(self, pages: PageIds, who: str) -> None:
        """End a use. The pages must not have become free meanwhile."""
        for page in pages:
            self._require_taken(page, who)
            del self._users[page]

    def use_put(self, page: int, tag: int, who: str) -> None:
        """Write a page in use at once."""
        if self._users.get(page) != who:
            raise Violation(f"{who} writes to {self.pool.name} page {page}, which it does not use")
        self.tags[page] = tag

    def put_layers(self, pages: PageIds, tags: list[int], layers: int) -> None:
        """Note that the first layers of pages under a write are in place."""
        for page, tag in zip(pages, tags, strict=True):
            self._layers[page] = (tag, layers)

    def expect_layers(self, pages: PageIds, tags: list[int], layers: int, who: str) -> None:
        """Raise a Violation unless the first layers of these pages hold these tags."""
        for at, (page, tag) in enumerate(zip(pages, tags, strict=True)):
            self._require_taken(page, who)
            # Layers of a copy that has failed stay in place, until the core hears of it and has them written again.
            is_whole = self.tags[page] != GARBAGE
            found, count = (self.tags[page], layers) if is_whole else self._layers.get(page, (GARBAGE, 0))
            if found != tag or count < layers:
                raise Violation(
                    f"{self.pool.name} page {page}, number {at} of {who}, has {count} layers of {found}, not"
                    f" {layers} of {tag}"
                )

    def _require_unused(self, page: int, who: object) -> None:
        if page in self._users:
            raise Violation(f"{who} takes {self.pool.name} page {page}, which {self._users[page]} may write to")

    def begin_write(self, pages: PageIds, who: object) -> None:
        """Begin a write by `who`: the pages hold garbage until `end_write`."""
        for page in pages:
            writer, count = self._writers.get(page, (who, 0))
            if writer != who:
                raise Violation(f"{who} writes to {self.pool.name} page {page}, to which {writer} still writes")
            if page in self._readers:
                raise Violation(f"{who} writes to {self.pool.name} page {page}, which is being read")
            self._require_taken(page, who)
            self._require_unused(page, who)
            self._layers.pop(page, None)
            self._writers[page] = (who, count + 1)
            self.tags[page] = GARBAGE
            self.flipped.discard(page)

    def end_write(self, pages: PageIds, who: object, tags: list[int] | None) -> None:
        """End one write by `who`, which left `tags`. None leaves the pages as they are."""
        for at, page in enumerate(pages):
            writer, count = self._writers.pop(page)
            if writer != who:
                raise Violation(f"{who} ends a write to {self.pool.name} page {page}, which is {writer}'s")
            if count > 1:
                self._writers[page] = (writer, count - 1)
            self._require_taken(page, who)
            if tags is not None:
                self.tags[page] = tags[at]

    def put(self, page: int, tag: int, who: object) -> None:
        """Write a page at once."""
        if page in self._writers or page in self._readers:
            raise Violation(f"{who} writes to {self.pool.name} page {page}, which is being written or read")
        self._require_unused(page, who)
        self.tags[page] = tag
        self.flipped.discard(page)

    def intact(self, pages: PageIds) -> int | None:
        """Return the number of pages before the first with a flipped bit, as checksums do; None if all are intact."""
        return next((at for at, page in enumerate(pages) if page in self.flipped), None)

    def begin_read(self, pages: PageIds, who: object) -> list[int]:
        """Begin a read; returns the tags of the pages, which must not be garbage."""
        found = [self.tags[page] for page in pages]
        if GARBAGE in found:
            raise Violation(f"{who} reads {self.pool.name} page {pages[found.index(GARBAGE)]}, which holds garbage")
        for page in pages:
            self._readers[page] = self._readers.get(page, 0) + 1
        return found

    def end_read(self, pages: PageIds, who: object, before: list[int]) -> None:
        """End a read. The pages must still have the tags that they had at its begin."""
        for page, tag in zip(pages, before, strict=True):
            count = self._readers.pop(page)
            if count > 1:
                self._readers[page] = count - 1
            if self.tags[page] != tag:
                raise Violation(f"{self.pool.name} page {page} changed while {who} read it")

    def expect(self, pages: PageIds, tags: list[int], who: object, *, may_be_flipped: bool = False) -> None:
        """Raise a Violation unless these pages hold these tags, have an owner, and are not being written.

        With `may_be_flipped` a bit of them may have flipped, since nothing has read them yet.
        """
        for at, (page, tag) in enumerate(zip(pages, tags, strict=True)):
            if not self._is_lent:
                self._require_taken(page, who)
            if self.tags[page] != tag:
                raise Violation(
                    f"{self.pool.name} page {page}, number {at} of {who}, holds {self.tags[page]} instead of {tag}"
                )
            if page in self.flipped and not may_be_flipped:
                raise Violation(f"{self.pool.name} page {page}, number {at} of {who}, has a flipped bit")
            if page in self._writers:
                raise Violation(
                    f"{self.pool.name} page {page}, number {at} of {who}, is being written by {self._writers[page]}"
                )

    def expect_quiet(self, pages: PageIds, who: object) -> None:
        """Raise a Violation if one of these pages, which their owner gets back, is being written or read."""
        for page in pages:
            if page in self._writers or page in self._readers:
                raise Violation(f"{who} gets {self.pool.name} page {page} back, which is being written or read")

    def check(self) -> None:
        """Raise a Violation if a free page is being read or written. Those of a lent pool are read by offers."""
        for page in (*self._writers, *self._users, *(() if self._is_lent else self._readers)):
            self._require_taken(page, "a reader or writer")

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is being written, read or used."""
        return not self._writers and not self._readers and not self._users

    def _require_taken(self, page: int, who: object) -> None:
        if self.pool.condition(page) is PageState.FREE:
            raise Violation(f"{who} touches {self.pool.name} page {page}, which is free")
