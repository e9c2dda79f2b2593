"""Windows and states between processes, with prefill killed or stopped in the middle of a tail.

The pages of a tail it has begun to write stay reserved until it has reported the end, or its death is proven.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from demo.prefill_process import ComponentOrder
from tests.support.fault_process import Done, Halt, Halted
from tests.support.inside import calls_of, core_of
from tests.support.waits import LIMIT_S, pass_s
from tidekv import HostPool, KVLayout, PageLayout, ReadyRequest, RequestFailed

pytestmark = pytest.mark.nixl

SIZE = 16
TAIL = 12
"""Pages of a window's tail."""
PAGES = 24
WINDOW = PageLayout.of(
    full=KVLayout(num_layers=2, num_kv_heads=2, head_dim=32, dtype="float32", page_size=SIZE),
    scales=KVLayout(num_layers=2, num_kv_heads=2, head_dim=1, dtype="float32", page_size=SIZE),
)
RECORD = PageLayout.of(
    full=KVLayout(kind="mla", num_layers=3, page_size=64, num_kv_heads=1, head_dim=16, dtype="float32"),
    convolution=KVLayout(kind="mla", num_layers=3, page_size=64, num_kv_heads=1, head_dim=4, dtype="float32"),
)
LIVENESS = {"heartbeat_s": 0.25, "peer_silence_s": 3.0}


def window(num_pages: int) -> ComponentOrder:
    return ComponentOrder(
        name="swa", kind="window", window_tokens=TAIL * SIZE, groups=WINDOW.groups, num_pages=num_pages
    )


def state(num_pages: int) -> ComponentOrder:
    return ComponentOrder(name="ssm", kind="state", groups=RECORD.groups, num_pages=num_pages)


async def test_every_byte_comes_from_another_process(spawn_prefill: Any, decode_over_nixl: Any, prompt: Any) -> None:
    child = await spawn_prefill(components=(state(16), window(64)))
    pools = [window(64).pools(), state(16).pools()]
    async with asyncio.timeout(LIMIT_S), decode_over_nixl([child.ready.address], components=pools) as decode:
        for number, (pages, tail) in enumerate([(0, 1), (1, 0), (TAIL, 0), (TAIL, 3), (PAGES, 0), (PAGES, 7)]):
            ready = await decode.restore(f"r{number}", prompt(number, pages, tail=tail))
            await decode.engine.finish(ready)
        await decode.assert_nothing_held()


