"""Cost of agreement: one vote next to a bare gloo all_reduce of the same size, and the number of votes.

    python -m benchmarks.ranks --ranks 2 --requests 256 --votes 2000

Every rank is a process. Three kinds alternate in blocks, so that changes of the machine affect all of them: the bare
all_reduce in a plain loop; a vote of `VoteThread`, awaited on uvloop; and a whole turn of real cores with that many
requests in flight, without frames: cast, vote, decide. Figures are medians of rank 0, in microseconds. At the end the
lag of the loop is measured, in alternating blocks: idle; with turns in direct succession; and with such turns but
without votes, in which a thread sleeps for the duration of a vote, and each rank decides by its own words. The effect
of votes on the loop is the difference between the last two. The figure is the p99 of each block, and the median of all
blocks, because the machine itself occasionally stops for milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import multiprocessing
import statistics
import time
from array import array
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import uvloop
from torch import distributed

from benchmarks.ports import free_port
from tidekv.states import events
from tidekv.states.core import Core
from tidekv.states.ranks.agreement import Agreement, Opening
from tidekv.states.settings import CoreSettings
from tidekv.transports.ranks.vote_thread import VoteThread

BLOCK = 100
TICK_S = 0.002
LAG_BLOCK_S = 0.2
LAG_TURNS = 400


def settings() -> CoreSettings:
    """Return settings with room for all requests at once."""
    return CoreSettings(page_size=16, key_bytes=64, device_pages=8192, host_pages=64)


class Turns:
    """A core with requests in flight, whose rooms progress a little in each turn."""

    def __init__(self, requests: int) -> None:
        self.core = Core(settings())
        # Without frames every rank lists the calls itself, as the leader does.
        self.agreement = Agreement(self.core, rank=0)
        self._names = [f"r{number}" for number in range(requests)]
        self._turn = 0
        for number, name in enumerate(self._names):
            keys = bytes(64) + number.to_bytes(64, "little") * 7
            self.agreement.receive(
                events.RequestArrived(at_s=0.0, request_id=name, request_number=number, keys=keys, prompt_tokens=128)
            )

    def opening(self) -> Opening:
        """Return the content of the leader's frame, which every rank derives here from the same calls."""
        return self.agreement.open_turn(float(self._turn))

    def receive(self) -> None:
        """Deliver one outcome for each of a few requests."""
        self._turn += 1
        name = self._names[self._turn % len(self._names)]
        self.agreement.receive(events.PromiseSent(at_s=0.0, request_id=name, generation=0, writer="p", ranks=1))

    def decide(self, words: array[int]) -> None:
        """Let the core take the decided events."""
        for event in self.agreement.decide(words).events:
            self.agreement.stepped(event, self.core.step(event))


async def measure(rank: int, ranks: int, port: int, votes: int, requests: int) -> dict[str, float]:
    """Run one rank's part; returns medians in seconds."""
    store = distributed.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    options = distributed.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=60)
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    bare = distributed.ProcessGroupGloo(distributed.PrefixStore("bare", store), rank, ranks, options)
    minimum = distributed.AllreduceOptions()
    minimum.reduceOp = distributed.ReduceOp.MIN
    thread = VoteThread(rank=rank, ranks=ranks, host="127.0.0.1", timeout_s=60.0)
    thread.start()
    await thread.form(1, port)
    turns = Turns(requests)
    turns.opening()
    turns.decide(await thread.reduce(turns.agreement.cast()))
    turns.opening()
    words = len(turns.agreement.cast())
    times: dict[str, list[float]] = {"bare": [], "vote": [], "turn": []}

    def time_bare() -> None:
        tensor = torch.zeros(words, dtype=torch.int64)
        for _ in range(BLOCK):
            began_s = time.perf_counter()
            bare.allreduce([tensor], minimum).wait()
            times["bare"].append(time.perf_counter() - began_s)

    async def time_votes() -> None:
        vector = array("q", bytes(8 * words))
        for _ in range(BLOCK):
            began_s = time.perf_counter()
            await thread.reduce(vector)
            times["vote"].append(time.perf_counter() - began_s)

    async def time_turns(count: int) -> None:
        for _ in range(count):
            turns.receive()
            began_s = time.perf_counter()
            turns.opening()
            reduced = await thread.reduce(turns.agreement.cast())
            turns.decide(reduced)
            times["turn"].append(time.perf_counter() - began_s)

    async def turns_alone(count: int) -> None:
        for _ in range(count):
            turns.receive()
            turns.opening()
            cast = turns.agreement.cast()
            await loop.run_in_executor(sleeper, time.sleep, found["vote"])
            turns.decide(cast)

    async def lag_while(kind: str, work: Coroutine[object, object, None]) -> None:
        doing = asyncio.ensure_future(work)
        late = []
        while not doing.done():
            due_s = time.perf_counter() + TICK_S
            await asyncio.sleep(TICK_S)
            late.append(max(time.perf_counter() - due_s, 0.0))
        await doing
        lags[kind].append(sorted(late)[len(late) * 99 // 100])

    loop = asyncio.get_running_loop()
    sleeper = ThreadPoolExecutor(1)
    lags: dict[str, list[float]] = {"lag idle": [], "lag voting": [], "lag alone": []}
    gc.collect()
    gc.freeze()
    for _ in range(votes // BLOCK):
        time_bare()
        await time_votes()
        await time_turns(BLOCK)
    found = {kind: statistics.median(values) for kind, values in times.items()}

    for _ in range(votes // BLOCK):
        # All ranks enter each block together.
        await thread.reduce(array("q", bytes(8 * words)))
        await lag_while("lag idle", asyncio.sleep(LAG_BLOCK_S))
        await lag_while("lag voting", time_turns(LAG_TURNS))
        await lag_while("lag alone", turns_alone(LAG_TURNS))
    found |= {kind: statistics.median(p99s) for kind, p99s in lags.items()}
    sleeper.shutdown()
    await thread.close()
    return {**found, "words": words}


def work(rank: int, ranks: int, port: int, votes: int, requests: int, tell: Callable[[object], None]) -> None:
    """Run the process of a rank."""
    torch.set_num_threads(1)
    found = uvloop.run(measure(rank, ranks, port, votes, requests))
    if rank == 0:
        tell(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--requests", type=int, default=256, help="requests in flight")
    parser.add_argument("--votes", type=int, default=2000, help="of each kind")
    given = parser.parse_args()
    port = free_port()
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    workers = [
        context.Process(target=work, args=(rank, given.ranks, port, given.votes, given.requests, answers.put))
        for rank in range(given.ranks)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        if worker.exitcode:
            # The other ranks would wait for it.
            for other in workers:
                other.kill()
            raise SystemExit(f"a rank ended with exit code {worker.exitcode}")
    found = answers.get()
    bare = found["bare"]
    print(f"{given.ranks} ranks, {given.requests} requests in flight, {found['words']} words of 8 bytes a vote")
    for kind, words in (
        ("bare", "bare all_reduce"),
        ("vote", "vote, awaited on the loop"),
        ("turn", "turn: cast, vote, decide"),
    ):
        print(f"{words:28} {1e6 * found[kind]:8.0f} us  {found[kind] / bare:5.2f} x")
    print("lag of the loop, p99 of a block:")
    for kind, words in (("idle", "idle"), ("alone", "turns without votes"), ("voting", "turns with votes")):
        print(f"{words:28} {1e3 * found[f'lag {kind}']:8.2f} ms")


if __name__ == "__main__":
    main()
