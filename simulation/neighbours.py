"""Other decode workers of the simulation: they have any first part of a prompt in host memory, and read from this one.

They have as many ranks as this one, and each of their ranks deals with the rank at its place. What they send is drawn
from random sources of their own, so that runs without them stay what they were.

Each of them hands prompts over to this worker, which hands its cache over to each: first rank to first rank, for all.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from simulation.faults import FAULTS, OF_NEIGHBOURS, OF_RANKS_OF_NEIGHBOURS, Chosen, Faults
from simulation.memory import GARBAGE, Violation
from simulation.tiers import STUCK_S
from tidekv.states import commands, events
from tidekv.states.backup.backups import Backup

if TYPE_CHECKING:
    from collections.abc import Collection

    from simulation.rank import Rank
    from simulation.world import World

SHARE = 0.25
"""Share of the seeds of a campaign that have neighbours."""
NAMES = ("decode-1", "decode-2", "decode-3")
CALLS_FROM = 1_000_000
"""Their reads are numbered from here on the first rank, and from so much more on each further one, apart from the hints
of an orchestrator.
"""
HAND_OVERS_FROM = 500_000
"""Prompts and caches that are handed over are numbered from here among those."""
READS_OF_AN_ARRIVAL = (0, 0, 1, 2)
HANDS_OVER = 0.2
"""Probability that another worker hands a prompt over that begins like that of a new request."""
IS_HANDED_OVER = 0.06
"""Probability that this worker hands its cache over when a request arrives."""


def draws_neighbours(seed: int) -> bool:
    """Whether a seed of a campaign draws neighbours."""
    return Random(f"draws neighbours {seed}").random() < SHARE


class Neighbours:
    """What requests name of them, and what they ask for."""

    def __init__(self, world: World, seed: int, ranks: int, chosen: Chosen, without: Collection[str]) -> None:
        self._world = world
        self.random = Random(f"neighbours {seed}")
        absent = FAULTS.keys() - OF_NEIGHBOURS | (OF_RANKS_OF_NEIGHBOURS if ranks == 1 else set())
        self.faults = Faults(self.random, chosen, without, absent=absent)
        self.ranks = ranks
        self._reads = 0

    def draw(self) -> tuple[str, ...]:
        """Return the neighbours that a request names."""
        return tuple(self.random.sample(NAMES, k=self.random.choice((0, 1, 1, 2))))

    def arrived(self, namespace: str, keys: bytes) -> None:
        """Let neighbours ask for parts of a prompt, now or later, and for prompts that begin like it."""
        random, settings = self.random, self._world.settings
        width = settings.key_bytes
        for _ in range(random.choice(READS_OF_AN_ARRIVAL)):
            pages = random.randint(0, len(keys) // width)
            wanted = keys[: pages * width] + (b"z" * width if random.random() < 0.2 else b"")
            delay_s = random.choice((0.0, 0.01, 0.5)) * random.random()
            self._reads += 1
            pages_max = settings.host_pages // random.choice((1, 2, 8))
            missed = random.randrange(self.ranks) if self.faults.hits("neighbour_misses_a_rank") else -1
            differs = random.randrange(self.ranks) if self.faults.hits("neighbour_asks_otherwise") else -1
            for rank in self._world.ranks:
                if rank.number != missed:
                    asked = wanted[:-width] if rank.number == differs else wanted
                    lag_s = 0.0 if rank.is_alone else rank.delay()
                    rank.schedule.after(
                        delay_s + lag_s, rank.with_neighbours.ask, self._reads, namespace, asked, pages_max
                    )
        rank = self._world.ranks[0]
        if random.random() < HANDS_OVER:
            more = b"".join(bytes([random.randrange(97, 123)]) * width for _ in range(random.choice((0, 0, 3))))
            handed = keys[: random.randint(1, len(keys) // width + 1) * width] + more
            if handed:
                delay_s = random.choice((0.0, 0.5)) * random.random()
                rank.schedule.after(delay_s, rank.with_neighbours.offer, namespace, handed)
        if random.random() < IS_HANDED_OVER:
            rank.schedule.after(0.0, rank.with_neighbours.take_all)


class NeighboursOfRank:
    """What one rank reads from others, and they from it, in one life of its process."""

    def __init__(self, rank: Rank, neighbours: Neighbours) -> None:
        self._rank = rank
        life = f"neighbours {rank.world.seed} of rank {rank.number} in epoch {rank.world.turns.epoch}"
        self._random = neighbours.random if rank.is_alone else Random(life)
        self.faults = neighbours.faults.of_rank(self._random, neighbours.ranks)
        self._wait_s = rank.settings.peer_wait_s
        self._calls_from = CALLS_FROM * (rank.number + 1)
        self._reads: dict[int, tuple[list[int], int]] = {}
        """By number, the tags of a prefix that a neighbour has asked for, and the pages that may be shared in all."""
        self._shared: dict[int, int] = {}
        """By operation, the pages that a neighbour reads."""
        self._hand_overs = 0
        self._handed: dict[int, int] = {}
        """By number, the pages of a prompt that a neighbour hands over."""
        self._runs: set[int] = set()
        """Runs to hand the cache over that have no report."""

    def _next_call(self) -> int:
        self._hand_overs += 1
        return self._calls_from + HAND_OVERS_FROM + self._hand_overs

    # --- Their prompts ---

    def offer(self, namespace: str, keys: bytes) -> None:
        """Have a neighbour hand a prompt over. A rank that is without another one refuses it."""
        rank, random = self._rank, self._random
        if rank.is_solo:
            return
        call = self._next_call()
        self._handed[call] = len(keys) // rank.settings.key_bytes
        rank.tell(
            events.HintReceived(
                at_s=rank.now_s,
                call=call,
                action="take",
                namespace=namespace,
                keys=keys,
                ttl_s=random.choice((0.0, 0.05, 30.0)),
                peer=random.choice(NAMES),
                heat=(
                    random.choice((0, 30, 900)),
                    random.choice((0, 900)),
                    random.randrange(4),
                    random.randrange(-1, 2),
                ),
            )
        )

    # --- Prompts of this worker ---

    def take_all(self) -> None:
        """Have this worker hand its cache over to a neighbour."""
        rank, random = self._rank, self._random
        if rank.is_solo:
            return
        call = self._next_call()
        self._runs.add(call)
        within_s, goes_on = random.choice((0.0, 0.05, 2.0, 30.0)), random.random() < 0.3
        rank.tell(
            events.StoreRequested(
                at_s=rank.now_s, call=call, within_s=within_s, to=random.choice(NAMES), goes_on=goes_on
            )
        )

    def offered(self, command: commands.HandPrompt) -> None:
        """Take a prompt, which must be in host memory until the answer. The first rank alone offers it."""
        rank, faults, random = self._rank, self.faults, self._random
        rank.outcomes.begin(command.op)
        if rank.number:
            rank.outcomes.tell(
                lambda at_s: events.PromptHanded(at_s=at_s, op=command.op, there=0, brought=0, error="not offered"),
                command.op,
            )
            return
        if faults.hits("neighbour_raises_at_offer"):
            rank.outcomes.raised(command.op)
            return
        namespace, keys = rank.core.keys_stored(command.op)
        self._check_offered(command, namespace, keys)
        there = command.page_count
        error, refuses, delay_s = "", False, min(rank.delay(), command.timeout_s)
        if faults.hits("neighbour_refuses"):
            there, error, refuses = 0, "refused", True
        elif faults.hits("neighbour_is_full"):
            there, error, refuses = random.randint(0, there), "full", True
        elif faults.hits("neighbour_takes_nothing"):
            there, error, delay_s = 0, "no answer", command.timeout_s
        elif faults.hits("neighbour_takes_nonsense"):
            there += random.choice((7, -99))
        brought = random.randint(0, max(there, 0))

        state = rank.core.state
        backup = state.operations[command.op]
        assert isinstance(backup, Backup)
        leaf = backup.leaf
        damaged = state.counters["l2_damaged"]

        def answer() -> None:
            # Damaged pages leave host memory at once: the worker that reads gets those before them. So it does where
            # device pages of the path are draining, but its host pages stay.
            held = sum(node.page_count for node in state.index.path(leaf) if node.host is not None)
            if held != command.page_count and state.counters["l2_damaged"] == damaged:
                raise Violation(f"{command} is not answered yet, and host memory holds {held} pages of it")
            rank.outcomes.tell(
                lambda at_s: events.PromptHanded(
                    at_s=at_s, op=command.op, there=there, brought=brought, error=error, refuses=refuses
                ),
                command.op,
            )

        rank.schedule.after(delay_s, answer)

    def _check_offered(self, command: commands.HandPrompt, namespace: str, keys: bytes) -> None:
        found = self._rank.core.state.index.host_end(namespace, keys).depth_pages
        if found != command.page_count or len(keys) != found * self._rank.settings.key_bytes or command.timeout_s <= 0:
            raise Violation(f"{command} offers {len(keys)} bytes of keys, and host memory has {found} pages of them")

    def all_handed(self, command: commands.ReportStored) -> None:
        """Take the report of a run to hand the cache over. Raises a Violation for a second one."""
        if self._is_of_first(command.call):
            return
        if command.call not in self._runs:
            raise Violation(f"{command}, but no such run was asked for")
        self._runs.remove(command.call)
        if min(command.stored, command.present, command.left - command.failed, command.failed) < 0:
            raise Violation(f"{command} does not add up")

    # --- Reads from them ---

    def fetch(self, command: commands.FetchPages) -> None:
        """Send what a neighbour has of the pages."""
        rank, faults, random = self._rank, self.faults, self._random
        rank.outcomes.begin(command.op)
        if faults.hits("neighbour_raises"):
            rank.outcomes.raised(command.op)
            return
        if command.peer not in NAMES or command.timeout_s > self._wait_s:
            raise Violation(f"{command} is no read from a neighbour, or may take too long")
        if command.request_id:
            tags = rank.caller(command.request_id).tags
        else:
            # A prompt that the neighbour hands over.
            tags = rank.contents.tags(*rank.core.keys_stored(command.op), rank.settings.key_bytes)
        wanted = [tags[at] for at in command.positions if at < len(tags)]
        if len(wanted) != len(command.host_pages):
            raise Violation(f"{command} requests pages that the prompt does not have")
        valid = len(wanted) if random.random() < 0.5 else random.randint(0, len(wanted))
        error = ""
        for name in ("neighbour_fails", "neighbour_lies"):
            if faults.hits(name):
                valid, error = random.randint(0, valid), "injected"
        delay_s = min(rank.delay(), command.timeout_s * 0.9)
        if faults.hits("neighbour_is_late"):
            # Stopped at the time-out, it may still write for a while.
            valid, error, delay_s = random.randint(0, valid), "late", command.timeout_s * (1.0 + random.random())
        elif faults.hits("neighbour_is_stuck"):
            valid, error, delay_s = random.randint(0, valid), "its process is gone", STUCK_S * (0.5 + random.random())
        holder = f"read {command.op}"
        rank.host.begin_write(command.host_pages, holder)

        def land() -> None:
            rank.host.end_write(command.host_pages, holder, [*wanted[:valid], *([GARBAGE] * (len(wanted) - valid))])
            count = valid + 7 if valid == len(wanted) and faults.hits("neighbour_reports_nonsense") else valid
            rank.outcomes.tell(
                lambda at_s: events.PagesFetched(at_s=at_s, op=command.op, valid=count, error=error), command.op
            )

        rank.schedule.after(delay_s, land)

    # --- Reads by them ---

    def ask(self, read: int, namespace: str, keys: bytes, pages_max: int) -> None:
        """Have a neighbour ask for a prefix. A rank that is without another one refuses it."""
        rank = self._rank
        if rank.is_solo:
            return
        call = self._calls_from + read
        self._reads[call] = (rank.contents.tags(namespace, keys, rank.settings.key_bytes), pages_max)
        rank.tell(
            events.ShareRequested(
                at_s=rank.now_s, call=call, read=f"read {read}", namespace=namespace, keys=keys, pages_max=pages_max
            )
        )
        rank.look_for_refusals()

    def share(self, command: commands.SharePages) -> None:
        """Read pages of this rank, which must stay what they are until the end."""
        rank, faults = self._rank, self.faults
        rank.outcomes.begin(command.op)
        if faults.hits("share_raises"):
            rank.outcomes.raised(command.op)
            return
        holder, pages = f"share {command.op}", command.host_pages
        tags, pages_max = self._reads[command.call]
        self._shared[command.op] = len(pages)
        if not pages or len(pages) > len(tags) or sum(self._shared.values()) > pages_max:
            raise Violation(f"{command} shares none of {len(tags)} pages, or more than {pages_max} in all")
        if len(self._shared) > rank.settings.peer_reads_max:
            raise Violation(f"{command} is one read by a peer more than may be")
        rank.host.expect(pages, tags[: len(pages)], holder, may_be_flipped=True)
        rank.flip_one(rank.host, pages)
        found = rank.host.begin_read(pages, holder)
        delay_s = STUCK_S * (0.5 + self._random.random()) if faults.hits("share_is_stuck") else rank.delay()

        def end() -> None:
            error = "injected" if faults.hits("share_fails") else ""
            intact = rank.host.intact(pages)
            rank.host.end_read(pages, holder, found)
            del self._shared[command.op]
            rank.outcomes.tell(
                lambda at_s: events.CopyEnded(at_s=at_s, op=command.op, error=error, intact=intact), command.op
            )

        rank.schedule.after(delay_s, end)

    def answered(self, command: commands.ReportHinted) -> None:
        """Take the answer to a read, or to a prompt that was handed over. Raises a Violation for a second one."""
        pages = self._handed.pop(command.call, None)
        if self._is_of_first(command.call):
            return
        if pages is None:
            self._answer(command.call)
        elif not 0 <= command.brought <= pages or not 0 <= command.page_count <= pages:
            raise Violation(f"{command} of a prompt of {pages} pages")

    def refused(self, call: events.ShareRequested) -> None:
        """Take that not all ranks were asked for the same. A rank that was not asked has no read."""
        if call.call in self._reads:
            self._answer(call.call)

    def _answer(self, call: int) -> None:
        if self._reads.pop(call, None) is None:
            raise Violation(f"an answer to read {call}, but no neighbour waits for that")

    def _is_of_first(self, call: int) -> bool:
        """Whether a call is the first rank's, and this one is another."""
        return call < self._calls_from

    def is_asked_by(self, command: commands.ReportHinted | commands.ReportStored) -> bool:
        """Whether a neighbour gets this answer."""
        return command.call > CALLS_FROM

    def check_end(self) -> None:
        """Raise a Violation if a read has no answer or no end."""
        if self._reads or self._shared:
            raise Violation(f"reads {list(self._reads)} were not answered, or {list(self._shared)} have not ended")
        if self._handed or self._runs:
            raise Violation(f"prompts {list(self._handed)} were not answered, or runs {self._runs} not reported")
