"""Test support: prefill instances of several ranks in one process, over NIXL, with KV that identifies each head.

A child serves several instances at once (a model on 1, 2, 4 ranks), which saves tests a process for each.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import msgspec

from tests.support.head_pages import HeadPages
from tidekv.backends.component_pools import ComponentPools
from tidekv.backends.device.pool import DevicePool
from tidekv.backends.layout import KVLayout
from tidekv.engine.prefill.prefill_config import PrefillConfig
from tidekv.engine.prefill.prefill_peer import PrefillPeer
from tidekv.engine.synthetic.components import component_digest
from tidekv.engine.synthetic.kv import prompt_digests
from tidekv.states.errors import InvalidRequest
from tidekv.states.handover.rank_place import RankPlace
from tidekv.states.types import page_ids
from tidekv.transports.nixl.transport import NixlTransport
from tidekv.transports.prefill.prefill_room import Room
from tidekv.transports.slices import partition_of

START_S = 90.0
POOL_PAGES = 64
CHUNK_PAGES = 3
FIRST_TOKEN = 11


class Instance(msgspec.Struct, frozen=True):
    """A model on several ranks, each with `heads` of `total`; with `contexts`, each of a part of the pages.

    With `window_tokens` it also has a window, with heads distributed over the ranks like those of the pages.
    """

    ranks: int
    heads: int
    total: int
    kind: str = "mha"
    layers: int = 2
    head_dim: int = 8
    page_size: int = 4
    dtype: str = "float16"
    window_tokens: int = 0
    contexts: int = 1
    stripe_pages: int = 0

    def layout(self) -> KVLayout:
        """Return the layout of one rank."""
        return KVLayout(
            num_layers=self.layers,
            num_kv_heads=self.heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            page_size=self.page_size,
            kind=self.kind,
        )

    def window_layout(self) -> KVLayout:
        """Return the layout of one rank's window: one more layer, and heads of twice the length."""
        return replace(self.layout(), num_layers=self.layers + 1, head_dim=2 * self.head_dim)

    def components(self) -> list[ComponentPools]:
        """Return the window of one rank with a new pool; empty if the model has none."""
        if not self.window_tokens:
            return []
        device = DevicePool.allocate(self.window_layout(), POOL_PAGES)
        return [ComponentPools(name="swa", kind="window", window_tokens=self.window_tokens, device=device)]

    def pages_of(self, rank: int, pool: DevicePool) -> HeadPages:
        """Return the expected content of a rank's pool, for its pages or its window."""
        width = self.ranks // self.contexts
        held = partition_of(ranks=width, heads=self.heads, kind=self.kind, total=self.total)
        return HeadPages(pool, pool.groups[0].layout, first=held.first(rank % width), total=self.total)


class SlicedPrefill:
    """Serves the rooms of one rank, one prompt after another on the same pages of its pool."""

    def __init__(self, instance: Instance, rank: int) -> None:
        self.pool = DevicePool.allocate(instance.layout(), POOL_PAGES)
        self.components = instance.components()
        self._pages = instance.pages_of(rank, self.pool)
        self._windows = {pools.name: instance.pages_of(rank, pools.device) for pools in self.components}
        self._page_size = instance.page_size
        self._turn = asyncio.Lock()

    async def serve(self, room: Room) -> None:
        """Serve one room from its promise to its end."""
        if room.tokens is None:
            raise InvalidRequest("send the request with send_prompt=True")
        digests = prompt_digests(room.tokens, self._page_size)
        async with self._turn:
            # Pages of another context have the content of an earlier prompt here.
            pages = page_ids(room.held(range(len(digests))))
            if pages:
                self._pages.fill(pages, [digests[at] for at in pages])
            for first in range(0, len(digests), CHUNK_PAGES):
                chunk = room.held(range(first, min(first + CHUNK_PAGES, len(digests))))
                end_token = min((first + CHUNK_PAGES) * self._page_size, room.prompt_tokens)
                await room.send(chunk, start_token=first * self._page_size, end_token=end_token)
            for name, asked in room.component_pages.items():
                tail = page_ids(room.held(range(asked.first, asked.first + asked.page_count)))
                if tail:
                    self._windows[name].fill(tail, [component_digest(name, digests[at]) for at in tail])
                await room.send_component_pages(name, tail)
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
                    PrefillConfig(
                        place=RankPlace(
                            rank=rank,
                            ranks=instance.ranks,
                            kv_heads_total=instance.total,
                            contexts=instance.contexts,
                            stripe_pages=instance.stripe_pages,
                        )
                    ),
                    device=prefill.pool,
                    components=prefill.components,
                    transport=NixlTransport(f"prefill-{number}-{rank}"),
                    on_room=prefill.serve,
                )
                await stack.enter_async_context(peer)
                of_ranks.append(peer.address)
            addresses.append(",".join(of_ranks))
        pipe.send(addresses)
        await asyncio.to_thread(pipe.recv)


def run_instances(instances: Sequence[Instance], pipe: Connection) -> None:
    """Run the process. Both ends of the pipe belong to one test and trust each other."""
    asyncio.run(_serve(instances, pipe))


class PrefillInstances:
    """The test's end of the process."""

    def __init__(self, instances: Sequence[Instance]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process: BaseProcess = context.Process(target=run_instances, args=(instances, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def addresses(self) -> list[str]:
        """Return the address of each instance: those of its ranks, joined by commas. Raises TimeoutError."""
        if not self._pipe.poll(START_S):
            raise TimeoutError(f"no prefill instance within {START_S:g} s")
        found: list[str] = self._pipe.recv()
        return found

    def end(self) -> None:
        """End the process, and kill it if it does not end in time."""
        if self._process.is_alive():
            self._pipe.send("end")
            self._process.join(START_S)
        self._process.kill()
        self._process.join()
        self._pipe.close()
