"""The order of use of a namespace's pages on a Redis server: one sorted set for all processes. Blocks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from tidekv.backends.storage.redis_link import RedisLink


class RedisIndex:
    """Page keys, those longest unused first. Every method may raise ServerTrouble."""

    def __init__(self, name: bytes) -> None:
        self.name = name

    def enter(self, link: RedisLink, keys: Sequence[bytes]) -> None:
        """Put keys at the end of the queue of those that go."""
        if keys:
            # A clock that is wrong makes pages go sooner or later than they should, and nothing else.
            link.call(b"ZADD", self.name, *_scored(repr(time.time()).encode(), keys))

    def enter_strays(self, link: RedisLink, keys: Sequence[bytes]) -> None:
        """Put those keys that are not there at the front of the queue."""
        if keys:
            link.call(b"ZADD", self.name, b"NX", *_scored(b"0", keys))

    def leave(self, link: RedisLink, keys: Sequence[bytes]) -> None:
        """Forget keys."""
        if keys:
            link.call(b"ZREM", self.name, *keys)

    def take_oldest(self, link: RedisLink, count: int) -> list[bytes]:
        """Forget, and return, the keys longest unused."""
        return link.pop_least(self.name, count)

    def clear(self, link: RedisLink) -> None:
        """Forget all keys."""
        link.call(b"UNLINK", self.name)

    def count(self, link: RedisLink) -> int:
        """Return how many keys there are."""
        return cast(int, link.call(b"ZCARD", self.name))


def scan(link: RedisLink, pattern: bytes) -> Iterator[list[bytes]]:
    """Return the names of all values that fit a pattern, in parts."""
    cursor, names = link.scan(pattern, None)
    yield names
    while cursor is not None:
        cursor, names = link.scan(pattern, cursor)
        yield names


def _scored(score: bytes, keys: Sequence[bytes]) -> list[bytes]:
    return [word for key in keys for word in (score, key)]
