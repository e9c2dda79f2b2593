"""Test support: prefill instances of several ranks each in one process, over NIXL, with KV whose heads can be told.

A child serves several instances at once (a model on 1, 2, 4 ranks), so that a test need not start a process for each.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Sequence
from contextlib import AsyncExitStack
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import msgspec

from tidekv.backends.device import DevicePool
from tidekv.backends.layout import KVLayout
from tidekv.engine.prefill_peer import PrefillPeer
from tidekv.engine.workload.head_pages import HeadPages
from tidekv.engine.workload.synthetic import prompt_digests
from tidekv.states.errors import InvalidRequest
from tidekv.states.shapes import page_ids
from tidekv.states.shares import holding_of
from tidekv.transports.nixl import NixlTransport
from tidekv.transports.outgoing import Room

START_S = 90.0
POOL_PAGES = 64
CHUNK_PAGES = 3
FIRST_TOKEN = 11


class Instance(msgspec.Struct, frozen=True):
    """A model on so many ranks: each holds `heads` of `total`."""

    ranks: int
    heads: int
    total: int
    kind: str = "mha"
    layers: int = 2
    head_dim: int = 8
    page_size: int = 4
    dtype: str = "float16"

    def layout(self) -> KVLayout:
        """The layout of one rank."""
        return KVLayout(
            num_layers=self.layers,
            num_kv_heads=self.heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            page_size=self.page_size,
            kind=self.kind,
        )

    def pages_of(self, rank: int, pool: DevicePool) -> HeadPages:
        """What the pool of a rank holds."""
        held = holding_of(ranks=self.ranks, heads=self.heads, kind=self.kind, total=self.total)
        return HeadPages(pool, self.layout(), first=held.first(rank), total=self.total)


class SlicedPrefill:
    """Serves the rooms of one rank, one prompt after another over the same pages of its pool."""

    def __init__(self, instance: Instance, rank: int) -> None:
        self.pool = DevicePool.allocate(instance.layout(), POOL_PAGES)
        self._pages = instance.pages_of(rank, self.pool)
        self._page_size = instance.page_size
        self._turn = asyncio.Lock()

    async def serve(self, room: Room) -> None:
        """One room, from its promise to its end."""
        if room.tokens is None:
            raise InvalidRequest("send the request with prompt='send'")
        digests = prompt_digests(room.tokens, self._page_size)
        async with self._turn:
            pages = page_ids(range(len(digests)))
            self._pages.fill(pages, digests)
            for first in range(0, len(pages), CHUNK_PAGES):
                await room.send(pages[first : first + CHUNK_PAGES], start_token=first * self._page_size)
            await room.finish(first_token=FIRST_TOKEN, aux={"sends_nothing": room.sends_nothing})
            await room.received()


async def _serve(instances: Sequence[Instance], pipe: Connection) -> None:
    async with AsyncExitStack() as stack:
        addresses = []
        for number, instance in enumerate(instances):
            of_ranks = []
            for rank in range(instance.ranks):
                prefill = SlicedPrefill(instance, rank)
                peer = PrefillPeer(
                    device=prefill.pool,
                    transport=NixlTransport(f"prefill-{number}-{rank}"),
                    on_room=prefill.serve,
                    rank=rank,
                    ranks=instance.ranks,
                    kv_heads_total=instance.total,
                )
                await stack.enter_async_context(peer)
                of_ranks.append(peer.address)
            addresses.append(",".join(of_ranks))
        pipe.send(addresses)
        await asyncio.to_thread(pipe.recv)


def run_instances(instances: Sequence[Instance], pipe: Connection) -> None:
    """The process; both ends of the pipe belong to one test and trust each other."""
    asyncio.run(_serve(instances, pipe))


class PrefillInstances:
    """The process, as the test sees it."""

    def __init__(self, instances: Sequence[Instance]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process: BaseProcess = context.Process(target=run_instances, args=(instances, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def addresses(self) -> list[str]:
        """Where each instance is: the addresses of its ranks, joined by commas. Raises TimeoutError."""
        if not self._pipe.poll(START_S):
            raise TimeoutError(f"no prefill instance within {START_S:g} s")
        found: list[str] = self._pipe.recv()
        return found

    def end(self) -> None:
        """End the process in order, or by force."""
        if self._process.is_alive():
            self._pipe.send("end")
            self._process.join(START_S)
        self._process.kill()
        self._process.join()
        self._pipe.close()
