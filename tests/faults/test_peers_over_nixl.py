"""Decode workers as processes that read a prefix from each other's host memory over NIXL: every byte is checked."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import pytest

from tests.support.fault_process import Done, Served, Settle, Turn
from tests.support.waits import LIMIT_S
from tidekv import CachePeerOptions

pytestmark = [pytest.mark.nixl, pytest.mark.slow]

PAGES = 24
TOKENS = PAGES * 16


def sharing(**fields: Any) -> CachePeerOptions:
    """Options of workers that share all of their host memory, and wait long enough on a busy machine."""
    defaults = {"listen": "127.0.0.1:0", "wait_s": 60.0, "wait_share": 0.9, "host_share": 1.0, "read_share": 1.0}
    return CachePeerOptions(enabled=True, **(defaults | fields))


async def served(child: Any, request_id: str, tokens: list[int], prefill: Any, peers: tuple[str, ...] = ()) -> Any:
    """Have a decode child serve a prompt, and require every page to be right; returns its tokens by source."""
    turn = Turn(request_id=request_id, tokens=tokens, prefill=[prefill.address], output=[1], peers=list(peers))
    found = await child.ask(turn, Served)
    assert found.wrong == []
    return found.sources


async def settle(child: Any) -> None:
    await child.ask(Settle(), Done)


@pytest.mark.parametrize("page_checksums", [False, True])
async def test_two_workers_restore_what_a_third_one_has(
    spawn_decode: Any, prefill_over_nixl: Any, prompt: Any, page_checksums: bool
) -> None:
    tokens = prompt(1, PAGES)
    options = {"cache_peers": sharing(), "page_checksums": page_checksums, "default_deadline_s": 120.0}
    async with asyncio.timeout(LIMIT_S), prefill_over_nixl() as prefill:
        first, second, third = await asyncio.gather(
            *(spawn_decode("memory:", name=f"decode-{number}", **options) for number in range(3))
        )
        assert (await served(first, "one", tokens, prefill))["transfer"] == TOKENS
        await settle(first)
        peer = first.ready.address
        of_second, of_third = await asyncio.gather(
            served(second, "two", tokens, prefill, (peer,)), served(third, "three", tokens, prefill, (peer,))
        )
        assert of_second == of_third == {"l1": 0, "l2": 0, "l3": 0, "transfer": 0, "peer": TOKENS}
        await settle(second)
        # From the second one on, which has it from the first.
        more = [*tokens, *prompt(2, 3)]
        child = await spawn_decode("memory:", name="decode-3", **options)
        assert (await served(child, "four", more, prefill, (second.ready.address,)))["peer"] == TOKENS
        for worker in (first, second, third, child):
            await settle(worker)
            counts = await worker.counts()
            assert counts["host_owned"] == counts["host_protected"] == counts["shared_pages"] == 0
        assert (await first.counts())["pages_shared"] == 2 * PAGES


async def test_a_killed_peer_costs_a_part_of_the_time_and_prefill_sends_the_pages(
    spawn_decode: Any, prefill_over_nixl: Any, prompt: Any
) -> None:
    tokens = prompt(3, PAGES)
    options = {"cache_peers": sharing(), "default_deadline_s": 120.0}
    async with asyncio.timeout(LIMIT_S), prefill_over_nixl() as prefill:
        first, second = await asyncio.gather(
            *(spawn_decode("memory:", name=f"decode-{number}", **options) for number in range(2))
        )
        await served(first, "one", tokens, prefill)
        await settle(first)
        peer = first.ready.address
        assert (await served(second, "two", tokens[: TOKENS // 2], prefill, (peer,)))["peer"] == TOKENS // 2
        first.signal(signal.SIGKILL)
        await first.wait_ended()
        # The link is broken, or is found to be: no process listens there any more.
        sources = await served(second, "three", tokens, prefill, (peer,))
        assert sources == {"l1": TOKENS // 2, "l2": 0, "l3": 0, "transfer": TOKENS // 2}
        await settle(second)
        counts = await second.counts()
        assert counts["host_owned"] == counts["peer_pages_in_flight"] == 0


async def test_a_stopped_peer_costs_its_share_and_its_late_bytes_land_in_pages_without_another_owner(
    spawn_decode: Any, prefill_over_nixl: Any, prompt: Any
) -> None:
    tokens = prompt(4, PAGES)
    # Long enough for a read on a busy machine: only the stopped peer is late.
    options = {"cache_peers": sharing(wait_s=8.0, pause_s=600.0), "default_deadline_s": 120.0}
    async with asyncio.timeout(LIMIT_S), prefill_over_nixl() as prefill:
        first, second = await asyncio.gather(
            *(spawn_decode("memory:", name=f"decode-{number}", **options) for number in range(2))
        )
        await served(first, "one", tokens, prefill)
        # Until the link is open.
        linked = prompt(20, 3)
        await served(first, "zero", linked, prefill)
        await settle(first)
        await served(second, "zero", linked, prefill, (first.ready.address,))
        await settle(second)
        before = await second.counts()
        assert before["peer_pages_short"] == before["peer_fetches_late"] == 0
        first.signal(signal.SIGSTOP)
        sources = await served(second, "two", tokens, prefill, (first.ready.address,))
        assert sources == {"l1": 0, "l2": 0, "l3": 0, "transfer": TOKENS}
        for number in range(5, 9):
            await served(second, f"r{number}", prompt(number, 2), prefill, (first.ready.address,))
        counts = await second.counts()
        assert (counts["peer_fetches"], counts["peer_fetches_late"]) == (2, 1)
        assert counts["peer_pages_in_flight"] == PAGES
        first.signal(signal.SIGCONT)
        await settle(second)
        assert (await second.counts())["host_owned"] == 0
        assert (await served(second, "three", tokens, prefill))["transfer"] == 0
        await settle(first)
