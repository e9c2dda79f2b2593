"""Prefill and decode instances of any numbers of ranks on one store, in one process; KV identifies its bytes."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from benchmarks.ports import free_address
from tests.support.configs import engine_config
from tests.support.inside import runtime_of
from tests.support.parallel_instances import PAGE_SIZE, POOL_PAGES, Model, Place, RankPools
from tests.support.waits import LEASE_S, LIMIT_S, PATIENT, PATIENT_GROUP, PATIENT_STORE
from tidekv import (
    DecodeEngine,
    DecodeRequest,
    HostPool,
    LoopbackTransport,
    PrefillConfig,
    PrefillPeer,
    PromptStoreSettings,
    RankGroup,
    ReadyRequest,
)
from tidekv.backends.keys.chain import pack_tokens
from tidekv.backends.storage.base import Storage
from tidekv.engine.config.engine_config import DeviceMode
from tidekv.engine.converted_storage import ConvertedStorage
from tidekv.engine.decode.values import RestoredPages
from tidekv.engine.synthetic.kv import prompt_digests
from tidekv.states.handover.rank_place import RankPlace
from tidekv.states.types import FULL, page_ids
from tidekv.transports.loopback import LoopbackNetwork
from tidekv.transports.prefill.prefill_room import Room

HOST_PAGES = 32
Open = Callable[[], Storage]


class PrefillRank:
    """One rank of a prefill instance, which serves one room at a time."""

    def __init__(self, model: Model, place: Place, network: LoopbackNetwork, storage: Storage | None) -> None:
        self.pools = RankPools(model, place)
        self.served = asyncio.Event()
        """Set after each room, when its pages were copied for storage."""
        self.peer = PrefillPeer(
            PrefillConfig(
                listen=f"prefill-{place.rank}",
                lease_s=LEASE_S,
                store=PromptStoreSettings(**PATIENT_STORE),
                place=RankPlace(
                    rank=place.rank, ranks=place.tp * place.pp, stages=place.pp, kv_heads_total=model.kv_heads_total
                ),
            ),
            device=self.pools.device,
            components=self.pools.components,
            transport=LoopbackTransport(f"prefill-{place.rank}", network),
            on_room=self._serve,
            storage=storage,
        )

    async def _serve(self, room: Room) -> None:
        assert room.tokens is not None
        self.served.clear()
        digests = prompt_digests(room.tokens, PAGE_SIZE)
        pages = list(range(len(digests)))
        self.pools.fill("full", pages, digests)
        await room.send(page_ids(pages), start_token=0)
        for name, asked in room.component_pages.items():
            tail = list(range(asked.first, asked.first + asked.page_count))
            if tail:
                self.pools.fill(name, tail, [digests[at] for at in tail])
            await room.send_component_pages(name, page_ids(tail))
        await room.finish(first_token=7)
        await room.received()
        self.served.set()


class DecodeRank:
    """One rank of a decode instance. Lent device pages are those of a host engine, other ones on each rank."""

    def __init__(
        self,
        model: Model,
        place: Place,
        network: LoopbackNetwork,
        storage: Storage | None,
        address: str,
        prefill: str,
        mode: DeviceMode,
    ) -> None:
        self.pools = RankPools(model, place)
        self.is_lent = mode == "lent"
        self._number = place.rank
        self.components = [
            dataclasses.replace(pools, host=HostPool.allocate(pools.device.layout, HOST_PAGES))
            for pools in self.pools.components
        ]
        self._prefill = prefill
        group = RankGroup(
            rank=place.rank,
            ranks=place.tp * place.pp,
            stages=place.pp,
            address=address,
            kv_heads_total=model.kv_heads_total,
            **PATIENT_GROUP,
        )
        self._host = HostPool.allocate(self.pools.device.layout, HOST_PAGES)
        self.engine = DecodeEngine(
            engine_config(
                **PATIENT,
                close_deadline_s=30.0,
                prefetch_threshold_tokens=0,
                page_checksums=True,
                device=mode,
            ),
            device=self.pools.device,
            host=self._host,
            components=self.components,
            storage=storage,
            transport=LoopbackTransport(f"decode-{place.rank}", network),
            ranks=group if place.tp * place.pp > 1 else None,
        )

    @property
    def groups(self) -> list[str]:
        """The names of all groups, that of the full KV first."""
        return [FULL, *(pools.name for pools in self.components)]

    def lose(self, *, host: bool) -> None:
        """Lose what the device pages hold, and the host pages if that is said: nothing may be right by chance."""
        pools = {FULL: self._host, **{pools.name: pools.host for pools in self.components}}
        for name, host_pool in pools.items():
            for row in self.pools.pool(name).rows:
                row.zero_()
            if host:
                assert host_pool is not None
                host_pool.buffer.zero_()

    def damage(self, group: str) -> None:
        """Change a byte of each host page of a group."""
        host = next((pools.host for pools in self.components if pools.name == group), self._host)
        assert host is not None
        host.array[:, 0] ^= 1

    async def restore_into(self, request_id: str, tokens: Sequence[int]) -> RestoredPages:
        """Restore into lent pages, and compare every byte of every group."""
        lent = self._lent(len(tokens))
        request = self._request(request_id, tokens)
        full, components = lent[FULL], {name: pages for name, pages in lent.items() if name != FULL}
        restored = await self.engine.restore_into(request, full, component_pages=components)
        assert restored.is_complete, restored
        digests = prompt_digests(pack_tokens(tokens), PAGE_SIZE)
        for name, pages in lent.items():
            assert self.pools.wrong(name, pages, digests[len(digests) - len(pages) :]) == [], name
        return restored

    async def offer(self, tokens: Sequence[int]) -> None:
        """Offer what was restored into lent pages, all of which is kept."""
        lent = self._lent(len(tokens))
        components = {name: pages for name, pages in lent.items() if name != FULL}
        offered = await self.engine.offer(tokens, lent[FULL], component_pages=components)
        assert not (offered.declined or offered.components_declined), offered

    def _lent(self, tokens: int) -> dict[str, list[int]]:
        """Pages of the host engine by group, for the positions that the end of a prompt needs."""
        count = -(-tokens // PAGE_SIZE)
        firsts = {pools.name: pools.component.needed_from(tokens, PAGE_SIZE) for pools in self.components}
        return {
            name: [(7 * at + 3 * self._number + 1) % POOL_PAGES for at in range(firsts.get(name, 0), count)]
            for name in self.groups
        }

    def _request(self, request_id: str, tokens: Sequence[int]) -> DecodeRequest:
        return DecodeRequest(request_id=request_id, tokens=tokens, prefill=self._prefill, send_prompt=True)

    async def restore(self, request_id: str, tokens: Sequence[int]) -> ReadyRequest:
        """Restore, and compare every byte of the pages and of the components at the prompt's end."""
        ready = await self.engine.restore(self._request(request_id, tokens))
        digests = prompt_digests(pack_tokens(tokens), PAGE_SIZE)
        assert self.pools.wrong("full", ready.pages[: len(digests)].tolist(), digests) == []
        for name, tail in ready.component_pages.items():
            wanted = digests[tail.first : tail.first + len(tail.pages)]
            assert self.pools.wrong(name, tail.pages[: len(wanted)].tolist(), wanted) == [], name
        return ready


