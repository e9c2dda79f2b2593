"""Look-up of a prompt in every tier, for routers: it takes no page, and makes no request."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tidekv.backends.keys.chain import TOKEN_BYTES, namespace_seed
from tidekv.backends.storage.base import leading, prefix_of
from tidekv.engine.decode.values import PromptLookUp
from tidekv.transports.tasks import own_cancels_only

if TYPE_CHECKING:
    from tidekv.engine.decode.runtime import Runtime


async def look_up(runtime: Runtime, packed: bytes, namespace: str, *, timeout_s: float) -> PromptLookUp:
    """See `DecodeEngine.look_up`; `namespace` is that within the engine's."""
    keys = runtime.prompt_keys.page_keys.of(packed)
    state, page_size = runtime.core.state, runtime.core.settings.page_size
    device, host = state.index.probe_prefix(namespace, keys, with_pending=False)
    full_pages = len(keys) // runtime.core.settings.key_bytes
    stored, cause = 0, "" if device + host == full_pages else "no storage is attached"
    storage = runtime.storage_in_use.current
    if storage is not None and device + host < full_pages:
        first = device + host
        prompt = runtime.prompt_keys.prompt(packed, namespace_seed(namespace))
        try:
            async with asyncio.timeout(timeout_s):
                digests = await prompt.digests(0, full_pages)
                above = prefix_of(storage, digests[:first])
                asked = storage.exists(digests[first:], timeout_s=timeout_s, **above)
                stored, cause = leading(await own_cancels_only(asked, "storage")), ""
        except TimeoutError:
            cause = f"storage did not answer within {timeout_s:g} s"
        except Exception as error:  # Engines of third parties may raise anything; the caller gets the error.
            cause = f"{type(error).__name__}: {error}"
    tokens = len(packed) // TOKEN_BYTES
    counts = [pages * page_size for pages in (device, host, stored)]
    rest = tokens - sum(counts)
    by_storage, by_prefill = runtime.core.storage.source_load, runtime.core.rooms.source_load
    waits = []
    for pages, load in ((stored, by_storage), (-(-rest // page_size), by_prefill)):
        if pages:
            waits.append((load.queued_pages + pages) * load.page_s if load.page_s else None)
    known = [wait for wait in waits if wait is not None]
    return PromptLookUp(
        l1=counts[0],
        l2=counts[1],
        l3=counts[2],
        transfer=rest,
        ready_s=max(known, default=0.0) if len(known) == len(waits) else None,
        recompute=tokens - counts[0],
        not_asked=cause,
    )
