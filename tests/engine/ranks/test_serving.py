"""Engines that decide as one: what one rank cannot do, no rank does, and all keep the same pages."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support.inside import core_of, runtime_of, serve_rooms
from tests.support.waits import LIMIT_S, expected
from tidekv import Replayer
from tidekv.engine.decode import driver
from tidekv.states.errors import (
    InvalidRequest,
    PrefillCause,
    RequestFailed,
)
from tidekv.states.events import RequestArrived
from tidekv.states.ranks.agreement import Decision
from tidekv.states.types import PageIds


@pytest.mark.parametrize("ranks", [1, 2, 3])
async def test_ranks_serve_through_every_tier_with_equal_pages(world, ranks: int) -> None:
    async with world.instance(ranks) as members:
        readies = await world.restore_all(members, "first")
        assert readies[0].sources["transfer"] == len(world.PROMPT)
        await world.finish_all(members, readies)
        await world.settle(members)
        readies = await world.restore_all(members, "l1")
        assert readies[0].sources["l1"] == world.FULL_PAGES * world.PAGE_SIZE
        await world.finish_all(members, readies)
        await members[0].engine.flush(("l1",))
        readies = await world.restore_all(members, "l2")
        assert readies[0].sources["l2"] == world.FULL_PAGES * world.PAGE_SIZE
        await world.finish_all(members, readies)
        await world.settle(members)
        await members[0].engine.flush(("l1", "l2"))
        readies = await world.restore_all(members, "l3")
        assert readies[0].sources["l3"] == world.FULL_PAGES * world.PAGE_SIZE
        await world.finish_all(members, readies)
        await world.settle(members)


async def test_all_ranks_act_on_the_hints_of_the_first_one_and_others_refuse_them(world) -> None:
    def envelope(kind: str, **payload: object) -> dict[str, object]:
        payload |= {"token_ids": list(world.PROMPT)}
        action = {"action_id": "a", "action_type": kind, "action_version": "1.0", "payload": payload}
        return {"protocol_version": "0.1", "message_id": "m", "actions": [action]}

    full = world.FULL_PAGES * world.PAGE_SIZE
    async with world.instance(2) as members:
        await world.finish_all(members, await world.restore_all(members, "first"))
        await world.settle(members)
        (pinned,) = await members[0].engine.hint(envelope("kv.pin", ttl_ms=3_600_000))
        assert (pinned.outcome, pinned.tokens) == ("accepted", full)
        with pytest.raises(InvalidRequest, match="call them on rank 0 only"):
            await members[1].engine.hint(envelope("kv.unpin"))
        await world.settle(members)
        assert [core_of(member.engine).hints.pinned_pages for member in members] == [world.FULL_PAGES] * 2
        (demoted,) = await members[0].engine.hint(envelope("kv.demote"))
        assert demoted.outcome == "accepted"
        readies = await world.restore_all(members, "demoted")
        assert readies[0].sources["l2"] == full
        await world.finish_all(members, readies)
        (unpinned,) = await members[0].engine.hint(envelope("kv.unpin"))
        assert unpinned.outcome == "accepted"
        await world.settle(members)


async def test_stages_restore_their_own_layers_from_every_tier_and_decide_as_one(world) -> None:
    async with world.instance(2, stages=2) as members:
        await world.finish_all(members, await world.restore_all(members, "transfer"))
        await world.settle(members)
        await members[0].engine.flush(("l1",))
        members[1].storage.fault = "nothing"
        await world.finish_all(members, await world.restore_all(members, "l2"))
        await world.settle(members)
        await members[0].engine.flush()
        # Storage of the second stage lacks its pages: the first stage does not use its own either.
        readies = await world.restore_all(members, "cut")
        assert readies[0].sources["transfer"] == len(world.PROMPT)
        await world.finish_all(members, readies)
        await world.settle(members)


async def test_callers_that_submit_in_different_orders_are_served_in_the_leaders(world) -> None:
    async with world.instance(2) as members:
        prompts = {f"r{number}": [number * 50 + at for at in range(30)] for number in range(12)}
        names = list(prompts)

        async def serve(member, order: list[str]) -> dict[str, list[int]]:
            async def one(name: str) -> tuple[str, list[int]]:
                ready = await member.restore(name, prompts[name])
                pages = ready.pages.tolist()
                await member.engine.finish(ready)
                return name, pages

            return dict(await asyncio.gather(*(one(name) for name in order)))

        first, second = await asyncio.gather(serve(members[0], names), serve(members[1], names[::-1]))
        assert first == second
        await world.settle(members)


@pytest.mark.parametrize("fault", ["nothing", "error"])
@pytest.mark.parametrize("at", [0, 1])
async def test_storage_that_fails_on_one_rank_cuts_the_plan_on_all(world, fault: str, at: int) -> None:
    async with world.instance(2) as members:
        await world.finish_all(members, await world.restore_all(members, "warm"))
        await world.settle(members)
        await members[0].engine.flush(("l1", "l2"))
        members[at].storage.fault = fault
        readies = await world.restore_all(members, "cut")
        assert readies[0].sources["l3"] == 0
        assert readies[0].sources["transfer"] == len(world.PROMPT)
        await world.finish_all(members, readies)
        await world.settle(members)


async def test_a_copy_that_cannot_be_started_on_one_rank_cuts_the_plan_on_all(
    world, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world.instance(2) as members:
        await world.finish_all(members, await world.restore_all(members, "warm"))
        await world.settle(members)
        await members[0].engine.flush(("l1",))

        def refuse(host_pages: PageIds, device_pages: PageIds) -> None:
            raise MemoryError("no staging memory on this rank")

        copier = runtime_of(members[1].engine).copier
        assert copier is not None
        monkeypatch.setattr(copier, "to_device", refuse)
        readies = await world.restore_all(members, "cut")
        assert readies[0].sources["l2"] == 0
        assert readies[0].sources["transfer"] == len(world.PROMPT)
        await world.finish_all(members, readies)
        await world.settle(members)


async def test_the_journal_of_each_rank_holds_the_same_events_and_replays(world, tmp_path: Path) -> None:
    async with world.instance(2, journals=str(tmp_path)) as members:
        await world.finish_all(members, await world.restore_all(members, "warm"))
        await world.settle(members)
        await members[0].engine.flush(("l1",))
        members[1].storage.fault = "nothing"
        await world.finish_all(members, await world.restore_all(members, "again"))
        await world.settle(members)
        books = members[0].books()
    for rank in range(2):
        replayer = Replayer(tmp_path / f"rank-{rank}.jsonl")
        assert replayer.run().complete
        assert list(replayer.core.state.device.free_pages) == books[1]


async def test_a_cancel_between_the_vote_on_an_arrival_and_its_step_ends_the_request_on_all(
    world, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The core takes one event in each turn of the loop: the second arrival still waits for it when its caller is
    # cancelled.
    monkeypatch.setattr(driver, "TURN_S_MAX", -1.0)
    async with world.instance(2) as members:
        ranks = runtime_of(members[1].engine).ranks
        follow = ranks._follow
        calls = [[asyncio.create_task(member.restore(name, world.PROMPT)) for name in "ab"] for member in members]

        def follow_and_cancel(decision: Decision) -> None:
            follow(decision)
            if sum(isinstance(event, RequestArrived) for event in decision.events) == 2:
                calls[1][1].cancel()

        ranks._follow = follow_and_cancel
        with pytest.raises(asyncio.CancelledError):
            await calls[1][1]
        async with expected("the end of the request on rank 0", limit_s=30.0):
            with pytest.raises(RequestFailed, match="cancelled by the caller"):
                await calls[0][1]
        await world.finish_all(members, [await calls[0][0], await calls[1][0]])
        await world.settle(members)


async def test_an_abort_on_one_rank_ends_the_request_on_all(world) -> None:
    async with world.instance(2) as members:
        readies = await world.restore_all(members, "a")
        await members[1].engine.abort("a")
        with pytest.raises((RequestFailed, InvalidRequest)):
            await members[0].engine.finish(readies[0])
        await world.settle(members)


async def test_only_the_leader_flushes_and_changes_policies(world) -> None:
    async with world.instance(2) as members:
        with pytest.raises(InvalidRequest, match="call them on rank 0"):
            await members[1].engine.flush()
        with pytest.raises(InvalidRequest, match="call them on rank 0"):
            members[1].engine.change_policy(breaker_failures=3)
        members[0].engine.change_policy(breaker_failures=3)
        await world.finish_all(members, await world.restore_all(members, "a"))
        await world.settle(members)
        assert [member.engine.policy.breaker_failures for member in members] == [3, 3]


async def test_the_drain_of_the_leader_stores_for_all_ranks(world) -> None:
    async with world.instance(2) as members:
        members[0].engine.change_policy(write="back")
        await world.finish_all(members, await world.restore_all(members, "a"))
        await world.settle(members)
        assert [member.storage.statistics().pages for member in members] == [0, 0]
        with pytest.raises(InvalidRequest, match="call them on rank 0"):
            await members[1].engine.drain(store_s=LIMIT_S)
        outcome = await members[0].engine.drain(store_s=LIMIT_S)
        assert outcome.stored > 0 == outcome.left
        assert [member.storage.statistics().pages for member in members] == [outcome.stored] * 2
        await world.settle(members)


async def test_storage_is_used_while_all_ranks_have_one(world) -> None:
    async with world.instance(2) as members:
        await world.finish_all(members, await world.restore_all(members, "warm"))
        await world.settle(members)
        await members[0].engine.flush()
        await members[1].engine.detach_storage()
        readies = await world.restore_all(members, "without")
        assert readies[0].sources["l3"] == 0
        await world.finish_all(members, readies)
        await members[1].engine.attach_storage("memory:?capacity=64MiB")
        await world.settle(members)
        assert all(core_of(member.engine).state.storage_available for member in members)


async def test_what_one_prefill_rank_raises_is_the_cause_on_all_ranks_and_its_words_are_kept(world) -> None:
    async with world.instance(2) as members:

        async def bug(room: object) -> None:
            raise ZeroDivisionError("no such head")

        serve_rooms(members[1].peer, bug)
        failed = await asyncio.gather(
            *(member.restore("r1", world.PROMPT) for member in members), return_exceptions=True
        )
        assert [type(end) for end in failed] == [RequestFailed] * 2
        assert {end.cause for end in failed} == {PrefillCause.RAISED}
        assert all("failed on rank" in end.detail for end in failed)
        # That prefill rank notifies both decode ranks; those it reached before the vote report its message.
        assert any("on this rank: prefill raised: ZeroDivisionError: no such head" in end.detail for end in failed)
        await world.settle(members)
