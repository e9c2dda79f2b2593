"""Simulation of several ranks of one decode instance, each with its own core, agreement, tiers and faults.

The decisions of all ranks must be equal, event by event. Frames and votes take virtual time, different on every rank,
so a rank may be far behind. If a rank dies, the others end their requests without it, and all start again with empty
cores once it is back.
"""

from __future__ import annotations

import zlib
from random import Random
from typing import TYPE_CHECKING

import msgspec

from simulation.early_callers import EARLY_REQUESTS, draws_early
from simulation.faults import ALWAYS
from simulation.hints import Orchestrator
from simulation.memory import Contents, Violation
from simulation.rank import FAULTS, SimulatedRank
from simulation.rank_callers import Script, draw_script
from simulation.schedule import Link, Schedule
from simulation.simulate import settings_of
from tidekv.states.errors import TidekvError
from tidekv.states.ranks.agreement import Opening
from tidekv.states.ranks.vote_items import LOST_RANK
from tidekv.states.settings import CoreSettings

if TYPE_CHECKING:
    from tidekv.states.ranks.votes import SlotValues

EVENTS_COMPARED = 50
"""Events between two full comparisons of the ranks' state."""
CLOCK_STEPS_MAX = 400_000


class RanksReport(msgspec.Struct, frozen=True):
    """Result of one run. The same seed gives the same report."""

    seed: int
    ranks: int
    requests: int
    events: int
    turns: int
    epochs: int
    virtual_s: float
    ends: dict[str, int]
    faults: dict[str, int]
    component_pages: dict[str, int]
    """Counts of operations on components, on the first rank."""
    early: dict[str, int]
    """What became of early READY, on the first rank."""
    digest: int


class RanksFailed(TidekvError):
    """A run reached a state that must never occur. The text contains what repeats it."""

    def __init__(self, seed: int, ranks: int, requests: int, what: BaseException) -> None:
        super().__init__(f"seed {seed}, {ranks} ranks, {requests} requests: {type(what).__name__}: {what}")
        self.seed = seed


