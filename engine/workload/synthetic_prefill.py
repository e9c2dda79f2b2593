"""A prefill worker without a model: its KV is synthetic, so that whoever receives it can verify every byte."""

from __future__ import annotations

import asyncio
import zlib

from tidekv.backends.device import DevicePool
from tidekv.engine.workload.kept_pages import HeldPages, KeptPages
from tidekv.engine.workload.synthetic import SyntheticKV
from tidekv.states.errors import InvalidRequest
from tidekv.transports.outgoing import Room


def synthetic_first_token(packed: bytes, vocabulary: int) -> int:
    """The token that a synthetic model answers a prompt with: a function of all its tokens."""
    return zlib.crc32(packed) % vocabulary


class SyntheticPrefill:
    """Serves rooms whose promise brought the tokens: `PrefillPeer(on_room=SyntheticPrefill(pool).serve)`.

    Fills and sends the prompt chunk by chunk, as a chunked prefill does, and frees its pages when decode has received
    all, or the lease has ended. Requests that find no pages wait for some. With `keep_prefixes`, pages of
    earlier prompts are kept, and sent without being filled again, as a prefill worker with a prefix cache does.
    """

    def __init__(
        self,
        pool: DevicePool,
        *,
        chunk_pages: int = 16,
        vocabulary: int = 2**31,
        namespace: str = "",
        keep_prefixes: bool = False,
    ) -> None:
        self._kv = SyntheticKV(pool)
        self._page_size = pool.layout.page_size
        self._pages = KeptPages(pool.num_pages, pool.layout.page_size, namespace=namespace, keep=keep_prefixes)
        self._freed = asyncio.Condition()
        self._chunk_pages = chunk_pages
        self._vocabulary = vocabulary
        self.rooms_served = 0
        self.outcomes: dict[str, int] = {}

    @property
    def pages_free(self) -> int:
        """Pages of the pool that nobody holds."""
        return self._pages.counts()["free"]

    def forget(self) -> None:
        """Drop every kept page that no room reads."""
        self._pages.forget()

    async def serve(self, room: Room) -> None:
        """One room, from its promise to its end. Raises InvalidRequest if the promise brought no tokens."""
        if room.tokens is None:
            raise InvalidRequest("this prefill has tokens from nobody else: send the request with prompt='send'")
        packed = bytes(room.tokens)
        async with self._freed:
            while (held := self._pages.take(packed)) is None:
                await self._freed.wait()
        filled = [held.known]
        try:
            await self._send_all(room, packed, held, filled)
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

    async def _send_all(self, room: Room, packed: bytes, held: HeldPages, filled: list[int]) -> None:
        """Send all pages; `filled` holds how many of them have their content."""
        pages = held.pages
        if held.known:
            await room.send(pages[: held.known], start_token=0)
        for first in range(held.known, len(pages), self._chunk_pages):
            chunk = slice(first, first + self._chunk_pages)
            self._kv.fill(pages[chunk], held.digests[first - held.known : first - held.known + self._chunk_pages])
            filled[0] = min(first + self._chunk_pages, len(pages))
            await room.send(pages[chunk], start_token=first * self._page_size)
            # Others have rooms too: a chunked prefill gives them their turn between chunks.
            await asyncio.sleep(0)
        await room.finish(first_token=synthetic_first_token(packed, self._vocabulary), aux={})
