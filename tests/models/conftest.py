"""Real models behind a whole engine: prefill computes prompts, decode restores their KV and goes on from it.

Transfers are judged by the model's next tokens, and byte by byte.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch

from benchmarks.ports import free_address
from tests.support.configs import engine_config
from tests.support.group_model import GroupModel, choices
from tests.support.model_pools import ModelPools, Places, layout_of_rank
from tests.support.speculation import Answer
from tests.support.waits import LEASE_S, PATIENT, PATIENT_GROUP, together
from tidekv import (
    ComponentPools,
    DecodeEngine,
    DecodeRequest,
    DevicePool,
    HostPool,
    KVLayout,
    LoopbackTransport,
    NixlTransport,
    PrefillConfig,
    PrefillPeer,
    RankGroup,
    ReadyRequest,
    open_storage,
)
from tidekv.backends.page_layout import Layout
from tidekv.engine.decode.component_pages import WindowPages
from tidekv.states.handover.rank_place import RankPlace
from tidekv.transports.loopback import LoopbackNetwork
from tidekv.transports.prefill.prefill_room import Room

PAGES = 64
SPARE_TOKENS = 8
LONGEST = 120
"""Tokens of the longest prompt with its answer: a window of that length keeps KV of all of them."""
FLUSHES: dict[str, tuple[str, ...]] = {"l1": (), "l2": ("l1",), "l3": ("l1", "l2")}


class Runner(Protocol):
    """A model, or two, on pages."""

    def prefill(self, prompt: list[int], pages: list[int], *draft_pages: list[int]) -> int:
        """Compute a prompt; returns the first token. A draft may have pages of its own."""

    def answer(
        self, prompt: list[int], first_token: int, pages: list[int], count: int, *draft_pages: list[int]
    ) -> Answer:
        """Go on from the prompt's KV, up to `count` tokens."""


class Greedy:
    """One model, token by token."""

    def __init__(self, model: GroupModel) -> None:
        self.model = model

    def prefill(self, prompt: list[int], pages: list[int]) -> int:
        return choices(self.model.forward(prompt, 0, pages)[-1:])[0]

    def answer(self, prompt: list[int], first_token: int, pages: list[int], count: int) -> Answer:
        output = [first_token]
        while len(output) < count:
            output += choices(self.model.forward(output[-1:], len(prompt) + len(output) - 1, pages))
        return Answer(output, [1] * (count - 1))


@dataclass
class Asked:
    """What one request brought: where its KV came from, the bytes of its prompt's pages, and the answer."""

    sources: dict[str, int]
    page_bytes: torch.Tensor
    answer: Answer


