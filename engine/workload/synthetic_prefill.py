"""A prefill worker without a model: its KV is synthetic, so that whoever receives it can verify every byte."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence

from tidekv.backends.device import DevicePool
from tidekv.engine.workload.synthetic import SyntheticKV, prompt_digests
from tidekv.states.accounts import PageAccount
from tidekv.states.errors import InvalidRequest
from tidekv.states.shapes import PageIds
from tidekv.transports.outgoing import Room


def synthetic_first_token(packed: bytes, vocabulary: int) -> int:
    """The token that a synthetic model answers a prompt with: a function of all its tokens."""
    return zlib.crc32(packed) % vocabulary


class SyntheticPrefill:
    """Serves rooms whose promise brought the tokens: `PrefillPeer(on_room=SyntheticPrefill(pool).serve)`.

    Fills and sends the prompt chunk by chunk, as a chunked prefill does, and frees its pages when decode has received
    all, or the lease has ended. Requests that find no pages wait for some.
    """

    def __init__(
        self, pool: DevicePool, *, chunk_pages: int = 16, vocabulary: int = 2**31, namespace: str = ""
    ) -> None:
        self._kv = SyntheticKV(pool)
        self._page_size = pool.layout.page_size
        self._account = PageAccount("prefill", pool.num_pages)
        self._freed = asyncio.Condition()
        self._chunk_pages = chunk_pages
        self._vocabulary = vocabulary
        self._namespace = namespace
        self.rooms_served = 0
        self.outcomes: dict[str, int] = {}

    @property
    def pages_free(self) -> int:
        """Pages of the pool that no room holds."""
        return self._account.free

    async def serve(self, room: Room) -> None:
        """One room, from its promise to its end. Raises InvalidRequest if the promise brought no tokens."""
        if room.tokens is None:
            raise InvalidRequest("this prefill has tokens from nobody else: send the request with prompt='send'")
        digests = prompt_digests(room.tokens, self._page_size, namespace=self._namespace)
        if len(digests) > self._account.total:
            raise InvalidRequest(
                f"the prompt has {len(digests)} pages, and the pool of this prefill {self._account.total}"
            )
        async with self._freed:
            await self._freed.wait_for(lambda: self._account.free >= len(digests))
            pages = self._account.take(len(digests))
        try:
            await self._send_all(room, room.tokens, pages, digests)
        except BaseException as error:
            # A cancellation too: nobody else would end the room while this task waits for it.
            room.fail(f"prefill gave up: {type(error).__name__}: {error}")
            raise
        finally:
            # Only now has the last write out of these pages ended.
            outcome = str(await room.received())
            async with self._freed:
                self._account.give_back(pages)
                self._freed.notify_all()
        self.rooms_served += 1
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1

    async def _send_all(self, room: Room, packed: bytes, pages: PageIds, digests: Sequence[bytes]) -> None:
        for first in range(0, len(pages), self._chunk_pages):
            chunk = slice(first, first + self._chunk_pages)
            self._kv.fill(pages[chunk], digests[chunk])
            await room.send(pages[chunk], start_token=first * self._page_size)
            # Others have rooms too: a chunked prefill gives them their turn between chunks.
            await asyncio.sleep(0)
        await room.finish(first_token=synthetic_first_token(packed, self._vocabulary), aux={})
