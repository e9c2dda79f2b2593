"""SGLang's prefill reads what decode has of a prompt: both ends over NIXL, under schedulers of SGLang's contract."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.sglang_contract import PAGE, HookRegistry, InsertParams, KVPoll, RadixKey, modules, request
from tests.support.sglang_servers import Servers
from tests.support.waits import LIMIT_S
from tidekv.engine.integrations.sglang.handover.plugin import register
from tidekv.engine.prefill.prefill_peer import PrefillPeer

pytestmark = pytest.mark.nixl
PROMPT = list(range(100, 122))  # Five pages of four tokens and a tail of two.
ANSWER = list(range(300, 309))  # With the prompt seven full pages, of 28 tokens, and three tokens.
TURN = [*PROMPT, *ANSWER, *range(400, 410)]
KEPT = 28
OURS = list(range(40, 51))
"""Pages of decode for a turn."""
Start = Callable[..., Servers]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts a prefill that reads, by these options of its `cache_peers`, and a decode that shares its memory."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    started: list[Servers] = []

    def servers(shares: bool = True, checks: bool = False, uri: str | None = None, **options: Any) -> Servers:
        peers = {"enabled": True, "wait_s": LIMIT_S, "wait_share": 1.0, "host_share": 1.0, **options}
        both = {"dials": ["127.0.0.1:*"], "host": "1MB", "uri": uri}
        storage = {"prefetch": "wait_complete", "prefetch_threshold_tokens": 2 * PAGE}
        give({**both, "engine": {"cache_peers": peers, "storage": storage, "page_checksums": checks}})
        prefill = sys.modules["sglang.srt.disaggregation.prefill"].PrefillBootstrapQueue()
        sharing = {"enabled": True, "listen": "127.0.0.1:0", "read_share": 1.0}
        peers = sharing if shares else {}
        give({**both, "engine": {"cache_peers": peers, "storage": storage, "page_checksums": checks}})
        started.append(Servers(prefill))
        return started[-1]

    def give(settings: dict[str, Any]) -> None:
        monkeypatch.setenv("TIDEKV_SGLANG", json.dumps(settings))

    give({})
    with modules():
        register()
        HookRegistry.apply_hooks()
        try:
            yield servers
        finally:
            for one in started:
                one.close()


def converse(servers: Servers, room: int = 11, **names: Any) -> None:
    """Serve the first turn: decode has prompt and answer in host memory, and prefill's tree has nothing."""
    pages = [9, 8, 7, 6, 5, 4, 3, 2]
    asked = servers.ask(PROMPT, pages[:6], room, **names)
    servers.send(PROMPT, [60, 61, 62, 63, 59, 58], room, **names)
    servers.commit(asked)
    asked.req.full_untruncated_fill_ids = array("q", [*PROMPT, *ANSWER])
    servers.pools[1].compute([*PROMPT, *ANSWER], pages)
    servers._note(servers.decode, asked.req, pages)
    servers.decode.tree_cache.checkpoint_into_tree(asked.req, up_to=len(PROMPT) + len(ANSWER))
    servers.settle()


