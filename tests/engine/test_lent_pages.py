"""Restores into device pages that a host engine lends, and offers of what it computed, on loopback, byte by byte."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.conftest import LAYOUT, PAGE_SIZE, Pair
from tests.support.configs import engine_config
from tests.support.fault_hooks import WriteGate
from tests.support.inside import calls_of
from tests.support.waits import LIMIT_S
from tidekv import (
    DecodeEngine,
    DevicePool,
    EngineClosed,
    InvalidConfig,
    InvalidRequest,
    LoopbackTransport,
    OfferedPages,
    Replayer,
    RequestFailed,
    open_storage,
)
from tidekv.backends.keys.chain import pack_tokens
from tidekv.backends.storage.base import Storage
from tidekv.engine.decode.values import RestoredPages
from tidekv.engine.synthetic.kv import prompt_digests

PROMPT = list(range(100, 122))  # Five pages of four tokens and a tail of two.
PAGES = [50, 3, 41, 7, 19, 28]


def digests(tokens: Sequence[int]) -> list[bytes]:
    return prompt_digests(pack_tokens(tokens), PAGE_SIZE)


def wrong(pair: Pair, tokens: Sequence[int], pages: Sequence[int], restored_tokens: int) -> list[int]:
    """Positions of the restored pages that differ from the prompt's KV."""
    restored = -(-restored_tokens // PAGE_SIZE)
    return pair.kv.verify(list(pages[:restored]), digests(tokens)[:restored])


async def restore(
    pair: Pair, request_id: str = "r1", tokens: Sequence[int] = PROMPT, pages: Sequence[int] = PAGES, have: int = 0
) -> RestoredPages:
    restored = await pair.engine.restore_into(pair.request(request_id, tokens), pages, have)
    assert wrong(pair, tokens, pages, restored.restored_tokens) == []
    assert sum(restored.sources.values()) == restored.restored_tokens
    return restored


async def test_prefill_fills_the_lent_pages(make_pair) -> None:
    async with make_pair(device="lent") as pair:
        restored = await restore(pair)
        assert restored.sources == {"l1": 0, "l2": 0, "l3": 0, "transfer": 22}
        assert restored.is_complete and restored.first_token is not None
        await pair.assert_nothing_held()
        assert pair.core()["device_free"] == 64


async def test_each_tier_serves_its_part_after_an_offer(make_pair) -> None:
    storage = open_storage("memory:?capacity=64MiB")
    async with make_pair(device="lent", storage=storage) as pair:
        first = await restore(pair)
        assert await pair.engine.offer(PROMPT, PAGES) == OfferedPages(written=5, present=0, declined=0)
        assert pair.engine.probe_prefix(PROMPT) == {"l1": 0, "l2": 20}
        assert await pair.engine.offer(PROMPT, PAGES) == OfferedPages(written=0, present=5, declined=0)
        other = [page + 1 for page in PAGES]
        again = await restore(pair, "r2", pages=other)
        assert again.sources == {"l1": 0, "l2": 20, "l3": 0, "transfer": 2}
        assert again.first_token == first.first_token
        # The first two pages are the host engine's own hit.
        held = await restore(pair, "r3", pages=[*PAGES[:2], 10, 11, 12, 13], have=11)
        assert held.sources == {"l1": 8, "l2": 12, "l3": 0, "transfer": 2}
        await pair.engine.wait_settled()
        await pair.engine.flush(("l2",))
        stored = await restore(pair, "r4", pages=[*PAGES[:1], 20, 21, 22, 23, 24], have=4)
        assert stored.sources == {"l1": 4, "l2": 0, "l3": 16, "transfer": 2}
        await pair.assert_nothing_held()


@pytest.mark.parametrize("page_checksums", [False, True])
async def test_what_host_memory_cannot_keep_is_read_from_storage_and_its_journal_replays(
    make_pair, tmp_path: Path, page_checksums: bool
) -> None:
    journal, tokens = tmp_path / "journal", list(range(100, 260))  # Forty pages, and host memory has sixteen.
    storage, pages = open_storage("memory:?capacity=64MiB"), list(range(40))
    config = {"device": "lent", "journal_path": str(journal), "page_checksums": page_checksums}
    async with make_pair(storage=storage, host_pages=16, **config) as pair:
        pair.kv.fill(pages, digests(tokens))
        # The end first: host memory has nothing before it. Then the rest, in two offers of which one continues another.
        end = await pair.engine.offer(tokens, pages[30:], start_token=30 * PAGE_SIZE, hold_s=LIMIT_S)
        assert (end.written, end.passed, end.declined) == (0, 10, 0)
        first = pair.engine.offer(tokens[: 4 * PAGE_SIZE], pages[:4], hold_s=LIMIT_S)
        rest = await pair.engine.offer(tokens, pages[4:], start_token=4 * PAGE_SIZE, hold_s=LIMIT_S)
        assert (await first).written == 4
        assert (rest.written + rest.passed, rest.declined) == (36, 0) and rest.passed > 20
        await pair.engine.wait_settled()
        await pair.engine.flush(("l2",))
        request = dataclasses.replace(pair.request("r1", tokens), prefill=())
        restored = await pair.engine.restore_into(request, range(20, 60))
        assert (restored.is_complete, restored.sources["l3"]) == (True, 160)
        assert wrong(pair, tokens, range(20, 60), 160) == []
        assert pair.core()["pages_passed_lost"] == 0
        await pair.assert_nothing_held()
    assert Replayer(journal).run().complete


async def test_without_a_prefill_host_memory_and_storage_serve_what_they_have(make_pair) -> None:
    storage = open_storage("memory:?capacity=64MiB")
    async with make_pair(device="lent", storage=storage) as pair:
        pair.kv.fill(PAGES, digests(PROMPT))
        await pair.engine.offer(PROMPT, PAGES)

        async def alone(request_id: str, tokens: Sequence[int], pages: Sequence[int], have: int = 0) -> RestoredPages:
            request = dataclasses.replace(pair.request(request_id, tokens), prefill=())
            restored = await pair.engine.restore_into(request, pages, have)
            assert wrong(pair, tokens, pages, restored.restored_tokens) == []
            await pair.assert_nothing_held()
            return restored

        kept, other = PROMPT[:20], [10, 11, 12, 13, 14]
        host = await alone("r1", kept, other)
        assert (host.is_complete, host.sources["l2"], host.first_token) == (True, 20, None)
        await pair.engine.wait_settled()
        await pair.engine.flush(("l2",))
        stored = await alone("r2", kept, [PAGES[0], *other[1:]], have=4)
        assert (stored.is_complete, stored.sources["l1"], stored.sources["l3"]) == (True, 4, 16)
        # What they do not have is the caller's to compute.
        short = await alone("r3", PROMPT, [20, 21, 22, 23, 24, 25])
        assert (short.is_complete, short.first_token) == (False, None)
        assert short.cause == "prefill failed" and "names no prefill" in short.detail
        assert pair.peer.statistics()["rooms_pending"] == 0


LONG = list(range(100, 180))
"""Twenty pages."""


async def kept_in_storage(make_pair) -> Storage:
    """Storage that has all pages of `LONG`."""
    storage = open_storage("memory:?capacity=64MiB")
    async with make_pair(device="lent", storage=storage.sibling()) as pair:
        pair.kv.fill(list(range(20)), digests(LONG))
        assert await pair.engine.offer(LONG, range(20)) == OfferedPages(written=20, present=0, declined=0)
        await pair.engine.wait_settled()
    return storage


async def restore_alone(pair: Pair, tokens: Sequence[int], pages: Sequence[int], have: int = 0) -> RestoredPages:
    """Restore without a prefill into pages that hold nothing right."""
    for at in range(have // PAGE_SIZE, len(pages)):
        pair.kv.fill([pages[at]], [bytes(32)])
    request = dataclasses.replace(pair.request("alone", tokens), prefill=())
    restored = await pair.engine.restore_into(request, pages, have)
    assert sum(restored.sources.values()) == restored.restored_tokens
    assert wrong(pair, tokens, pages, restored.restored_tokens) == []
    await pair.assert_nothing_held()
    return restored


async def test_without_a_prefill_the_part_that_tiers_have_is_restored(make_pair) -> None:
    storage, longer, pages = await kept_in_storage(make_pair), [*LONG, *range(9)], list(range(30, 53))
    async with make_pair(device="lent", storage=storage) as pair:
        for tier in ("l3", "l2"):
            restored = await restore_alone(pair, longer, pages)
            assert (restored.is_complete, restored.restored_tokens, restored.sources[tier]) == (False, 80, 80)
            assert restored.cause == "prefill failed" and "names no prefill" in restored.detail
        await pair.engine.flush(("l2",))
        # Storage has lost a page: those before it are good.
        await storage.delete(digests(LONG)[13:14])
        restored = await restore_alone(pair, LONG, pages[:20])
        assert (restored.restored_tokens, restored.sources["l3"]) == (52, 52)
        assert pair.core()["sent_back"] == 0


@pytest.mark.parametrize("host_pages", [3, 8])
async def test_without_a_prefill_a_prompt_longer_than_host_memory_is_restored_in_parts(
    make_pair, host_pages: int
) -> None:
    storage, pages = await kept_in_storage(make_pair), list(range(30, 50))
    async with make_pair(device="lent", storage=storage, host_pages=host_pages) as pair:
        restored = await restore_alone(pair, LONG, pages)
        assert (restored.is_complete, restored.sources["l3"]) == (True, 80)
        # Once more, behind what the host engine has itself, which is in no tier any more.
        restored = await restore_alone(pair, LONG, pages, have=40)
        assert (restored.is_complete, restored.sources["l1"]) == (True, 40)
        longer = await restore_alone(pair, [*LONG, *range(9)], [*pages, 50, 51, 52])
        assert (longer.is_complete, longer.restored_tokens) == (False, 80)


async def test_without_a_prefill_prompts_wait_while_others_use_all_host_memory(make_pair) -> None:
    storage, host_pages = await kept_in_storage(make_pair), 3
    async with make_pair(device="lent", storage=storage, host_pages=host_pages) as pair:
        requests = [dataclasses.replace(pair.request(f"r{at}", LONG), prefill=()) for at in range(3)]
        calls = [pair.engine.restore_into(each, range(20 * at, 20 * at + 20)) for at, each in enumerate(requests)]
        for at, restored in enumerate(await asyncio.gather(*calls)):
            assert restored.is_complete, restored
            assert wrong(pair, LONG, list(range(20 * at, 20 * at + 20)), 80) == []
        await pair.assert_nothing_held()


async def test_only_lent_pages_are_restored_without_a_prefill(make_pair) -> None:
    async with make_pair() as pair:
        with pytest.raises(InvalidRequest, match="prefill names no address; only restore_into"):
            await pair.engine.restore(dataclasses.replace(pair.request("r1", PROMPT), prefill=()))
        await pair.assert_nothing_held()


async def test_offers_of_a_growing_prompt_copy_each_page_once(make_pair) -> None:
    async with make_pair(device="lent") as pair:
        pair.kv.fill(PAGES, digests(PROMPT))
        chunks = [pair.engine.offer(PROMPT[:8], PAGES[:2]), pair.engine.offer(PROMPT[:18], PAGES[2:5], start_token=8)]
        assert await asyncio.gather(*chunks) == [OfferedPages(2, 0, 0), OfferedPages(2, 0, 0)]
        assert await pair.engine.offer(PROMPT, PAGES) == OfferedPages(written=1, present=4, declined=0)
        assert pair.core()["pages_backed_up"] == 5
        # Without the pages before them, pages cannot be found again.
        assert await pair.engine.offer([1, 2, 3, 4, 5, 6, 7, 8], [60], start_token=4) == OfferedPages(0, 0, 1)
        await pair.assert_nothing_held()


async def test_a_killed_prefill_leaves_the_pages_that_have_arrived(make_pair) -> None:
    prompt = list(range(500, 560))
    pages = list(range(15))
    async with make_pair(device="lent") as pair:
        gate = WriteGate(pair.network, free=2)
        call = asyncio.create_task(pair.engine.restore_into(pair.request("r1", prompt), pages))
        await gate.is_reached.wait()
        pair.network.kill(pair.peer._transport.instance)
        gate.opened.set()
        restored = await call
        assert restored.cause.startswith("prefill") and restored.first_token is None
        assert 0 < restored.restored_tokens < len(prompt)
        assert wrong(pair, prompt, pages, restored.restored_tokens) == []
        await pair.assert_nothing_held()


async def test_a_passed_deadline_returns_the_pages_only_when_the_writer_has_stopped(make_pair) -> None:
    async with make_pair(device="lent") as pair:
        gate = WriteGate(pair.network, free=1)
        call = asyncio.create_task(pair.engine.restore_into(pair.request("r1", PROMPT, deadline_s=0.2), PAGES))
        await gate.is_reached.wait()
        await calls_of(pair.engine).wait_until(lambda: not pair.engine.states())
        assert not call.done()
        with pytest.raises(InvalidRequest, match="page 28 is lent to request 'r1'"):
            await pair.engine.restore_into(pair.request("r2", PROMPT[:4]), [28])
        with pytest.raises(InvalidRequest, match="page 28 is lent to request 'r1'"):
            pair.engine.offer(PROMPT[:4], [28])
        gate.opened.set()
        restored = await call
        assert (restored.cause, restored.restored_tokens) == ("deadline", 12)
        assert wrong(pair, PROMPT, PAGES, 12) == []
        await pair.assert_nothing_held()


@pytest.mark.parametrize("way", ["abort", "cancel"])
async def test_an_abort_waits_for_the_writer(make_pair, way: str) -> None:
    async with make_pair(device="lent") as pair:
        gate = WriteGate(pair.network)
        call = asyncio.create_task(pair.engine.restore_into(pair.request("r1", PROMPT), PAGES))
        await gate.is_reached.wait()
        aborting = None
        if way == "abort":
            aborting = asyncio.create_task(pair.engine.abort("r1"))
        else:
            call.cancel()
        await calls_of(pair.engine).wait_until(lambda: not pair.engine.states())
        assert not call.done() and not (aborting and aborting.done())
        gate.opened.set()
        with pytest.raises(RequestFailed, match="aborted") if aborting else pytest.raises(asyncio.CancelledError):
            await call
        assert aborting is None or await aborting
        await pair.assert_nothing_held()
        assert (await restore(pair)).is_complete


async def test_a_caller_that_would_begin_early_is_refused_by_name(make_pair) -> None:
    async with make_pair(device="lent") as pair:
        request = dataclasses.replace(pair.request("r1", PROMPT), early=True)
        with pytest.raises(InvalidRequest, match="takes no early=True: a step"):
            await pair.engine.restore_into(request, PAGES)
        await pair.assert_nothing_held()


async def test_a_token_behind_the_prompt_is_for_pages_that_are_lent(make_pair) -> None:
    async with make_pair() as pair:
        request = dataclasses.replace(pair.request("r1", PROMPT), next_token=5)
        with pytest.raises(InvalidRequest, match="next_token is for restore_into"):
            await pair.engine.restore(request)
        await pair.assert_nothing_held()


async def test_calls_of_the_other_mode_and_wrong_pages_are_refused_by_name(make_pair) -> None:
    async with make_pair(device="lent") as pair:
        with pytest.raises(InvalidRequest, match=r"restore needs config\.device to be 'owned'"):
            await pair.engine.restore(pair.request("r1", PROMPT))
        for pages, have, match in (
            (PAGES[:5], 0, "needs 6 pages of 4 tokens, not 5"),
            ([*PAGES[:5], 64], 0, "page 64 is not in the device pool, which has pages 0 to 63"),
            ([*PAGES[:5], 50], 0, "page 50 is named twice"),
            (["x"], 0, "pages must be a sequence of page numbers"),
            (PAGES, 23, "have_tokens must be at most its 22 tokens, not 23"),
            (PAGES, -1, "have_tokens"),
        ):
            with pytest.raises(InvalidRequest, match=match):
                await pair.engine.restore_into(pair.request("r1", PROMPT), pages, have)
        with pytest.raises(InvalidRequest, match="start_token must be a multiple of 4"):
            pair.engine.offer(PROMPT, PAGES[1:], start_token=3)
        with pytest.raises(InvalidRequest, match="fill 5 pages of 4 tokens; 4 pages were given"):
            pair.engine.offer(PROMPT, PAGES[:4])
        assert (await restore(pair)).is_complete
        await pair.assert_nothing_held()
    async with make_pair() as pair:
        with pytest.raises(InvalidRequest, match=r"restore_into needs config\.device to be 'lent'"):
            await pair.engine.restore_into(pair.request("r1", PROMPT), PAGES)
        with pytest.raises(InvalidRequest, match=r"offer needs config\.device to be 'lent'"):
            pair.engine.offer(PROMPT, PAGES)


async def test_the_first_page_of_all_is_named_rightly_when_it_is_in_use(make_pair) -> None:
    """Number 0 is a page like any other."""
    pages = [0, *PAGES[1:]]
    async with make_pair(device="lent") as pair:
        pair.kv.fill(pages, digests(PROMPT))
        offered = pair.engine.offer(PROMPT, pages)
        with pytest.raises(InvalidRequest, match="page 0 is read by an offer"):
            await pair.engine.restore_into(pair.request("r1", PROMPT), pages)
        await offered
        lent = asyncio.ensure_future(pair.engine.restore_into(pair.request("r1", PROMPT), pages))
        await asyncio.sleep(0)
        with pytest.raises(InvalidRequest, match="page 0 is lent to request 'r1'"):
            pair.engine.offer(PROMPT, pages)
        with pytest.raises(InvalidRequest, match="request 'r2': page 0 is lent to request 'r1'"):
            await pair.engine.restore_into(pair.request("r2", PROMPT), [0, *range(40, 40 + len(pages) - 1)])
        assert (await lent).is_complete


async def test_a_page_is_lent_once_and_not_while_an_offer_reads_it(make_pair) -> None:
    async with make_pair(device="lent") as pair:
        pair.kv.fill(PAGES, digests(PROMPT))
        offered = pair.engine.offer(PROMPT, PAGES)
        with pytest.raises(InvalidRequest, match="page 50 is read by an offer"):
            await pair.engine.restore_into(pair.request("r1", PROMPT), PAGES)
        await offered
        assert (await restore(pair)).is_complete


@pytest.mark.parametrize(
    ("option", "value"),
    [("admission_prefill_share", 0.5), ("admission_running_max", 4), ("sharing_wait_s", 1.0)],
)
def test_options_that_have_no_effect_are_refused_by_name(option: str, value: float) -> None:
    with pytest.raises(InvalidConfig, match=f'{option.replace("_", ".", 1)} has no effect with device="lent": '):
        engine_config(device="lent", **{option: value})
    assert engine_config(device="owned", **{option: value}).device == "owned"


def test_parts_that_the_mode_does_not_support_are_refused_by_name() -> None:
    async def recompute(job: object) -> tuple[int, dict[str, object]]:
        return 0, {}

    engine = DecodeEngine(
        engine_config(device="lent"), device=DevicePool.allocate(LAYOUT, 4), transport=LoopbackTransport("alone")
    )
    with pytest.raises(InvalidConfig, match="there is nothing to recompute with"):
        engine.recompute_with(recompute)


async def test_the_end_of_the_engine_ends_calls_and_offers(make_pair) -> None:
    async with make_pair(device="lent", close_deadline_s=0.5) as pair:
        gate = WriteGate(pair.network)
        call = asyncio.create_task(pair.engine.restore_into(pair.request("r1", PROMPT), PAGES))
        await gate.is_reached.wait()
        closing = asyncio.create_task(pair.engine.__aexit__(None, None, None))
        with pytest.raises((EngineClosed, RequestFailed)):
            await call
        gate.opened.set()
        await closing
