"""Windows and states through an engine: restored from prefill, from the device and from the host, byte by byte."""

from __future__ import annotations

import random

import pytest

from tests.support.inside import core_of
from tidekv import DecodeRequest, RequestFailed

SIZE = 4
PROMPT = list(range(100, 100 + 6 * SIZE))
OUTPUT = list(range(500, 500 + 2 * SIZE + 1))
# Eight pages of tokens that have KV once OUTPUT was generated.
KEPT = PROMPT + OUTPUT[:-1]
LONGER = [*KEPT, 7, 8, 9]


async def test_what_a_request_leaves_is_there_for_the_next_from_the_device_and_from_the_host(worker) -> None:
    async with worker() as made:
        assert await made.answer("r1", PROMPT, OUTPUT) == {"transfer": len(PROMPT)}
        assert await made.answer("r2", LONGER, []) == {"l1": len(KEPT), "transfer": 3}
        await made.engine.flush(("l1",))
        assert made.pages("window")["cached"] == made.pages("state")["cached"] == 0
        assert await made.answer("r3", LONGER, []) == {"l2": len(KEPT), "transfer": 3}
        copies = made.engine.statistics()["component_copies"]
        # The record at the end of the prompt is prefill's: that of the boundary was not needed.
        assert copies["window"]["to_device_bytes"] > 0 == copies["state"]["to_device_bytes"]
        assert copies["window"]["to_host_bytes"] > 0 < copies["state"]["to_host_bytes"]
        made.expect_nothing_held()


async def test_a_prompt_that_is_all_here_gets_a_record_of_its_own(worker) -> None:
    async with worker() as made:
        await made.answer("r1", PROMPT, OUTPUT)
        ready = await made.restore("r2", KEPT)
        other = await made.restore("r3", KEPT)
        assert ready.sources["l1"] == len(KEPT)
        assert ready.component_pages["window"].pages.tolist() == other.component_pages["window"].pages.tolist()
        assert not set(ready.component_pages["window"].pages.tolist()) & set(
            ready.component_pages["window"].own.tolist()
        )
        assert ready.component_pages["state"].record != other.component_pages["state"].record
        # One goes on in place; what the other has, and what is cached, stays what it was.
        made.generate(ready, KEPT, OUTPUT)
        made.verify(other, KEPT)
        await made.engine.abort("r2")
        await made.engine.finish(other)
        assert (await made.answer("r4", KEPT, []))["l1"] == len(KEPT)
        assert made.engine.statistics()["component_copies"]["state"]["cloned_bytes"] > 0
        await made.engine.flush(("l1",))
        assert (await made.answer("r5", KEPT, []))["l2"] == len(KEPT)
        assert made.engine.statistics()["component_copies"]["state"]["to_device_bytes"] > 0
        made.expect_nothing_held()


async def test_what_left_nothing_of_its_components_is_restored_and_prefill_sends_windows_and_records(worker) -> None:
    async with worker() as made:
        await made.answer("r1", PROMPT, OUTPUT, leaves=False)
        assert made.pages("window")["cached"] == made.pages("state")["cached"] == 0
        assert made.engine.probe_prefix(LONGER) == {"l1": len(KEPT), "l2": 0}
        assert await made.answer("r2", LONGER, []) == {"l1": len(KEPT), "transfer": 3}


async def test_a_long_prefix_is_restored_beyond_its_last_snapshot(worker) -> None:
    async with worker("state") as made:
        prompt = list(range(20 * SIZE))
        await made.answer("r1", prompt, list(range(1000, 1000 + 12 * SIZE + 1)))
        ready = await made.restore("r2", prompt + list(range(1000, 1000 + 12 * SIZE)))
        assert ready.sources["l1"] == 32 * SIZE
        # It goes on for eight pages, and leaves its pages without a record.
        output = list(range(2000, 2000 + 8 * SIZE + 1))
        made.generate(ready, prompt + list(range(1000, 1000 + 12 * SIZE)), output)
        await made.engine.finish(ready, output)
        forty = prompt + list(range(1000, 1000 + 12 * SIZE)) + output[:-1]
        assert len(forty) == 40 * SIZE
        sources = await made.answer("r3", forty, [])
        assert sources == {"l1": 40 * SIZE}


