"""A real model whose pass overlaps with the copies of a restore: the measured part of `python -m benchmarks.layers`.

One process: a decode engine with its pools, a prefill peer over the loopback transport, and a small Llama in float64.
Prefill computes the prompt once, and sends it while it computes. Then decode restores it from host memory, again and
again, and computes the token behind the first one on a thread of its own, once everything is in place or layer by
layer. Every token and every KV byte that the pass reads is real: a layer read too soon gives another token.

Copies run as fast as the machine makes them, or paced: a pass and copies by the same processors compete for them and
for their memory, which the copy engine of a GPU does not. A paced copy sleeps after each layer until a link of a stated
speed would have carried it.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import torch

from tidekv import (
    DecodeEngine,
    DecodeRequest,
    DevicePool,
    EngineConfig,
    HostPool,
    KVLayout,
    LoopbackTransport,
    PrefillConfig,
    PrefillPeer,
    ReadyRequest,
)
from tidekv.backends.copies.cpu_moves import PageMover
from tidekv.backends.copies.streams import Mark
from tidekv.backends.memory import PageIndex
from tidekv.engine.demo.model import ModelShape, PagedModel, build_llama, greedy
from tidekv.transports.loopback import LoopbackNetwork
from tidekv.transports.prefill.prefill_room import Room

PAGE_SIZE = 4
CHUNK_PAGES = 128
SHAPE = ModelShape(num_layers=8, num_heads=4, num_kv_heads=4, head_dim=32)
WAIT_S = 60.0


@dataclass
class Sent:
    """What the last transfer of prefill took, on the clock of the loop."""

    began_at_s: float = 0.0
    computed_at_s: float = 0.0
    """When the last chunk was computed; that of a prompt that prefill has is `began_at_s`."""


@dataclass
class LayersRig:
    """The engine, its model, and the prompt that is in the host pool only between two calls."""

    engine: DecodeEngine
    model: PagedModel
    mover: PacedMover
    prompt: list[int]
    expected: tuple[int, int]
    """First token and the token behind it, computed by prefill's side from prefill's own pages."""
    sent: Sent
    first_restore_s: float = 0.0
    """Seconds until READY with nothing cached on either side."""
    computed_after_s: float = 0.0
    """The part of it after the last chunk was computed."""
    _number: int = field(default=0, init=False)

    async def time_pass(self) -> float:
        """Return the seconds of the pass by itself, with everything in place."""
        ready = await self.restore(early=False)
        began_s = time.perf_counter()
        await self._compute(ready, wait_layer=None)
        spent_s = time.perf_counter() - began_s
        await self._end(ready)
        return spent_s

    async def time_to_token(self, *, early: bool) -> tuple[float, float]:
        """Return the seconds from the call of `restore` to READY or, with `early`, to the first layer, and to the
        token. Raises AssertionError if the token is wrong.
        """
        began_s = time.perf_counter()
        ready = await self.restore(early=early)
        begun_s = time.perf_counter() - began_s
        loop = asyncio.get_running_loop()

        def wait_layer(layer: int) -> None:
            in_place = ready.layers_in_place
            if in_place is not None and in_place <= layer:
                asyncio.run_coroutine_threadsafe(ready.wait_layer(layer), loop).result(WAIT_S)

        token = await self._compute(ready, wait_layer=wait_layer if early else None)
        spent_s = time.perf_counter() - began_s
        assert (ready.first_token, token) == self.expected, "the tokens are not those of prefill's own pages"
        assert ready.sources["l2"] == len(self.prompt) // PAGE_SIZE * PAGE_SIZE, ready.sources
        await self._end(ready)
        return begun_s, spent_s

    async def time_cached_transfer(self) -> float:
        """Return the seconds from the first write of a prompt that prefill has, and decode has not, to READY."""
        await self.engine.flush()
        ready = await self.restore(early=False)
        spent_s = asyncio.get_running_loop().time() - self.sent.began_at_s
        await self._end(ready)
        return spent_s

    async def restore(self, *, early: bool) -> ReadyRequest:
        """Call `restore` for the prompt."""
        self._number += 1
        return await self.engine.restore(
            DecodeRequest(
                request_id=f"r{self._number}", tokens=self.prompt, prefill="prefill", send_prompt=True, early=early
            )
        )

    async def _compute(self, ready: ReadyRequest, *, wait_layer: Callable[[int], None] | None) -> int:
        self.engine.grow(ready)
        logits = await asyncio.to_thread(
            self.model.decode_step,
            ready.first_token,
            len(self.prompt),
            ready.pages.tolist(),
            wait_layer=wait_layer,
        )
        return greedy(logits).token

    async def _end(self, ready: ReadyRequest) -> None:
        """Give the request back, and leave the prompt in host memory only, with other bytes in the device pages."""
        await self.engine.finish(ready, keep=False)
        await self.engine.wait_settled()
        await self.engine.flush(("l1",))
        for k, v in zip(self.model.pool.k, self.model.pool.v, strict=True):
            k.zero_()
            v.zero_()


class PacedMover:
    """Moves pages as PageMover does; with `bytes_per_s`, not faster than a link of this speed."""

    def __init__(self, inner: PageMover, *, page_bytes: int, layers: int) -> None:
        self.bytes_per_s: float | None = None
        self.steps_a_page = inner.steps_a_page
        self._inner = inner
        self._page_bytes = page_bytes
        self._layers = layers

    def to_device(self, host_pages: PageIndex, device_pages: PageIndex) -> None:
        """Copy host pages to device pages, pairwise."""
        began_s = time.perf_counter()
        self._inner.to_device(host_pages, device_pages)
        self._sleep(began_s, len(host_pages) * self._page_bytes)

    def to_device_by_layer(self, host_pages: PageIndex, device_pages: PageIndex, told: Callable[[Mark], None]) -> None:
        """Copy layer by layer; each is reported when the link would have carried it."""
        began_s, copied = time.perf_counter(), 0

        def told_in_time(mark: Mark) -> None:
            nonlocal copied
            copied += 1
            self._sleep(began_s, len(host_pages) * self._page_bytes * copied / self._layers)
            told(mark)

        self._inner.to_device_by_layer(host_pages, device_pages, told_in_time)

    def to_host(self, device_pages: PageIndex, host_pages: PageIndex) -> None:
        """Copy device pages to host pages, pairwise; not paced."""
        self._inner.to_host(device_pages, host_pages)

    def _sleep(self, began_s: float, size_bytes: float) -> None:
        if self.bytes_per_s is not None:
            # It sleeps without the interpreter's lock and without a processor, as a copy engine works.
            time.sleep(max(0.0, began_s + size_bytes / self.bytes_per_s - time.perf_counter()))


@asynccontextmanager
async def open_rig(pages: int) -> AsyncIterator[LayersRig]:
    """Open an engine whose host pool has `pages` full pages of a prompt, which ends with one more token."""
    shape = SHAPE
    layout = KVLayout(
        num_layers=shape.num_layers, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, dtype=shape.dtype,
        page_size=PAGE_SIZE,
    )  # fmt: skip
    pool_pages = pages + 16
    theirs, ours = DevicePool.allocate(layout, pool_pages), DevicePool.allocate(layout, pool_pages)
    host = HostPool.allocate(layout, pool_pages)
    for row in ours.rows:
        row.zero_()  # First touches of memory are slow, and are not measured.
    host.array[:] = 0
    llama, network, sent = build_llama(shape), LoopbackNetwork(), Sent()
    source = PagedModel(llama, theirs)
    prompt = torch.randint(
        0, shape.vocab_size, (pages * PAGE_SIZE + 1,), generator=torch.Generator().manual_seed(5)
    ).tolist()
    prompt_pages = list(range(pages + 1))
    first_tokens: list[int] = []

    async def serve(room: Room) -> None:
        loop = asyncio.get_running_loop()
        sent.began_at_s = sent.computed_at_s = loop.time()
        if first_tokens:
            await room.send(prompt_pages, start_token=0)
        else:
            for start in range(0, len(prompt), CHUNK_PAGES * PAGE_SIZE):
                tokens = prompt[start : start + CHUNK_PAGES * PAGE_SIZE]
                logits = await asyncio.to_thread(source.prefill_chunk, tokens, start, prompt_pages)
                sent.computed_at_s = loop.time()
                first = start // PAGE_SIZE
                await room.send(prompt_pages[first : first + CHUNK_PAGES], start_token=start)
            first_tokens.append(greedy(logits).token)
        await room.finish(first_token=first_tokens[0])
        await room.received()

    async with (
        PrefillPeer(
            PrefillConfig(listen="prefill"),
            device=theirs,
            transport=LoopbackTransport("prefill-0", network),
            on_room=serve,
        ),
        DecodeEngine(
            EngineConfig(default_deadline_s=600.0),
            device=ours,
            host=host,
            transport=LoopbackTransport("decode-0", network),
        ) as engine,
    ):
        copier = engine._runtime.copier
        assert copier is not None and isinstance(copier._mover, PageMover)
        mover = PacedMover(copier._mover, page_bytes=layout.page_bytes, layers=shape.num_layers)
        copier._mover = mover  # type: ignore[assignment]  # It has the methods of a mover.
        rig = LayersRig(engine, PagedModel(llama, ours), mover, prompt, (0, 0), sent)
        began_s = asyncio.get_running_loop().time()
        ready = await rig.restore(early=False)
        ready_s = asyncio.get_running_loop().time()
        rig.first_restore_s, rig.computed_after_s = ready_s - began_s, ready_s - sent.computed_at_s
        await rig._end(ready)
        own_pages = [*prompt_pages, pages + 1]
        logits = await asyncio.to_thread(source.decode_step, first_tokens[0], len(prompt), own_pages)
        rig.expected = (first_tokens[0], greedy(logits).token)
        yield rig


@dataclass(frozen=True, slots=True)
class Overlap:
    """Medians of one setting, in seconds."""

    setting: str
    copy_s: float
    """The call of `restore` until READY, waiting for all."""
    pass_s: float
    waits_s: float
    early_s: float

    @property
    def saved(self) -> float:
        """Part of the time to the token that is saved by layer."""
        return 1 - self.early_s / self.waits_s


async def measure_overlap(rig: LayersRig, setting: str, rounds: int, pass_s: float) -> Overlap:
    """Measure both ways in turns. The first round is not counted."""
    copies: list[float] = []
    waits: list[float] = []
    early: list[float] = []
    for number in range(rounds + 1):
        copy_s, waits_s = await rig.time_to_token(early=False)
        _, early_s = await rig.time_to_token(early=True)
        if number:
            copies.append(copy_s)
            waits.append(waits_s)
            early.append(early_s)
    return Overlap(setting, *map(statistics.median, (copies, [pass_s], waits, early)))
