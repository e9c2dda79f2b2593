"""Removal of a namespace's pages from storage, as far as the prefix index knows them.

Keys of storage are hashes of whole prefixes, as in SGLang's HiCache: no engine can tell whose a page is. The index can,
for the prompts that it still holds on the device or the host.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tidekv.backends.keys.chain import namespace_seed
from tidekv.states.errors import StorageFailed
from tidekv.transports.tasks import own_cancels_only

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidekv.backends.keys.page_keys import PageKeys
    from tidekv.backends.storage.base import Storage
    from tidekv.engine.decode.runtime import Runtime

DELETED_AT_ONCE = 1024
"""Keys of one call of an engine."""


def stored_keys(edges: Sequence[tuple[int, bytes]], page_keys: PageKeys, namespace: str) -> list[bytes]:
    """Return the storage keys of all pages of a namespace, from `PrefixIndex.edges_of`. A microsecond a page."""
    keys: list[bytes] = []
    last: list[bytes] = []
    for parent, edge in edges:
        prefix = namespace_seed(namespace) if parent < 0 else last[parent]
        digests = page_keys.digests(page_keys.tokens_of(edge), prefix=prefix)
        keys += digests
        last.append(digests[-1])
    return keys


async def delete_stored(
    runtime: Runtime, edges: Sequence[tuple[int, bytes]], namespace: str, *, timeout_s: float
) -> int:
    """Delete these pages, those of components too; return how many full pages were there. Raises what the engines
    raise, and StorageFailed at the timeout.
    """
    keys = await asyncio.to_thread(stored_keys, edges, runtime.prompt_keys.page_keys, namespace)
    storage, removed = runtime.storage_in_use.current, 0
    if storage is None:
        return 0
    engines: list[Storage] = [storage, *runtime.storage_in_use.component_pages.values()]
    try:
        async with asyncio.timeout(timeout_s):
            for first in range(0, len(keys), DELETED_AT_ONCE):
                part = keys[first : first + DELETED_AT_ONCE]
                for engine in engines:
                    there = await own_cancels_only(engine.delete(part), engine.uri)
                    removed += sum(there) if engine is storage else 0
    except TimeoutError:
        raise StorageFailed(
            f"{storage.uri} has not deleted the {len(keys)} pages of the namespace in time; {removed} are gone"
        ) from None
    return removed