def cached(servers: Servers, tokens: list[int] = TURN, **names: Any) -> list[int]:
    """The pages in prefill's tree that have the longest prefix of these tokens."""
    tree = servers.prefill.scheduler.tree_cache
    key = RadixKey(tokens, names.get("extra_key"), names.get("cache_salt"))
    return [slot // PAGE for slot in tree.paths[tree.match(key)][::PAGE]]


def fill_tree(servers: Servers, tokens: list[int]) -> None:
    """Let prefill's tree have what prefill has computed of these tokens."""
    scheduler = servers.prefill.scheduler
    slots = scheduler.token_to_kv_pool_allocator.alloc(len(tokens) // PAGE * PAGE)
    servers.pools[0].compute(tokens[: len(slots)], [slot // PAGE for slot in slots[::PAGE].tolist()])
    key = RadixKey(tokens[: len(slots)])
    scheduler.tree_cache.insert(InsertParams(key=key, value=slots, prev_prefix_len=0, priority=0))


def settled(servers: Servers) -> tuple[int, int]:
    """The balance of a prefill that reads nothing."""
    assert not servers.prefill.scheduler.tree_cache.locked
    return balance(servers)


def balance(servers: Servers) -> tuple[int, int]:
    """Free slots of prefill, and those of its tree."""
    scheduler = servers.prefill.scheduler
    held = {slot for path in scheduler.tree_cache.paths.values() for slot in path}
    assert not held & set(scheduler.token_to_kv_pool_allocator.free_slots)
    return len(scheduler.token_to_kv_pool_allocator.free_slots), len(held)


def reader(servers: Servers) -> Any:
    return servers.prefill.kv_manager.prefill._thread._peer._reader.engine


@contextmanager
def held_read(servers: Servers, tokens: list[int], room: int) -> Iterator[Any]:
    """Queue a prompt whose read begins, and goes on when the block has ended; gives its request."""
    peer, gate, req = servers.prefill.kv_manager.prefill._thread._peer, threading.Event(), request(tokens, room)
    read_prefix = peer.read_prefix

    async def behind_gate(*args: Any, **named: Any) -> Any:
        await asyncio.to_thread(gate.wait, LIMIT_S)
        return await read_prefix(*args, **named)

    peer.read_prefix = behind_gate
    try:
        assert servers.prefill.create_sender(req, 2)

        def is_reading() -> bool:
            assert req.disagg_kv_sender.poll() == KVPoll.Bootstrapping
            return req.disagg_kv_sender.sending.reading.read is not None

        servers.wait(is_reading)
        yield req
    finally:
        gate.set()
        peer.read_prefix = read_prefix


def counts(servers: Servers) -> dict[str, int]:
    statistics = servers.prefill.kv_manager.prefill.statistics()
    return {name.removeprefix("prefix_"): n for name, n in statistics.items() if name.startswith("prefix_")}


def test_a_turn_costs_prefill_its_new_tokens(start: Start) -> None:
    servers = start()
    free, _ = settled(servers)
    converse(servers)
    asked = servers.ask(TURN, OURS, 12)
    req = servers.bootstrap(TURN, 12)
    pages = cached(servers)
    assert len(pages) == KEPT // PAGE
    assert servers.pools[0].holds(TURN[:KEPT], pages)
    assert counts(servers) == {"reads": 1, "reads_failed": 0, "tokens_wanted": KEPT, "tokens_read": KEPT}
    assert settled(servers) == (free - KEPT, KEPT)
    # SGLang computes the rest, and hands over all pages, as always.
    whole = [*pages, *(page for page in range(1, 60) if page not in pages)][: len(OURS)]
    servers.pools[0].compute(TURN, whole)
    servers.hand_over(req, whole)
    servers.commit(asked)
    assert servers.pools[1].holds(TURN, OURS)


def test_what_prefill_has_is_not_read_and_not_written(start: Start) -> None:
    servers = start()
    fill_tree(servers, PROMPT[:8])
    own = cached(servers)
    converse(servers)
    servers.ask(TURN, OURS, 12)
    servers.pools[0].compute([1] * 8, own)
    servers.bootstrap(TURN, 12)
    pages = cached(servers)
    assert pages[:2] == own and servers.pools[0].holds([1] * 8, own)
    assert len(pages) == KEPT // PAGE and counts(servers)["tokens_read"] == KEPT - 8
    settled(servers)


def test_what_another_request_has_computed_meanwhile_stays(start: Start) -> None:
    servers = start()
    converse(servers)
    free, _ = settled(servers)
    servers.ask(TURN, OURS, 12)
    with held_read(servers, TURN, 12) as req:
        fill_tree(servers, TURN[:16])
    own = cached(servers)
    servers.wait(lambda: req.disagg_kv_sender.poll() == KVPoll.WaitingForInput)
    pages = cached(servers)
    assert pages[:4] == own and servers.pools[0].holds(TURN[:KEPT], pages)
    assert settled(servers) == (free - KEPT, KEPT)


@pytest.mark.parametrize(
    "names",
    [{"cache_salt": "mine"}, {"extra_key": "mine"}],
    ids=["salt", "key"],
)
def test_pages_of_a_salt_or_a_key_are_read_for_it_alone(start: Start, names: dict[str, str]) -> None:
    servers = start()
    converse(servers, **names)
    servers.ask(TURN, OURS, 12)
    servers.bootstrap(TURN, 12)
    assert cached(servers) == []
    servers.ask(TURN, [*range(20, 31)], 13, **names)
    servers.bootstrap(TURN, 13, **names)
    assert len(cached(servers, **names)) == KEPT // PAGE


@pytest.mark.parametrize(
    "more",
    [{"session": object()}, {"skip_radix_cache_insert": True}, {"lora_id": "a", "extra_key": "a"}],
    ids=["session", "embeddings", "adapter"],
)
def test_a_request_that_the_tree_does_not_serve_by_tokens_alone_is_computed(start: Start, more: Any) -> None:
    servers = start()
    converse(servers, **({"extra_key": "a", "lora_id": "a"} if "lora_id" in more else {}))
    servers.ask(TURN, OURS, 12, **more)
    servers.bootstrap(TURN, 12, **more)
    assert counts(servers)["reads"] == 0


def test_log_probabilities_of_a_prompt_are_computed_from_where_they_begin(start: Start) -> None:
    servers = start()
    converse(servers)
    servers.ask(TURN, OURS, 12)
    servers.bootstrap(TURN, 12, logprob_start_len=18)
    assert len(cached(servers)) == 4


def test_decode_that_does_not_ask_is_waited_for_no_longer_than_for_a_peer(start: Start) -> None:
    servers = start(wait_s=0.05)
    converse(servers)
    servers.bootstrap(TURN, 12)
    assert counts(servers)["reads"] == 0
    assert not cached(servers)


def test_short_prompts_and_those_that_prefill_has_do_not_wait_for_decode(start: Start) -> None:
    servers = start()
    fill_tree(servers, TURN)
    servers.bootstrap(TURN, 12)
    servers.bootstrap(TURN[:8], 13)


def test_of_a_decode_that_shares_nothing_nothing_is_read(start: Start) -> None:
    servers = start(shares=False)
    converse(servers)
    servers.ask(TURN, OURS, 12)
    servers.bootstrap(TURN, 12)
    assert counts(servers)["reads"] == 0


def test_for_what_is_read_the_tree_makes_room_if_that_suffices(start: Start) -> None:
    servers = start()
    converse(servers)
    allocator = servers.prefill.scheduler.token_to_kv_pool_allocator
    others = list(range(900, 908))
    fill_tree(servers, others)
    # Two pages are evictable.
    for free, is_read in ((KEPT - 12, False), (KEPT - 8, True)):
        kept, allocator.free_slots = allocator.free_slots[free:], allocator.free_slots[:free]
        before = settled(servers)
        room = 12 + is_read
        servers.ask(TURN, OURS if is_read else [*range(20, 31)], room)
        servers.bootstrap(TURN, room)
        assert settled(servers) == ((0, KEPT) if is_read else before)
        assert len(cached(servers, others)) == (0 if is_read else 2)
        allocator.free_slots += kept


def test_damaged_pages_of_decode_are_not_taken(start: Start) -> None:
    servers = start(checks=True)
    converse(servers)
    host = servers.decode.kv_manager.decode._host
    host.buffer[:] ^= 1
    before = settled(servers)
    servers.ask(TURN, OURS, 12)
    servers.bootstrap(TURN, 12)
    assert counts(servers) == {"reads": 1, "reads_failed": 1, "tokens_wanted": KEPT, "tokens_read": 0}
    assert settled(servers) == before


def test_a_decode_that_has_ended_costs_its_request_alone(start: Start) -> None:
    servers = start()
    converse(servers)
    servers.ask(TURN, OURS, 12)
    before = settled(servers)
    with held_read(servers, TURN, 12) as req:
        servers.decode.kv_manager.decode.close()
    servers.wait(lambda: req.disagg_kv_sender.poll() != KVPoll.Bootstrapping)
    req.disagg_kv_sender.clear()
    free, held = settled(servers)
    assert free + held == sum(before)


def test_pages_of_an_aborted_request_are_back_when_sglang_has_aborted_it(start: Start) -> None:
    servers = start()
    converse(servers)
    before = settled(servers)
    servers.ask(TURN, OURS, 12)
    with held_read(servers, TURN, 12) as req:
        assert sum(balance(servers)) == sum(before) - KEPT
        req.disagg_kv_sender.abort()
        assert req.disagg_kv_sender.poll() == KVPoll.Failed
        assert settled(servers) == before
    # SGLang may flush now.
    servers.prefill.scheduler.tree_cache.reset()
    assert reader(servers).balance()["host"].cached == 0


def test_a_defect_in_a_read_costs_pages_and_does_not_end_the_server(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An exception that reaches SGLang's scheduler ends it. Whether anything writes to the pages is not known."""

    async def raise_it(*args: object, **named: object) -> int:
        raise RuntimeError("by a test")

    servers = start()
    converse(servers)
    before = settled(servers)
    servers.ask(TURN, OURS, 12)
    monkeypatch.setattr(PrefillPeer, "read_prefix", raise_it)
    req = servers.bootstrap(TURN, 12)
    assert req.disagg_kv_sender.poll() == KVPoll.WaitingForInput, "it is computed"
    req.disagg_kv_sender.clear()
    assert sum(settled(servers)) == sum(before) - KEPT
    assert "by a test" in caplog.text


def test_a_read_that_outlives_the_tree_gives_no_page_back_twice(start: Start) -> None:
    servers = start()
    converse(servers)
    servers.ask(TURN, OURS, 12)
    scheduler = servers.prefill.scheduler
    tree, allocator = scheduler.tree_cache, scheduler.token_to_kv_pool_allocator
    with held_read(servers, TURN, 12) as req:
        # SGLang forgets its tree and all locks, and gives the pages to others.
        for locks in (tree.locked, tree.locked_windows):
            locks.clear()
        tree.reset()
        allocator.free_slots = []
    servers.wait(lambda: req.disagg_kv_sender.poll() != KVPoll.Bootstrapping)
    assert req.disagg_kv_sender.poll() == KVPoll.WaitingForInput
    assert allocator.free_slots == [] and cached(servers) == []
    req.disagg_kv_sender.clear()


def test_what_both_servers_have_in_storage_is_read_from_there(start: Start, tmp_path: Path) -> None:
    servers = start(uri=f"file:{tmp_path}?capacity=100MB")
    converse(servers)
    servers.decode.kv_manager.decode._engine.wait_settled()
    servers.decode.tree_cache.reset()
    servers.ask(TURN, OURS, 12)
    servers.bootstrap(TURN, 12)
    pages = cached(servers)
    assert len(pages) == KEPT // PAGE and servers.pools[0].holds(TURN[:KEPT], pages)
    assert reader(servers).statistics()["core"]["peer_fetches"] == 0


def test_a_flush_of_prefill_empties_its_host_memory_and_decode_is_read_again(start: Start) -> None:
    servers = start()
    converse(servers)
    for room in (12, 13):
        servers.ask(TURN, OURS if room == 12 else [*range(20, 31)], room)
        servers.bootstrap(TURN, room)
        assert len(cached(servers)) == KEPT // PAGE
        servers.prefill.scheduler.tree_cache.reset()
    assert reader(servers).statistics()["core"]["peer_fetches"] == 2
