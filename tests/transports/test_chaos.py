"""Rooms under seeded trouble: aborts, cut links, killed and restarted prefills, slow writes, extends, retries.

Whatever happens, each room ends, what is complete is right, and a page that was declared settled is never written
again: it is poisoned at that moment, and the poison must still be there at the end. The same with components: their
tails are included.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.support.prompts import DIGEST
from tests.support.waits import LIMIT_S
from tidekv.states import events
from tidekv.states.component_specs import ComponentPages
from tidekv.states.errors import EngineClosed
from tidekv.states.types import page_ids

POISON = 0xEE
ROOMS = 12
PAGES = 6
ADDRESS = "prefill:chaos"


class Asked:
    """One generation of one request, with pages of decode's pool that no other room uses."""

    def __init__(self, name: str, generation: int, first_page: int, promised: int) -> None:
        self.key = (name, generation)
        self.promised = promised
        self.want = {page: first_page + page for page in range(promised, PAGES)}
        self.pages = list(range(first_page, first_page + PAGES))
        # Of components the same page ids, in pools of their own: where a tail begins, of what is not promised.
        self.component_pages = {"swa": max(promised, PAGES - 2), "ssm": max(promised, PAGES - 1)}
        self.component_extends: dict[str, int] = {}
        """By component, the position that it asks for by an extend."""
        self.spans = {0}
        self.writer = ""
        self.lasts: set[int] = set()
        self.has_aux = False
        self.is_complete = False
        self.is_settled = False
        self.is_lost = False


