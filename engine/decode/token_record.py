"""The tokens of a request with their storage keys, and the front of the engine that keeps these records."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Protocol

from tidekv.backends.keys.chain import namespace_seed
from tidekv.states import commands

if TYPE_CHECKING:
    from tidekv.backends.keys.page_keys import PageKeys
    from tidekv.engine.decode.known_digests import KnownDigests
    from tidekv.states.commands import Command

HASH_INLINE_BYTES = 64 * 1024
"""Token bytes that are hashed on the loop; more would hold it up for longer than a thread hop costs."""


class TokenRecord:
    """The tokens that a request's pages were computed from, and their storage keys as far as somebody asked."""

    __slots__ = (
        "_digests",
        "_known",
        "_page_keys",
        "_seed",
        "address_list",
        "cache",
        "deadline_at_s",
        "namespace",
        "packed",
        "sends_prompt",
    )

    def __init__(
        self,
        packed: bytes,
        *,
        page_keys: PageKeys,
        namespace: str,
        addresses: tuple[str, ...],
        sends_prompt: bool,
        cache: bool = True,
        known: KnownDigests | None = None,
    ) -> None:
        """Raises InvalidRequest for a namespace that is not valid text. With `known`, pages of prompts that were hashed
        lately are not hashed again.
        """
        self.packed = packed
        self.namespace = namespace
        self.cache = cache
        self._seed = namespace_seed(namespace)
        self.address_list = addresses
        self.sends_prompt = sends_prompt
        self.deadline_at_s = math.inf
        """Time, on the driver's clock, by which the request must be ready."""
        self._page_keys = page_keys
        self._digests: list[bytes] = []
        self._known = known

    @property
    def key_seed(self) -> bytes | None:
        """What its storage keys begin with; None: nobody may keep these tokens."""
        return self._seed if self.cache else None

    def grown(self, packed: bytes) -> None:
        """The request's tokens are these now; the first ones are what they were."""
        self.packed = packed

    async def digests(self, first: int, count: int) -> list[bytes]:
        """Storage keys of pages [first, first + count). Only pages that are new to this record are hashed."""
        end = first + count
        if not self._digests and self._known is not None:
            self._digests = self._known.of(self._seed, self.packed)
        start = len(self._digests)
        while (known := len(self._digests)) < end:
            prefix = self._digests[-1] if known else self._seed
            hash_pages = partial(self._page_keys.digests, self.packed, first=known, end=end, prefix=prefix)
            is_short = (end - known) * self._page_keys.key_bytes <= HASH_INLINE_BYTES
            digests = hash_pages() if is_short else await asyncio.to_thread(hash_pages)
            # Another call may have hashed the same pages while this one was in its thread.
            if len(self._digests) == known:
                self._digests += digests
        if len(self._digests) > start and self._known is not None:
            self._known.remember(self._seed, self.packed, self._digests)
        return self._digests[first:end]


class Caller(Protocol):
    """Whoever the core's answers are for: the engine's front."""

    def tokens_of(self, request_id: str) -> TokenRecord:
        """The record of a live request."""
        ...

    def tokens_left(self, serial: int) -> TokenRecord:
        """The record that a finished request left."""
        ...

    def tell(self, command: Command) -> None:
        """An answer to the caller."""
        ...

    def recompute(
        self, command: commands.Recompute, end: Callable[[commands.Recompute, Exception | None], None]
    ) -> Coroutine[object, object, None]:
        """Have the caller compute what no prefill can send; `end` hears how that went."""
        ...
