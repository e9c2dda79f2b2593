"""Soak test of ranks as real processes: agent sessions, faults of one rank at a time, deaths and stops.

    python -m tests.support.ranks_soak --ranks 2 --minutes 30 --trace claude-code-sessions.jsonl.gz

Every rank is a process with a decode engine, its own storage and its own prefill rank, over NIXL; votes go over gloo.
Ranks compare their state at every vote. After each round whole trees and free lists are compared as well, and every
page has been compared byte for byte. Occasionally a rank is killed, or stopped for longer than the allowed silence.
Without a recording the prompts are generated agent sessions. The exit code is 1 if any violation was found.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from collections import Counter
from random import Random

from benchmarks.ports import free_address
from tests.support.rank_process import RankPlan, RankProcess, Serve, Served, Stop

ROUND_REQUESTS = 40
TRACE_REQUESTS = 49_334
"""Requests of the recording. Each round takes the next ones, starting over at the end."""
DEATH_EVERY = 12
SILENCE_S = 10.0
HANG_S = 300.0
"""Seconds after which a round counts as hung; every wait in it has a shorter deadline."""
PAGES = 4096


class Soak:
    """One instance of several ranks, and its results."""

    def __init__(self, *, ranks: int, trace: str, fault_rate: float, seed: int) -> None:
        address, *prefills = [free_address() for _ in range(ranks + 1)]
        plans = [
            RankPlan(rank, ranks, address, ",".join(prefills), PAGES, PAGES, fault_rate=fault_rate, silence_s=SILENCE_S)
            for rank in range(ranks)
        ]
        self.members = [RankProcess(plan) for plan in plans]
        self.random = Random(f"soak {seed}")
        self.ends: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.sources: Counter[str] = Counter()
        self.causes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.rounds = self.kills = self.stops = self.votes = self.wrong_pages = 0
        self._trace = trace
        self._seen_faults: list[dict[str, int]] = [{} for _ in plans]

    async def ready(self) -> None:
        """Wait until all ranks have formed their first group."""
        await asyncio.gather(*(member.hear(HANG_S) for member in self.members))

    def work(self) -> Serve:
        """Return the work of the next round."""
        first = self.rounds * ROUND_REQUESTS % (TRACE_REQUESTS - ROUND_REQUESTS)
        return Serve(self.rounds, ROUND_REQUESTS, agents=not self._trace, trace=self._trace, first=first)

    async def round(self) -> None:
        """Serve on all ranks, and compare."""
        served = await asyncio.gather(*(member.serve(self.work(), HANG_S) for member in self.members))
        self._note(served)
        if len({one.books for one in served}) > 1:
            self.wrong.append(f"round {self.rounds}: trees or free lists differ")
        if any(one.sources != served[0].sources or one.ends != served[0].ends for one in served):
            self.wrong.append(f"round {self.rounds}: ranks ended in different ways: {[one.ends for one in served]}")
        self.rounds += 1

    async def disturbed_round(self) -> None:
        """Kill or stop a rank during a round. The others must detect it, and serve again when it is back."""
        victim = self.random.randrange(len(self.members))
        for member in self.members:
            member.tell(self.work())
        await asyncio.sleep(self.random.random())
        pid = self.members[victim].process.pid
        assert pid is not None
        if self.random.random() < 0.5:
            self.kills += 1
            os.kill(pid, signal.SIGKILL)
            others = [member for rank, member in enumerate(self.members) if rank != victim]
            await self.members[victim].join()
            self.members[victim] = RankProcess(self.members[victim].plan)
            self._seen_faults[victim] = {}
            # Concurrently: if the group was just being formed, the others serve nothing before this rank is back.
            *found, _ = await asyncio.gather(*(m.hear(HANG_S) for m in (*others, self.members[victim])))
            self._note([one for one in found if isinstance(one, Served)])
        else:
            self.stops += 1
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(1.5 * SILENCE_S)
            os.kill(pid, signal.SIGCONT)
            found = await asyncio.gather(*(member.hear(HANG_S) for member in self.members))
            self._note([one for one in found if isinstance(one, Served)])
            # A rank that had served everything when it was stopped may not know yet that it was lost: its next calls
            # are refused, and the others wait in vain for these calls. So one more round runs without a comparison.
            self.rounds += 1
            for member in self.members:
                member.tell(self.work())
            found = await asyncio.gather(*(member.hear(HANG_S) for member in self.members))
            self._note([one for one in found if isinstance(one, Served)])
        self.rounds += 1

    async def end(self) -> None:
        """Make all ranks leave together."""
        for member in self.members:
            member.tell(Stop())
        codes = await asyncio.gather(*(member.join() for member in self.members))
        if set(codes) != {0}:
            self.wrong.append(f"exit codes {codes}")

    def _note(self, served: list[Served]) -> None:
        self.ends.update(served[0].ends)
        self.sources.update(served[0].sources)
        for one in served:
            rank = int(one.statistics["rank"])
            self.wrong_pages += one.wrong_pages
            self.faults.update(
                {kind: count - self._seen_faults[rank].get(kind, 0) for kind, count in one.faults.items()}
            )
            self._seen_faults[rank] = one.faults
            self.causes.update(one.causes)
            if one.wrong_pages:
                self.wrong.append(f"round {self.rounds}: {one.wrong_pages} wrong pages on rank {rank}")
        self.votes = int(served[0].statistics["votes"])

    def report(self, elapsed_s: float) -> str:
        """Return the results so far, in a line."""
        return (
            f"{elapsed_s / 60:5.1f} min  {self.rounds} rounds  {sum(self.ends.values())} requests {dict(self.ends)}  "
            f"{self.kills} kills  {self.stops} stops  faults {dict(self.faults)}  tokens {dict(self.sources)}  "
            f"{self.votes} votes since rank 0's start  {self.wrong_pages} wrong pages  {len(self.wrong)} wrong"
        )


async def soak(given: argparse.Namespace) -> int:
    """Run for the given time; returns the exit code."""
    run = Soak(ranks=given.ranks, trace=given.trace, fault_rate=given.fault_rate, seed=given.seed)
    began_s = reported_s = time.monotonic()
    try:
        await run.ready()
        while time.monotonic() - began_s < 60 * given.minutes and not run.wrong:
            if given.deaths and run.rounds % DEATH_EVERY == DEATH_EVERY - 1:
                await run.disturbed_round()
            else:
                await run.round()
            if time.monotonic() - reported_s > 60:
                reported_s = time.monotonic()
                print(run.report(reported_s - began_s), flush=True)
        await run.end()
    except TimeoutError as error:
        run.wrong.append(f"a hang: {error}")
    finally:
        for member in run.members:
            member.process.kill()
    print(run.report(time.monotonic() - began_s))
    for cause, count in run.causes.most_common():
        print(f"{count:6} rounds of a rank in which requests failed: {cause}")
    print("\n".join(run.wrong) or "nothing that must not be")
    return 1 if run.wrong else 0


def main() -> None:
    """Parse the options and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--trace", default="", help="a recording of agent sessions; without one, generated agents")
    parser.add_argument("--fault-rate", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-deaths", dest="deaths", action="store_false", help="do not kill or stop ranks")
    sys.exit(asyncio.run(soak(parser.parse_args())))


if __name__ == "__main__":
    main()
