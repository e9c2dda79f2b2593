"""Callers that begin with the first layer, while prefill, storage or decode fails before the next one."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.fault_hooks import GatedStorage, LayerGate
from tests.support.fault_process import Begun, Done, EarlyTurn, Halt, Served, Settle, Turn
from tests.support.inside import calls_of
from tests.support.waits import LIMIT_S
from tidekv import LayersLost, ReadyRequest, RequestFailed, open_storage

pytestmark = pytest.mark.nixl

PAGE_SIZE = 16
PAGES = 24
LAYERS = 2
# A silent peer is out of reach sooner than by default, so that the tests are short.
LIVENESS = {"heartbeat_s": 0.25, "peer_silence_s": 3.0}


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> LayerGate:
    return LayerGate(LAYERS, patch=monkeypatch.setattr)


async def keep_on_host(decode: Any, tokens: list[int], **options: Any) -> None:
    """Leave the full pages of a prompt in host memory only, and other bytes in the device pages that they had."""
    await decode.serve("warm", tokens, **options)
    await decode.engine.wait_settled()
    await decode.engine.flush(("l1",))
    for row in decode.device.rows:
        row.zero_()


async def begin(decode: Any, tokens: list[int], request_id: str = "early", **options: Any) -> ReadyRequest:
    """Return a request with layer 0 in place and the others held."""
    ready = await decode.engine.restore(decode.request(request_id, tokens, early=True, **options))
    await ready.wait_layer(0)
    assert ready.layers_in_place == 1
    return ready


async def use_all_layers(decode: Any, ready: ReadyRequest, tokens: list[int]) -> None:
    """Wait for all layers and check their bytes."""
    for layer in range(LAYERS):
        await ready.wait_layer(layer)
    assert ready.layers_in_place is None
    assert decode.wrong(ready, tokens) == []
    assert sum(ready.sources.values()) == len(tokens)


async def test_prefill_that_dies_between_layers_is_a_loss_and_the_next_one_takes_over(
    spawn_prefill: Any, decode_over_nixl: Any, prompt: Any, gate: LayerGate
) -> None:
    first, second = await asyncio.gather(spawn_prefill(name="first"), spawn_prefill(name="second"))
    addresses, tokens = [first.ready.address, second.ready.address], prompt(1, PAGES, tail=3)
    async with asyncio.timeout(LIMIT_S), decode_over_nixl(addresses) as decode:
        await keep_on_host(decode, tokens)
        ready = await begin(decode, tokens)
        waiting = asyncio.create_task(ready.wait_layer(1))
        first.signal(signal.SIGKILL)
        with pytest.raises(LayersLost, match="prefill"):
            await waiting
        # The copy of the first attempt is still held, and keeps its pages from the second one.
        again = asyncio.create_task(use_all_layers(decode, ready, tokens))
        gate.open()
        await again
        assert decode.core()["prefill_retries"] == 1
        await decode.engine.finish(ready, [1])
        await decode.assert_nothing_held()
        await decode.serve("next", prompt(2, PAGES))
        await decode.assert_nothing_held()


async def test_a_lost_layer_of_a_dead_prefill_fails_the_request_and_says_why(
    spawn_prefill: Any, decode_over_nixl: Any, prompt: Any, gate: LayerGate
) -> None:
    child, tokens = await spawn_prefill(), prompt(1, PAGES, tail=3)
    async with asyncio.timeout(LIMIT_S), decode_over_nixl([child.ready.address]) as decode:
        await keep_on_host(decode, tokens)
        ready = await begin(decode, tokens)
        decode.engine.grow(ready, PAGE_SIZE)
        child.signal(signal.SIGKILL)
        assert await child.wait_ended() == -signal.SIGKILL
        gate.open(fails=True)
        with pytest.raises(LayersLost):
            await ready.wait_layer(1)
        with pytest.raises(RequestFailed) as failed:
            await ready.wait_layer(0)
        assert failed.value.cause in ("prefill lost", "prefill process gone")
        gate.open()
        await decode.assert_nothing_held()
        await spawn_prefill(listen=child.ready.address)
        await decode.serve("next", tokens)
        await decode.assert_nothing_held()


@pytest.mark.slow
async def test_a_prefill_that_stops_while_it_sends_lost_layers_keeps_its_pages_until_it_goes_on(
    spawn_prefill: Any, decode_over_nixl: Any, prompt: Any, gate: LayerGate
) -> None:
    first, second = await asyncio.gather(spawn_prefill(name="first"), spawn_prefill(name="second"))
    addresses, tokens = [first.ready.address, second.ready.address], prompt(1, PAGES, tail=3)
    async with asyncio.timeout(LIMIT_S), decode_over_nixl(addresses, **LIVENESS) as decode:
        await keep_on_host(decode, tokens)
        ready = await begin(decode, tokens)
        old = ready.pages.tolist()
        await first.ask(Halt(after_checks=PAGES // 2, stops=True), Done)
        gate.open(fails=True)
        with pytest.raises(LayersLost, match="the copy from host to device failed"):
            await ready.wait_layer(1)
        gate.open()
        waiting = asyncio.create_task(ready.wait_layer(0))
        await first.wait_stopped()
        # It falls silent: the caller, which had begun to wait for the layer again, gets the prefill that follows.
        with contextlib.suppress(LayersLost):
            await waiting
        await use_all_layers(decode, ready, tokens)
        assert decode.core()["device_draining"] > 0
        assert not set(ready.pages.tolist()) & set(old[:PAGES])
        for number in range(10, 20):
            other = await decode.restore(f"r{number}", prompt(number, 2), prefill=second.ready.address)
            assert not set(other.pages.tolist()) & set(old[:PAGES])
            await decode.engine.finish(other)
        first.signal(signal.SIGCONT)
        await decode.engine.wait_settled()
        assert decode.core()["device_draining"] == 0
        assert decode.wrong(ready, tokens) == []
        await decode.engine.finish(ready, [1])
        await decode.serve("next", prompt(3, PAGES), prefill=first.ready.address)
        await decode.assert_nothing_held()


async def test_pages_of_an_aborted_request_are_kept_while_its_copy_is_between_layers(
    spawn_prefill: Any, decode_over_nixl: Any, prompt: Any, gate: LayerGate
) -> None:
    child, tokens, big = await spawn_prefill(), prompt(1, PAGES, tail=3), prompt(2, PAGES)
    # Forty pages: both prompts together do not fit.
    async with asyncio.timeout(LIMIT_S), decode_over_nixl([child.ready.address], device_pages=40) as decode:
        await keep_on_host(decode, tokens)
        ready = await begin(decode, tokens)
        old = set(ready.pages.tolist()[:PAGES])
        waiting = asyncio.create_task(ready.wait_layer(1))
        await asyncio.sleep(0)
        assert await decode.engine.abort("early")
        with pytest.raises((LayersLost, RequestFailed)):
            await waiting
        small = await decode.restore("small", prompt(3, 4))
        assert not set(small.pages.tolist()) & old
        needs_them = decode.start("big", big)
        for number in range(10, 20):
            other = await decode.restore(f"r{number}", prompt(number, 2))
            assert not old & set(other.pages.tolist())
            await decode.engine.finish(other)
        assert not needs_them.done(), "pages were reused while a copy was writing to them"
        gate.open()
        ready = await needs_them
        assert decode.wrong(ready, big) == []
        assert decode.wrong(small, prompt(3, 4)) == []
        for request in (ready, small):
            await decode.engine.finish(request)
        await decode.assert_nothing_held()


def destroy(folder: Path) -> None:
    """Leave no byte in the segments of a storage."""
    for path in folder.glob("*/*.seg"):
        with path.open("r+b") as file:
            file.truncate(0)


async def test_storage_that_fails_before_the_first_layer_costs_a_longer_transfer(
    tmp_path: Path, prefill_over_nixl: Any, decode_over_nixl: Any, prompt: Any, gate: LayerGate
) -> None:
    # Reads over NIXL pass the gate of the poller.
    storage = GatedStorage(open_storage(f"file:{tmp_path}?capacity=64MiB&io=nixl"))
    stored, tokens = prompt(1, PAGES), prompt(1, PAGES, tail=3)
    half = PAGES * PAGE_SIZE // 2
    async with (
        asyncio.timeout(LIMIT_S),
        prefill_over_nixl() as prefill,
        # One fetch, which fails as a whole: what it had brought would wait behind the copy that is held.
        decode_over_nixl([prefill.address], storage=storage, fetch_run_pages=PAGES) as decode,
    ):
        await decode.serve("warm", stored)
        await decode.engine.wait_settled()
        await decode.engine.flush()
        # The first half comes back to host memory; the rest is in storage only.
        await decode.serve("half", stored[:half])
        await decode.engine.wait_settled()
        await decode.engine.flush(("l1",))
        assert storage.gate is not None
        storage.gate.close_gate()
        restoring = asyncio.create_task(decode.engine.restore(decode.request("early", tokens, early=True)))
        await storage.gate.halted.wait()
        assert not restoring.done()
        destroy(tmp_path)
        storage.gate.open_gate()
        ready = await restoring
        await ready.wait_layer(0)
        assert ready.layers_in_place == 1
        gate.open()
        await use_all_layers(decode, ready, tokens)
        assert ready.sources == {"l1": 0, "l2": half, "l3": 0, "transfer": half + 3}
        await decode.engine.finish(ready, [1])
        await decode.serve("next", prompt(2, PAGES))
        await decode.assert_nothing_held()


@pytest.mark.parametrize("fails", [False, True], ids=["storage only", "storage and the copy"])
async def test_storage_that_fails_between_layers_is_not_needed_again(
    tmp_path: Path, prefill_over_nixl: Any, decode_over_nixl: Any, prompt: Any, gate: LayerGate, fails: bool
) -> None:
    """The pages are in host memory by then; if their copy fails as well, prefill sends them."""
    stored, tokens = prompt(1, PAGES), prompt(1, PAGES, tail=3)
    async with (
        asyncio.timeout(LIMIT_S),
        prefill_over_nixl() as prefill,
        # One fetch, and so one copy: the first layer of a second copy would wait behind the first one, which is held.
        decode_over_nixl(
            [prefill.address], storage=open_storage(f"file:{tmp_path}?capacity=64MiB"), fetch_run_pages=PAGES
        ) as decode,
    ):
        await decode.serve("warm", stored)
        await decode.engine.wait_settled()
        await decode.engine.flush()
        ready = await begin(decode, tokens)
        destroy(tmp_path)
        gate.open(fails=fails)
        if fails:
            with pytest.raises(LayersLost, match="the copy from host to device failed"):
                await ready.wait_layer(1)
            gate.open()
        await use_all_layers(decode, ready, tokens)
        sent = len(stored) if fails else 0
        assert ready.sources == {"l1": 0, "l2": 0, "l3": len(stored) - sent, "transfer": 3 + sent}
        await decode.engine.finish(ready, [1])
        await decode.serve("next", prompt(2, PAGES))
        await decode.assert_nothing_held()


@pytest.mark.slow
async def test_aborts_and_lost_layers_at_random_leave_nothing_behind(
    spawn_prefill: Any, decode_over_nixl: Any, prompt: Any, gate: LayerGate
) -> None:
    """Two hundred requests whose copies are slow, and fail at times; each is aborted, cancelled or finished."""
    child, source, ends = await spawn_prefill(), random.Random(5), Counter[str]()
    gate.open()
    slow = random.Random(6)

    def before_layer(layer: int) -> None:
        time.sleep(slow.choice((0, 0.004, 0.02)))  # On the thread of the copies.
        if layer and slow.random() < 0.3:
            raise ZeroDivisionError("a bug of the copy")

    async def use(decode: Any, request_id: str, tokens: list[int], ready: ReadyRequest) -> None:
        layers = source.choice((0, 1, LAYERS, LAYERS, LAYERS))
        while True:
            try:
                for layer in range(layers):
                    await ready.wait_layer(layer)
                break
            except LayersLost:
                ends["lost"] += 1
        if layers == LAYERS:
            assert decode.wrong(ready, tokens) == []
            await decode.engine.finish(ready, [1])
            ends["finished"] += 1
        else:
            await decode.engine.abort(request_id)
            ends[f"aborted in layer {layers}"] += 1

    async with (
        asyncio.timeout(LIMIT_S),
        decode_over_nixl([child.ready.address], device_pages=72, host_pages=64) as decode,
    ):

        async def lane(number: int) -> None:
            for _ in range(50):
                request_id, tokens = f"r{number}", prompt(source.randrange(6), source.randrange(8, 16), tail=3)
                task = asyncio.create_task(
                    decode.engine.restore(decode.request(request_id, tokens, early=source.random() < 0.8))
                )
                if source.random() < 0.15:
                    await asyncio.wait([task], timeout=source.choice((0, 0.001, 0.005)))
                    task.cancel()
                try:
                    await use(decode, request_id, tokens, await task)
                except asyncio.CancelledError:
                    ends["cancelled"] += 1
                await decode.until(partial(_is_over, decode, request_id))
                # Most prompts are in host memory only, so that copies bring them.
                await decode.engine.flush(("l1",))

        gate.before_layer = before_layer
        async with asyncio.TaskGroup() as group:
            for number in range(4):
                group.create_task(lane(number))
        gate.open()
        await decode.assert_nothing_held()
        assert min(ends[end] for end in ("lost", "finished", "aborted in layer 1", "cancelled")) >= 5, ends
        await decode.serve("next", prompt(9, PAGES))
        await decode.assert_nothing_held()


def _is_over(decode: Any, request_id: str) -> bool:
    return not calls_of(decode.engine).is_live(request_id)


async def test_decode_that_dies_between_layers_gives_prefill_its_pages_back_and_is_right_when_it_is_back(
    tmp_path: Path, spawn_decode: Any, prefill_over_nixl: Any, prompt: Any
) -> None:
    tokens, storage = prompt(1, PAGES, tail=3), f"file:{tmp_path}?capacity=64MiB&io=nixl"

    def turn(request_id: str, kind: type = EarlyTurn) -> Any:
        return kind(request_id=request_id, tokens=tokens, prefill=[prefill.address], output=[1])

    async with asyncio.timeout(LIMIT_S), prefill_over_nixl(lease_s=3.0) as prefill:
        child = await spawn_decode(storage)
        assert (await child.ask(turn("warm", Turn), Served)).wrong == []
        await child.ask(Settle(), Done)
        child.signal(signal.SIGKILL)
        child = await spawn_decode(storage, fetch_run_pages=PAGES)
        child.line.say(turn("early"))
        assert (await child.line.hear(Begun)).layers == 1
        child.signal(signal.SIGKILL)
        async with prefill.worker.freed:
            await prefill.worker.freed.wait_for(lambda: prefill.worker.pages_free == 256)
        child = await spawn_decode(storage)
        served = await child.ask(turn("again", Turn), Served)
        assert (served.wrong, served.sources["l3"]) == ([], PAGES * PAGE_SIZE)
        await child.ask(Settle(), Done)