class Instances:
    """A prefill instance of `prefill` ranks, and a decode instance of `decode` ranks."""

    def __init__(self, prefills: list[PrefillRank], decodes: list[DecodeRank]) -> None:
        self.prefills = prefills
        self.decodes = decodes

    async def serve(self, request_id: str, tokens: Sequence[int]) -> dict[str, int]:
        """Restore and finish on all ranks; returns the sources that brought tokens."""
        readies = await asyncio.gather(*(member.restore(request_id, tokens) for member in self.decodes))
        assert all(ready.sources == readies[0].sources for ready in readies)
        await asyncio.gather(
            *(member.engine.finish(ready) for member, ready in zip(self.decodes, readies, strict=True))
        )
        await asyncio.gather(*(member.engine.wait_settled() for member in self.decodes))
        for member in self.prefills:
            if readies[0].sources["transfer"]:
                await member.served.wait()
            await member.peer.wait_stored()
        return {source: count for source, count in readies[0].sources.items() if count}

    async def forget(self, *tiers: str) -> None:
        """Drop what these tiers have, and lose the bytes."""
        await self.decodes[0].engine.flush(tiers)
        for member in self.decodes:
            member.lose(host="l2" in tiers)

    async def serve_and_leave(self, request_id: str, tokens: Sequence[int]) -> dict[str, int]:
        """The same, and leave windows and records as they are at the prompt's end, which is that of a page."""
        if self.decodes[0].is_lent:
            return await self._serve_and_offer(request_id, tokens)
        readies = await asyncio.gather(*(member.restore(request_id, tokens) for member in self.decodes))
        assert all(ready.sources == readies[0].sources for ready in readies)
        left = {name: (tail.first, tail.pages) for name, tail in readies[0].component_pages.items()}
        await asyncio.gather(
            *(
                member.engine.finish(ready, component_pages=left)
                for member, ready in zip(self.decodes, readies, strict=True)
            )
        )
        await asyncio.gather(*(member.engine.wait_settled() for member in self.decodes))
        return {source: count for source, count in readies[0].sources.items() if count}

    async def _serve_and_offer(self, request_id: str, tokens: Sequence[int]) -> dict[str, int]:
        restored = await asyncio.gather(*(member.restore_into(request_id, tokens) for member in self.decodes))
        assert all(one.sources == restored[0].sources for one in restored)
        await asyncio.gather(*(member.offer(tokens) for member in self.decodes))
        await asyncio.gather(*(member.engine.wait_settled() for member in self.decodes))
        return {source: count for source, count in restored[0].sources.items() if count}

    def storage_of(self, rank: int, component: str) -> Storage:
        """What decode rank `rank` reads from storage: full pages, or those of a component."""
        in_use = runtime_of(self.decodes[rank].engine).storage_in_use
        storage = in_use.current if component == FULL else in_use.component_pages[component]
        assert storage is not None
        return storage

    def converted(self) -> dict[str, int]:
        """Pages that decode read from other layouts, by component; "" for full pages."""
        counts: Counter[str] = Counter()
        for member in self.decodes:
            in_use = runtime_of(member.engine).storage_in_use
            for name, storage in {"": in_use.current, **in_use.component_pages}.items():
                counts[name] += storage.statistics().converted if storage else 0
        return +counts

    async def look(self) -> None:
        """Look for other layouts, as a miss does that follows the last look by LOOK_S."""
        for member in self.decodes:
            in_use = runtime_of(member.engine).storage_in_use
            for storage in (in_use.current, *in_use.component_pages.values()):
                assert isinstance(storage, ConvertedStorage)
                await storage.look()


