"""A drain that stores: a successor of the same storage serves what only device and host of its predecessor had."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.conftest import MakePair
from tests.engine.test_attach_storage import Hung
from tests.engine.test_lasting_pool import served
from tests.engine.test_lent_pages import PAGES, restore
from tests.engine.test_restart import Dialog, speak
from tests.engine.test_status_server import ask
from tests.support.inside import calls_of, core_of
from tests.support.waits import LIMIT_S
from tidekv import DrainOutcome, EngineClosed, InvalidRequest, OfferedPages, Replayer, open_storage
from tidekv.states.errors import StorageFailed

PROMPT = list(range(100, 142))  # Ten pages of four tokens and a partial one of two.
FORKED = PROMPT[:22] + list(range(500, 520))
USERS = 8


def uri(directory: Path) -> str:
    return f"file:{directory}/pages?io=threads&capacity=16MiB"


def numbers(outcome: DrainOutcome) -> tuple[int, int, int, int]:
    return outcome.stored, outcome.present, outcome.left, outcome.failed


@pytest.mark.parametrize("page_checksums", [False, True])
async def test_all_that_device_and_host_had_is_served_from_storage_by_the_next_engine(
    make_pair: MakePair, tmp_path: Path, page_checksums: bool, caplog: pytest.LogCaptureFixture
) -> None:
    journal = tmp_path / "journal"
    config = {"write": "back", "page_checksums": page_checksums}
    async with make_pair(storage=open_storage(uri(tmp_path)), journal_path=str(journal), **config) as pair:
        await served(pair, "r1", PROMPT)
        await served(pair, "r2", FORKED)
        # One on the host only.
        pair.engine.drop(await pair.engine.retract(await pair.restore("r3", PROMPT, namespace="tenant é")))
        await pair.engine.wait_settled()
        assert pair.core()["pages_stored"] == 0
        caplog.clear()
        with caplog.at_level("INFO"):
            outcome = await pair.engine.drain(store_s=LIMIT_S)
        assert outcome.live == [] and numbers(outcome) == (25, 0, 0, 0) and 0 < outcome.seconds < LIMIT_S
        assert len([line for line in caplog.messages if "stored what storage lacked" in line]) == 1
        await pair.assert_nothing_held()
    assert Replayer(journal).run().complete
    async with make_pair(storage=open_storage(uri(tmp_path))) as pair:
        assert await served(pair, "r1", FORKED) == {"l1": 0, "l2": 0, "l3": 40, "transfer": 2}
        assert await served(pair, "r2", PROMPT) == {"l1": 20, "l2": 0, "l3": 20, "transfer": 2}
        assert await served(pair, "r3", PROMPT, namespace="tenant é") == {"l1": 0, "l2": 0, "l3": 40, "transfer": 2}


async def test_the_hottest_prompts_are_stored_if_storage_cannot_hold_all(make_pair: MakePair) -> None:
    # Ten pages of 1 KiB each; room for three prompts.
    storage = open_storage("memory:?capacity=35KiB")
    async with make_pair(storage=storage, write="back", device_pages=128) as pair:
        for number in range(8):
            await served(pair, f"r{number}", [number, *PROMPT[:40]])
        outcome = await pair.engine.drain(store_s=LIMIT_S)
        assert numbers(outcome) == (30, 0, 50, 0)
        await pair.engine.flush()
        found = [(await pair.engine.look_up([number, *PROMPT[:40]])).l3 for number in range(8)]
        assert found == [0] * 5 + [40] * 3


async def test_without_time_to_store_nothing_is_written(make_pair: MakePair) -> None:
    storage = open_storage("memory:")
    async with make_pair(storage=storage, write="back") as pair:
        await served(pair, "r1", PROMPT)
        assert await pair.engine.drain() == DrainOutcome(live=[])
        assert await pair.engine.drain(store_s=0) == DrainOutcome(live=[])
        assert storage.statistics().pages == 0
        with pytest.raises(InvalidRequest, match="store_s must be a number from 0"):
            await pair.engine.drain(store_s=-1)


async def test_a_storage_that_hangs_ends_the_drain_at_its_limit(make_pair: MakePair) -> None:
    hung = Hung("memory:?capacity=1MiB", "put_from")
    async with make_pair(storage=hung, write="back") as pair:
        with hung:
            await served(pair, "r1", PROMPT)
            outcome = await pair.engine.drain(store_s=0.3)
            assert numbers(outcome) == (0, 0, 10, 0)
            assert outcome.seconds >= 0.3
        await pair.assert_nothing_held()


async def test_a_storage_that_fails_is_reported(make_pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = open_storage("memory:")

    async def fail(*_: object, **__: object) -> list[bool]:
        raise StorageFailed("the shelf is gone")

    monkeypatch.setattr(storage, "put_from", fail)
    async with make_pair(storage=storage, write="back") as pair:
        await served(pair, "r1", PROMPT)
        assert numbers(await pair.engine.drain(store_s=LIMIT_S)) == (0, 0, 10, 10)
        await pair.assert_nothing_held()


async def test_what_the_last_live_request_leaves_is_stored_as_well(make_pair: MakePair, tmp_path: Path) -> None:
    async with make_pair(storage=open_storage(uri(tmp_path)), write="back") as pair:
        await served(pair, "r1", PROMPT)
        ready = await pair.restore("r2", PROMPT[:20])
        draining = asyncio.ensure_future(pair.engine.drain(store_s=LIMIT_S))
        # What is there is stored while the request is live.
        await calls_of(pair.engine).wait_until(lambda: pair.core()["pages_stored"] == 10)
        with pytest.raises(EngineClosed, match="drains"):
            await pair.engine.restore(pair.request("r3", PROMPT))
        await pair.finish(ready, PROMPT[:20], list(range(600, 609)))
        assert numbers(await draining) == (12, 0, 0, 0)


async def test_a_drain_that_is_cancelled_begins_no_further_write(make_pair: MakePair) -> None:
    hung = Hung("memory:?capacity=1MiB", "put_from")
    async with make_pair(storage=hung, write="back") as pair:
        with hung:
            await served(pair, "r1", PROMPT)
            draining = asyncio.ensure_future(pair.engine.drain(store_s=1e6))
            await hung.entered.wait()
            draining.cancel()
            with pytest.raises(asyncio.CancelledError):
                await draining
            await calls_of(pair.engine).wait_until(lambda: core_of(pair.engine).store_all.run is None)
        await pair.assert_nothing_held()


@pytest.mark.parametrize("close_store_s", [0.0, LIMIT_S])
async def test_closing_stores_if_it_is_given_time(make_pair: MakePair, tmp_path: Path, close_store_s: float) -> None:
    async with make_pair(storage=open_storage(uri(tmp_path)), write="back", close_store_s=close_store_s) as pair:
        await served(pair, "r1", PROMPT)
        await pair.restore("live", FORKED)
    async with make_pair(storage=open_storage(uri(tmp_path))) as pair:
        from_storage = 40 if close_store_s else 0
        assert (await served(pair, "r1", PROMPT))["l3"] == from_storage
        assert (await served(pair, "r2", FORKED))["l3"] == (20 if close_store_s else 0)


async def test_a_run_that_is_under_way_does_not_keep_the_engine_from_closing(make_pair: MakePair) -> None:
    hung = Hung("memory:?capacity=1MiB", "put_from")
    with hung:
        async with make_pair(storage=hung, write="back", close_deadline_s=0.2) as pair:
            await served(pair, "r1", PROMPT)
            draining = asyncio.ensure_future(pair.engine.drain(store_s=1e6))
            await hung.entered.wait()
        assert numbers(await draining) == (0, 0, 10, 0)


async def test_pages_of_an_embedder_are_stored_from_host_memory(make_pair: MakePair, tmp_path: Path) -> None:
    tokens = PROMPT[:22]
    async with make_pair(device="lent", storage=open_storage(uri(tmp_path)), write="back") as pair:
        await restore(pair, tokens=tokens)
        assert await pair.engine.offer(tokens, PAGES) == OfferedPages(written=5, present=0, declined=0)
        assert numbers(await pair.engine.drain(store_s=LIMIT_S)) == (5, 0, 0, 0)
    async with make_pair(device="lent", storage=open_storage(uri(tmp_path))) as pair:
        assert (await restore(pair, tokens=tokens)).sources == {"l1": 0, "l2": 0, "l3": 20, "transfer": 2}


async def test_the_status_server_stores_for_a_server_that_goes_on_serving(make_pair: MakePair, tmp_path: Path) -> None:
    storage = open_storage(uri(tmp_path))
    async with make_pair(storage=storage, write="back", status_listen="127.0.0.1:0") as pair:
        await served(pair, "r1", PROMPT)
        address = pair.engine.status_address
        status, told = await ask(address, "POST", "/store", {"within_s": LIMIT_S})
        assert status == 200 and (told["stored"], told["left"], told["live"]) == (10, 0, [])
        assert (await ask(address, "GET", "/ready"))[0] == 200
        assert await served(pair, "r2", FORKED) == {"l1": 20, "l2": 0, "l3": 0, "transfer": 22}
        for body in ({}, {"within_s": 0}, {"within_s": 1e9}, {"within_s": "soon"}):
            assert (await ask(address, "POST", "/store", body))[0] == 400
        assert (await ask(address, "GET", "/store"))[0] == 405


@pytest.mark.parametrize("store_s", [0.0, LIMIT_S])
async def test_a_rolling_restart_under_traffic_by_drain_alone_keeps_the_hit_rate(
    make_pair: MakePair, tmp_path: Path, store_s: float
) -> None:
    """Eight users talk all the time, half of them at each worker; those of one that restarts wait for its successor."""
    tokens, received = {False: 0, True: 0}, {False: 0, True: 0}
    turns, is_over, turned = 0, False, asyncio.Event()

    async with AsyncExitStack() as workers:
        stacks = [await workers.enter_async_context(AsyncExitStack()) for _ in range(2)]

        async def start(number: int):  # type: ignore[no-untyped-def]  # A Pair.
            # Nothing is written to storage but by the drain.
            storage = open_storage(uri(tmp_path / str(number)))
            pools = {"device_pages": 1024, "host_pages": 1024, "prefill_pages": 1024}
            return await stacks[number].enter_async_context(make_pair(storage=storage, write="back", **pools))

        pairs: list = [await start(0), await start(1)]
        is_back = [asyncio.Event(), asyncio.Event()]

        async def talk(number: int) -> None:
            nonlocal turns
            dialog, served_by = Dialog(number), pairs[number % 2]
            while not is_over:
                if len(dialog.tokens) > 400 and served_by is pairs[number % 2]:
                    dialog = Dialog(number + USERS * turns)
                prompt, pair = dialog.tokens, pairs[number % 2]
                try:
                    sources = await speak(pair, dialog)
                except EngineClosed as refused:
                    assert "drains" in str(refused)
                    await is_back[number % 2].wait()
                    continue
                is_first, served_by = pair is not served_by, pair
                tokens[is_first] += len(prompt)
                received[is_first] += sources["transfer"]
                turns += 1
                turned.set()

        async def hear(count: int) -> None:
            last = turns + count
            while turns < last:
                turned.clear()
                await turned.wait()

        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as users:
            for number in range(USERS):
                users.create_task(talk(number))
            await hear(10 * USERS)
            for number in range(2):
                outcome = await pairs[number].engine.drain(store_s=store_s)
                assert outcome.live == [] and outcome.left == 0
                assert pairs[number].core()["pages_stored"] == outcome.stored
                await stacks[number].aclose()
                pairs[number] = await start(number)
                is_back[number].set()
                await hear(4 * USERS)
            is_over = True
    # Of the first prompt of each user at the successor, beside all others.
    after, before = (1 - received[is_first] / tokens[is_first] for is_first in (True, False))
    if store_s:
        assert after >= 0.8 * before > 0.4, (before, after)
    else:
        assert after < 0.1, (before, after)
