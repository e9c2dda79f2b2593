"""Host engines of several ranks lend device pages, each its own: all of them get the same part of each prompt."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.inside import core_of, runtime_of
from tidekv import DecodeRequest, OfferedPages, Replayer, RequestFailed
from tidekv.backends.keys.chain import pack_tokens
from tidekv.engine.synthetic.kv import prompt_digests

OTHERS = [[50, 3, 41, 7, 19, 28, 11, 60, 2, 33, 9], [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], [*range(20, 31)]]
"""Pages of the prompt by rank: none of them has to be the same."""


async def restore(world: Any, member: Any, request_id: str, have_tokens: int = 0, **options: Any) -> Any:
    pages = OTHERS[member.number]
    options = {"prefill": ",".join(member.prefills), "send_prompt": True, **options}
    request = DecodeRequest(request_id=request_id, tokens=world.PROMPT, **options)
    restored = await member.engine.restore_into(request, pages, have_tokens)
    in_place = -(-restored.restored_tokens // world.PAGE_SIZE)
    digests = prompt_digests(pack_tokens(world.PROMPT), world.PAGE_SIZE)
    assert member.kv.verify(pages[:in_place], digests[:in_place]) == []
    return restored


async def restore_all(world: Any, members: list[Any], request_id: str, **options: Any) -> Any:
    restored = await asyncio.gather(*(restore(world, member, request_id, **options) for member in members))
    assert {(one.restored_tokens, str(one.sources), one.cause) for one in restored} == {
        (restored[0].restored_tokens, str(restored[0].sources), restored[0].cause)
    }
    return restored[0]


async def offer_all(world: Any, members: list[Any]) -> list[OfferedPages]:
    return await asyncio.gather(*(one.engine.offer(world.PROMPT, OTHERS[one.number]) for one in members))


def tokens(world: Any, **by_source: int) -> dict[str, int]:
    return {"l1": 0, "l2": 0, "l3": 0, "transfer": 0, **by_source}


@pytest.mark.parametrize("ranks", [1, 2, 3])
async def test_each_tier_fills_the_pages_that_each_rank_lends(world, ranks: int, tmp_path) -> None:
    async with world.instance(ranks, device="lent", journals=str(tmp_path)) as members:
        whole, full = len(world.PROMPT), world.FULL_PAGES * world.PAGE_SIZE
        assert (await restore_all(world, members, "transfer")).sources == tokens(world, transfer=whole)
        assert await offer_all(world, members) == [OfferedPages(world.FULL_PAGES, 0, 0)] * ranks
        assert (await restore_all(world, members, "l2")).sources == tokens(world, l2=full, transfer=whole - full)
        await world.settle(members)
        await members[0].engine.flush(("l2",))
        assert (await restore_all(world, members, "l3")).sources == tokens(world, l3=full, transfer=whole - full)
        # The host engines have the first pages themselves.
        held = await restore_all(world, members, "held", have_tokens=9)
        assert held.sources == tokens(world, l1=8, l2=full - 8, transfer=whole - full)
        await world.settle(members)
    for rank in range(ranks):
        assert Replayer(tmp_path / f"rank-{rank}.jsonl").run().complete


async def test_what_the_storage_of_one_rank_lacks_is_sent_to_all(world) -> None:
    async with world.instance(2, device="lent") as members:
        await restore_all(world, members, "first")
        await offer_all(world, members)
        await world.settle(members)
        await members[0].engine.flush(("l2",))
        members[1].storage.fault = "nothing"
        assert (await restore_all(world, members, "cut")).sources == tokens(world, transfer=len(world.PROMPT))
        await world.settle(members)


@pytest.mark.parametrize("fault", ["", "nothing"])
async def test_without_a_prefill_all_ranks_get_the_part_that_the_storage_of_all_has(world, fault: str) -> None:
    async with world.instance(2, device="lent") as members:
        await restore_all(world, members, "first")
        await offer_all(world, members)
        await world.settle(members)
        await members[0].engine.flush(("l2",))
        members[1].storage.fault = fault
        restored = await restore_all(world, members, "alone", prefill=())
        full = 0 if fault else world.FULL_PAGES * world.PAGE_SIZE
        assert (restored.sources, restored.is_complete) == (tokens(world, l3=full), False)
        assert restored.cause == "prefill failed"
        await world.settle(members)


async def test_a_deadline_leaves_the_same_part_on_all_ranks(world) -> None:
    async with world.instance(2, device="lent") as members:
        await restore_all(world, members, "first")
        await offer_all(world, members)
        members[1].gate.clear()
        restored = await restore_all(world, members, "late", deadline_s=0.5)
        assert restored.restored_tokens == world.FULL_PAGES * world.PAGE_SIZE and restored.cause == "deadline"
        members[1].gate.set()
        await world.settle(members)


async def test_ranks_that_hold_different_pages_of_a_prompt_are_told(world) -> None:
    async with world.instance(2, device="lent") as members:
        asked = (restore(world, member, "r", have_tokens=8 * member.number) for member in members)
        for failed in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(failed, RequestFailed) and failed.cause == "ranks differ"
        # Nothing is lent any more.
        assert (await restore_all(world, members, "again")).is_complete
        await world.settle(members)


async def test_an_offer_that_one_rank_does_not_make_is_declined_and_reads_nothing(world) -> None:
    async with world.instance(2, device="lent", hold_s=0.3) as members:
        await restore_all(world, members, "first")
        for member in members:
            assert await member.engine.offer(world.PROMPT, OTHERS[member.number]) == OfferedPages(
                0, 0, world.FULL_PAGES
            )
        assert await offer_all(world, members) == [OfferedPages(world.FULL_PAGES, 0, 0)] * 2
        await world.settle(members)


async def test_two_equal_offers_at_a_time_are_one_and_the_other_is_declined(world) -> None:
    async with world.instance(2, device="lent", hold_s=0.3) as members:
        await restore_all(world, members, "first")
        both = await asyncio.gather(*(offer_all(world, members) for _ in range(2)))
        done = [sorted(one[rank].written for one in both) for rank in range(2)]
        assert done[0] == done[1] and done[0] in ([0, 0], [0, world.FULL_PAGES])
        await world.settle(members)


async def test_a_lost_rank_ends_the_restores_of_the_others_and_their_pages_go_back(world) -> None:
    async with world.instance(2, device="lent", vote_timeout_s=5.0) as members:
        for member in members:
            member.gate.clear()
        asked = [asyncio.create_task(restore(world, member, "r")) for member in members]
        for member in members:
            await world.wait_for_room(member)
        # It ends without leaving, as a killed process does.
        await runtime_of(members[1].engine).ranks.close()
        with pytest.raises(RequestFailed, match="rank 1 is lost"):
            await asked[0]
        core = core_of(members[0].engine)
        core.check()
        assert core.statistics()["device_free"] == 64
        asked[1].cancel()
    await asyncio.gather(*asked, return_exceptions=True)
