"""A prefill worker that dies or stops while it writes to lent pages: what has arrived is right, and nothing writes to a
page that was handed back.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.fault_process import Done, Halt, Halted
from tests.support.waits import LIMIT_S
from tidekv import InvalidRequest, OfferedPages
from tidekv.backends.keys.chain import pack_tokens
from tidekv.engine.synthetic.kv import prompt_digests

pytestmark = pytest.mark.nixl

PAGES, PAGE_SIZE, CHUNK_PAGES, LOCAL_PAGES = 24, 16, 4, 8
BLOCKS = [3 * block % 96 for block in range(1, PAGES + 1)]


def wrong(decode: Any, tokens: Sequence[int], pages: Sequence[int], restored_tokens: int) -> list[int]:
    """Positions of the restored pages whose bytes are not those of the prompt's KV."""
    restored = -(-restored_tokens // PAGE_SIZE)
    found: list[int] = decode.kv.verify(
        list(pages[:restored]), prompt_digests(pack_tokens(tokens), PAGE_SIZE)[:restored]
    )
    return found


async def offer_first_pages(decode: Any, tokens: list[int]) -> None:
    """Compute the first pages of a prompt in blocks of the host engine, and offer them."""
    pages = list(range(LOCAL_PAGES))
    decode.kv.fill(pages, prompt_digests(pack_tokens(tokens), PAGE_SIZE)[:LOCAL_PAGES])
    assert await decode.engine.offer(tokens[: LOCAL_PAGES * PAGE_SIZE], pages) == OfferedPages(LOCAL_PAGES, 0, 0)
    # The host engine uses its blocks for something else.
    decode.kv.fill(pages, [b"%32d" % page for page in pages])


async def test_a_killed_prefill_leaves_what_has_arrived(spawn_prefill: Any, decode_over_nixl: Any, prompt: Any) -> None:
    child = await spawn_prefill(chunk_pages=CHUNK_PAGES)
    tokens = prompt(1, PAGES, tail=5)
    blocks = [*BLOCKS, 95]
    async with asyncio.timeout(LIMIT_S), decode_over_nixl([child.ready.address], device="lent") as decode:
        await offer_first_pages(decode, tokens)
        await child.ask(Halt(after_checks=10), Done)
        call = asyncio.create_task(decode.engine.restore_into(decode.request("r1", tokens), blocks))
        await child.line.hear(Halted)
        with pytest.raises(InvalidRequest, match=f"page {blocks[-1]} is lent"):
            decode.engine.offer(tokens[:PAGE_SIZE], [blocks[-1]])
        child.signal(signal.SIGKILL)
        restored = await call
        assert restored.cause in ("prefill lost", "prefill process gone")
        assert LOCAL_PAGES * PAGE_SIZE <= restored.restored_tokens < len(tokens)
        assert restored.sources["l2"] == LOCAL_PAGES * PAGE_SIZE
        assert wrong(decode, tokens, blocks, restored.restored_tokens) == []
        # The blocks are the host engine's: it computes the rest, and offers everything.
        digests, in_place = prompt_digests(pack_tokens(tokens), PAGE_SIZE), restored.restored_tokens // PAGE_SIZE
        decode.kv.fill(blocks[in_place:], digests[in_place:])
        offered = await decode.engine.offer(tokens, blocks)
        assert offered == OfferedPages(written=PAGES - LOCAL_PAGES, present=LOCAL_PAGES, declined=0)
        await decode.assert_nothing_held()
        await spawn_prefill(listen=child.ready.address)
        again = await decode.engine.restore_into(decode.request("r2", tokens), blocks, 2 * PAGE_SIZE)
        assert again.sources == {"l1": 2 * PAGE_SIZE, "l2": (PAGES - 2) * PAGE_SIZE, "l3": 0, "transfer": 5}
        assert wrong(decode, tokens, blocks, len(tokens)) == []
        await decode.assert_nothing_held()


async def test_pages_of_a_stopped_prefill_return_when_it_is_dead(
    spawn_prefill: Any, decode_over_nixl: Any, prompt: Any
) -> None:
    child = await spawn_prefill(chunk_pages=CHUNK_PAGES)
    tokens = prompt(2, PAGES)
    async with asyncio.timeout(LIMIT_S), decode_over_nixl([child.ready.address], device="lent") as decode:
        await child.ask(Halt(after_checks=10, stops=True), Done)
        request = decode.request("r1", tokens, deadline_s=1.0)
        call = asyncio.create_task(decode.engine.restore_into(request, BLOCKS))
        await decode.until(lambda: decode.core()["requests_returning"] == 1)
        # Stopped, it may go on at any time, and would write.
        assert not call.done() and decode.core()["device_draining"] > 0
        child.signal(signal.SIGKILL)
        restored = await call
        assert restored.cause in ("deadline", "prefill lost")
        assert wrong(decode, tokens, BLOCKS, restored.restored_tokens) == []
        await decode.assert_nothing_held()
