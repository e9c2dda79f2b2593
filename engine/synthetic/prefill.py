"""Prefill worker without a model: its KV is synthetic, so that every byte can be verified at the receiver."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence

from tidekv.backends.component_pools import ComponentPools
from tidekv.backends.device.pool import DevicePool
from tidekv.engine.synthetic.components import SyntheticComponents
from tidekv.engine.synthetic.kept_pages import HeldPages, KeptPages
from tidekv.engine.synthetic.kv import SyntheticKV
from tidekv.states.errors import InvalidRequest
from tidekv.states.types import PageIds
from tidekv.transports.prefill.prefill_room import Room


def synthetic_first_token(packed: bytes, vocabulary: int) -> int:
    """Return the first token that a synthetic model generates: a function of all tokens of the prompt."""
    return zlib.crc32(packed) % vocabulary


class SyntheticPrefill:
    """Serves rooms whose promise included the tokens: `PrefillPeer(on_room=SyntheticPrefill(pool).serve)`.

    Fills and sends the prompt in chunks, as a chunked prefill does, and frees its pages once decode has received all of
    them, or the lease has ended. Requests without free pages wait for some. With `keep_prefixes`, pages of earlier
    prompts are kept and sent without being filled again, as by a prefill worker with a prefix cache. For `components`,
    which its peer must have too, it fills and sends the component pages that decode requests.
    """

    def __init__(
        self,
        pool: DevicePool,
        *,
        chunk_pages: int = 16,
        vocabulary: int = 2**31,
        namespace: str = "",
        keep_prefixes: bool = False,
        components: Sequence[ComponentPools] = (),
    ) -> None:
        self._kv = SyntheticKV(pool)
        self._page_size = pool.layout.page_size
        self._pages = KeptPages(pool.num_pages, pool.layout.page_size, namespace=namespace, keep=keep_prefixes)
        self._component_pages = SyntheticComponents(components)
        self.freed = asyncio.Condition()
        """Notified when pages are free again, or a room was served."""
        self._chunk_pages = chunk_pages
        self._vocabulary = vocabulary
        self.rooms_served = 0
        self.outcomes: dict[str, int] = {}

    @property
    def pages_free(self) -> int:
        """Number of free pages of the pool."""
        return self._pages.counts()["free"]

    def forget(self) -> None:
        """Drop every kept page that no room uses."""
        self._pages.forget()

    async def compute(self, packed: bytes) -> None:
        """Fill a prompt's pages before its room exists.

        With `keep_prefixes` all of them except the last token's are then known. Raises InvalidRequest for a prompt that
        can never fit.
        """
        async with self.freed:
            while (held := self._pages.take(packed)) is None:
                await self.freed.wait()
        filled = held.known
        try:
            for first in range(held.known, len(held.pages), self._chunk_pages):
                self._fill(held, first)
                filled = first + self._chunk_pages
                await asyncio.sleep(0)
        finally:
            async with self.freed:
                self._pages.give_back(held, computed=min(filled, len(held.pages)))
                self.freed.notify_all()

    async def serve(self, room: Room) -> None:
        """Serve one room from its promise to its end. Raises InvalidRequest if the promise included no tokens."""
        if room.tokens is None:
            raise InvalidRequest("this prefill receives no tokens: send the request with send_prompt=True")
        packed = bytes(room.tokens)
        async with self.freed:
            while (taken := self._take(room, packed)) is None:
                await self.freed.wait()
        held, component_pages = taken
        filled = [held.known]
        try:
            await self._send_all(room, held, filled)
            await self._send_components(room, held, component_pages)
            await room.finish(first_token=synthetic_first_token(packed, self._vocabulary), aux={})
        except BaseException as error:
            # On cancellation, too: otherwise the room would never end, and `received` below would wait for it.
            room.fail(f"prefill gave up: {type(error).__name__}: {error}")
            raise
        finally:
            # The last write out of these pages has ended only now.
            outcome = str(await room.received())
            async with self.freed:
                self._pages.give_back(held, computed=filled[0])
                self._component_pages.give_back(component_pages)
                self.freed.notify_all()
        self.rooms_served += 1
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1

    def _take(self, room: Room, packed: bytes) -> tuple[HeldPages, dict[str, PageIds]] | None:
        """Take all pages that a room needs, or return None."""
        component_pages = self._component_pages.take(room.component_pages)
        if component_pages is None:
            return None
        try:
            held = self._pages.take(packed)
        except InvalidRequest:
            self._component_pages.give_back(component_pages)
            raise
        if held is None:
            self._component_pages.give_back(component_pages)
            return None
        return held, component_pages

    async def _send_all(self, room: Room, held: HeldPages, filled: list[int]) -> None:
        """Send all pages. `filled` counts the pages that have their content, also if this raises."""
        pages = held.pages
        if held.known:
            await room.send(pages[: held.known], start_token=0)
        for first in range(held.known, len(pages), self._chunk_pages):
            self._fill(held, first)
            filled[0] = min(first + self._chunk_pages, len(pages))
            await room.send(pages[first : first + self._chunk_pages], start_token=first * self._page_size)
            # Yield between chunks, as a chunked prefill does, so that other rooms progress.
            await asyncio.sleep(0)

    def _fill(self, held: HeldPages, first: int) -> None:
        digests = held.digests[first - held.known : first - held.known + self._chunk_pages]
        self._kv.fill(held.pages[first : first + self._chunk_pages], digests)

    async def _send_components(self, room: Room, held: HeldPages, component_pages: dict[str, PageIds]) -> None:
        """Send the component pages, which exist once the whole prompt is computed."""
        for name, asked in room.component_pages.items():
            positions = range(asked.first, asked.first + asked.page_count)
            self._component_pages.fill(
                asked, component_pages[name], [self._pages.digest_at(held, at) for at in positions]
            )
            await room.send_component_pages(name, component_pages[name])
