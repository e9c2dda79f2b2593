"""The decode engine end to end on loopback: four sources, every byte verified, nothing held at the end."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.inside import calls_of
from tidekv import EngineClosed, InvalidRequest, OutOfPages, RequestFailed, open_storage

PROMPT = list(range(100, 122))  # Five pages of four tokens and a tail of two.


async def test_first_restore_comes_whole_from_prefill(make_pair) -> None:
    async with make_pair() as pair:
        ready = await pair.restore("r1", PROMPT)
        assert ready.sources == {"l1": 0, "l2": 0, "l3": 0, "transfer": 22}
        assert len(ready.pages) == 6
        await pair.finish(ready, PROMPT, [1, 2, 3])
        await pair.assert_nothing_held()


async def test_second_turn_is_served_from_device_and_the_delta(make_pair) -> None:
    async with make_pair() as pair:
        ready = await pair.restore("r1", PROMPT)
        await pair.finish(ready, PROMPT, [1, 2, 3])
        sent = pair.peer.statistics()["pages_sent"]
        # 22 tokens and 2 of the 3 output tokens have KV: six full pages.
        again = await pair.restore("r2", [*PROMPT, 1, 2, 3, 50, 51, 52])
        assert again.sources == {"l1": 24, "l2": 0, "l3": 0, "transfer": 4}
        assert pair.peer.statistics()["pages_sent"] - sent == 1
        await pair.finish(again, [*PROMPT, 1, 2, 3, 50, 51, 52], [9])
        await pair.assert_nothing_held()


async def test_full_hit_moves_no_bytes_and_still_brings_the_first_token(make_pair) -> None:
    prompt = PROMPT[:20]
    async with make_pair() as pair:
        first = await pair.restore("r1", prompt)
        await pair.finish(first, prompt, [7])
        sent = pair.peer.statistics()["bytes_sent"]
        hit = await pair.restore("r2", prompt)
        assert hit.sources == {"l1": 20, "l2": 0, "l3": 0, "transfer": 0}
        assert hit.first_token == first.first_token
        assert pair.peer.statistics()["bytes_sent"] == sent
        await pair.finish(hit, prompt, [7])
        await pair.assert_nothing_held()


async def test_host_copies_serve_after_the_device_forgot(make_pair) -> None:
    async with make_pair() as pair:
        ready = await pair.restore("r1", PROMPT)
        await pair.finish(ready, PROMPT, [1])
        await pair.engine.wait_settled()
        assert (await pair.engine.flush(("l1",)))["dropped"] == {"l1": 5}
        again = await pair.restore("r2", PROMPT)
        assert again.sources == {"l1": 0, "l2": 20, "l3": 0, "transfer": 2}
        await pair.finish(again, PROMPT, [1])
        await pair.assert_nothing_held()


async def test_storage_serves_after_device_and_host_forgot(make_pair) -> None:
    storage = open_storage("memory:?capacity=64MiB")
    async with make_pair(storage=storage, fetch_run_pages=2) as pair:
        ready = await pair.restore("r1", PROMPT)
        await pair.finish(ready, PROMPT, [1])
        await pair.engine.wait_settled()
        await pair.engine.flush()
        again = await pair.restore("r2", PROMPT)
        assert again.sources == {"l1": 0, "l2": 0, "l3": 20, "transfer": 2}
        await pair.finish(again, PROMPT, [1])
        await pair.assert_nothing_held()


async def test_grow_hands_out_pages_as_they_fill_and_refuses_when_there_are_none(make_pair) -> None:
    async with make_pair(device_pages=8, host_pages=0) as pair:
        ready = await pair.restore("r1", PROMPT[:8])
        assert pair.engine.grow(ready, 0) == []
        new = pair.engine.grow(ready, 1)
        assert len(new) == 1
        assert pair.engine.grow(ready, 3) == []
        assert len(pair.engine.grow(ready, 16)) == 4
        assert len(ready.pages) == 7
        before = ready.length
        with pytest.raises(OutOfPages):
            pair.engine.grow(ready, 100)
        assert ready.length == before
        assert len(set(ready.pages.tolist())) == 7
        await pair.engine.finish(ready, [1])
        await pair.assert_nothing_held()


async def test_retract_and_resume_bring_the_same_bytes(make_pair) -> None:
    async with make_pair() as pair:
        ready = await pair.restore("r1", PROMPT)
        output = [1, 2, 3, 4, 5, 6]
        everything = [*PROMPT, *output]
        pair.engine.grow(ready, len(output) - 1)
        from tidekv.backends.keys.chain import pack_tokens
        from tidekv.engine.synthetic.kv import prompt_digests

        digests = prompt_digests(pack_tokens(everything[:-1]), 4)
        pair.kv.fill(ready.pages[5 : len(digests)].tolist(), digests[5:])
        retracted = await pair.engine.retract(ready, output)
        assert retracted.held_tokens == 24
        await pair.engine.flush()
        resumed = await pair.engine.resume(retracted)
        assert pair.wrong_pages(resumed, everything) == []
        assert resumed.sources == {"l1": 0, "l2": 24, "l3": 0, "transfer": 4}
        await pair.engine.finish(resumed, [8])
        await pair.assert_nothing_held()


async def test_abort_and_cancel_end_the_request_and_hold_nothing(make_pair) -> None:
    async with make_pair() as pair:
        ready = await pair.restore("r1", PROMPT)
        assert await pair.engine.abort("r1")
        assert not await pair.engine.abort("r1")
        with pytest.raises(InvalidRequest, match="given back"):
            pair.engine.grow(ready, 1)
        waiting = asyncio.create_task(pair.engine.restore(pair.request("r2", PROMPT)))
        await asyncio.sleep(0)
        assert await pair.engine.abort("r2")
        with pytest.raises(RequestFailed, match="aborted"):
            await waiting
        cancelled = asyncio.create_task(pair.engine.restore(pair.request("r3", PROMPT)))
        await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        await pair.assert_nothing_held()


async def test_many_requests_at_once_through_a_small_device(make_pair) -> None:
    storage = open_storage("memory:?capacity=64MiB")
    async with make_pair(device_pages=24, host_pages=20, storage=storage) as pair:

        async def converse(number: int) -> None:
            tokens = [number % 3] * 7 + [number] * 5
            for turn in range(4):
                ready = await pair.restore(f"c{number}t{turn}", tokens)
                output = [number, turn, ready.first_token % 97]
                await pair.finish(ready, tokens, output)
                tokens = [*tokens, *output, turn]

        async with asyncio.TaskGroup() as group:
            for number in range(12):
                group.create_task(converse(number))
        await pair.assert_nothing_held()


@pytest.mark.parametrize(
    ("tokens", "words"),
    [([], "empty"), ([1, -2], "-2"), ([1, 2**32], str(2**32)), (list(range(4 * 64 + 1)), "pool has 64")],
)
async def test_bad_prompts_are_refused_by_name_and_change_nothing(make_pair, tokens: list[int], words: str) -> None:
    async with make_pair() as pair:
        before = pair.core()
        with pytest.raises(InvalidRequest, match=words):
            await pair.engine.restore(pair.request("bad", tokens))
        assert pair.core() == before


async def test_a_live_id_is_refused_a_second_time(make_pair) -> None:
    async with make_pair() as pair:
        ready = await pair.restore("r1", PROMPT)
        with pytest.raises(InvalidRequest, match="'r1' is live"):
            await pair.engine.restore(pair.request("r1", PROMPT))
        await pair.engine.finish(ready)
        await pair.assert_nothing_held()


async def test_drain_waits_for_live_requests_and_takes_no_new_ones(make_pair) -> None:
    async with make_pair() as pair:
        ready = await pair.restore("r1", PROMPT)
        assert (await pair.engine.drain(timeout_s=0.01)).live == ["r1"]
        with pytest.raises(EngineClosed, match="drains"):
            await pair.engine.restore(pair.request("r2", PROMPT))
        draining = asyncio.create_task(pair.engine.drain())
        await pair.engine.finish(ready, [1])
        assert (await draining).live == []


async def test_probe_prefix_tells_what_is_cached_and_changes_nothing(make_pair) -> None:
    async with make_pair() as pair:
        ready = await pair.restore("r1", PROMPT)
        await pair.finish(ready, PROMPT, [1])
        await pair.engine.wait_settled()
        assert pair.engine.probe_prefix(PROMPT) == {"l1": 20, "l2": 0}
        assert pair.engine.probe_prefix(PROMPT, namespace="other") == {"l1": 0, "l2": 0}
        await pair.engine.flush(("l1",))
        assert pair.engine.probe_prefix(PROMPT[:13]) == {"l1": 0, "l2": 12}
        await pair.assert_nothing_held()


async def test_closing_fails_live_requests_and_leaves_nothing_running(make_pair) -> None:
    before = {task.get_name() for task in asyncio.all_tasks()}
    held = asyncio.Event()

    async def hold(*_: object) -> None:
        await held.wait()

    async with make_pair() as pair:
        pair.network.before_write = hold
        waiting = asyncio.create_task(pair.engine.restore(pair.request("r1", PROMPT)))
        await calls_of(pair.engine).wait_until(lambda: pair.core()["requests_transfer"] == 1)
        asyncio.get_running_loop().call_later(0.05, held.set)
    with pytest.raises(RequestFailed, match="engine closed"):
        await waiting
    assert {task.get_name() for task in asyncio.all_tasks()} == before


async def test_a_request_that_is_aborted_just_when_it_is_ready_is_not_handed_out(make_pair, monkeypatch) -> None:
    """Its pages may be another request's before its caller runs: no caller must ever see them as its own."""
    async with make_pair() as pair:
        pair.abort_when_ready(monkeypatch, before_its_caller=True)
        with pytest.raises(RequestFailed, match="just when it had become READY") as failed:
            await pair.engine.restore(pair.request("r1", PROMPT))
        assert failed.value.cause == "aborted"
        await pair.assert_nothing_held()
