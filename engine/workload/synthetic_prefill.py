"""A prefill worker without a model: its KV is synthetic, so that whoever receives it can verify every byte."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence

from tidekv.backends.device import DevicePool
from tidekv.backends.keys import TOKEN_BYTES
from tidekv.engine.workload.prefix_pages import PrefixPages, PromptPages
from tidekv.engine.workload.synthetic import SyntheticKV, prompt_digests
from tidekv.states.errors import InvalidRequest
from tidekv.transports.outgoing import Room


def synthetic_first_token(packed: bytes, vocabulary: int) -> int:
    """The token that a synthetic model answers a prompt with: a function of all its tokens."""
    return zlib.crc32(packed) % vocabulary


class SyntheticPrefill:
    """Serves rooms whose promise brought the tokens: `PrefillPeer(on_room=SyntheticPrefill(pool).serve)`.

    Fills and sends the prompt chunk by chunk, as a chunked prefill does, and frees its pages when decode has received
    all, or the lease has ended. Requests that find no pages wait for some. Where `pages` keeps those of earlier
    prompts, they are sent without being filled again, as a prefill worker with a prefix cache does.
    """

    def __init__(
        self,
        pool: DevicePool,
        *,
        chunk_pages: int = 16,
        vocabulary: int = 2**31,
        namespace: str = "",
        pages: PrefixPages | None = None,
    ) -> None:
        self._kv = SyntheticKV(pool)
        self._page_size = pool.layout.page_size
        self._pages = pages or PrefixPages(pool.num_pages, pool.layout.page_size, keep=False)
        self._freed = asyncio.Condition()
        self._chunk_pages = chunk_pages
        self._vocabulary = vocabulary
        self._namespace = namespace
        self.rooms_served = 0
        self.outcomes: dict[str, int] = {}

    @property
    def pages_free(self) -> int:
        """Pages of the pool that nobody holds."""
        return self._pages.counts()["free"]

    async def serve(self, room: Room) -> None:
        """One room, from its promise to its end. Raises InvalidRequest if the promise brought no tokens."""
        if room.tokens is None:
            raise InvalidRequest("this prefill has tokens from nobody else: send the request with prompt='send'")
        packed = bytes(room.tokens)
        digests = prompt_digests(packed, self._page_size, namespace=self._namespace)
        full = digests[: len(packed) // TOKEN_BYTES // self._page_size]
        async with self._freed:
            while (held := self._pages.take(packed, full)) is None:
                await self._freed.wait()
        filled = [held.known]
        try:
            await self._send_all(room, packed, held, digests, filled)
        except BaseException as error:
            # A cancellation too: nobody else would end the room while this task waits for it.
            room.fail(f"prefill gave up: {type(error).__name__}: {error}")
            raise
        finally:
            # Only now has the last write out of these pages ended.
            outcome = str(await room.received())
            async with self._freed:
                self._pages.give_back(held, computed=filled[0])
                self._freed.notify_all()
        self.rooms_served += 1
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1

    async def _send_all(
        self, room: Room, packed: bytes, held: PromptPages, digests: Sequence[bytes], filled: list[int]
    ) -> None:
        """Send all pages; `filled` holds how many of them have their content."""
        pages = held.pages
        if held.known:
            await room.send(pages[: held.known], start_token=0)
        for first in range(held.known, len(pages), self._chunk_pages):
            chunk = slice(first, first + self._chunk_pages)
            self._kv.fill(pages[chunk], digests[chunk])
            filled[0] = min(first + self._chunk_pages, len(pages))
            await room.send(pages[chunk], start_token=first * self._page_size)
            # Others have rooms too: a chunked prefill gives them their turn between chunks.
            await asyncio.sleep(0)
        await room.finish(first_token=synthetic_first_token(packed, self._vocabulary), aux={})
