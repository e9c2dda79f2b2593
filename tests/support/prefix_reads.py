"""A prefill worker that reads what decode has of a prompt: every byte of it is checked, and each read is kept."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from tests.support.neighbours import LAYOUT, PATIENT, GatedNetwork, Worker, sharing
from tidekv import (
    CachePeerOptions,
    DecodeEngine,
    DevicePool,
    EngineConfig,
    HostPool,
    LoopbackNetwork,
    LoopbackTransport,
    PrefillConfig,
    PrefillPeer,
    StorageOptions,
)
from tidekv.backends.keys.chain import TOKEN_BYTES, page_digests
from tidekv.engine.synthetic.kv import SyntheticKV, prompt_digests
from tidekv.transports.prefill.prefill_room import Room, RoomOutcome


@dataclass
class Read:
    """What one room's read has brought: leading tokens in place, behind those that prefill had."""

    had: int
    read: int
    prompt: int
    decode_had: int


class ReadingPrefill:
    """Serves rooms with synthetic KV: `PrefillPeer(on_room=ReadingPrefill(pool).serve)`, with a reader.

    With `keeps`, the full pages of the last prompt stay, as in a prefix cache.
    """

    def __init__(self, pool: DevicePool, *, keeps: bool = False) -> None:
        self.kv = SyntheticKV(pool)
        self.peer: PrefillPeer | None = None
        self.free = list(range(pool.num_pages))
        self.reads: list[Read] = []
        self.wrong: list[int] = []
        """Positions of pages that were not as they had to be."""
        self.errors: list[BaseException] = []
        self.before_read: Callable[[Room], None] = lambda room: None
        self._pool = pool
        self._keeps = keeps
        self._kept: tuple[bytes, list[int]] = (b"", [])

    async def serve(self, room: Room) -> None:
        """Serve one room from its promise to its end."""
        assert self.peer is not None and room.tokens is not None
        size = self._pool.layout.page_size
        tokens, pages = self._kept
        had = len(tokens) // TOKEN_BYTES if tokens and bytes(room.tokens).startswith(tokens) else 0
        pages = pages if had else []
        fresh = [self.free.pop() for _ in range(-(-room.prompt_tokens // size) - len(pages))]
        pages = [*pages, *fresh]
        # What is not read, or read from elsewhere, is found by its bytes.
        for tensor in self._pool.rows:
            tensor[fresh] = 0x5A
        try:
            self.before_read(room)
            place = await self.peer.read_prefix(room, pages, had)
            self.reads.append(Read(had, place - had, room.prompt_tokens, room.decode_prefix_len))
            digests = _digests(room, size)
            self.wrong += self.kv.verify(pages[: place // size], digests[: place // size])
            self.kv.fill(pages[place // size :], digests[place // size :])
            await room.send(pages, start_token=0)
            await room.finish(first_token=1)
        except BaseException as error:
            self.errors.append(error)
            room.fail("prefill gave up")
            raise
        finally:
            await room.received()
            full = room.prompt_tokens // size
            if self._keeps and room.outcome is RoomOutcome.RECEIVED:
                self._kept = bytes(room.tokens)[: full * size * TOKEN_BYTES], pages[:full]
                self.free += pages[full:]
            else:
                self.free += fresh


def _digests(room: Room, size: int) -> list[bytes]:
    assert room.tokens is not None
    packed = bytes(room.tokens)
    if not room._key_seed:
        return prompt_digests(packed, size)
    # Of another namespace, whose name prefill does not know: prompts of tests end with a page then.
    return page_digests(packed, size, prefix=room._key_seed)


@dataclass
class Talk(GatedNetwork):
    """A prefill worker that reads, and decode workers that it reads from."""

    prefill: ReadingPrefill
    peer: PrefillPeer
    reader: DecodeEngine
    workers: list[Worker]

    def core(self) -> dict[str, int]:
        """Counts of the core that reads."""
        return dict(self.reader.statistics()["core"])

    async def settle(self) -> None:
        """Wait until nothing is in flight, and require that nothing is held by anything."""
        for engine in (self.reader, *(worker.engine for worker in self.workers)):
            await engine.wait_settled()
            engine.check()
            balance = engine.balance()["host"]
            assert balance.owned == balance.draining == balance.protected == 0
        assert self.prefill.wrong == []
        assert self.peer._reader is not None and self.peer._reader._live == set()


@contextlib.asynccontextmanager
async def talk(
    count: int = 1,
    *,
    keeps: bool = False,
    options: CachePeerOptions | None = None,
    reads: dict[str, Any] | None = None,
    configs: dict[str, Any] | None = None,
    host_pages: int = 64,
    namespace: str = "",
    **fields: Any,
) -> AsyncIterator[Talk]:
    """A prefill worker and so many decode workers. `options` are those of decode's sharing, `reads` further ones of the
    engine that reads, `configs` of decode's engines, and `fields` of both.
    """
    network, pool = LoopbackNetwork(), DevicePool.allocate(LAYOUT, 256)
    prefill = ReadingPrefill(pool, keeps=keeps)
    storage = StorageOptions(prefetch_threshold_tokens=1)
    mine = sharing(listen=None, host_share=1.0)
    ours = {"storage": storage, "peer": PATIENT, "cache_peers": mine, "device": "lent", **fields, **(reads or {})}
    reader = DecodeEngine(
        EngineConfig(**ours),
        device=pool,
        host=HostPool.allocate(LAYOUT, 64),
        transport=LoopbackTransport("reader", network),
    )
    peer = PrefillPeer(
        PrefillConfig(model=str(fields.get("model", "")), lease_s=120.0),
        device=pool,
        transport=LoopbackTransport("prefill-0", network),
        on_room=prefill.serve,
    )
    peer.read_with(reader)
    prefill.peer = peer
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(peer)
        workers = []
        for number in range(count):
            theirs = {"storage": storage, "peer": PATIENT, "cache_peers": options or sharing(read_share=1.0), **fields}
            device, host = DevicePool.allocate(LAYOUT, 64), HostPool.allocate(LAYOUT, host_pages)
            transport = LoopbackTransport(f"decode-{number}", network)
            engine = DecodeEngine(
                EngineConfig(**theirs, **(configs or {})), device=device, host=host, transport=transport
            )
            await stack.enter_async_context(engine)
            workers.append(Worker(f"decode-{number}", engine, device, host, transport, peer.address))
        all_of = Talk(network, prefill, peer, reader, workers)
        try:
            yield all_of
        finally:
            for gate in all_of.gates:
                gate.opened.set()


async def settled(worker: Worker) -> None:
    """Wait until what a worker's requests have left is in its host memory."""
    async with asyncio.timeout(120.0):
        await worker.engine.wait_settled()
