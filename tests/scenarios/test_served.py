"""What other systems stumbled over, on a running decode engine and its prefill, with every byte verified."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.inside import runtime_of
from tests.support.waits import LIMIT_S
from tidekv import RequestFailed, open_storage
from tidekv.backends.keys.chain import pack_tokens, page_digests
from tidekv.engine.decode.driver import Driver
from tidekv.engine.synthetic.kv import prompt_digests
from tidekv.states import events

PAGE_SIZE = 4
PROMPT = list(range(300, 330))  # Seven pages of four tokens and a tail of two.
TIERS = ("l1", "l2", "l3")


async def keep(pair, request_id: str, tokens: list[int], **options: object) -> None:
    """Bring tokens into every tier."""
    ready = await pair.restore(request_id, tokens, **options)
    await pair.finish(ready, tokens, [1])
    await pair.engine.wait_settled()


def forget_above(pair, tier: str):
    return pair.engine.flush(TIERS[: TIERS.index(tier)][:2])


@pytest.mark.parametrize("tier", TIERS)
async def test_a_prefix_of_every_length_from_every_tier_and_the_delta_behind_it(make_pair, tier: str) -> None:
    """None, one page, some, all but the tail, and all: each page has its own bytes at its own place."""
    for cached in range(8):
        async with make_pair(storage=open_storage("memory:?capacity=64MiB"), fetch_run_pages=2) as pair:
            if cached:
                await keep(pair, "warm", PROMPT[: cached * PAGE_SIZE])
            await forget_above(pair, tier)
            for prompt in (PROMPT, PROMPT[:28]):
                ready = await pair.restore(f"r{len(prompt)}", prompt)
                expected = dict.fromkeys(TIERS, 0) | {tier: cached * PAGE_SIZE}
                assert ready.sources == expected | {"transfer": len(prompt) - cached * PAGE_SIZE}
                await pair.engine.abort(ready.request_id)
                await pair.engine.wait_settled()
                await pair.engine.flush()
                if cached:
                    await keep(pair, f"again{len(prompt)}", PROMPT[: cached * PAGE_SIZE])
                    await forget_above(pair, tier)


@pytest.mark.parametrize("hole", [0, 3, 6])
async def test_a_hole_in_storage_ends_the_hit_and_is_filled_again(make_pair, hole: int) -> None:
    storage = open_storage("memory:?capacity=64MiB")
    async with make_pair(storage=storage, fetch_run_pages=2) as pair:
        await keep(pair, "warm", PROMPT)
        await pair.engine.flush()
        key = page_digests(pack_tokens(PROMPT), PAGE_SIZE)[hole]
        assert await storage.delete([key]) == [True]
        ready = await pair.restore("r1", PROMPT)
        assert ready.sources["l3"] == hole * PAGE_SIZE
        await pair.finish(ready, PROMPT, [1])
        await pair.engine.wait_settled()
        await pair.engine.flush()
        ready = await pair.restore("r2", PROMPT)
        assert ready.sources["l3"] == 28
        await pair.engine.abort("r2")
        await pair.assert_nothing_held()


async def test_an_engine_that_starts_with_an_empty_tree_is_served_by_a_full_storage(make_pair, tmp_path) -> None:
    place = f"file:{tmp_path}?capacity=16MiB"
    async with make_pair(storage=open_storage(place)) as pair:
        await keep(pair, "r1", PROMPT)
    async with make_pair(storage=open_storage(place)) as pair:
        ready = await pair.restore("r1", PROMPT)
        assert ready.sources == {"l1": 0, "l2": 0, "l3": 28, "transfer": 2}
        await pair.engine.abort("r1")
        await pair.assert_nothing_held()


@pytest.mark.parametrize("tier", TIERS)
async def test_another_namespace_never_sees_what_is_cached_in_any_tier(make_pair, tier: str) -> None:
    async with make_pair(storage=open_storage("memory:?capacity=64MiB")) as pair:
        await keep(pair, "ours", PROMPT)
        await forget_above(pair, tier)
        theirs = await pair.restore("theirs", PROMPT, namespace="adapter")
        assert theirs.sources == {"l1": 0, "l2": 0, "l3": 0, "transfer": 30}
        await pair.engine.abort("theirs")
        await pair.engine.wait_settled()
        ours = await pair.restore("ours again", PROMPT)
        assert ours.sources[tier] == 28
        await pair.engine.abort("ours again")
        await pair.assert_nothing_held()


async def test_a_write_that_lands_behind_an_abort_hits_no_page_of_the_next_owner(make_pair) -> None:
    """The write of the aborted room is held until another request owns every page that is free, and then let go."""
    async with make_pair(device_pages=17, host_pages=0, growth_reserve_pages=0) as pair:
        began, may_land = asyncio.Event(), asyncio.Event()

        async def hold(writer: str, target: str, pages: int) -> None:
            began.set()
            await may_land.wait()

        pair.network.before_write = hold
        aborted = asyncio.create_task(pair.engine.restore(pair.request("r1", PROMPT)))
        await began.wait()
        pair.network.before_write = None
        await pair.engine.abort("r1")
        with pytest.raises(RequestFailed):
            await aborted
        assert pair.core()["device_draining"] == 8
        other = list(range(1000, 1036))
        ready = await pair.restore("r2", other)
        assert pair.core()["device_free"] == 0
        may_land.set()
        await runtime_of(pair.engine).calls.wait_until(lambda: not pair.core()["device_draining"])
        digests = prompt_digests(pack_tokens(other), PAGE_SIZE)
        assert pair.kv.verify(ready.pages.tolist(), digests) == []
        await pair.finish(ready, other, [1])
        await pair.assert_nothing_held()


async def test_what_has_ended_in_the_turn_of_its_deadline_is_taken_before_the_deadline() -> None:
    taken: list[events.Event] = []

    class Core:
        """A core with a deadline that is always due."""

        def next_deadline_s(self) -> float | None:
            return None if any(isinstance(event, events.ClockAdvanced) for event in taken) else 0.0

        def step(self, event: events.Event) -> list[object]:
            taken.append(event)
            return []

    broken: list[BaseException] = []
    drained = asyncio.Event()
    driver = Driver(Core(), lambda command: None, on_broken=broken.append, after_drain=drained.set)
    driver.post(events.CopyEnded(at_s=0.0, op=1))
    # The timer fires in this very turn, before the loop has come to the outcome.
    driver._time_is_up()
    async with asyncio.timeout(LIMIT_S):
        await drained.wait()
    assert [type(event) for event in taken] == [events.CopyEnded, events.ClockAdvanced]
    assert broken == []
    driver.stop()


async def test_a_request_that_was_stored_to_the_last_page_still_gets_its_first_token_from_prefill(make_pair) -> None:
    prompt = PROMPT[:28]
    async with make_pair(storage=open_storage("memory:?capacity=64MiB")) as pair:
        first = await pair.restore("r1", prompt)
        await pair.finish(first, prompt, [1])
        await pair.engine.wait_settled()
        await pair.engine.flush()
        sent = pair.peer.statistics()["bytes_sent"]
        again = await pair.restore("r2", prompt)
        assert again.sources == {"l1": 0, "l2": 0, "l3": 28, "transfer": 0}
        assert again.first_token == first.first_token
        assert pair.peer.statistics()["bytes_sent"] == sent
        await pair.engine.abort("r2")
        await pair.assert_nothing_held()
