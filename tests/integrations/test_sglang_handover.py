"""SGLang's transfer backend: both ends over NIXL, under schedulers that are made of SGLang's contract."""

from __future__ import annotations

import subprocess
import sys
import threading
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from benchmarks.ports import free_port
from tests.support.sglang_contract import (
    ASKED,
    PAGE,
    RECOMPUTES,
    SERVICES,
    HookRegistry,
    KVPoll,
    KVTransferError,
    UnifiedRadixCache,
    modules,
    request,
)
from tests.support.sglang_servers import Servers
from tests.support.waits import LIMIT_S
from tidekv.backends.keys.chain import page_digests
from tidekv.engine.integrations.sglang.handover import decode_end, prefill_end
from tidekv.engine.integrations.sglang.handover.plugin import HOOKS, check_hooks, register
from tidekv.engine.integrations.sglang.handover.ranks import Ranks
from tidekv.engine.integrations.sglang.handover.requests import PageNamespaces
from tidekv.engine.integrations.sglang.handover.settings import BackendSettings, read_settings
from tidekv.engine.integrations.sglang.handover.tree import KeptTree
from tidekv.engine.kv_events.messages import hash_of
from tidekv.engine.thread import prefill_thread
from tidekv.states.errors import InvalidConfig, TidekvError

pytestmark = pytest.mark.nixl
PROMPT = list(range(100, 122))  # Five pages of four tokens and a tail of two.
SETTINGS = '{"dials": ["127.0.0.1:*"], "host": "1MB"}'


