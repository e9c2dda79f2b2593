"""Puts of a prefix: what storage lacks of it is written, and all of it counts as used."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from itertools import compress
from operator import not_
from typing import NamedTuple

from tidekv.backends.storage.base import Storage, prefix_of, touch
from tidekv.states.types import PageIds, page_ids


class PrefixPut(NamedTuple):
    """Which pages of a prefix storage has now, and how many of them it did not have before.

    `intact` is the first of the pages that was not put because its checksum differs. None: there is none.
    """

    there: list[bool]
    put: int
    intact: int | None


async def put_prefix(
    storage: Storage,
    keys: Sequence[bytes],
    pages: PageIds,
    *,
    timeout_s: float,
    checked: Callable[[PageIds], Awaitable[int | None]] | None = None,
    prefix_keys: Sequence[bytes] = (),
) -> PrefixPut:
    """Put what storage lacks of a prefix with these keys; `pages` are the host pages of the first of them.

    The others are only asked for. `checked` returns the first of some pages that must not be put, None if all may be.
    `prefix_keys` are those of the pages before the first one, if `keys` do not begin with the prompt. Each call to
    storage has `timeout_s` seconds. Raises what the engine raises; `pages` are the engine's until the return, as in
    `Storage.put_from`.
    """
    there = await touch(storage, keys, timeout_s=timeout_s, prefix_keys=prefix_keys)
    missing = [*compress(range(len(pages)), map(not_, there))]
    ours = page_ids(map(pages.__getitem__, missing))
    intact = None
    if missing and checked is not None:
        valid = await checked(ours)
        if valid is not None:
            intact, missing, ours = missing[valid], missing[:valid], ours[:valid]
    if not missing:
        return PrefixPut(there, 0, intact)
    above = prefix_of(storage, [*prefix_keys, *keys[: missing[0]]])
    flags = await storage.put_from([*map(keys.__getitem__, missing)], ours, timeout_s=timeout_s, **above)
    if sum(flags) < len(keys) and hasattr(storage, "touch"):
        # What was put is the newest in storage now. The pages before it must not be evicted before it.
        there = await touch(storage, keys, timeout_s=timeout_s, prefix_keys=prefix_keys)
    for at, is_there in zip(missing, flags, strict=True):
        there[at] = is_there
    return PrefixPut(there, sum(flags), intact)
