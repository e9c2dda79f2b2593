"""Puts of a prefix: what storage lacks of it is written, and all of it counts as used."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from tidekv.backends.storage.base import Storage, touch
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
) -> PrefixPut:
    """Put what storage lacks of a prefix with these keys; `pages` are the host pages of the first of them.

    The others are only asked for. `checked` returns the first of some pages that must not be put, None if all may be.
    Each call to storage has `timeout_s` seconds. Raises what the engine raises; `pages` are the engine's until the
    return, as in `Storage.put_from`.
    """
    there = await touch(storage, keys, timeout_s=timeout_s)
    missing = [at for at in range(len(pages)) if not there[at]]
    intact = None
    if missing and checked is not None:
        good = await checked(page_ids(pages[at] for at in missing))
        if good is not None:
            intact, missing = missing[good], missing[:good]
    if not missing:
        return PrefixPut(there, 0, intact)
    ours = page_ids(pages[at] for at in missing)
    flags = await storage.put_from([keys[at] for at in missing], ours, timeout_s=timeout_s)
    if sum(flags) < len(keys):
        # What was put is the newest in storage now. The pages before it must not be evicted before it.
        there = await touch(storage, keys, timeout_s=timeout_s)
    for at, is_there in zip(missing, flags, strict=True):
        there[at] = is_there
    return PrefixPut(there, sum(flags), intact)
