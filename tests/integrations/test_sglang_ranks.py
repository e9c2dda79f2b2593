"""What SGLang's schedulers of several tensor-parallel ranks agree on, each rank in a process of its own."""

from __future__ import annotations

import multiprocessing
from multiprocessing.queues import Queue
from pathlib import Path

import torch

from tests.support.waits import LIMIT_S
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
