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
from typing import Protocol

import pytest
import torch

from tests.support.configs import engine_config
from tests.support.group_model import GroupModel, choices
from tests.support.speculation import Answer
from tidekv import (
    DecodeEngine,
    DecodeRequest,
    DevicePool,
    HostPool,
    LoopbackTransport,
    NixlTransport,
    PrefillConfig,
    PrefillPeer,
    open_storage,
)
from tidekv.backends.page_layout import Layout
from tidekv.transports.loopback import LoopbackNetwork
from tidekv.transports.prefill.prefill_room import Room

PAGES = 64
SPARE_TOKENS = 8
FLUSHES: dict[str, tuple[str, ...]] = {"l1": (), "l2": ("l1",), "l3": ("l1", "l2")}


@pytest.fixture(autouse=True, scope="session")
def one_torch_thread() -> Iterator[None]:
    """Small tensors: threads would wait for each other longer than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Runner(Protocol):
    """A model, or two, on the pages of one pool."""

    def prefill(self, prompt: list[int], pages: list[int]) -> int:
        """Compute a prompt; returns the first token."""

    def answer(self, prompt: list[int], first_token: int, pages: list[int], count: int) -> Answer:
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
    """A prefill worker, and decode workers with a storage directory, one after another."""

    layout: Layout
    make_runner: Callable[[DevicePool], Runner]
    folder: Path
    nixl: bool = False
    bigram_keys: bool = False
    network: LoopbackNetwork = field(default_factory=LoopbackNetwork)
    numbers: Iterator[int] = field(default_factory=itertools.count)
    address: str = "prefill"

    def transport(self, name: str) -> LoopbackTransport | NixlTransport:
        return NixlTransport(name, dials=["127.0.0.1:*"]) if self.nixl else LoopbackTransport(name, self.network)

    @asynccontextmanager
    async def prefill(self) -> AsyncIterator[None]:
        pool = DevicePool.allocate(self.layout, PAGES)
        runner = self.make_runner(pool)
        alone = asyncio.Lock()

        async def serve(room: Room) -> None:
            prompt = memoryview(room.tokens).cast("I").tolist()
            pages = list(range(-(-len(prompt) // self.layout.page_size)))
            async with alone:
                first_token = await asyncio.to_thread(runner.prefill, prompt, pages)
                await room.send(pages, start_token=0)
                await room.finish(first_token=first_token)
                await room.received()

        async with PrefillPeer(
            PrefillConfig(listen="127.0.0.1:0" if self.nixl else "prefill", model="m", bigram_keys=self.bigram_keys),
            device=pool,
            transport=self.transport("prefill-0"),
            on_room=serve,
        ) as peer:
            self.address = peer.address
            yield

    @asynccontextmanager
    async def decode(self) -> AsyncIterator[Decode]:
        device = DevicePool.allocate(self.layout, PAGES)
        async with DecodeEngine(
            engine_config(model="m", prefetch_threshold_tokens=0, bigram_keys=self.bigram_keys),
            device=device,
            host=HostPool.allocate(self.layout, PAGES),
            storage=open_storage(f"file:{self.folder}?capacity=64MB"),
            transport=self.transport(f"decode-{next(self.numbers)}"),
        ) as engine:
            yield Decode(self, engine, device, self.make_runner(device))


@dataclass
class Decode:
    """One decode worker."""

    rig: Rig
    engine: DecodeEngine
    device: DevicePool
    runner: Runner

    async def ask(self, prompt: list[int], count: int, *, zero: str = "") -> Asked:
        """Answer a prompt; `zero`: what the restored pages hold in that group is lost before the model sees it."""
        request_id = f"r{next(self.rig.numbers)}"
        ready = await self.engine.restore(
            DecodeRequest(request_id=request_id, tokens=prompt, prefill=self.rig.address, send_prompt=True)
        )
        full = ready.pages[: len(prompt) // self.rig.layout.page_size].tolist()
        page_bytes = self.device.read_pages(full)
        for row in self.device.group(zero).rows if zero else ():
            row[ready.pages.tolist()] = 0
        self.engine.grow(ready, count + SPARE_TOKENS)
        answer = await asyncio.to_thread(self.runner.answer, prompt, ready.first_token, ready.pages.tolist(), count)
        if zero:
            # No later request may hit the spoilt pages.
            await self.engine.abort(request_id)
        else:
            await self.engine.finish(ready, answer.output)
        await self.engine.wait_settled()
        return Asked(ready.sources, page_bytes, answer)

    async def ask_from(self, tier: str, prompt: list[int], count: int, *, zero: str = "") -> Asked:
        """Answer a prompt that was asked before, with no copy of its KV in a tier above this one."""
        await self.engine.flush(FLUSHES[tier])
        asked = await self.ask(prompt, count, zero=zero)
        assert asked.sources[tier] >= (len(prompt) - 1) // self.rig.layout.page_size * self.rig.layout.page_size
        return asked


MakeRig = Callable[..., AbstractAsyncContextManager[Rig]]


@pytest.fixture
def make_rig(tmp_path: Path) -> MakeRig:
    """A rig with a running prefill worker."""

    @asynccontextmanager
    async def make(layout: Layout, make_runner: Callable[[DevicePool], Runner], **options: bool) -> AsyncIterator[Rig]:
        rig = Rig(layout, make_runner, tmp_path / "storage", **options)
        async with rig.prefill():
            yield rig

    return make


@pytest.fixture
def greedy() -> type[Greedy]:
    """A runner of one model."""
    return Greedy
