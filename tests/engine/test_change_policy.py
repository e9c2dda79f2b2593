"""Policies changed while serving, and the breaker, on a real engine: no request fails, and the journal replays."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from tests.support.inside import calls_of, core_of
from tests.support.waits import expected
from tidekv import InvalidConfig, Replayer, open_storage
from tidekv.states.errors import StorageFailed
from tidekv.states.storage_policy import POLICY_FIELDS

PROMPT = list(range(100, 122))  # Five pages of four tokens and a tail of two.


async def test_policies_change_while_requests_run(make_pair, tmp_path: Path) -> None:
    journal = tmp_path / "run.journal"
    changes: list[dict[str, object]] = [
        {"prefetch": "best_effort"},
        {"fetch_pages_in_flight_max": 2},
        {"prefetch": "wait_complete", "fetch_pages_per_s": 100.0},
        {"write": "selective", "write_hits_min": 2},
        {"store_wait_s": 0.0, "fetch_pages_in_flight_max": 0, "renew_s": 0.01},
        {"write": "through", "write_tokens_min": 16, "breaker_failures": 1},
        {"prefetch": "timeout", "prefetch_threshold_tokens": 8},
        {"write": "back", "write_back_ahead": 0.5},
        {"lookahead_pages_max": 16, "fetch_deadline_share": 0.5},
        {"prefetch_base_s": 0.5, "prefetch_per_ki_token_s": 0.5, "prefetch_threshold_tokens": 0},
        {"store_wait_s": 0.01, "store_fetch_s_max": 0.001, "store_host_share": 0.25},
        {"breaker_failures": 4, "breaker_backoff_s": 0.5, "breaker_backoff_max_s": 1.0},
        {"lookahead_pages_max": 0, "fetch_deadline_share": 0.0, "write_back_ahead": 1.0},
    ]
    assert {name for change in changes for name in change} == set(POLICY_FIELDS)
    storage = open_storage("memory:?capacity=1MiB")
    async with make_pair(device_pages=32, host_pages=32, storage=storage, journal_path=str(journal)) as pair:
        changed = 0

        async def converse(number: int) -> None:
            nonlocal changed
            tokens = [number] * 7 + [number + 1] * 5
            for turn in range(8):
                ready = await pair.restore(f"c{number}t{turn}", tokens)
                output = [number, turn, ready.first_token % 97]
                await pair.finish(ready, tokens, output)
                tokens = [*tokens, *output, turn]
                pair.engine.change_policy(**changes[changed % len(changes)])
                changed += 1
                if turn % 3 == 2:
                    await pair.engine.flush()

        async with asyncio.TaskGroup() as group:
            for number in range(6):
                group.create_task(converse(number))
        assert changed == 48
        await pair.assert_nothing_held()
    assert Replayer(journal).run().complete


async def test_a_policy_is_told_and_a_wrong_one_changes_nothing(make_pair) -> None:
    async with make_pair(prefetch="best_effort", write_tokens_min=9) as pair:
        assert (pair.engine.policy.prefetch, pair.engine.policy.write_tokens_min) == ("best_effort", 9)
        with pytest.raises(InvalidConfig, match="no policy 'fetch'"):
            pair.engine.change_policy(fetch=1)
        with pytest.raises(InvalidConfig, match="write"):
            pair.engine.change_policy(write="sometimes", prefetch="timeout")
        assert pair.engine.policy.prefetch == "best_effort"
        assert pair.engine.change_policy(write="selective").write == "selective"
        assert pair.engine.policy.write_tokens_min == 9
    with pytest.raises(InvalidConfig, match="best_effort"):
        async with make_pair(prefetch="sometimes"):
            pass


async def test_write_back_writes_what_is_evicted_and_it_comes_back_from_every_tier(make_pair, tmp_path: Path) -> None:
    """No request lives when its pages are put: their keys are those that a request with the same prompt asks for."""
    journal = tmp_path / "run.journal"
    storage = open_storage("memory:?capacity=4MiB")
    async with make_pair(
        device_pages=24,
        host_pages=24,
        storage=storage,
        journal_path=str(journal),
        namespace="tenant",
        write="back",
        write_back_ahead=1.0,
    ) as pair:
        prompts = [[number] * 12 + [number + 50] * 10 for number in range(12)]
        for number, prompt in enumerate(prompts):
            await pair.finish(await pair.restore(f"w{number}", prompt), prompt, [1])
            await pair.engine.wait_settled()
        core = pair.core()
        assert core["pages_backed_up"] > 24
        assert core["pages_stored"] > 24
        assert not core["l1_pages_dropped"]
        assert not core["l2_pages_dropped"]
        sources: Counter[str] = Counter()
        for number, prompt in enumerate(prompts):
            ready = await pair.restore(f"r{number}", prompt)
            sources.update(ready.sources)
            await pair.finish(ready, prompt, [1])
            await pair.engine.wait_settled()
        # All full pages of all prompts came from some cache.
        assert sources["transfer"] == 12 * 2
        assert sources["l3"] > 0
        await pair.assert_nothing_held()
    assert Replayer(journal).run().complete


async def test_who_waits_for_memory_has_its_pages_fetched_ahead(make_pair, tmp_path: Path) -> None:
    journal = tmp_path / "run.journal"
    storage = open_storage("memory:?capacity=4MiB")
    async with make_pair(
        device_pages=24, host_pages=24, storage=storage, journal_path=str(journal), lookahead_pages_max=16
    ) as pair:
        await pair.finish(await pair.restore("past", PROMPT), PROMPT, [1])
        await pair.engine.wait_settled()
        await pair.engine.flush()
        big = await pair.restore("big", [7] * 84)
        waiting = asyncio.create_task(pair.restore("again", PROMPT))
        await calls_of(pair.engine).wait_until(lambda: core_of(pair.engine).state.host.cached == 5)
        assert not waiting.done()
        await pair.engine.abort("big")
        again = await waiting
        assert again.sources == {"l1": 0, "l2": 0, "l3": 20, "transfer": 2}
        assert len(big.pages) == 21
        await pair.finish(again, PROMPT, [1])
        # A request that is cancelled while it waits leaves nothing behind.
        await pair.engine.wait_settled()
        await pair.engine.flush()
        await pair.restore("big2", [7] * 84)
        waiting = asyncio.create_task(pair.restore("gone", PROMPT))
        await calls_of(pair.engine).wait_until(lambda: core_of(pair.engine).state.host.cached == 5)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await pair.engine.abort("big2")
        await pair.assert_nothing_held()
    assert Replayer(journal).run().complete


class Failing:
    """A memory engine that fails while `broken` is set, and counts its calls."""

    def __init__(self) -> None:
        self._storage = open_storage("memory:?capacity=1MiB")
        self.broken = True
        self.asked = 0
        self.probed = asyncio.Event()

    def __getattr__(self, name: str) -> object:
        return getattr(self._storage, name)

    async def exists(self, keys: list[bytes], *, timeout_s: float) -> list[bool]:
        self.asked += 1
        self._check()
        return await self._storage.exists(keys, timeout_s=timeout_s)

    async def put_from(self, keys: list[bytes], pages: object, *, timeout_s: float) -> list[bool]:
        self.asked += 1
        self._check()
        return await self._storage.put_from(keys, pages, timeout_s=timeout_s)

    async def probe(self) -> None:
        self.probed.set()
        self._check()

    def _check(self) -> None:
        if self.broken:
            raise StorageFailed("it is gone")


async def test_failing_storage_is_left_alone_until_a_probe_succeeds(make_pair) -> None:
    storage = Failing()
    async with make_pair(
        storage=storage, breaker_failures=3, breaker_backoff_s=0.01, breaker_backoff_max_s=0.02
    ) as pair:
        for number in range(6):
            prompt = [number] * 12
            await pair.finish(await pair.restore(f"r{number}", prompt), prompt, [1])
            await pair.engine.wait_settled()
        # The third query that fails, beside two writes.
        assert storage.asked == 5
        assert pair.core()["l3_breaker_opened"] == 1
        await pair.assert_nothing_held()
        async with expected("a probe of storage"):
            await storage.probed.wait()
        storage.broken = False
        storage.probed.clear()
        async with expected("a probe that closes the breaker"):
            await calls_of(pair.engine).wait_until(lambda: core_of(pair.engine).storage.is_usable)
        ready = await pair.restore("back", PROMPT)
        await pair.finish(ready, PROMPT, [1])
        await pair.engine.wait_settled()
        await pair.engine.flush()
        again = await pair.restore("again", PROMPT)
        assert again.sources["l3"] == 20
        await pair.finish(again, PROMPT, [1])
        await pair.assert_nothing_held()
