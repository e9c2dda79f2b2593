"""Prefill reads what decode workers, as processes, have of a prompt over NIXL: every byte is checked at both ends."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.configs import engine_config
from tests.support.fault_process import Done, FaultProcess, Served, Settle, Turn
from tests.support.prefix_reads import Read, ReadingPrefill
from tests.support.waits import LIMIT_S, PATIENT, until
from tidekv import (
    CachePeerOptions,
    DecodeEngine,
    DevicePool,
    HostPool,
    KVLayout,
    NixlTransport,
    PrefillConfig,
    PrefillPeer,
)
from tidekv.transports.prefill.prefill_room import Room

pytestmark = [pytest.mark.nixl, pytest.mark.slow]

PAGE = 16
PAGES = 24
TOKENS = PAGES * PAGE
OUTPUT = list(range(33))
"""Two pages of it get KV, which prefill never had."""


def sharing(**fields: Any) -> CachePeerOptions:
    """Options of workers that share all of their host memory, and wait long enough on a busy machine."""
    defaults = {"wait_s": 60.0, "wait_share": 0.9, "host_share": 1.0, "read_share": 1.0}
    return CachePeerOptions(enabled=True, **(defaults | fields))


@dataclass
class Reading:
    """A prefill worker in this process, and the engine by which it reads."""

    peer: PrefillPeer
    worker: ReadingPrefill
    reader: DecodeEngine

    @property
    def address(self) -> str:
        return self.peer.address

    def core(self) -> dict[str, int]:
        return dict(self.reader.statistics()["core"])


@asynccontextmanager
async def reading(layout: KVLayout, *, num_pages: int = 256, **fields: Any) -> AsyncIterator[Reading]:
    pool = DevicePool.allocate(layout, num_pages)
    worker = ReadingPrefill(pool)
    options = {"cache_peers": sharing(), "page_checksums": False, "default_deadline_s": 120.0, **fields}
    reader = DecodeEngine(
        engine_config(**(PATIENT | {"prefetch_threshold_tokens": 0, "device": "lent"} | options)),
        device=pool,
        host=HostPool.allocate(layout, 96),
        transport=NixlTransport("reader", dials=["127.0.0.1:*"]),
    )
    peer = PrefillPeer(
        PrefillConfig(lease_s=LIMIT_S), device=pool, transport=NixlTransport("prefill"), on_room=worker.serve
    )
    peer.read_with(reader)
    worker.peer = peer
    async with peer:
        yield Reading(peer, worker, reader)
    assert worker.wrong == []


async def ask(child: FaultProcess, request_id: str, tokens: list[int], prefill: Reading) -> dict[str, int]:
    """Have a decode worker serve a turn, and require every page to be right; returns its tokens by source."""
    turn = Turn(request_id=request_id, tokens=tokens, prefill=[prefill.address], output=OUTPUT)
    found = await child.ask(turn, Served)
    assert found.wrong == []
    return found.sources


async def settle(child: FaultProcess) -> None:
    await child.ask(Settle(), Done)


@pytest.mark.parametrize("page_checksums", [False, True])
async def test_the_next_turns_of_two_decode_workers_are_read_from_them(
    spawn_decode: Any, layout: KVLayout, prompt: Callable[..., list[int]], page_checksums: bool
) -> None:
    options = {"page_checksums": page_checksums, "default_deadline_s": 120.0}
    async with asyncio.timeout(LIMIT_S), reading(layout, **options) as prefill:
        shares = sharing(listen="127.0.0.1:0")
        children = await asyncio.gather(
            *(spawn_decode("memory:", name=f"decode-{number}", cache_peers=shares, **options) for number in range(2))
        )
        turns = [prompt(number + 1, PAGES) for number in range(2)]
        await asyncio.gather(
            *(ask(child, "one", tokens, prefill) for child, tokens in zip(children, turns, strict=True))
        )
        await asyncio.gather(*map(settle, children))
        assert [read.read for read in prefill.worker.reads] == [0, 0]
        # The output too, which prefill never had, but for its last token, which has no KV.
        more = [[*tokens, *OUTPUT, *prompt(9, 1)] for tokens in turns]
        # One id at both, at the same time.
        await asyncio.gather(
            *(ask(child, "two", tokens, prefill) for child, tokens in zip(children, more, strict=True))
        )
        had = TOKENS + 2 * PAGE
        assert prefill.worker.reads[2:] == 2 * [Read(had=0, read=had, prompt=had + 1 + PAGE, decode_had=had)]
        await prefill.reader.wait_settled()
        prefill.reader.check()
        assert prefill.core()["host_owned"] == prefill.core()["peer_pages_in_flight"] == 0
        for child in children:
            await settle(child)
            counts = await child.counts()
            assert counts["shared_pages"] == counts["host_protected"] == counts["host_owned"] == 0


async def end_at_read(decode: FaultProcess, number: signal.Signals, tokens: list[int], prefill: Reading) -> None:
    """Serve a prompt, and end the decode worker by a signal as prefill begins to read for the next one."""
    await ask(decode, "one", tokens, prefill)
    await settle(decode)
    prefill.worker.before_read = lambda room: decode.signal(number) if room.decode_prefix_len else None
    asking = asyncio.ensure_future(ask(decode, "two", [*tokens, *OUTPUT, 7], prefill))
    await decode.wait_ended()
    await until(lambda: len(prefill.worker.reads) == 2)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


async def test_a_decode_worker_that_is_killed_before_it_answers_costs_the_others_nothing(
    spawn_decode: Any, layout: KVLayout, prompt: Callable[..., list[int]]
) -> None:
    tokens = prompt(3, PAGES)
    options = {"cache_peers": sharing(listen="127.0.0.1:0"), "default_deadline_s": 120.0}
    async with asyncio.timeout(LIMIT_S), reading(layout) as prefill:
        first, second = await asyncio.gather(
            *(spawn_decode("memory:", name=f"decode-{number}", **options) for number in range(2))
        )
        await end_at_read(first, signal.SIGKILL, tokens, prefill)
        assert prefill.worker.reads[1].read == 0
        assert (await ask(second, "three", tokens, prefill))["transfer"] == TOKENS
        await prefill.reader.wait_settled()
        prefill.reader.check()
        assert prefill.core()["host_owned"] == prefill.core()["peer_pages_in_flight"] == 0


async def test_a_stopped_decode_worker_costs_its_share_and_its_late_bytes_land_in_pages_without_another_owner(
    spawn_decode: Any, layout: KVLayout, prompt: Callable[..., list[int]]
) -> None:
    tokens = prompt(4, PAGES)
    shares = {"cache_peers": sharing(listen="127.0.0.1:0"), "default_deadline_s": 120.0}
    # Long enough for a read on a busy machine: only the stopped worker is late.
    async with (
        asyncio.timeout(LIMIT_S),
        reading(layout, cache_peers=sharing(wait_s=8.0, pause_s=600.0)) as prefill,
    ):
        first, second = await asyncio.gather(
            *(spawn_decode("memory:", name=f"decode-{number}", **shares) for number in range(2))
        )
        linked = prompt(20, 3)
        for request_id, prompt_tokens in (("one", tokens), ("zero", linked), ("more", [*linked, *OUTPUT, 5])):
            await ask(first, request_id, prompt_tokens, prefill)
            await settle(first)
        # The link is open by now.
        assert prefill.worker.reads.pop().read == 5 * PAGE

        def stop(room: Room) -> None:
            if room.request_id == "two":
                first.signal(signal.SIGSTOP)

        prefill.worker.before_read = stop
        asking = asyncio.ensure_future(ask(first, "two", [*tokens, *OUTPUT, 7], prefill))
        await until(lambda: len(prefill.worker.reads) == 3)
        assert prefill.worker.reads[2].read == 0
        assert prefill.core()["peer_pages_in_flight"] == PAGES + 2 == prefill.core()["host_owned"]
        # Meanwhile others are served, from prefill's own pages.
        assert (await ask(second, "three", tokens, prefill))["transfer"] == TOKENS
        assert prefill.core()["peer_fetches_late"] == 1
        first.signal(signal.SIGCONT)
        # What it gets was computed, and every byte of it is right.
        assert (await asking)["transfer"] == 2
        await prefill.reader.wait_settled()
        prefill.reader.check()
        assert prefill.core()["host_owned"] == prefill.core()["peer_pages_in_flight"] == 0


async def test_a_decode_worker_that_ends_while_prefill_reads_delays_no_other_request(
    spawn_decode: Any, layout: KVLayout, prompt: Callable[..., list[int]]
) -> None:
    tokens = prompt(5, PAGES)
    options = {"cache_peers": sharing(listen="127.0.0.1:0"), "default_deadline_s": 120.0}
    async with asyncio.timeout(LIMIT_S), reading(layout) as prefill:
        first, second = await asyncio.gather(
            *(spawn_decode("memory:", name=f"decode-{number}", **options) for number in range(2))
        )
        # A regular end: it aborts its requests, drains, and closes.
        await end_at_read(first, signal.SIGINT, tokens, prefill)
        assert (await ask(second, "three", tokens, prefill))["transfer"] == TOKENS
        await until(lambda: len(prefill.worker.free) == 256)
        await prefill.reader.wait_settled()
        prefill.reader.check()
        assert prefill.core()["host_owned"] == prefill.core()["peer_pages_in_flight"] == 0
