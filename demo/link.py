"""A link of limited speed between the workers, and the deployment that it stands for."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from tidekv.backends.layout import KVLayout
from tidekv.states.types import PageIds
from tidekv.transports.base import PeerMemory
from tidekv.transports.nixl.transport import NixlTransport


class Throttle:
    """A line that serves in order at one rate. `bytes_per_s` can be changed for later calls."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_at_s = 0.0

    def reserve(self, size_bytes: float) -> float:
        """Queue that many bytes; returns when they are through, on the clock of the running loop."""
        now_s = asyncio.get_running_loop().time()
        self._free_at_s = max(self._free_at_s, now_s) + size_bytes / self.bytes_per_s
        return self._free_at_s

    async def until(self, at_s: float) -> None:
        """Wait until that time."""
        await asyncio.sleep(max(0.0, at_s - asyncio.get_running_loop().time()))


class ThrottledTransport(NixlTransport):
    """A transport whose writes are throttled together, as by one network card."""

    def __init__(self, *, name: str, bytes_per_s: float) -> None:
        super().__init__(name=name)
        self._throttle = Throttle(bytes_per_s)

    async def write(self, peer: PeerMemory, our_pages: PageIds, their_pages: PageIds) -> int:
        """See `Transport.write`."""
        written = await super().write(peer, our_pages, their_pages)
        await self._throttle.until(self._throttle.reserve(written))
        return written


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """A model and the link of a prefill worker. A small model stands for it at the same tokens per second."""

    model: str
    kv_bytes_per_token: int
    link_bits_per_s: float

    @property
    def tokens_per_s(self) -> float:
        """Tokens whose KV the link carries in a second."""
        return self.link_bits_per_s / 8 / self.kv_bytes_per_token

    def bytes_per_s(self, layout: KVLayout) -> float:
        """Return the speed at which a link carries as many tokens a second of this layout."""
        return self.tokens_per_s * layout.page_bytes / layout.page_size

    def describe(self, layout: KVLayout) -> str:
        """Return the constants on one line."""
        return (
            f"{self.model}: {self.kv_bytes_per_token:,} bytes of KV a token, {self.link_bits_per_s / 1e9:g} Gb/s from "
            f"prefill, so {self.tokens_per_s:,.0f} tokens a second; here {self.bytes_per_s(layout) / 1e6:,.1f} MB/s. "
            "Prefill computes with the small model and keeps prefixes in both runs."
        )


LARGE_MODEL = Deployment(
    # 80 layers x 8 heads x 128 elements x (K and V) x 2 bytes.
    model="Llama 3.1 70B in bfloat16",
    kv_bytes_per_token=80 * 8 * 128 * 2 * 2,
    link_bits_per_s=25e9,
)