class Chaos:
    """A decode worker with this test as its core."""

    def __init__(self, world, seed: int, *, has_components: bool) -> None:
        self.world = world
        self.components = (world.STATE, world.WINDOW) if has_components else ()
        self.random = random.Random(seed)
        self.asked: dict[tuple[str, int], Asked] = {}
        self.next_page = 0
        self.tasks: set[asyncio.Task[None]] = set()
        self.news = asyncio.Event()

    async def start(self) -> None:
        self.decode = await self.world.decode(
            pages=PAGES * ROOMS * 8,
            heartbeat_s=0.01,
            missed_s=0.5,
            lease_s=5.0,
            deliver=self.take,
            components=self.components,
        )
        self.world.network.before_write = self.delay
        await self.new_prefill()

    async def new_prefill(self) -> None:
        self.prefill = await self.world.prefill(ADDRESS, on_room=self.serve_later, components=self.components)

    async def delay(self, writer: str, target: str, pages: int) -> None:
        for _ in range(self.random.choice([0, 0, 1, 5, 60])):
            await asyncio.sleep(0)

    def serve_later(self, room) -> None:
        task = asyncio.create_task(self.serve(room))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def serve(self, room) -> None:
        """A prefill loop: its pages for request n are the same each time, so that the bytes can be checked."""
        number = int(room.request_id)
        mine = [(number * PAGES + page) % 64 for page in range(PAGES)]
        at = 0
        while at < PAGES:
            count = self.random.randint(1, 3)
            await room.send(mine[at : at + count], start_token=at * self.world.PAGE_SIZE)
            at += count
            for _ in range(self.random.randint(0, 8)):
                await asyncio.sleep(0)
        for name in self.random.sample(sorted(room.component_pages), len(room.component_pages)):
            await room.send_component_pages(name, mine[PAGES - room.component_pages[name].page_count :])
            for _ in range(self.random.choice([0, 0, 3])):
                await asyncio.sleep(0)
        if self.random.random() < 0.1:
            room.fail("prefill had enough")
            return
        await room.finish(first_token=number)

    def promise(self, name: str) -> None:
        generation = sum(key[0] == name for key in self.asked)
        promised = self.random.randint(0, PAGES)
        asked = Asked(name, generation, self.next_page, promised)
        self.next_page += PAGES
        self.asked[asked.key] = asked
        self.decode.receiver.promise(
            ADDRESS,
            name,
            generation,
            prompt_tokens=PAGES * self.world.PAGE_SIZE,
            promised_tokens=promised * self.world.PAGE_SIZE,
            pages=page_ids(asked.pages[promised:]),
            prompt_digest=DIGEST,
            component_pages=self.component_pages_of(asked),
        )

    def component_pages_of(self, asked: Asked) -> list[ComponentPages] | None:
        if not self.components:
            return None
        return [
            ComponentPages(name, first, page_ids(asked.pages[first:])) for name, first in asked.component_pages.items()
        ]

    def extend(self, asked: Asked) -> None:
        if asked.is_complete:
            return
        if 1 not in asked.spans and asked.promised:
            asked.spans.add(1)
            first = self.random.randint(0, asked.promised - 1)
            asked.want |= {page: asked.pages[page] for page in range(first, asked.promised)}
            self.decode.receiver.extend(*asked.key, 1, first, page_ids(asked.pages[first : asked.promised]))
        elif self.components and not asked.component_extends and asked.component_pages["swa"] == PAGES:
            # Nothing of components was promised to be sent: a tier of decode had all of it, and loses it.
            for span, (name, first) in enumerate((("swa", PAGES - 2), ("ssm", PAGES - 1)), 2):
                asked.spans.add(span)
                asked.component_extends[name] = first
                self.decode.receiver.extend(*asked.key, span, first, page_ids(asked.pages[first:]), name)

    def take(self, event: events.AnyEvent) -> None:
        self.news.set()
        match event:
            case events.WriterLost(writer=writer):
                for asked in self.asked.values():
                    if asked.writer == writer and not asked.is_complete and not asked.is_settled:
                        asked.is_lost = True
                        self.decode.receiver.abort(*asked.key)
                return
            case events.WriterDead(writer=writer):
                for asked in self.asked.values():
                    if asked.writer == writer:
                        self.settle(asked)
                return
        asked = self.asked[event.request_id, event.generation]
        match event:
            case events.PromiseSent(writer=writer):
                asked.writer = writer
            case events.ChunkReceived(last=True, span=span):
                asked.lasts.add(span)
            case events.AuxReceived():
                asked.has_aux = True
            case events.RoomRefused():
                self.decode.receiver.abort(*asked.key)
            case events.RoomFailed(settled=True) | events.RoomDrained():
                self.settle(asked)
        if asked.lasts == asked.spans and asked.has_aux and not asked.is_settled and not asked.is_complete:
            asked.is_complete = True
            self.check(asked)
            self.decode.receiver.received(*asked.key)

    def check(self, asked: Asked) -> None:
        """Every page that was wanted holds what prefill's page does, at this very moment."""
        number = int(asked.key[0])
        for page, ours in asked.want.items():
            assert self.decode.pool.page(ours) == self.prefill.pool.page((number * PAGES + page) % 64)
        for name, pool in self.decode.components.items():
            for page in range(asked.component_extends.get(name, asked.component_pages[name]), PAGES):
                theirs = self.prefill.components[name].page((number * PAGES + page) % 64)
                assert pool.page(asked.pages[page]) == theirs

    def settle(self, asked: Asked) -> None:
        if not asked.is_settled and not asked.is_complete:
            asked.is_settled = True
            for pool in self.pools:
                for buffer in pool.buffers:
                    buffer[asked.pages] = POISON

    @property
    def pools(self) -> list:
        return [self.decode.pool, *self.decode.components.values()]

    async def trouble(self) -> None:
        live = [asked for asked in self.asked.values() if not asked.is_settled and not asked.is_complete]
        match self.random.choice(["abort", "extend", "extend", "retry", "cut", "kill", "wait", "wait"]):
            case "abort" if live:
                self.decode.receiver.abort(*self.random.choice(live).key)
            case "extend" if live:
                asked = self.random.choice(live)
                if not asked.is_lost:
                    self.extend(asked)
            case "retry" if self.asked and self.next_page < PAGES * ROOMS * 7:
                self.promise(self.random.choice(list(self.asked))[0])
            case "cut":
                self.world.network.cut(self.decode.transport.instance)
            case "kill" if self.random.random() < 0.3:
                self.world.network.kill(self.prefill.transport.instance)
                await self.new_prefill()
        for _ in range(self.random.randint(0, 40)):
            await asyncio.sleep(0)

    async def run(self) -> None:
        await self.start()
        for number in range(ROOMS):
            self.promise(str(number))
            await self.trouble()
        for _ in range(25):
            await self.trouble()
        # What is still open is aborted, and all of it has to settle.
        for asked in list(self.asked.values()):
            if not asked.is_complete and not asked.is_settled:
                self.decode.receiver.abort(*asked.key)
        async with asyncio.timeout(LIMIT_S):
            while not all(asked.is_complete or asked.is_settled for asked in self.asked.values()):
                self.news.clear()
                await self.news.wait()
            while self.tasks:
                await asyncio.wait(list(self.tasks))


@pytest.mark.parametrize("has_components", [False, True], ids=["pages", "components"])
@pytest.mark.parametrize("seed", range(25))
async def test_every_room_ends_and_no_settled_page_is_written(world, seed: int, has_components: bool) -> None:
    chaos = Chaos(world, seed, has_components=has_components)
    await chaos.run()
    for asked in chaos.asked.values():
        if asked.is_settled:
            assert all(set(pool.page(page)) == {POISON} for pool in chaos.pools for page in asked.pages), asked.key
    statistics = chaos.decode.receiver.statistics()
    assert (statistics["rooms_open"], statistics["rooms_unsettled"]) == (0, 0)
    assert statistics.get("rooms_broken", 0) == 0
    # Prefill is left only with rooms that have a Received or Abort on its way.
    await chaos.prefill.sender.close()
    assert chaos.prefill.sender.statistics()["writes_in_flight"] == 0
    assert chaos.prefill.sender.statistics()["peers"] == 0
    with pytest.raises(EngineClosed):
        await chaos.prefill.room("0")