async def test_a_flush_forgets_windows_and_states_with_their_pages(worker) -> None:
    async with worker() as made:
        await made.answer("r1", PROMPT, OUTPUT)
        ready = await made.restore("r2", KEPT)
        answer = await made.engine.flush()
        assert answer["spared"]["l1"] == 8
        # Pages that the live request continues from are spared; the unused host copies are flushed.
        assert made.pages("window")["cached"] == 3
        assert made.pages("window", "host")["cached"] == made.pages("state", "host")["cached"] == 0
        made.verify(ready, KEPT)
        await made.engine.finish(ready)
        await made.engine.wait_settled()
        await made.engine.flush()
        for pools in made.components:
            for tier in ("device", "host"):
                assert made.pages(pools.name, tier)["cached"] == 0
        assert await made.answer("r3", KEPT, []) == {"transfer": len(KEPT)}


async def test_a_retracted_request_goes_on_with_its_window_and_record(worker) -> None:
    async with worker() as made:
        ready = await made.restore("r1", PROMPT)
        left = made.generate(ready, PROMPT, OUTPUT)
        retracted = await made.engine.retract(ready, OUTPUT, component_pages=left)
        assert retracted.held_tokens == len(KEPT)
        await made.engine.wait_settled()
        await made.engine.flush(("l1",))
        resumed = await made.engine.resume(retracted)
        assert resumed.sources["l2"] == len(KEPT) and resumed.sources["transfer"] == 1
        made.verify(resumed, PROMPT + OUTPUT)
        await made.engine.finish(resumed)
        await made.engine.wait_settled()
        made.expect_nothing_held()


async def test_an_abort_gives_every_page_of_every_component_back(worker) -> None:
    async with worker() as made:
        await made.answer("r1", PROMPT, OUTPUT)
        await made.restore("r2", KEPT)
        await made.engine.abort("r2")
        waiting = DecodeRequest(request_id="r3", tokens=LONGER, prefill="nobody", send_prompt=True)
        with pytest.raises(RequestFailed):
            await made.engine.restore(waiting)
        await made.engine.wait_settled()
        made.expect_nothing_held()


async def test_pools_that_are_short_make_requests_wait_and_not_fail(worker) -> None:
    """Room for the windows of two requests: the third waits until one gives its own back."""
    async with worker(device_pages=8) as made:
        first, second = await made.restore("r1", PROMPT), await made.restore("r2", KEPT)
        third = made.engine.restore(
            DecodeRequest(request_id="r3", tokens=LONGER, prefill="prefill", send_prompt=True, deadline_s=0.2)
        )
        with pytest.raises(RequestFailed):
            await third
        await made.engine.finish(first)
        assert (await made.answer("r4", LONGER, []))["transfer"] == 3
        await made.engine.finish(second)
        made.expect_nothing_held()


@pytest.mark.parametrize("kinds", [("window",), ("state",), ("window", "state")])
@pytest.mark.parametrize("seed", range(3))
async def test_conversations_in_any_order_never_see_a_wrong_byte(worker, kinds: tuple[str, ...], seed: int) -> None:
    draw = random.Random(seed)
    async with worker(*kinds, device_pages=draw.choice((8, 14)), host_pages=draw.choice((0, 6, 20))) as made:
        served = {"l1": 0, "l2": 0}
        histories: list[list[int]] = [[]]
        for number in range(25):
            history = draw.choice(histories)
            prompt = (history + draw.choices(range(50), k=draw.randint(1, 9)))[-100:]
            output = draw.choices(range(50, 99), k=draw.randint(1, 3 * SIZE))
            ready = await made.restore(f"r{number}", prompt)
            for tier in served:
                served[tier] += ready.sources.get(tier, 0)
            left = made.generate(ready, prompt, output)
            match draw.randrange(8):
                case 0:
                    await made.engine.abort(ready.request_id)
                case 1:
                    await made.engine.finish(ready, output)
                case 2:
                    retracted = await made.engine.retract(ready, output, component_pages=left)
                    resumed = await made.engine.resume(retracted)
                    made.verify(resumed, prompt + output)
                    await made.engine.finish(resumed)
                case _:
                    await made.engine.finish(ready, output, component_pages=left)
                    histories.append(prompt + output)
            if draw.random() < 0.3:
                await made.engine.wait_settled()
                await made.engine.flush((draw.choice(("l1", "l2")),))
            core_of(made.engine).check()
        assert served["l1"] > 0
        await made.engine.wait_settled()
        made.expect_nothing_held()
