"""What SGLang's schedulers of several tensor-parallel ranks agree on, each rank in a process of its own."""

from __future__ import annotations

import itertools
import multiprocessing
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.sglang_contract import HEADS, PAGE, HookRegistry, KVPoll, modules, request
from tests.support.waits import LIMIT_S
from tidekv.engine.integrations.sglang.handover.plugin import register
from tidekv.engine.integrations.sglang.handover.ranks import Ranks

RANKS = 2


def agree(rank: int, folder: Path, found: Queue[tuple[int, object]]) -> None:
    """One rank: make the calls, as a scheduler does."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    try:
        ranks = Ranks(rank, RANKS, torch.distributed.group.WORLD)
        ranks.meet("127.0.0.1", kv_heads_total=8, secret="s")
        group = ranks.engines
        assert group is not None
        found.put(
            (
                rank,
                (
                    ranks.share(f"of rank {rank}"),
                    ranks.all_of([True, rank == 0, False]),
                    ranks.all_of([]),
                    ranks.is_first,
                    group.address,
                    (group.rank, group.ranks, group.kv_heads_total),
                ),
            )
        )
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_ranks_share_what_the_first_one_says_and_do_what_all_can(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    found: Queue[tuple[int, object]] = context.Queue()
    processes = [context.Process(target=agree, args=(rank, tmp_path, found)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    try:
        by_rank = dict(found.get(timeout=LIMIT_S) for _ in processes)
    finally:
        for process in processes:
            process.join(LIMIT_S)
    address = by_rank[0][4]  # type: ignore[index]  # A tuple that went through a queue.
    common = ("of rank 0", [True, False, False], [])
    assert by_rank == {rank: (*common, rank == 0, address, (rank, RANKS, 8)) for rank in range(RANKS)}


def test_one_rank_asks_nobody() -> None:
    sole = Ranks()
    sole.meet("127.0.0.1", kv_heads_total=0, secret="")
    assert sole.engines is None
    assert sole.share("text") == "text"
    assert sole.all_of([True, False]) == [True, False]


class ThreadRanks(Ranks):
    """Ranks that are threads of one process."""

    def __init__(self, rank: int, ranks: int, barrier: threading.Barrier, said: dict[int, Any]) -> None:
        super().__init__(rank, ranks)
        self._barrier, self._said = barrier, said

    def share(self, text: str) -> str:
        return str(self._all(text)[0])

    def all_of(self, flags: Sequence[bool]) -> list[bool]:
        return [all(each) for each in zip(*self._all(flags), strict=True)] if flags else []

    def _all(self, said: Any) -> list[Any]:
        self._said[self.rank] = said
        self._barrier.wait(LIMIT_S)
        everything = [self._said[rank] for rank in range(self.ranks)]
        self._barrier.wait(LIMIT_S)
        return everything


PROMPT = list(range(100, 122))  # Five pages of four tokens and a tail of two.
WINDOWS_FROM = 12
"""First token whose windows are handed over: those of eight tokens and one more before the end, in whole pages."""
WINDOWS_BEHIND = 20
"""Pages from one of the full KV to that of its windows."""


class Side:
    """The schedulers of all ranks of one server."""

    def __init__(self, module: str, queue: str, ranks: int, *, windows: bool) -> None:
        made = getattr(sys.modules[f"sglang.srt.disaggregation.{module}"], queue)
        self._threads = ThreadPoolExecutor(ranks)
        # Decode's engines start once all of them are there; of prefill's ranks the first one registers first.
        starts = self.on_all if module == "decode" else lambda *given: list(map(*given))
        self.queues = starts(lambda rank: made(rank=rank, ranks=ranks, windows=windows), range(ranks))

    def on_all(self, work: Callable[[Any], Any], ranks: Any = None) -> list[Any]:
        """Call `work` with each queue, or with each of `ranks`, in a thread of its own."""
        return list(self._threads.map(work, self.queues if ranks is None else ranks))

    def places(self, pages: list[int]) -> Any:
        """Where each rank has the prompt's KV, head by head, and what it is there."""
        for rank, queue in enumerate(self.queues):
            pool = queue.token_to_kv_pool
            if not hasattr(pool, "swa_kv_pool"):
                yield from self._places(rank, pool, pages, first=0)
                continue
            yield from self._places(rank, pool.full_kv_pool, pages, first=0)
            windows = [page + WINDOWS_BEHIND for page in pages]
            pool.map(pages[WINDOWS_FROM // PAGE :], windows[WINDOWS_FROM // PAGE :])
            for at, value in self._places(rank, pool.swa_kv_pool, windows, first=WINDOWS_FROM):
                yield at, -value

    def _places(self, rank: int, pool: Any, pages: list[int], *, first: int) -> Any:
        heads = HEADS // len(self.queues)
        for number, buffer in enumerate((*pool.k_buffer, *pool.v_buffer)):
            for (place, token), head in itertools.product(enumerate(PROMPT[first:], first), range(heads)):
                at = pages[place // PAGE] * PAGE + place % PAGE
                yield buffer[at, head], token * 8 + number + place / 1024 + (rank * heads + head) / 4

    def close(self) -> None:
        self._threads.shutdown()


@pytest.mark.nixl
@pytest.mark.parametrize("windows", [False, True], ids=["full attention", "sliding windows"])
@pytest.mark.parametrize(("of_prefill", "of_decode"), [(1, 2), (2, 1), (2, 2)])
def test_each_rank_gets_its_heads_from_ranks_of_any_number(
    of_prefill: int, of_decode: int, windows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("TIDEKV_SGLANG", '{"dials": ["127.0.0.1:*"], "host": "1MB"}')
    with modules():
        register()
        HookRegistry.apply_hooks()
        from tidekv.engine.integrations.sglang.handover.manager import TidekvManager

        barrier, said = threading.Barrier(of_decode), dict[int, Any]()

        def ranks_of(manager: Any, queue: Any) -> Ranks:
            return ThreadRanks(manager.attn_tp_rank, manager.attn_tp_size, barrier, said)

        # Of a prefill server nothing is agreed here.
        monkeypatch.setattr(TidekvManager, "_ranks", ranks_of)
        prefill = Side("prefill", "PrefillBootstrapQueue", of_prefill, windows=windows)
        decode = Side("decode", "DecodePreallocQueue", of_decode, windows=windows)
        mixin = sys.modules["sglang.srt.disaggregation.decode"].SchedulerDisaggregationDecodeMixin
        theirs, ours = [1, 2, 3, 4, 5, 6], [9, 8, 7, 6, 5, 4]
        try:
            for buffer, value in prefill.places(theirs):
                buffer.fill_(value)
            for room, found in enumerate([{"transfer": 22}, {"l2": 20, "transfer": 2}]):
                for buffer, _ in decode.places(ours):
                    buffer.fill_(0)
                asked = decode.on_all(lambda queue, room=room: ask(queue, ours, room))
                sent = prefill.on_all(lambda queue, room=room: send(queue, theirs, room))
                wait(lambda asked=asked: all(each.kv_receiver.poll() == KVPoll.Success for each in asked))
                wait(lambda sent=sent: all(each.disagg_kv_sender.poll() == KVPoll.Success for each in sent))
                assert all(bool((buffer == value).all()) for buffer, value in decode.places(ours))
                for each in asked:
                    sources = each.kv_receiver.restore.sources
                    assert {source: count for source, count in sources.items() if count} == found
                    each.kv_receiver.clear()

                def settle(queue: Any, asked: list[Any] = asked) -> None:
                    queue.tree_cache.checkpoint_into_tree(asked[queue.place[0]].req, up_to=len(PROMPT))
                    while queue.tree_cache.locked:
                        mixin.process_decode_queue(queue.scheduler)
                        time.sleep(0.001)

                decode.on_all(settle)
        finally:
            decode.on_all(lambda queue: queue.kv_manager.decode.close())
            prefill.on_all(lambda queue: queue.kv_manager.prefill.close())
            decode.close()
            prefill.close()


def ask(queue: Any, pages: list[int], room: int) -> Any:
    """Ask for the prompt on one rank."""
    asked = queue._create_receiver_and_enqueue(request(PROMPT, room))
    assert queue.kv_manager.try_ensure_parallel_info(asked.req.bootstrap_addr)
    asked.kv_receiver.init(0)
    assert asked.kv_receiver.poll() == KVPoll.WaitingForInput
    note(queue, asked.req, pages)
    asked.kv_receiver.send_metadata(np.asarray(pages, dtype=np.int32), room, None, decode_prefix_len=0)
    return asked


def note(queue: Any, req: Any, pages: list[int]) -> None:
    """Note where the request's tokens are, as SGLang does."""
    table = queue.scheduler.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
    for number, page in enumerate(pages):
        table[number * PAGE : (number + 1) * PAGE] = torch.arange(PAGE) + page * PAGE


def send(queue: Any, pages: list[int], room: int) -> Any:
    """Hand the prompt over on one rank."""
    req = request(PROMPT, room)
    assert queue.create_sender(req, HEADS)
    wait(lambda: req.disagg_kv_sender.poll() == KVPoll.WaitingForInput)
    note(queue, req, pages)
    req.disagg_kv_sender.init(len(pages), room)
    queue.metadata_buffers.bootstrap_room[room, 0] = room
    req.disagg_kv_sender.send(np.asarray(pages, dtype=np.int32), None)
    return req


def wait(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end_s, "it did not happen"
        time.sleep(0.001)
