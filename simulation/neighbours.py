"""Other decode workers of the simulation: they have any first part of a prompt in host memory, and read from this one.

What they send is drawn from a random source of its own, so that runs without them stay what they were.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from simulation.faults import FAULTS, OF_NEIGHBOURS, Chosen, Faults
from simulation.memory import GARBAGE, Violation
from simulation.tiers import STUCK_S
from tidekv.states import commands, events

if TYPE_CHECKING:
    from collections.abc import Collection

    from simulation.surroundings import Surroundings

SHARE = 0.25
"""Share of the seeds of a campaign that have neighbours."""
NAMES = ("decode-1", "decode-2", "decode-3")
CALLS_FROM = 1_000_000
"""Their reads are numbered from here, apart from the hints of an orchestrator."""
READS_OF_AN_ARRIVAL = (0, 0, 1, 2)


def draws_neighbours(seed: int) -> bool:
    """Whether a seed of a campaign draws neighbours."""
    return Random(f"draws neighbours {seed}").random() < SHARE


class Neighbours:
    """What this worker reads from others, and they from it."""

    def __init__(self, world: Surroundings, seed: int, chosen: Chosen, without: Collection[str]) -> None:
        self._world = world
        self._random = random = Random(f"neighbours {seed}")
        self.faults = Faults(random, chosen, without, absent=FAULTS.keys() - OF_NEIGHBOURS)
        self._wait_s = world.settings.peer_wait_s
        self._reads: dict[int, list[int]] = {}
        """By number, the tags of a prefix that a neighbour has asked for."""
        self._calls = CALLS_FROM
        self._shared: dict[int, int] = {}
        """By operation, the pages that a neighbour reads."""
        self._shares_max = 0

    def draw(self) -> tuple[str, ...]:
        """Return the neighbours that a request names."""
        return tuple(self._random.sample(NAMES, k=self._random.choice((0, 1, 1, 2))))

    def arrived(self, namespace: str, keys: bytes) -> None:
        """Let neighbours ask for parts of a prompt, now or later, and for prompts that begin like it."""
        random, width = self._random, self._world.settings.key_bytes
        for _ in range(random.choice(READS_OF_AN_ARRIVAL)):
            pages = random.randint(0, len(keys) // width)
            wanted = keys[: pages * width] + (b"z" * width if random.random() < 0.2 else b"")
            self._world.schedule.after(random.choice((0.0, 0.01, 0.5)) * random.random(), self._ask, namespace, wanted)

    # --- Reads from them ---

    def fetch(self, command: commands.FetchPages) -> None:
        """Send what a neighbour has of the pages."""
        world, faults, random = self._world, self.faults, self._random
        world.outcomes.begin(command.op)
        if faults.hits("neighbour_raises"):
            world.outcomes.raised(command.op)
            return
        if command.peer not in NAMES or command.timeout_s > self._wait_s:
            raise Violation(f"{command} is no read from a neighbour, or may take too long")
        tags = world.caller(command.request_id).tags
        wanted = [tags[at] for at in command.positions if at < len(tags)]
        if len(wanted) != len(command.host_pages):
            raise Violation(f"{command} requests pages that the prompt does not have")
        valid = len(wanted) if random.random() < 0.5 else random.randint(0, len(wanted))
        error = ""
        for name in ("neighbour_fails", "neighbour_lies"):
            if faults.hits(name):
                valid, error = random.randint(0, valid), "injected"
        delay_s = min(world.delay(), command.timeout_s * 0.9)
        if faults.hits("neighbour_is_late"):
            # Stopped at the time-out, it may still write for a while.
            valid, error, delay_s = random.randint(0, valid), "late", command.timeout_s * (1.0 + random.random())
        elif faults.hits("neighbour_is_stuck"):
            valid, error, delay_s = random.randint(0, valid), "its process is gone", STUCK_S * (0.5 + random.random())
        who = f"read {command.op}"
        world.host.begin_write(command.host_pages, who)

        def land() -> None:
            world.host.end_write(command.host_pages, who, [*wanted[:valid], *([GARBAGE] * (len(wanted) - valid))])
            count = valid + 7 if valid == len(wanted) and faults.hits("neighbour_reports_nonsense") else valid
            world.outcomes.tell(
                lambda at_s: events.PagesFetched(at_s=at_s, op=command.op, valid=count, error=error), command.op
            )

        world.schedule.after(delay_s, land)

    # --- Reads by them ---

    def _ask(self, namespace: str, keys: bytes) -> None:
        world, settings = self._world, self._world.settings
        self._calls += 1
        self._reads[self._calls] = world.contents.tags(namespace, keys, settings.key_bytes)
        self._shares_max = settings.host_pages // self._random.choice((1, 2, 8))
        world.tell(
            events.HintReceived(
                at_s=world.now_s,
                call=self._calls,
                action="share",
                namespace=namespace,
                keys=keys,
                pages_max=self._shares_max,
            )
        )

    def share(self, command: commands.SharePages) -> None:
        """Read pages of this worker, which must stay what they are until the end."""
        world, faults = self._world, self.faults
        world.outcomes.begin(command.op)
        if faults.hits("share_raises"):
            world.outcomes.raised(command.op)
            return
        who, pages, tags = f"share {command.op}", command.host_pages, self._reads[command.call]
        self._shared[command.op] = len(pages)
        if not pages or len(pages) > len(tags) or sum(self._shared.values()) > self._shares_max:
            raise Violation(f"{command} shares none of {len(tags)} pages, or more than {self._shares_max} in all")
        if len(self._shared) > world.settings.peer_reads_max:
            raise Violation(f"{command} is one read by a peer more than may be")
        world.host.expect(pages, tags[: len(pages)], who, may_be_flipped=True)
        world.flip_one(world.host, pages)
        found = world.host.begin_read(pages, who)
        delay_s = STUCK_S * (0.5 + self._random.random()) if faults.hits("share_is_stuck") else world.delay()

        def end() -> None:
            error = "injected" if faults.hits("share_fails") else ""
            intact = world.host.intact(pages)
            world.host.end_read(pages, who, found)
            del self._shared[command.op]
            world.outcomes.tell(
                lambda at_s: events.CopyEnded(at_s=at_s, op=command.op, error=error, intact=intact), command.op
            )

        world.schedule.after(delay_s, end)

    def answered(self, command: commands.ReportHinted) -> None:
        """Take the answer to a read. Raises a Violation for a second one."""
        if self._reads.pop(command.call, None) is None:
            raise Violation(f"{command}, but no neighbour waits for that")

    def is_asked_by(self, command: commands.ReportHinted) -> bool:
        """Whether a neighbour gets this answer."""
        return command.call > CALLS_FROM

    def check_end(self) -> None:
        """Raise a Violation if a read has no answer or no end."""
        if self._reads or self._shared:
            raise Violation(f"reads {list(self._reads)} were not answered, or {list(self._shared)} have not ended")