async def test_a_prefill_killed_in_a_tail_is_followed_by_the_next(
    spawn_prefill: Any, decode_over_nixl: Any, prompt: Any
) -> None:
    orders = (window(64), state(16))
    first, second = await asyncio.gather(
        spawn_prefill(name="first", components=orders), spawn_prefill(name="second", components=orders)
    )
    pools = [order.pools() for order in orders]
    addresses = [first.ready.address, second.ready.address]
    async with asyncio.timeout(LIMIT_S), decode_over_nixl(addresses, components=pools) as decode:
        # The pages are written; of the window half.
        await first.ask(Halt(after_checks=TAIL // 2, skips=1), Done)
        waiting = decode.start("r", prompt(1, PAGES))
        await first.line.hear(Halted)
        assert not waiting.done()
        first.signal(signal.SIGKILL)
        assert await first.wait_ended() == -signal.SIGKILL
        ready = await waiting
        await decode.engine.finish(ready)
        # What the dead one was writing to is free again: its death is proven.
        await decode.assert_nothing_held()
        assert decode.core()["prefill_retries"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["goes on", "is killed"])
async def test_what_a_stopped_prefill_writes_of_a_tail_is_nobodys_until_it_has_ended(
    spawn_prefill: Any, decode_over_nixl: Any, prompt: Any, ends: str
) -> None:
    first, second = await asyncio.gather(
        spawn_prefill(name="first", components=(window(64),)), spawn_prefill(name="second", components=(window(64),))
    )
    # A request needs its tail and the page that it writes: there is room for the tail that is aborted, and no other.
    pools = [window(2 * TAIL).pools()]
    tokens, small, big = prompt(1, PAGES), prompt(2, 0, tail=3), prompt(3, PAGES)
    settings = {"device_pages": 96, "components": pools, **LIVENESS}
    async with asyncio.timeout(LIMIT_S), decode_over_nixl([second.ready.address], **settings) as decode:
        await first.ask(Halt(after_checks=TAIL // 2, skips=1, stops=True), Done)
        aborted = decode.start("aborted", tokens, prefill=first.ready.address)
        await first.wait_stopped()
        targets = core_of(decode.engine).request("aborted").component_pages.remote["swa"]
        assert len(targets) == TAIL
        await decode.engine.abort("aborted")
        with pytest.raises(RequestFailed, match="aborted"):
            await aborted
        assert decode.core()["swa_device_draining"] == TAIL
        # Piece after piece of all pages is written: of the first some are there, of the last none.
        pieces = [row[targets.tolist()] for row in pools[0].device.rows]
        assert pieces[0].any()
        assert not pieces[-1].any(), "the write had come too far before it stopped"
        waiting = decode.start("big", big)
        await pass_s(2.0)
        assert decode.core()["swa_device_draining"] == TAIL, "a stopped writer passed for one that is done"
        assert not waiting.done()
        if ends == "goes on":
            first.signal(signal.SIGCONT)
        else:
            first.signal(signal.SIGKILL)
        ready = await waiting
        assert decode.core()["swa_device_draining"] == 0
        if ends == "goes on":
            # Its late bytes did come, all of them, to the pages that were kept for them.
            assert (await first.counts())["writes"] == 2
        await pass_s(0.3)
        assert decode.wrong(ready, big) == []
        await decode.engine.finish(ready)
        await decode.engine.finish(await decode.restore("small", small))
        await decode.assert_nothing_held()


@pytest.mark.slow
async def test_aborts_at_random_points_leave_no_page_of_any_pool_behind(
    prefill_over_nixl: Any, decode_over_nixl: Any, prompt: Any, abort_at_random: Any
) -> None:
    source = random.Random(5)
    outcomes: Counter[str] = Counter()
    orders = (window(3 * (TAIL + 1)), state(6))
    there = [window(64).pools(), state(8).pools()]
    # On the host there is less room than on the device: some tails go there, and come from there.
    pools = [replace(made, host=HostPool.allocate(made.device.layout, 12)) for made in (o.pools() for o in orders)]
    async with (
        asyncio.timeout(LIMIT_S),
        prefill_over_nixl(num_pages=200, components=there) as prefill,
        decode_over_nixl([prefill.address], components=pools, device_pages=72, host_pages=48) as decode,
    ):

        async def check_and_finish(tokens: list[int], ready: ReadyRequest) -> None:
            assert decode.wrong(ready, tokens) == []
            boundary = len(tokens) // SIZE
            left = {
                name: (tail.first, tail.pages[: boundary - tail.first]) for name, tail in ready.component_pages.items()
            }
            if len(tokens) % SIZE:
                del left["ssm"]
            await decode.engine.finish(ready, component_pages=left)

        async def lane(lane: int) -> None:
            for _ in range(40):
                tokens = prompt(source.randrange(8), source.randrange(1, 24), tail=source.choice((0, 0, 3)))
                request, give_back = decode.request(f"r{lane}", tokens), partial(check_and_finish, tokens)
                # More of them than elsewhere are let through: what they leave makes the next ones differ.
                outcome = await abort_at_random(decode.engine, request, source, give_back, aborted=0.4, cancelled=0.3)
                outcomes[outcome] += 1
                await decode.until(lambda: not calls_of(decode.engine).is_live(f"r{lane}"))

        await asyncio.gather(*(lane(number) for number in range(5)))
        await decode.assert_nothing_held()
        async with prefill.worker.freed:
            await prefill.worker.freed.wait_for(lambda: prefill.worker.pages_free == 200)
        assert prefill.peer.statistics()["writes_in_flight"] == 0
        assert min(outcomes[name] for name in ("aborted", "cancelled", "served")) >= 10, outcomes