class RankGroupWorld:
    """All ranks of one instance, and the connections between them."""

    def __init__(
        self,
        *,
        seed: int,
        ranks: int,
        requests: int,
        settings: CoreSettings,
        with_faults: bool,
        early: bool = False,
        hints: bool = False,
    ) -> None:
        """With `early`, callers begin with the first layers of their prompts; with `hints` an orchestrator gives hints
        about them to the first rank.
        """
        self.seed = seed
        self.with_faults = with_faults
        # A source of its own, so that everything else is what it was for the same seed.
        self._early = Random(f"early scripts {seed}") if early else None
        self._held = Random(f"held pages {seed}")
        self.random = Random(f"group {seed}")
        self.schedule = Schedule()
        self.contents = Contents()
        self.settings = settings
        self.epoch = 0
        self.turns = 0
        self.events = 0
        self.digest = 0
        self.ends: dict[str, int] = {}
        self.rates = {name: _rate(self._random_of(name, seed)) if with_faults else 0.0 for name in FAULTS}
        # A death ends every request; at the rates of the other faults the rest would hardly be exercised.
        self.rates["rank_dies"] /= 5
        self.rates |= {name: float(with_faults) for name in FAULTS if name in ALWAYS}
        self.counts = dict.fromkeys(FAULTS, 0)
        self.slowness_s = self.random.choice((0.0, 0.0005, 0.01))
        self.ranks = [SimulatedRank(self, number, Random(f"rank {seed} {number}")) for number in range(ranks)]
        self.orchestrator: Orchestrator | None = None
        if hints:
            self.orchestrator = Orchestrator(
                seed,
                settings,
                give=self.ranks[0].receive,
                after=self.schedule.after,
                now_s=lambda: self.schedule.now_s,
            )
        self.scripts_left = requests
        self.scripts_live = 0
        self._number = 0
        self._written: list[bytes] = []
        self._asked: list[bytes] = []
        self._wires = [Link(self.schedule) for _ in range(ranks)]
        self._votes: dict[int, SlotValues] = {}
        self._log: list[tuple[int, int]] = []
        self._is_open = False
        self._wake_at_s = float("inf")

    def _random_of(self, name: str, seed: int) -> Random:
        # A source of its own, so that seeds without this fault give the same runs as before it was added.
        return Random(f"flips {seed}") if name == "host_page_is_flipped" or name in ALWAYS else self.random

    def hits(self, name: str, random: Random) -> bool:
        """Decide whether a fault strikes a rank now."""
        rate = self.rates[name]
        if not rate or (rate < 1.0 and random.random() >= rate):
            return False
        self.counts[name] += 1
        return True

    # --- Requests ---

    def run(self, clients: int) -> None:
        """Serve all requests on all ranks, and check that nothing is left."""
        for rank in self.ranks:
            rank.attach_storage()
        for _ in range(clients):
            self.schedule.after(self.random.random() * 0.01, self.next_script)
        steps = 0
        while self.schedule.run_next():
            steps += 1
            if steps > CLOCK_STEPS_MAX * (1 + self._number):
                raise Violation("the run does not come to an end")
        self._check_end()

    def next_script(self) -> None:
        """Make one more request, which the callers of all ranks submit, each at its own time."""
        if not self.scripts_left:
            return
        self.scripts_left -= 1
        self.scripts_live += 1
        self._number += 1
        script = draw_script(self.random, self._number, self.settings, len(self.ranks), self._written, self._asked)
        if self._early is not None:
            script.early = self._early.random() < EARLY_REQUESTS
            if self._early.random() < 0.4:
                # Only pages that have left the device are copied by layer.
                script.flushes = ("l1",)
        if len(self.ranks) > 1 and self._held.random() < 0.02:
            script.holds_more_on = self._held.randrange(len(self.ranks))
        script.deadline_at_s = self.schedule.now_s + self.random.choice((0.05, 5.0, float("inf"), float("inf")))
        for rank in self.ranks:
            self.schedule.after(self.delay(rank), rank.submit, script, self.epoch)
        if self.orchestrator is not None:
            size = self.settings.page_size
            self.orchestrator.arrived("", script.tokens[: len(script.tokens) // size * size])
        if self.hits("rank_dies", self.random):
            self.schedule.after(self.random.random() * 0.05, self.die, self.random.randrange(len(self.ranks)))

    def ended(self, script: Script, rank: int, end: str) -> None:
        """Note the end of a request on one rank. Once it has ended on all, make the next one."""
        script.ends[rank] = end
        if len(script.ends) == len(self.ranks):
            kinds = set(script.ends.values())
            if len(kinds) > 1 and LOST_RANK not in kinds and not kinds <= {"aborted", "ranks differ", "cancelled"}:
                raise Violation(f"{script.request_id} ended in different ways: {script.ends}")
            counted = "restored" if end.startswith("restored") else end
            self.ends[counted] = self.ends.get(counted, 0) + 1
            self.scripts_live -= 1
            self.schedule.after(self.delay(self.ranks[0]), self.next_script)

    def delay(self, rank: SimulatedRank) -> float:
        """Return the duration of an action on a rank, or of a message to it."""
        slow = 20 if self.hits("rank_lags", rank.random) else 1
        return (0.0002 + self.slowness_s) * rank.random.random() * slow

    # --- Turns ---

    def wish(self, rank: SimulatedRank) -> None:
        """Inform the leader that a rank has news."""
        self.schedule.after(0.0 if rank.number == 0 else self.delay(rank), self.open_turn, self.epoch)

    def wake_at(self, at_s: float) -> None:
        """Schedule a turn of the leader at that time."""
        if at_s < self._wake_at_s:
            self._wake_at_s = at_s
            self.schedule.at(at_s, self._wake)

    def _wake(self) -> None:
        self._wake_at_s = float("inf")
        self.open_turn(self.epoch)
        self._arm()

    def _arm(self) -> None:
        leader = self.ranks[0]
        due_s = None if leader.is_dead or leader.is_solo else leader.agreement.next_deadline_s()
        if due_s is not None:
            self.wake_at(max(due_s, self.schedule.now_s + 0.001))

    def open_turn(self, epoch: int) -> None:
        """Open a turn, unless one is open or there is no reason for one."""
        leader = self.ranks[0]
        if self._is_open or epoch != self.epoch or any(rank.is_dead or rank.is_solo for rank in self.ranks):
            return
        now_s, agreement = self.schedule.now_s, leader.agreement
        due_s = agreement.next_deadline_s()
        is_due = due_s is not None and due_s <= now_s
        others = any(rank.agreement.has_news for rank in self.ranks)
        is_quiet = agreement.is_idle and leader.core.is_idle and not agreement.is_whole
        if not (others or is_due or is_quiet):
            return
        self._is_open = True
        self.turns += 1
        self._votes = {}
        frame = msgspec.msgpack.encode(agreement.open_turn(now_s))
        for rank, wire in zip(self.ranks, self._wires, strict=True):
            wire.send(0.0 if rank is leader else self.delay(rank), self._opened, rank, frame, self.epoch)

    def _opened(self, rank: SimulatedRank, frame: bytes, epoch: int) -> None:
        if epoch != self.epoch or rank.is_dead or rank.is_solo:
            return
        if rank.number:
            rank.agreement.take_opening(msgspec.msgpack.decode(frame, type=Opening))
        self._votes[rank.number] = rank.agreement.cast()
        if len(self._votes) == len(self.ranks):
            if len({len(words) for words in self._votes.values()}) > 1:
                raise Violation("votes have different shapes")
            reduced = list(map(min, *self._votes.values())) if len(self._votes) > 1 else list(self._votes[0])
            arriving = [self.schedule.now_s + self.delay(other) for other in self.ranks]
            for other, at_s in zip(self.ranks, arriving, strict=True):
                self.schedule.at(at_s, self._reduced, other, reduced, epoch)
            self.schedule.at(max(arriving), self._closed, epoch)

    def _reduced(self, rank: SimulatedRank, reduced: list[int], epoch: int) -> None:
        if epoch == self.epoch and not rank.is_dead and not rank.is_solo:
            rank.decide(reduced)

    def _closed(self, epoch: int) -> None:
        # A real leader opens the next turn at once. Frames keep their order, so no rank is overtaken either way.
        if epoch != self.epoch or any(rank.is_dead or rank.is_solo for rank in self.ranks):
            return
        self._is_open = False
        self.open_turn(epoch)
        self._arm()

    def stepped(self, rank: SimulatedRank, word: int) -> None:
        """Note an event that a rank's core took.

        Raises a Violation if another rank took a different one at this place.
        """
        if rank.is_solo:
            return
        place = rank.events
        if place == len(self._log):
            self._log.append((word, 1))
            self.events += 1
            self.digest = zlib.crc32(word.to_bytes(4, "little"), self.digest)
        elif self._log[place][0] != word:
            raise Violation(f"rank {rank.number} took another event at place {place}")
        rank.events += 1

    # --- Death ---

    def die(self, number: int) -> None:
        """End a rank's process. The others notice it, each at its own time."""
        dead = self.ranks[number]
        if dead.is_dead or any(rank.is_solo for rank in self.ranks) or not self.scripts_live:
            return
        dead.die()
        for rank in self.ranks:
            if rank is not dead:
                self.schedule.after(0.05 + self.delay(rank), rank.go_solo)
        self.schedule.after(0.2 + self.random.random(), dead.come_back)

    def try_to_form(self) -> None:
        """Form a new group once every rank has nothing in flight."""
        if not all(rank.is_ready_to_form for rank in self.ranks):
            return
        self.epoch += 1
        self._is_open = False
        self._log = []
        for rank in self.ranks:
            rank.begin_epoch(self.epoch)

    # --- The end ---

    def _check_end(self) -> None:
        stuck = {rank.number: list(rank.callers) for rank in self.ranks if rank.callers}
        if stuck:
            raise Violation(f"requests never ended: {stuck}")
        places = {rank.events for rank in self.ranks}
        if len(places) > 1:
            raise Violation(f"ranks took different numbers of events: {places}")
        books = {rank.books() for rank in self.ranks}
        if len(books) > 1:
            raise Violation("the trees or free lists of the ranks differ at the end")
        for rank in self.ranks:
            rank.check_end()


def _rate(random: Random) -> float:
    return random.choice((0.0, 0.0, 0.01, 0.05, 0.2))


def simulate_ranks(
    seed: int,
    ranks: int,
    requests: int,
    *,
    with_faults: bool = True,
    settings: CoreSettings | None = None,
    always_components: bool = False,
    early: bool | None = None,
    lends: bool = False,
    hints: bool = True,
) -> RanksReport:
    """Serve requests on several ranks in virtual time, with faults of single ranks drawn from the seed.

    Without `settings` those are drawn from the seed, too, and components with `always_components` in every seed. With
    `early` callers begin with the first layers of their prompts; None draws that from the seed with the settings. With
    `lends` host engines lend their device pages in every seed, each rank its own; otherwise the seed draws that too.
    With `hints` the first rank is given KV hints. Raises RanksFailed with what is needed to repeat the run.
    """
    random = Random(f"settings {seed}")
    drawn = settings_of(random, seed, settings, always_components=always_components, lends=lends)
    if drawn.lends_device:
        early = False
    if early is None:
        early = settings is None and draws_early(seed)
    world = RankGroupWorld(
        seed=seed, ranks=ranks, requests=requests, settings=drawn, with_faults=with_faults, early=early, hints=hints
    )
    try:
        world.run(random.randint(1, 8))
    except Exception as error:
        raise RanksFailed(seed, ranks, requests, error) from error
    return RanksReport(
        seed=seed,
        ranks=ranks,
        requests=requests,
        events=world.events,
        turns=world.turns,
        epochs=world.epoch + 1,
        virtual_s=world.schedule.now_s,
        ends=world.ends,
        faults=world.counts,
        component_pages=dict(sorted(world.ranks[0].component_pages.counts.items())),
        early=dict(sorted(world.ranks[0].early_counts.items())),
        digest=world.digest,
    )
