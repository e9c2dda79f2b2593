"""Room for the new tokens of a READY request, out of the pages that it holds in reserve.

    ready.pages     [0, length) has tokens or room for them; the last page may have room for more
    ready.reserve   page ids that are the request's already; growth takes them from the front

The core is told afterwards (`GrowthTaken`): it counts the same pages off the front of the same queue, and refills it at
the back. So taking needs neither the core nor its loop, and whoever owns the request may take on a thread of its own,
as long as every taking is told before the request is given back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tidekv.backends.keys import TOKEN_BYTES
from tidekv.states.errors import InvalidRequest

if TYPE_CHECKING:
    from tidekv.engine.values import ReadyRequest


def pages_needed(ready: ReadyRequest, tokens: int, *, page_size: int) -> int:
    """How many pages room for `tokens` more tokens would add. Raises InvalidRequest for a negative count."""
    if tokens < 0:
        raise InvalidRequest(f"request {ready.request_id!r} cannot grow by {tokens} tokens")
    return max(0, -(-(ready.length + tokens) // page_size) - len(ready.pages))


def grow_from_reserve(ready: ReadyRequest, tokens: int, *, page_size: int) -> list[int] | None:
    """Make room for `tokens` more tokens; returns the pages that this took, mostly none.

    None, having changed nothing, where the reserve has too few. One thread at a time may call it for a request.
    """
    needed = pages_needed(ready, tokens, page_size=page_size)
    if needed > len(ready.reserve):
        return None
    ready.length += tokens
    if not needed:
        return []
    taken = [ready.reserve.popleft() for _ in range(needed)]
    ready.pages = np.concatenate((ready.pages, np.array(taken, dtype=np.int32)))
    return taken


def kept_tokens(ready: ReadyRequest, packed_output: bytes, *, page_size: int) -> int:
    """How many tokens of prompt and output have KV: all but the last of the output.

    Raises InvalidRequest for output that the request's pages have no room for.
    """
    tokens = (len(ready.packed_tokens) + len(packed_output)) // TOKEN_BYTES - (1 if packed_output else 0)
    if -(-tokens // page_size) > len(ready.pages):
        raise InvalidRequest(
            f"request {ready.request_id!r}: {tokens} tokens have KV, but its {len(ready.pages)} pages hold "
            f"{len(ready.pages) * page_size}; grow before writing"
        )
    return tokens