@pytest.fixture
def plugged(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("TIDEKV_SGLANG", SETTINGS)
    with modules():
        register()
        HookRegistry.apply_hooks()
        yield


@pytest.fixture
def servers(plugged: None) -> Iterator[Servers]:
    servers = Servers()
    try:
        yield servers
    finally:
        servers.close()


def test_a_prompt_is_sent_then_found_in_host_memory_then_extended(servers: Servers) -> None:
    assert servers.serve(PROMPT, [1, 2, 3, 4, 5, 6], [9, 8, 7, 6, 5, 4], 11) == {"transfer": 22}
    assert int(servers.decode.metadata_buffers.output_ids[3, 0]) == 122
    # SGLang has given the pages to others; four full pages and what follows are there again.
    servers.pools[1].compute([1] * 24, [9, 8, 7, 6, 5, 4])
    assert servers.serve(PROMPT, [1, 2, 3, 4, 5, 6], [20, 21, 22, 23, 24, 25], 12) == {"l2": 20, "transfer": 2}
    # The tree has two pages; a longer prompt continues behind what host memory has.
    longer = PROMPT + list(range(500, 520))
    pages = [20, 21, *range(30, 39)]
    found = servers.serve(longer, list(range(10, 21)), pages, 13, have=8)
    assert found == {"l1": 8, "l2": 12, "transfer": 22}
    counts = servers.decode.metadata_buffers.cached_tokens[13 % 8, :4].tolist()
    assert counts == [20, 8, 12, 0]


def test_windows_come_with_their_prompt_into_the_pool_that_sglang_has_for_them(plugged: None) -> None:
    servers = Servers(windows=True)
    theirs, ours = servers.pools
    try:
        for room, (pages, windows) in enumerate(
            [([9, 8, 7, 6, 5, 4], [3, 2, 1]), ([20, 21, 22, 23, 24, 25], [7, 8, 9])]
        ):
            theirs.map([4, 5, 6], [11, 12, 13])
            # Of the windows of two tokens in the last page, those of eight tokens and one more are needed: three pages.
            ours.map(pages[3:], windows)
            theirs.full_kv_pool.compute(PROMPT, [1, 2, 3, 4, 5, 6])
            theirs.swa_kv_pool.compute([0] * 12 + PROMPT[12:], [30, 30, 30, 11, 12, 13])
            asked = servers.ask(PROMPT, pages, room)
            sent = servers.send(PROMPT, [1, 2, 3, 4, 5, 6], room)
            servers.commit(asked)
            servers.wait(lambda sent=sent: sent.disagg_kv_sender.poll() == KVPoll.Success)
            assert ours.full_kv_pool.holds(PROMPT, pages)
            for place, token in enumerate(PROMPT[12:], 12):
                at = windows[place // PAGE - 3] * PAGE + place % PAGE
                assert float(ours.swa_kv_pool.k_buffer[0][at, 0, 0]) == token * 8 + place / 1024
            servers.settle()
            sources = {source: count for source, count in asked.kv_receiver.restore.sources.items() if count}
            assert sources == ({"l2": 20, "transfer": 2} if room else {"transfer": 22})
    finally:
        servers.close()


def test_a_prompt_whose_windows_sglang_has_given_up_fails_alone(plugged: None) -> None:
    servers = Servers(windows=True)
    try:
        asked = servers.ask(PROMPT, [9, 8, 7, 6, 5, 4], 5)
        with pytest.raises(KVTransferError, match="does not have the windows"):
            asked.kv_receiver.failure_exception()
    finally:
        servers.close()


def test_chunks_are_sent_as_they_are_computed_and_before_decode_asks(servers: Servers) -> None:
    sent = servers.send(PROMPT, [1, 2, 3, 4, 5, 6], 5, chunks=3)
    assert sent.disagg_kv_sender.poll() == KVPoll.Transferring
    asked = servers.ask(PROMPT, [9, 8, 7, 6, 5, 4], 5)
    servers.commit(asked)
    assert servers.pools[1].holds(PROMPT, [9, 8, 7, 6, 5, 4])
    servers.wait(lambda: sent.disagg_kv_sender.poll() == KVPoll.Success)
    page_bytes = 2 * 2 * PAGE * 2 * 8 * 4
    assert sent.disagg_kv_sender.get_transfer_metric().transfer_total_bytes == 6 * page_bytes


def test_pages_of_an_aborted_request_are_held_until_nothing_writes_to_them(servers: Servers) -> None:
    assert servers.decode.transfer_queue.deferred_kv_release_timeout == float("inf")
    asked = servers.ask(PROMPT, [9, 8, 7, 6, 5, 4], 5)
    manager = servers.decode.kv_manager
    assert not manager.is_abort_release_safe(5, 1)
    asked.kv_receiver.abort()
    assert asked.kv_receiver.poll() == KVPoll.Failed
    assert asked.kv_receiver.abort_notified
    with pytest.raises(KVTransferError, match="Aborted by AbortReq") as raised:
        asked.kv_receiver.failure_exception()
    assert not raised.value.is_from_another_rank
    servers.wait(lambda: manager.is_abort_release_safe(5, 1))
    # Prefill computes it all the same, and is told.
    sent = servers.send(PROMPT, [1, 2, 3, 4, 5, 6], 5)
    sent.disagg_kv_sender.abort()
    assert sent.disagg_kv_sender.poll() == KVPoll.Failed


def test_pages_of_a_hand_over_that_cannot_be_stopped_are_not_used_again(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    req = request(PROMPT, 5)
    assert servers.prefill.create_sender(req, 2)
    end = servers.prefill.kv_manager.prefill
    turn, held = threading.Event(), threading.Event()

    async def hold() -> None:
        held.set()
        turn.wait(LIMIT_S)

    end._thread._started().start(hold())
    assert held.wait(LIMIT_S)
    monkeypatch.setattr(prefill_thread, "STOP_S", 0.05)
    try:
        with pytest.raises(TidekvError, match="did not withdraw"):
            req.disagg_kv_sender.abort()
    finally:
        turn.set()
    req.disagg_kv_sender.abort()
    assert req.disagg_kv_sender.poll() == KVPoll.Failed


def test_a_request_that_prefill_gives_up_fails_at_decode_with_the_reason(servers: Servers) -> None:
    asked = servers.ask(PROMPT, [9, 8, 7, 6, 5, 4], 5)
    sent = servers.send(PROMPT[:10] + [7] * 12, [1, 2, 3, 4, 5, 6], 6)
    req = request(PROMPT, 5)
    assert servers.prefill.create_sender(req, 2)
    req.disagg_kv_sender.abort()
    servers.wait(lambda: asked.kv_receiver.poll() == KVPoll.Failed)
    with pytest.raises(KVTransferError, match="Aborted by AbortReq"):
        asked.kv_receiver.failure_exception()
    with pytest.raises(KVTransferError, match="another rank"):
        sent.disagg_kv_sender.failure_exception()


def test_a_room_with_another_prompt_gives_nothing(servers: Servers) -> None:
    asked = servers.ask(PROMPT, [9, 8, 7, 6, 5, 4], 5, cache_salt="mine")
    servers.send(PROMPT, [1, 2, 3, 4, 5, 6], 5)
    servers.wait(lambda: asked.kv_receiver.poll() == KVPoll.Failed)
    assert not servers.pools[1].k_buffer[0].any()


def test_adapters_that_each_server_numbers_for_itself_are_one_prompt(servers: Servers) -> None:
    asked = servers.ask(PROMPT, [9, 8, 7, 6, 5, 4], 5, extra_key="k" + "aa", lora_id="aa")
    servers.send(PROMPT, [1, 2, 3, 4, 5, 6], 5, extra_key="k" + "bb", lora_id="bb")
    servers.commit(asked)


def test_a_client_does_not_choose_whom_decode_connects_to(servers: Servers) -> None:
    asked = servers.ask(PROMPT, [9, 8, 7, 6, 5, 4], 5, bootstrap_addr="10.1.2.3:8998")
    assert asked.kv_receiver.poll() == KVPoll.Failed
    assert not servers.decode.kv_manager.try_ensure_parallel_info("10.1.2.3:8998")
    assert ASKED == []
    with pytest.raises(KVTransferError, match=r"10\.1\.2\.3:8998.*not in dials"):
        asked.kv_receiver.failure_exception()


def test_a_room_that_is_live_or_no_number_fails_its_request_alone(servers: Servers) -> None:
    first = servers.ask(PROMPT, [9, 8, 7, 6, 5, 4], 5)
    second = servers.ask(PROMPT, [19, 18, 17, 16, 15, 14], 5)
    assert second.kv_receiver.poll() == KVPoll.Failed
    odd = servers.decode._create_receiver_and_enqueue(request(PROMPT, 5))
    odd.kv_receiver.__init__(servers.decode.kv_manager, odd.req.bootstrap_addr, "5")
    assert odd.kv_receiver.poll() == KVPoll.Failed
    servers.send(PROMPT, [1, 2, 3, 4, 5, 6], 5)
    servers.commit(first)


def test_host_memory_with_a_path_survives_a_restart_of_decode(
    plugged: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = {**msgspec.json.decode(SETTINGS), "host_path": str(tmp_path / "pool")}
    monkeypatch.setenv("TIDEKV_SGLANG", msgspec.json.encode(settings).decode())
    servers = Servers()
    try:
        assert servers.serve(PROMPT, [1, 2, 3, 4, 5, 6], [9, 8, 7, 6, 5, 4], 11) == {"transfer": 22}
        servers.decode.kv_manager.decode.close()
        servers = Servers(servers.prefill)
        found = servers.serve(PROMPT, [1, 2, 3, 4, 5, 6], [9, 8, 7, 6, 5, 4], 12)
        assert found == {"l2": 20, "transfer": 2}
    finally:
        servers.close()


def test_a_loop_without_work_is_woken_by_the_end_of_what_it_waits_for(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (decode_end, prefill_end):
        monkeypatch.setattr(module, "REST_S", 10 * LIMIT_S)
    idle = sys.modules["sglang.srt.managers.scheduler"].Scheduler.on_idle
    decode, prefill = servers.decode.scheduler, servers.prefill.scheduler
    asked = servers.ask(PROMPT, [9, 8, 7, 6, 5, 4], 5)
    sent = servers.send(PROMPT, [1, 2, 3, 4, 5, 6], 5)
    while asked.kv_receiver.poll() != KVPoll.Success:
        idle(decode)
    while sent.disagg_kv_sender.poll() != KVPoll.Success:
        idle(prefill)
    servers.decode.tree_cache.checkpoint_into_tree(asked.req, up_to=len(PROMPT))
    while servers.decode.tree_cache.locked:
        idle(decode)
        servers.mixin.process_decode_queue(decode)
    # What has no request waits by SGLang's own rules.
    for scheduler in (decode, prefill):
        scheduler.is_fully_idle = lambda: True
        idle(scheduler)


def test_the_tree_is_unlocked_when_all_ranks_have_copied(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = servers.ask(PROMPT, [9, 8, 7, 6, 5, 4], 11)
    servers.send(PROMPT, [1, 2, 3, 4, 5, 6], 11)
    end = servers.decode.kv_manager.decode
    votes: list[list[bool]] = []

    def others_have_not(flags: list[bool]) -> list[bool]:
        votes.append(flags)
        return [False] * len(flags)

    with monkeypatch.context() as patched:
        patched.setattr(end._ranks, "all_of", others_have_not)
        servers.commit(asked)
        servers.wait(lambda: votes[-1:] == [[True]] or servers._is_reaped())
        assert servers.decode.tree_cache.locked == ["node of 11"]
    servers.settle()


def test_a_flush_waits_for_copies_and_empties_host_memory(servers: Servers) -> None:
    asked = servers.ask(PROMPT, [9, 8, 7, 6, 5, 4], 11)
    servers.send(PROMPT, [1, 2, 3, 4, 5, 6], 11)
    servers.commit(asked)
    servers.decode.tree_cache.reset()
    assert servers.serve(PROMPT, [1, 2, 3, 4, 5, 6], [20, 21, 22, 23, 24, 25], 12) == {"transfer": 22}


def test_a_retracted_request_takes_the_pages_that_the_tree_has_and_loads_the_rest(servers: Servers) -> None:
    queue, pool = servers.decode, servers.pools[1]
    retracted = request(PROMPT, 5, output_ids=array("q", [1, 2, 3]), lock=None)
    pool.compute([*PROMPT, 1, 2], [9, 8, 7, 6, 5, 4])
    slots = [page * PAGE + offset for page in (9, 8, 7, 6, 5, 4) for offset in range(PAGE)]
    copies = pool.get_cpu_copy(slots)
    for copy in copies:
        copy[:8] = 777  # What the tree has is read by others, and stays as it is.
    retracted.kv.retraction_backup = SimpleNamespace(cpu_tensors=copies)
    pool.compute([1] * 16, [7, 6, 5, 4])
    queue.tree_cache.matched, queue.free_pages = slots[:8], [20, 21, 22, 23]
    queue.resume(retracted)
    assert pool.holds([*PROMPT, 1, 2], [9, 8, 20, 21, 22, 23])
    row = queue.req_to_token_pool.req_to_token[retracted.kv.req_pool_idx]
    assert row[:24:PAGE].tolist() == [page * PAGE for page in (9, 8, 20, 21, 22, 23)]
    assert retracted.kv.cache_protected_len == 8
    assert queue.tree_cache.locked == [retracted.lock]
    queue.tree_cache.unlock(retracted.lock)


def test_a_retracted_request_leaves_the_windows_of_the_tree_to_those_that_need_room(plugged: None) -> None:
    servers = Servers(windows=True)
    try:
        queue, pool = servers.decode, servers.pools[1].full_kv_pool
        retracted = request(PROMPT, 5, output_ids=array("q", [1]), lock=None)
        pool.compute(PROMPT, [9, 8, 7, 6, 5, 4])
        slots = [page * PAGE + offset for page in (9, 8, 7, 6, 5, 4) for offset in range(PAGE)]
        retracted.kv.retraction_backup = SimpleNamespace(cpu_tensors=pool.get_cpu_copy(slots[:22]))
        queue.token_to_kv_pool.load_cpu_copy = pool.load_cpu_copy
        queue.tree_cache.matched, queue.free_pages = slots[:8], [20, 21, 22, 23]
        queue.resume(retracted)
        assert pool.holds(PROMPT, [9, 8, 20, 21, 22, 23])
        assert queue.tree_cache.locked == [retracted.lock]
        queue.tree_cache.unlock(retracted.lock)
    finally:
        servers.close()


def test_a_retracted_request_that_the_tree_has_forgotten_is_loaded_as_a_whole(servers: Servers) -> None:
    queue, pool = servers.decode, servers.pools[1]
    retracted = request(PROMPT, 5, output_ids=array("q", [1]), lock=None)
    pool.compute(PROMPT, [9, 8, 7, 6, 5, 4])
    slots = [page * PAGE + offset for page in (9, 8, 7, 6, 5, 4) for offset in range(PAGE)]
    retracted.kv.retraction_backup = SimpleNamespace(cpu_tensors=pool.get_cpu_copy(slots[:22]))
    queue.free_pages = [20, 21, 22, 23, 24, 25]
    queue.resume(retracted)
    assert pool.holds(PROMPT, [20, 21, 22, 23, 24, 25])
    queue.tree_cache.unlock(retracted.lock)


def test_prefill_writes_through_so_that_another_decode_starts_warm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plugged: None
) -> None:
    fetch = '"engine": {"storage": {"prefetch": "wait_complete", "prefetch_threshold_tokens": 0}}'
    shared = f', "uri": "file:{tmp_path}?capacity=100MB", {fetch}}}'
    monkeypatch.setenv("TIDEKV_SGLANG", SETTINGS[:-1] + shared)
    prefill = sys.modules["sglang.srt.disaggregation.prefill"].PrefillBootstrapQueue()
    monkeypatch.setenv("TIDEKV_SGLANG", SETTINGS)
    first = Servers(prefill)
    try:
        salted = {"cache_salt": "mine"}
        for room, more in ((11, {}), (12, salted)):
            asked = first.ask(PROMPT, [9, 8, 7, 6, 5, 4], room, **more)
            first.send(PROMPT, [1, 2, 3, 4, 5, 6], room, **more)
            first.commit(asked)
            first.settle()
        statistics = prefill.kv_manager.prefill.statistics
        first.wait(lambda: statistics()["store_pages_written"] == 10)
        first.decode.kv_manager.decode.close()
        monkeypatch.setenv("TIDEKV_SGLANG", SETTINGS[:-1] + shared)
        first.decode = Servers(prefill).decode
        found = first.serve(PROMPT, [1, 2, 3, 4, 5, 6], [20, 21, 22, 23, 24, 25], 13)
        assert found == {"l3": 20, "transfer": 2}
        # Under other weights its pages have other names, too.
        module = sys.modules["sglang.srt.managers.scheduler_components.weight_updater"]
        received = SimpleNamespace(flush_cache=True, weight_version="v2")
        prefill.scheduler.tree_cache = SimpleNamespace(reset=lambda: None)
        module.SchedulerWeightUpdaterManager(prefill.scheduler).flush_cache_after_weight_update(received, True, "")
        asked = first.ask(PROMPT, [30, 31, 32, 33, 34, 35], 14)
        first.send(PROMPT, [1, 2, 3, 4, 5, 6], 14)
        first.commit(asked)
        first.wait(lambda: statistics()["store_pages_written"] == 15)
        first.settle()
    finally:
        first.close()


def test_a_hint_of_a_request_names_a_decode_server_that_has_the_prompt(
    monkeypatch: pytest.MonkeyPatch, plugged: None
) -> None:
    options: dict[str, Any] = {"dials": ["127.0.0.1:*"], "host": "1MB"}
    peers = {"enabled": True, "wait_s": LIMIT_S, "wait_share": 0.9}

    def set_options(**more: object) -> None:
        engine = {"cache_peers": peers | more, "storage": {"prefetch": "timeout", "prefetch_threshold_tokens": 1}}
        monkeypatch.setenv("TIDEKV_SGLANG", msgspec.json.encode(options | {"engine": engine}).decode())

    set_options(listen="127.0.0.1:0")
    first = Servers()
    set_options(allow=["127.0.0.1:*"])
    second = Servers(first.prefill)
    try:
        assert first.serve(PROMPT, [1, 2, 3, 4, 5, 6], [9, 8, 7, 6, 5, 4], 11) == {"transfer": 22}
        address = first.decode.kv_manager.decode._engine.call(lambda engine: engine.peer_address)
        payload = {"source_control_endpoint": f"tcp://{address}", "block_hashes": []}
        action = {"action_id": "a", "action_type": "kv.fetch", "action_version": "1.0", "payload": payload}
        hints = {"protocol_version": "0.1", "message_id": "m", "actions": [action]}
        found = second.serve(PROMPT, [1, 2, 3, 4, 5, 6], [20, 21, 22, 23, 24, 25], 12, kv_hints=hints)
        assert found == {"peer": 20, "transfer": 2}
        counts = second.decode.metadata_buffers.cached_tokens[12 % 8, :4].tolist()
        assert counts == [20, 0, 0, 20]
    finally:
        second.decode.kv_manager.decode.close()
        first.close()


def test_host_memory_and_storage_are_published_under_the_hashes_of_sglang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plugged: None
) -> None:
    zmq = pytest.importorskip("zmq")
    endpoint = f"ipc://{tmp_path}/e"
    more = f', "uri": "file:{tmp_path}/l3?capacity=100MB", "engine": {{"kv_events": {{"endpoint": "{endpoint}"}}}}}}'
    monkeypatch.setenv("TIDEKV_SGLANG", SETTINGS[:-1] + more)
    wanted = {hash_of(digest) for digest in page_digests(np.asarray(PROMPT, dtype="<u4").tobytes(), PAGE)}
    assert len(wanted) == 5
    held: dict[str, set[int]] = {}
    with zmq.Context() as context, context.socket(zmq.SUB) as listener:
        listener.linger = 0
        listener.subscribe("")
        servers = Servers()
        try:
            listener.connect(endpoint)
            servers.serve(PROMPT, [1, 2, 3, 4, 5, 6], [9, 8, 7, 6, 5, 4], 11)

            def all_are_published() -> bool:
                while listener.poll(0):
                    _, events, *_ = msgspec.msgpack.decode(listener.recv_multipart()[2])
                    for event in events:
                        if event["type"] == "BlockStored":
                            held.setdefault(event["medium"], set()).update(event["block_hashes"])
                return held.get("CPU") == wanted and held.get("STORAGE") == wanted

            servers.wait(all_are_published)
            assert set(held) == {"CPU", "STORAGE"}, "SGLang publishes its tree itself"
        finally:
            servers.close()


def test_another_prefill_computes_the_prompt_of_one_that_is_gone(
    monkeypatch: pytest.MonkeyPatch, plugged: None
) -> None:
    monkeypatch.setenv("TIDEKV_SGLANG", SETTINGS[:-1] + ', "prefills": ["127.0.0.1:7", "127.0.0.1:8998"]}')
    servers = Servers()
    SERVICES["127.0.0.1:6"] = [{"rank_ip": "127.0.0.1", "rank_port": free_port()}]
    try:
        asked = servers.ask(PROMPT, [9, 8, 7, 6, 5, 4], 5, bootstrap_addr="127.0.0.1:6")
        servers.wait(lambda: asked.kv_receiver.poll() == KVPoll.Failed or bool(RECOMPUTES))
        assert RECOMPUTES == [
            {"input_ids": PROMPT, "bootstrap_room": 5, "bootstrap_host": "127.0.0.1", "bootstrap_port": 8998}
        ]
        servers.send(PROMPT, [1, 2, 3, 4, 5, 6], 5)
        servers.commit(asked)
        assert servers.pools[1].holds(PROMPT, [9, 8, 7, 6, 5, 4])
        # Not with a first token that the request for another computation would not give.
        asked = servers.ask(PROMPT, [19, 18, 17, 16, 15, 14], 6, grammar="json", bootstrap_addr="127.0.0.1:6")
        servers.wait(lambda: asked.kv_receiver.poll() == KVPoll.Failed)
        assert len(RECOMPUTES) == 1
    finally:
        servers.close()


def test_a_row_of_another_length_fails_its_request_alone(servers: Servers) -> None:
    servers.decode.kv_manager.decode._row_bytes += 1
    asked = servers.ask(PROMPT, [9, 8, 7, 6, 5, 4], 5)
    servers.send(PROMPT, [1, 2, 3, 4, 5, 6], 5)
    servers.wait(lambda: asked.kv_receiver.poll() == KVPoll.Failed)
    with pytest.raises(KVTransferError, match="no row of metadata of"):
        asked.kv_receiver.failure_exception()


def test_a_prefill_is_found_while_sglang_asks_how_its_request_is(
    monkeypatch: pytest.MonkeyPatch, plugged: None
) -> None:
    """What SGLang knows of it is not forgotten between its look-up and its use, on another thread."""
    monkeypatch.setenv("TIDEKV_SGLANG", SETTINGS[:-1] + ', "prefills": ["127.0.0.1:8998"]}')
    servers = Servers()
    SERVICES["127.0.0.1:6"] = [{"rank_ip": "127.0.0.1", "rank_port": free_port()}]
    is_known, was_polled = threading.Event(), threading.Event()
    try:
        asked = servers.ask(PROMPT, [9, 8, 7, 6, 5, 4], 5, bootstrap_addr="127.0.0.1:6")
        look_up = servers.decode.kv_manager.try_ensure_parallel_info

        def slowly(address: str) -> bool:
            found = bool(look_up(address))
            is_known.set()
            return was_polled.wait(LIMIT_S) and found

        monkeypatch.setattr(servers.decode.kv_manager, "try_ensure_parallel_info", slowly)
        servers.wait(lambda: asked.kv_receiver.poll() == KVPoll.Failed or is_known.is_set())
        assert asked.kv_receiver.poll() == KVPoll.Transferring
        was_polled.set()
        servers.wait(lambda: asked.kv_receiver.poll() == KVPoll.Failed or bool(RECOMPUTES))
        assert [each["bootstrap_port"] for each in RECOMPUTES] == [8998]
        servers.send(PROMPT, [1, 2, 3, 4, 5, 6], 5)
        servers.commit(asked)
    finally:
        was_polled.set()
        servers.close()


def test_a_copy_that_outlives_a_flush_unlocks_nothing_in_the_new_tree() -> None:
    released: list[Callable[[], None]] = []
    decode = SimpleNamespace(offer=lambda *args, release, **more: released.append(release), flush=lambda: None)
    pool = SimpleNamespace(req_to_token=torch.zeros((8, 24), dtype=torch.int32))
    tree = UnifiedRadixCache(pool)
    kept = KeptTree(decode, tree, PageNamespaces(Ranks()))  # type: ignore[arg-type]  # The part of the decode end that it calls.
    served = request(PROMPT, 5)
    tree.checkpoint_into_tree(served, up_to=len(PROMPT))
    kept.offer(served)
    kept.flush()
    tree.locked.clear()
    released[0]()  # Raises if it unlocks.
    later = request(PROMPT, 6)
    tree.checkpoint_into_tree(later, up_to=len(PROMPT))
    kept.offer(later)
    assert tree.locked == ["node of 6"]
    released[1]()
    assert tree.locked == []


@pytest.mark.parametrize("version", ["v2", None])
def test_pages_of_other_weights_are_not_found_again(
    version: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plugged: None
) -> None:
    monkeypatch.setenv("TIDEKV_SGLANG", SETTINGS[:-1] + f', "uri": "file:{tmp_path}?capacity=100MB"}}')
    servers = Servers()
    try:
        assert servers.serve(PROMPT, [1, 2, 3, 4, 5, 6], [9, 8, 7, 6, 5, 4], 11) == {"transfer": 22}
        module = sys.modules["sglang.srt.managers.scheduler_components.weight_updater"]
        updater = module.SchedulerWeightUpdaterManager(servers.decode.scheduler)
        received = SimpleNamespace(flush_cache=True, weight_version=version)
        assert updater.flush_cache_after_weight_update(received, True, "") == (True, "")
        found = servers.serve(PROMPT, [1, 2, 3, 4, 5, 6], [20, 21, 22, 23, 24, 25], 12)
        assert found == {"transfer": 22}
        assert "l2" in servers.serve(PROMPT, [1, 2, 3, 4, 5, 6], [30, 31, 32, 33, 34, 35], 13)
    finally:
        servers.close()


@pytest.mark.parametrize("target", [hook.target for hook in HOOKS])
def test_a_hooked_function_that_sglang_does_not_have_is_named_at_the_start(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDEKV_SGLANG", SETTINGS)
    with modules(without=target):
        register()
        HookRegistry.apply_hooks()
        utils = sys.modules["sglang.srt.disaggregation.utils"]
        with pytest.raises(InvalidConfig, match=target.replace(".", r"\.")):
            utils.get_kv_class(utils.TransferBackend("tidekv"), utils.KVClassType.MANAGER)
        assert utils.get_kv_class(utils.TransferBackend.NIXL, utils.KVClassType.MANAGER) == "manager of nixl"


@pytest.mark.parametrize("dropped", HOOKS, ids=[hook.target.rpartition(".")[2] for hook in HOOKS])
def test_a_hook_that_was_not_applied_is_named(dropped: Any, plugged: None) -> None:
    check_hooks()
    with modules():
        register()
        HookRegistry.hooks = [hook for hook in HookRegistry.hooks if hook[0] != dropped.target]
        HookRegistry.apply_hooks()
        with pytest.raises(InvalidConfig, match=dropped.target.replace(".", r"\.")):
            check_hooks()


def test_the_plugin_imports_no_metrics_before_sglang_has_named_their_folder() -> None:
    # prometheus_client reads PROMETHEUS_MULTIPROC_DIR when it is imported: what SGLang's main process counted before
    # would not be in its /metrics.
    ask = "import sys, tidekv.engine.integrations.sglang.handover.plugin; print(sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout
    assert "'prometheus_client'" not in loaded
    assert "'torch'" not in loaded


def test_without_settings_the_backend_has_a_name_and_no_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIDEKV_SGLANG", raising=False)
    with modules():
        register()
        assert [target for target, _, _ in HookRegistry.hooks] == ["sglang.srt.disaggregation.utils.get_kv_class"]
        HookRegistry.apply_hooks()
        utils = sys.modules["sglang.srt.disaggregation.utils"]
        with pytest.raises(InvalidConfig, match="TIDEKV_SGLANG"):
            utils.get_kv_class(utils.TransferBackend("tidekv"), utils.KVClassType.MANAGER)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "JSON"),
        ("@/nowhere/at-all.json", "cannot be read"),
        ('{"dial": []}', "dial"),
        ('{"host": "none"}', "host"),
        ('{"uri": "memory:"}', "memory"),
        ('{"dials": ["x"]}', "dials"),
        ('{"dials": ["10.0.0.1:*"], "prefills": ["10.0.0.2:8998"]}', "prefills"),
        ('{"lease_s": 0}', "lease_s"),
    ],
)
def test_wrong_settings_are_refused_by_name(text: str, words: str) -> None:
    with pytest.raises(InvalidConfig, match=words) as raised:
        read_settings({"TIDEKV_SGLANG": text})
    assert "TIDEKV_SGLANG" in str(raised.value)


def test_each_rank_has_ports_for_its_metrics_and_peers_and_a_file_for_its_journal(tmp_path: Path) -> None:
    def settings(engine: str) -> BackendSettings:
        return read_settings({"TIDEKV_SGLANG": f'{{"engine": {engine}}}'})

    metrics = settings('{"metrics": {"listen": "127.0.0.1:9400"}}')
    assert [metrics.engine_of(rank, 2).metrics.listen for rank in (0, 1)] == ["127.0.0.1:9400", "127.0.0.1:9401"]
    assert metrics.engine_of(0, 1).metrics.listen == "127.0.0.1:9400"
    assert settings('{"metrics": {"listen": "127.0.0.1:0"}}').engine_of(1, 2).metrics.listen == "127.0.0.1:0"
    peers = settings('{"cache_peers": {"enabled": true, "listen": "10.0.0.5:7100", "ask": ["10.0.0.6:7100"]}}')
    assert [peers.engine_of(rank, 2).cache_peers.listen for rank in (0, 1)] == ["10.0.0.5:7100", "10.0.0.5:7101"]
    # What is asked is agreed on: each rank knows its place.
    assert peers.engine_of(1, 2).cache_peers.ask == ("10.0.0.6:7100",)
    one_file = settings(f'{{"journal": {{"path": "{tmp_path}/journal"}}}}')
    assert one_file.engine_of(0, 1).journal.path == f"{tmp_path}/journal"
    with pytest.raises(InvalidConfig, match=r"journal\.path.*2 ranks"):
        one_file.engine_of(0, 2)
    with pytest.raises(InvalidConfig, match="kv_events"):
        settings('{"kv_events": {"endpoint": "tcp://127.0.0.1:5557"}}').engine_of(0, 2)


def test_the_page_on_sglang_names_each_key() -> None:
    page = (Path(__file__).parents[2] / "docs" / "sglang.md").read_text()
    for name in BackendSettings.__struct_fields__:
        assert f"`{name}`" in page, name


def test_a_silent_prefill_is_waited_for_by_half_of_the_lease() -> None:
    peer = BackendSettings(lease_s=30.0).peer
    assert (peer.lease_s, peer.silence_s, peer.heartbeat_s) == (30.0, 15.0, 0.5)
