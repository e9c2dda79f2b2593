"""Decode workers as processes that hand their caches over to each other over NIXL: every byte is checked."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.faults.test_peers_over_nixl import PAGES, TOKENS, served, settle, sharing
from tests.support.fault_process import Drain, Failed, FaultProcess, Handed, Served, Turn
from tests.support.waits import LIMIT_S

pytestmark = [pytest.mark.nixl, pytest.mark.slow]

PAGE = 16
USERS, WORKERS = 6, 3
OPTIONS = {"cache_peers": sharing(allow=("127.0.0.1:*",)), "default_deadline_s": 120.0}


async def test_a_successor_that_is_killed_ends_the_drain_and_the_old_worker_holds_nothing(
    spawn_decode: Any, prefill_over_nixl: Any, prompt: Any
) -> None:
    async with asyncio.timeout(LIMIT_S), prefill_over_nixl() as prefill:
        old, new = await asyncio.gather(
            *(spawn_decode("memory:", name=f"decode-{number}", **OPTIONS) for number in range(2))
        )
        for number in range(2):
            await served(old, f"r{number}", prompt(number, PAGES), prefill)
        await settle(old)
        new.signal(signal.SIGSTOP)
        await new.wait_stopped()
        draining = asyncio.ensure_future(old.ask(Drain(to=new.ready.address, hand_s=LIMIT_S), Handed))
        # Whether it dies before it has the link, or in it.
        new.signal(signal.SIGKILL)
        outcome = await draining
        assert (outcome.handed, outcome.left) == (0, 2 * PAGES) and outcome.cause
        counts = await old.counts()
        assert counts["host_protected"] == counts["shared_pages"] == 0


async def test_a_worker_that_is_killed_amid_its_drain_leaves_whole_prompts_at_the_successor(
    spawn_decode: Any, prefill_over_nixl: Any, prompt: Any
) -> None:
    async with asyncio.timeout(LIMIT_S), prefill_over_nixl() as prefill:
        old, new, third = await asyncio.gather(
            *(spawn_decode("memory:", name=f"decode-{number}", **OPTIONS) for number in range(3))
        )
        tokens = [prompt(number, PAGES) for number in range(3)]
        for number in range(3):
            await served(old, f"r{number}", tokens[number], prefill)
        await settle(old)
        # Of the hottest one, and then it dies with the others under way or not.
        old.line.say(Drain(to=new.ready.address, hand_s=LIMIT_S))
        while not (await new.counts())["pages_taken"]:  # noqa: ASYNC110  # Only the counts of the child tell it.
            await asyncio.sleep(0.005)
        old.signal(signal.SIGKILL)
        await old.wait_ended()
        await settle(new)
        counts = await new.counts()
        assert counts["host_owned"] == counts["peer_pages_in_flight"] == 0
        found = 0
        for number in range(3):
            # `served` verifies every byte.
            found += (await served(new, f"s{number}", tokens[number], prefill))["l2"]
        assert found >= TOKENS
        # It hands on what it has.
        await settle(new)
        outcome = await new.ask(Drain(to=third.ready.address, hand_s=LIMIT_S), Handed)
        assert (outcome.handed, outcome.left) == (3 * PAGES, 0), outcome


@dataclass
class Slot:
    """The place of one worker, which its successor takes."""

    child: FaultProcess
    generation: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """One turn of a worker at a time."""


@dataclass
class Counted:
    """Tokens of prompts, and those that prefill sent."""

    tokens: int = 0
    received: int = 0

    @property
    def hit_rate(self) -> float:
        return 1 - self.received / self.tokens


async def test_a_rolling_restart_of_all_workers_by_drain_alone_keeps_the_hit_rate(
    spawn_decode: Any, prefill_over_nixl: Any, prompt: Callable[[int, int], list[int]]
) -> None:
    """Each worker hands over to a process that was started beside it. No request fails: what a draining worker refuses
    goes to its successor, as a router sends it.
    """
    before, first = Counted(), Counted()
    turns, is_over, turned = 0, False, asyncio.Event()
    moved: set[int] = set()
    """Users that a successor has served."""

    # Twice the time of one restore: many turns on a busy machine.
    async with asyncio.timeout(2 * LIMIT_S), prefill_over_nixl(num_pages=512) as prefill:

        async def start(number: int, generation: int) -> FaultProcess:
            child: FaultProcess = await spawn_decode("memory:", name=f"decode-{number}-{generation}", **OPTIONS)
            return child

        slots = [Slot(child) for child in await asyncio.gather(*(start(number, 0) for number in range(WORKERS)))]
        is_back = [asyncio.Event() for _ in slots]

        async def talk(user: int) -> None:
            nonlocal turns
            slot, generation, said = slots[user % WORKERS], 0, 0
            tokens, continues = prompt(500 * user, 6), False
            while not is_over:
                said += 1
                name = f"user-{user}-{said}"
                output = prompt(500 * user + 3 * said, 1)[: PAGE // 2]
                turn = Turn(request_id=name, tokens=tokens, prefill=[prefill.address], output=output)
                async with slot.lock:
                    at, child = slot.generation, slot.child
                    answer = await child.ask(turn, Served | Failed)  # type: ignore[type-var]  # Either of both.
                if isinstance(answer, Failed):
                    assert "drains" in answer.cause, answer
                    await is_back[user % WORKERS].wait()
                    continue
                assert answer.request_id == name and answer.wrong == []
                is_first = at != generation
                counted = first if is_first else before
                moved.update([user] if is_first else [])
                # No worker has a new prompt, before a drain or behind it.
                if continues:
                    counted.tokens += len(tokens)
                    counted.received += answer.sources["transfer"]
                generation = at
                turns += 1
                turned.set()
                tokens = [*tokens, *output, *prompt(500 * user + 3 * said + 1, 1)[: PAGE // 2]]
                continues = len(tokens) <= 13 * PAGE
                if not continues:
                    tokens = prompt(500 * user + 3 * said + 2, 6)

        async def hear(count: int) -> None:
            last = turns + count
            while turns < last:
                turned.clear()
                await turned.wait()

        async with asyncio.TaskGroup() as users:
            for user in range(USERS):
                users.create_task(talk(user))
            await hear(4 * USERS)
            for number, slot in enumerate(slots):
                new = await start(number, slot.generation + 1)
                outcome = await slot.child.ask(Drain(to=new.ready.address, hand_s=LIMIT_S), Handed)
                # A page or two may find no room while the new worker restores: users are served all the time.
                assert not outcome.live and outcome.left * 10 <= outcome.handed, outcome
                async with slot.lock:
                    old, slot.child = slot.child, new
                    slot.generation += 1
                is_back[number].set()
                old.signal(signal.SIGINT)
                await old.wait_ended()
                while not moved.issuperset(range(number, USERS, WORKERS)):
                    await hear(1)
            is_over = True
    assert first.hit_rate >= 0.8 * before.hit_rate > 0.4, (before, first)