@asynccontextmanager
async def instances(
    model: Model,
    *,
    prefill: tuple[int, int],
    decode: tuple[int, int],
    prefill_storage: Open | None = None,
    decode_storage: Open | None = None,
    mode: DeviceMode = "owned",
) -> AsyncIterator[Instances]:
    """Start two instances, (TP, PP) each; storage is opened for each rank. `mode`: whose decode's device pages are."""
    address = free_address()
    network = LoopbackNetwork()
    prefills = [
        PrefillRank(model, Place(*prefill, rank), network, prefill_storage and prefill_storage())
        for rank in range(prefill[0] * prefill[1])
    ]
    names = ",".join(f"prefill-{rank}" for rank in range(len(prefills)))
    decodes = [
        DecodeRank(model, Place(*decode, rank), network, decode_storage and decode_storage(), address, names, mode)
        for rank in range(decode[0] * decode[1])
    ]
    parts: list[PrefillPeer | DecodeEngine] = [
        *(member.peer for member in prefills),
        *(member.engine for member in decodes),
    ]
    lives = [AsyncExitStack() for _ in parts]
    async with asyncio.timeout(LIMIT_S):
        # Ranks enter and leave together.
        await asyncio.gather(*(life.enter_async_context(part) for life, part in zip(lives, parts, strict=True)))
        try:
            yield Instances(prefills, decodes)
        finally:
            await asyncio.gather(*(life.aclose() for life in lives))
