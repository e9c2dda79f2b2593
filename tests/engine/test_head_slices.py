"""Hand-overs between unequal numbers of ranks, over NIXL between processes: every byte of every head is compared."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack

import pytest

from benchmarks.ports import free_address
from tests.support.sliced_prefill import Instance, PrefillInstances
from tests.support.waits import LIMIT_S
from tidekv import (
    DecodeEngine,
    DecodeRequest,
    DevicePool,
    EngineConfig,
    EngineThread,
    Finished,
    NixlTransport,
    Restored,
)
from tidekv.backends.keys.chain import pack_tokens
from tidekv.engine.ranks.group import RankGroup
from tidekv.engine.synthetic.components import component_digest
from tidekv.engine.synthetic.kv import prompt_digests
from tidekv.states.types import page_ids

pytestmark = [pytest.mark.nixl, pytest.mark.slow]

PREFILLS = {
    "mha 1": Instance(ranks=1, heads=4, total=4),
    "mha 2": Instance(ranks=2, heads=2, total=4),
    "mha 4": Instance(ranks=4, heads=1, total=4),
    "copies 4": Instance(ranks=4, heads=1, total=2),
    "mla 2": Instance(ranks=2, heads=1, total=1, kind="mla"),
    "mla 4": Instance(ranks=4, heads=1, total=1, kind="mla"),
    "window 2": Instance(ranks=2, heads=2, total=4, window_tokens=10),
    "mla window 2": Instance(ranks=2, heads=1, total=1, kind="mla", window_tokens=10),
    "2 contexts": Instance(ranks=2, heads=4, total=4, contexts=2),
    "2 contexts of 2": Instance(ranks=4, heads=2, total=4, contexts=2, stripe_pages=1, window_tokens=10),
}
PROMPT = list(range(7, 7 + 30))


@pytest.fixture(scope="module")
def prefills() -> Iterator[dict[str, str]]:
    instances = PrefillInstances(list(PREFILLS.values()))
    try:
        yield dict(zip(PREFILLS, instances.addresses(), strict=True))
    finally:
        instances.end()


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ("mha 2", Instance(ranks=4, heads=1, total=4)),
        ("mha 4", Instance(ranks=2, heads=2, total=4)),
        ("mha 1", Instance(ranks=4, heads=1, total=4)),
        ("mha 4", Instance(ranks=1, heads=4, total=4)),
        ("mha 2", Instance(ranks=2, heads=2, total=4)),
        ("copies 4", Instance(ranks=2, heads=1, total=2)),
        ("copies 4", Instance(ranks=1, heads=2, total=2)),
        ("mla 2", Instance(ranks=4, heads=1, total=1, kind="mla")),
        ("mla 4", Instance(ranks=2, heads=1, total=1, kind="mla")),
        ("window 2", Instance(ranks=4, heads=1, total=4, window_tokens=10)),
        ("window 2", Instance(ranks=1, heads=4, total=4, window_tokens=10)),
        ("mla window 2", Instance(ranks=4, heads=1, total=1, kind="mla", window_tokens=10)),
        ("2 contexts", Instance(ranks=1, heads=4, total=4)),
        ("2 contexts", Instance(ranks=2, heads=2, total=4)),
        ("2 contexts of 2", Instance(ranks=1, heads=4, total=4, window_tokens=10)),
        ("2 contexts of 2", Instance(ranks=2, heads=2, total=4, window_tokens=10)),
        ("2 contexts of 2", Instance(ranks=4, heads=1, total=4, window_tokens=10)),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.ranks} x {value.heads}",
)
async def test_every_head_comes_to_the_rank_that_holds_it(
    prefills: dict[str, str], prefill: str, decode: Instance
) -> None:
    address = free_address()
    pools = [DevicePool.allocate(decode.layout(), 32) for _ in range(decode.ranks)]
    windows = [decode.components() for _ in range(decode.ranks)]
    engines = [
        DecodeEngine(
            # The checksums of both ends are of the heads that both hold.
            EngineConfig(close_deadline_s=5.0, page_checksums=True),
            device=pool,
            components=windows[rank],
            transport=NixlTransport(f"decode-{rank}", dials=["127.0.0.1:*"]),
            ranks=RankGroup(rank=rank, ranks=decode.ranks, address=address, kv_heads_total=decode.total),
        )
        for rank, pool in enumerate(pools)
    ]
    # Ranks enter and leave together.
    lives = [AsyncExitStack() for _ in engines]
    entering = [life.enter_async_context(engine) for life, engine in zip(lives, engines, strict=True)]
    async with asyncio.timeout(LIMIT_S):
        await asyncio.gather(*entering)
        # The second prompt shares four pages with the first: they are promised, and not sent.
        for name, tokens in (("first", PROMPT), ("second", [*PROMPT[:17], *range(900, 920)])):
            request = DecodeRequest(request_id=name, tokens=tokens, prefill=prefills[prefill], send_prompt=True)
            readies = await asyncio.gather(*(engine.restore(request) for engine in engines))
            digests = prompt_digests(pack_tokens(tokens), decode.page_size)
            # Of the last page only the prompt's own tokens have content, but prefill fills it whole.
            for rank, (pool, ready) in enumerate(zip(pools, readies, strict=True)):
                pages = page_ids(ready.pages.tolist())
                assert decode.pages_of(rank, pool).wrong(pages, digests) == []
                assert ready.sources == readies[0].sources
                for component in windows[rank]:
                    tail = ready.component_pages[component.name]
                    wanted = [component_digest(component.name, digest) for digest in digests[tail.first :]]
                    assert decode.pages_of(rank, component.device).wrong(tail.pages.tolist(), wanted) == []
                    assert tail.first + len(tail.pages) == len(digests)
            # A window of the first prompt ends behind the page where the second one goes another way: prefill sends it.
            assert readies[0].sources["l1"] == (16 if name == "second" else 0)
            await asyncio.gather(*(engine.finish(ready) for engine, ready in zip(engines, readies, strict=True)))
        for engine in engines:
            assert engine.statistics()["receiver"]["pages_damaged"] == 0
        await asyncio.gather(*(life.aclose() for life in lives))


def test_engines_on_threads_of_their_own_decide_as_one(prefills: dict[str, str]) -> None:
    decode, address = PREFILLS["mha 2"], free_address()
    pools = [DevicePool.allocate(decode.layout(), 32) for _ in range(2)]
    threads = [
        EngineThread(
            DecodeEngine(
                EngineConfig(close_deadline_s=5.0),
                device=pool,
                transport=NixlTransport(f"decode-{rank}", dials=["127.0.0.1:*"]),
                ranks=RankGroup(rank=rank, ranks=2, address=address),
            )
        )
        for rank, pool in enumerate(pools)
    ]
    with ThreadPoolExecutor(2) as starters:
        # Each start, and each end, waits for the other rank.
        list(starters.map(EngineThread.start, threads))
        request = DecodeRequest(request_id="r", tokens=PROMPT, prefill=prefills["mha 4"], send_prompt=True)
        for thread in threads:
            thread.submit(request)
        outcomes = [outcome for thread in threads for outcome in thread.poll(30.0)]
        restored = [outcome.ready for outcome in outcomes if isinstance(outcome, Restored)]
        assert len(restored) == 2, outcomes
        assert restored[0].pages.tolist() == restored[1].pages.tolist()
        digests = prompt_digests(pack_tokens(PROMPT), decode.page_size)
        for rank, (thread, ready) in enumerate(zip(threads, restored, strict=True)):
            assert decode.pages_of(rank, pools[rank]).wrong(page_ids(ready.pages.tolist()), digests) == []
            thread.finish(ready)
        ended = [outcome for thread in threads for outcome in thread.poll(30.0)]
        assert [type(outcome) for outcome in ended] == [Finished, Finished]
        list(starters.map(EngineThread.close, threads))