@dataclass
class Rig:
    """A prefill worker, and decode workers with a storage directory, one after another.

    With several ranks each has its heads of the KV, or a copy of what has none, and a prefill rank of its own.
    With `draft` a draft has pages of this layout, in pools of their own.
    """

    layout: Layout
    make_runner: Callable[..., Runner]
    folder: Path
    draft: KVLayout | None = None
    nixl: bool = False
    bigram_keys: bool = False
    lent: bool = False
    ranks: int = 1
    network: LoopbackNetwork = field(default_factory=LoopbackNetwork)
    numbers: Iterator[int] = field(default_factory=itertools.count)
    address: str = "prefill"

    def transport(self, name: str) -> LoopbackTransport | NixlTransport:
        return NixlTransport(name, dials=["127.0.0.1:*"]) if self.nixl else LoopbackTransport(name, self.network)

    def pool(self) -> DevicePool:
        """The device pages of one rank."""
        return DevicePool.allocate(layout_of_rank(self.layout, self.ranks), PAGES)

    def draft_pools(self, *, host: bool) -> tuple[ComponentPools, ...]:
        """The pools of a draft's pages of one rank, if it has any: a window as long as the longest prompt."""
        if self.draft is None:
            return ()
        layout = layout_of_rank(self.draft, self.ranks)
        return (
            ComponentPools(
                name="draft",
                kind="window",
                window_tokens=LONGEST,
                device=DevicePool.allocate(layout, PAGES),
                host=HostPool.allocate(layout, PAGES) if host else None,
            ),
        )

    def prefill_rank(self, rank: int) -> PrefillPeer:
        """A prefill rank, which computes all of the model and has its part of the KV."""
        pool, drafts = self.pool(), self.draft_pools(host=False)
        ours = ({rank: each} for each in (pool, *(one.device for one in drafts)))
        runner = self.make_runner(*(ModelPools(by_rank, Places(self.ranks)) for by_rank in ours))
        alone = asyncio.Lock()

        async def serve(room: Room) -> None:
            prompt = memoryview(room.tokens).cast("I").tolist()
            pages = list(range(-(-len(prompt) // self.layout.page_size)))
            own = [others(pages) for _ in drafts]
            async with alone:
                first_token = await asyncio.to_thread(runner.prefill, prompt, pages, *own)
                await room.send(pages, start_token=0)
                for name, asked in room.component_pages.items():
                    await room.send_component_pages(name, own[0][asked.first :])
                await room.finish(first_token=first_token)
                await room.received()

        config = PrefillConfig(
            listen="127.0.0.1:0" if self.nixl else f"prefill-{rank}",
            model="m",
            bigram_keys=self.bigram_keys,
            lease_s=LEASE_S,
            place=RankPlace(rank=rank, ranks=self.ranks),
        )
        transport = self.transport(f"prefill-{rank}")
        return PrefillPeer(config, device=pool, components=drafts, transport=transport, on_room=serve)

    @asynccontextmanager
    async def prefill(self) -> AsyncIterator[None]:
        peers = [self.prefill_rank(rank) for rank in range(self.ranks)]
        async with together(*peers):
            self.address = ",".join(peer.address for peer in peers)
            yield

    @asynccontextmanager
    async def decode(self) -> AsyncIterator[Decode]:
        group = free_address() if self.ranks > 1 else ""
        pools, engines = {rank: self.pool() for rank in range(self.ranks)}, []
        drafts = {rank: self.draft_pools(host=True) for rank in pools}
        for rank, device in pools.items():
            engine = DecodeEngine(
                engine_config(
                    **PATIENT,
                    model="m",
                    prefetch_threshold_tokens=0,
                    bigram_keys=self.bigram_keys,
                    device="lent" if self.lent else "owned",
                ),
                device=device,
                host=HostPool.allocate(device.layout, PAGES),
                components=drafts[rank],
                storage=open_storage(f"file:{self.folder}?capacity=64MB"),
                transport=self.transport(f"decode-{next(self.numbers)}"),
                ranks=None if not group else RankGroup(rank=rank, ranks=self.ranks, address=group, **PATIENT_GROUP),
            )
            engines.append(engine)
        places = Places(self.ranks, differ=self.lent)
        model_pools = ModelPools(pools, places)
        draft_pools = {
            pools.name: ModelPools({rank: of[at].device for rank, of in drafts.items()}, places)
            for at, pools in enumerate(drafts[0])
        }
        async with together(*engines):
            yield Decode(self, engines, model_pools, draft_pools, self.make_runner(model_pools, *draft_pools.values()))


@dataclass
class Decode:
    """One decode worker. With lent pages, the host engine has the first ones, and finds its last answer in them."""

    rig: Rig
    engines: list[DecodeEngine]
    pools: ModelPools
    draft_pools: dict[str, ModelPools]
    """Those of a draft that has pages of its own, by the name of its component."""
    runner: Runner
    kept: list[int] = field(default_factory=list)
    """With lent pages, the tokens whose KV is in the first pages."""

    async def forget(self, tiers: tuple[str, ...]) -> None:
        """Drop what these tiers hold."""
        if self.rig.lent and "l1" in tiers:
            self.kept, tiers = [], tiers[1:]
        await self.engines[0].flush(tiers)

    async def ask(self, prompt: list[int], count: int, *, zero: str = "") -> Asked:
        """Answer a prompt; `zero`: what the restored pages hold in that group is lost before the model sees it."""
        size, bigram = self.rig.layout.page_size, int(self.rig.bigram_keys)
        request = DecodeRequest(
            request_id=f"r{next(self.rig.numbers)}", tokens=prompt, prefill=self.rig.address, send_prompt=True
        )
        pages, end = list(range(-(-(len(prompt) + count + SPARE_TOKENS) // size))), -(-len(prompt) // size)
        draft_pages = dict.fromkeys(self.draft_pools, others(pages))
        if self.rig.lent:
            lent = {name: of[:end] for name, of in draft_pages.items()}
            first_token, sources = await self._restore_into(request, pages[:end], lent)
        else:
            readies = await asyncio.gather(*(engine.restore(request) for engine in self.engines))
            await asyncio.gather(
                *(
                    engine.wait_grown(ready, count + SPARE_TOKENS)
                    for engine, ready in zip(self.engines, readies, strict=True)
                )
            )
            pages, first_token, sources = readies[0].pages.tolist(), readies[0].first_token, readies[0].sources
            draft_pages = {name: _grown(readies[0], name, count + SPARE_TOKENS, size) for name in self.draft_pools}
        each = [(self.pools, pages), *((self.draft_pools[name], of) for name, of in draft_pages.items())]
        page_bytes = torch.cat([pools.read_pages(ids[: len(prompt) // size]) for pools, ids in each], dim=1)
        if zero in draft_pages:
            self.draft_pools[zero].zero(draft_pages[zero][:end])
        elif zero:
            self.pools.zero(pages[:end], zero)
        answer = await asyncio.to_thread(self.runner.answer, prompt, first_token, pages, count, *draft_pages.values())
        if self.rig.lent:
            # No later request may hit the spoilt pages.
            kept = [*prompt, *answer.output[:-1]]
            # The draft of a page's last token depends on the next one.
            self.kept = [] if zero else kept[: (len(kept) - bigram) // size * size]
            await self._offer([] if zero else kept, pages, draft_pages)
        elif zero:
            await asyncio.gather(*(engine.abort(request.request_id) for engine in self.engines))
        else:
            full = (len(prompt) + len(answer.output) - 1) // size
            left = {name: (0, of[:full]) for name, of in draft_pages.items()}
            finished = zip(self.engines, readies, strict=True)
            await asyncio.gather(
                *(engine.finish(ready, answer.output, component_pages=left) for engine, ready in finished)
            )
        await asyncio.gather(*(engine.wait_settled() for engine in self.engines))
        return Asked(sources, page_bytes, answer)

    async def _restore_into(
        self, request: DecodeRequest, pages: list[int], draft_pages: dict[str, list[int]]
    ) -> tuple[int | None, dict[str, int]]:
        size, prompt = self.rig.layout.page_size, request.tokens
        same = next(
            (at for at, (ours, theirs) in enumerate(zip(self.kept, prompt, strict=False)) if ours != theirs), None
        )
        have = min(len(self.kept), len(prompt)) if same is None else same
        restored = await asyncio.gather(
            *(
                engine.restore_into(
                    request,
                    self.pools.pages_of(rank, pages),
                    have // size * size,
                    component_pages=self._of_draft(rank, draft_pages),
                )
                for rank, engine in enumerate(self.engines)
            )
        )
        assert all(one.is_complete and one.sources == restored[0].sources for one in restored)
        return restored[0].first_token, dict(restored[0].sources)

    async def _offer(self, tokens: list[int], pages: list[int], draft_pages: dict[str, list[int]]) -> None:
        if not tokens:
            return
        size = self.rig.layout.page_size
        pages, full = pages[: -(-len(tokens) // size)], (len(tokens) - int(self.rig.bigram_keys)) // size
        offers = (
            engine.offer(
                tokens,
                self.pools.pages_of(rank, pages),
                component_pages=self._of_draft(rank, {name: of[:full] for name, of in draft_pages.items()}),
            )
            for rank, engine in enumerate(self.engines)
        )
        for offered in await asyncio.gather(*offers):
            assert not (offered.declined or offered.components_declined)

    def _of_draft(self, rank: int, draft_pages: dict[str, list[int]]) -> dict[str, list[int]]:
        """The pages of a rank for those of a draft."""
        return {name: self.draft_pools[name].pages_of(rank, pages) for name, pages in draft_pages.items()}

    async def ask_from(self, tier: str, prompt: list[int], count: int, *, zero: str = "") -> Asked:
        """Answer a prompt that was asked before, with no copy of its KV in a tier above this one."""
        if self.rig.lent and tier == "l1" and not self.kept:
            await self.ask(prompt, count)
        await self.forget(FLUSHES[tier])
        asked = await self.ask(prompt, count, zero=zero)
        assert asked.sources[tier] >= (len(prompt) - 1) // self.rig.layout.page_size * self.rig.layout.page_size
        return asked


def others(pages: list[int]) -> list[int]:
    """The pages of a draft for those of the model, if a host engine chooses both: never the same."""
    return [PAGES - 1 - page for page in pages]


def _grown(ready: ReadyRequest, component: str, tokens: int, page_size: int) -> list[int]:
    """The pages of a window as long as the longest prompt, with room for so many tokens behind the prompt."""
    window = WindowPages(ready.component_pages[component], window_tokens=LONGEST, page_size=page_size)
    for end in range(ready.prompt_tokens + 1, ready.prompt_tokens + tokens + 1):
        window.grow(end)
    assert window.first == 0
    return window.pages


MakeRig = Callable[..., AbstractAsyncContextManager[Rig]]


@pytest.fixture
def make_rig(tmp_path: Path) -> MakeRig:
    """A rig with a running prefill worker."""

    @asynccontextmanager
    async def make(layout: Layout, make_runner: Callable[..., Runner], **options: Any) -> AsyncIterator[Rig]:
        rig = Rig(layout, make_runner, tmp_path / "storage", **options)
        async with rig.prefill():
            yield rig

    return make


@pytest.fixture
def greedy() -> type[Greedy]:
    """A runner of one model."""
    return Greedy
