"""Simulated environment of one decode instance: its ranks, their callers, and what strikes them all.

One rank is the smallest group: it takes each event at once, where several vote. Everything else is the same for any
number of ranks, each with a core, tiers and prefill peers of its own.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from simulation.callers import SESSIONS, Client, Script
from simulation.early_callers import EARLY_REQUESTS
from simulation.faults import OF_LENDING, OF_NEIGHBOURS, OF_RANKS, Chosen, Faults
from simulation.hints import Orchestrator
from simulation.memory import Contents, Violation
from simulation.neighbours import Neighbours
from simulation.policies import draw_policy
from simulation.rank import Rank
from simulation.schedule import Schedule
from simulation.votes import Turns
from tidekv.states import commands, events
from tidekv.states.ranks.vote_items import LOST_RANK

if TYPE_CHECKING:
    from collections.abc import Collection

    from tidekv.states.core import Core
    from tidekv.states.settings import CoreSettings

STORED_SEEDS = 4
"""One of so many seeds stores everything now and then, and at its end."""
ACTIONS_MAX = 200_000
ACTIONS_OF_REQUEST_MAX = 2_000
"""Actions in virtual time on each rank, and for each request there, after which a run does not come to an end."""


class World:
    """One run."""

    prefill_count = 3

    def __init__(
        self,
        *,
        seed: int,
        requests: int,
        faults: Chosen,
        settings: CoreSettings,
        ranks: int = 1,
        without: Collection[str] = (),
        early: bool = False,
        hints: bool = False,
        neighbours: bool = False,
    ) -> None:
        """With `early`, callers begin with the first layers of their prompts; with `hints` an orchestrator gives hints
        about them to the first rank; with `neighbours` other decode workers share host memory with this one.
        """
        self.seed = seed
        self.random = random = Random(seed)
        self.settings = settings
        self.is_early = early
        self.schedule = Schedule()
        self.contents = Contents()
        absent = OF_NEIGHBOURS | (OF_RANKS if ranks == 1 else set()) | (set() if settings.lends_device else OF_LENDING)
        self.faults = Faults(random, faults, without, absent=absent)
        self._latency_s = random.choice((0.001, 0.004, 0.015))
        self.prompt_tokens_max = max(1, (settings.device_pages * 3 // 5 - settings.growth_reserve_pages)) * (
            settings.page_size
        )
        self.turns = Turns(self)
        self.generations: dict[str, int] = {}
        """The last generation of each request id on any rank."""
        self.neighbours = Neighbours(self, seed, ranks, faults, without) if neighbours else None
        self.ranks = [Rank(self, number, ranks) for number in range(ranks)]
        self.stepping = self.ranks[0]
        """The rank whose core has taken the last event."""
        self.orchestrator: Orchestrator | None = None
        if hints:
            first = self.ranks[0]
            self.orchestrator = Orchestrator(
                seed, settings, give=first.tell, after=self.schedule.after, now_s=lambda: self.now_s
            )
        self.retracted_ids: set[str] = set()
        self.ends: dict[str, int] = {}
        self.arrivals_left = requests
        self._ids = 0
        self._numbers = 0
        self._live: dict[str, Script] = {}
        self._waiting: list[Client] = []
        """Clients that make their next request once the ranks have formed a group again."""
        self._stores_all = self.faults.is_on("all_is_stored") and seed % STORED_SEEDS == STORED_SEEDS - 1
        self._to_report: set[tuple[int, int]] = set()
        """Requests to store everything, by rank, that have no report."""
        self._stored: commands.ReportStored | None = None

    def run(self, clients: int) -> None:
        """Serve all requests, and check that nothing is left."""
        sessions = [(self.random.choice(("", "", "adapter")), b"") for _ in range(SESSIONS)]
        for rank in self.ranks:
            rank.change_storage(available=True)
        for _ in range(clients):
            self.schedule.after(self.delay(), Client(self, sessions).begin)
        self._run_all()
        if self._stores_all:
            self._store_at_end()
        self._check_end()

    def _run_all(self) -> None:
        actions = 0
        while self.schedule.run_next():
            actions += 1
            if actions > (ACTIONS_MAX + ACTIONS_OF_REQUEST_MAX * self._numbers) * len(self.ranks):
                raise Violation("the run does not come to an end")

    # --- Used by its parts ---

    @property
    def core(self) -> Core:
        """The core of the first rank."""
        return self.ranks[0].core

    @property
    def now_s(self) -> float:
        """The virtual time."""
        return self.schedule.now_s

    def delay(self) -> float:
        """Return the duration of an action of a client."""
        return self.delay_of(self.random)

    def delay_of(self, random: Random) -> float:
        """Return the duration of an action without a fault."""
        return self._latency_s * (random.random() + 0.1 * (random.random() < 0.1) * 50)

    @property
    def restoring(self) -> list[Script]:
        """Live requests that are not READY."""
        return [script for script in self._live.values() if not script.was_ready]

    def next_number(self) -> int:
        """Return a new number, which identifies the tokens of a request."""
        self._numbers += 1
        return self._numbers

    def new_id(self) -> str:
        """Return a request id: a new one, or occasionally one that was used before."""
        if self._ids and self.faults.hits("id_returns"):
            name = f"r{self.random.randrange(max(1, self._ids - 6), self._ids + 1)}"
            if name not in self._live and name not in self.retracted_ids:
                return name
        self._ids += 1
        return f"r{self._ids}"

    def draws_early(self) -> bool:
        """Whether the next request begins early."""
        return self.is_early and self.random.random() < EARLY_REQUESTS

    # --- Requests ---

    def take_arrival(self) -> bool:
        """Whether one more request may be made. Faults of peers, ranks and storage are drawn at this moment, too."""
        if not self.arrivals_left:
            return False
        self.arrivals_left -= 1
        faults, random, schedule = self.faults, self.random, self.schedule
        for fault, name in (
            ("peer_crashes", "crash"),
            ("peer_is_partitioned", "cut_off"),
            ("peer_is_silent", "fall_silent"),
        ):
            if faults.hits(fault):
                rank = random.choice(self.ranks)
                rank.schedule.after(rank.delay(), getattr(random.choice(rank.peers), name))
        if faults.hits("policy_changes"):
            policy = draw_policy(random, self.settings.page_size)
            self.ranks[0].tell(events.PolicyChanged(at_s=self.now_s, policy=policy))
        if faults.hits("storage_is_detached"):
            rank = random.choice(self.ranks)
            rank.change_storage(available=False)
            rank.schedule.after(self.delay() * 20, lambda: rank.change_storage(available=True))
        # By their numbers and not drawn, so that it comes at any time.
        if self._stores_all and self.arrivals_left % 23 == 7 and faults.hits("all_is_stored"):
            schedule.after(0.0, self._store_all, (0.02, 1.0, 20.0, 0.0)[self.arrivals_left % 4])
        if faults.hits("rank_dies"):
            schedule.after(random.random() * 0.05, self._die, random.randrange(len(self.ranks)))
        return True

    def submit(self, script: Script) -> None:
        """Have the callers of all ranks submit a request, each at its own time."""
        self._live[script.request_id] = script
        for rank in self.ranks:
            if rank.is_alone:
                rank.submit(script, self.turns.epoch)
            else:
                self.schedule.after(rank.delay(), rank.submit, script, self.turns.epoch)
        size = self.settings.page_size
        keys = script.tokens[: len(script.tokens) // size * size]
        if self.neighbours is not None:
            self.neighbours.arrived(script.namespace, keys)
        if self.orchestrator is not None:
            self.orchestrator.arrived(script.namespace, keys)

    def ended(self, script: Script, rank: int, end: str) -> None:
        """Note the end of a request on one rank. Once it has ended on all, its client goes on."""
        if rank in script.ends:
            raise Violation(f"{script.request_id} ended more than once: {script.ends}, {end}")
        script.ends[rank] = end
        if len(script.ends) < len(self.ranks):
            return
        kinds = set(script.ends.values())
        if len(kinds) > 1 and LOST_RANK not in kinds and not kinds <= {"aborted", "ranks differ"}:
            raise Violation(f"{script.request_id} ended in different ways: {script.ends}")
        del self._live[script.request_id]
        if LOST_RANK in kinds and len(kinds) > 1:
            end = LOST_RANK
            self.retracted_ids.discard(script.request_id)
        counted = end.partition(",")[0]
        if script.was_ready and counted not in ("internal error", LOST_RANK):
            counted = "READY"
        self.ends[counted] = self.ends.get(counted, 0) + 1
        script.client.ended(script, end)

    def begin_later(self, client: Client) -> None:
        """Have a client make its next request, but not while a rank is lost."""
        if self.turns.is_whole:
            self.schedule.after(self.delay(), client.begin)
        else:
            self._waiting.append(client)

    # --- Losing a rank ---

    def _die(self, number: int) -> None:
        """End a rank's process. The others notice it, each at its own time."""
        dead = self.ranks[number]
        if not self.turns.is_whole or not self._live:
            return
        dead.die()
        for rank in self.ranks:
            if rank is not dead:
                self.schedule.after(0.05 + rank.delay(), rank.go_solo)
        self.schedule.after(0.2 + self.random.random(), dead.come_back)

    def has_formed(self) -> None:
        """Go on with a new group."""
        self._to_report.clear()
        if self.orchestrator is not None:
            self.orchestrator.forget()
        waiting, self._waiting = self._waiting, []
        for client in waiting:
            self.begin_later(client)

    # --- Calls about all requests ---

    def _store_all(self, within_s: float) -> None:
        if self.turns.is_whole:
            call = self.faults.counts["all_is_stored"]
            self._to_report |= {(rank.number, call) for rank in self.ranks}
            self.ranks[0].tell(events.StoreRequested(at_s=self.now_s, call=call, within_s=within_s))

    def all_stored(self, rank: Rank, command: commands.ReportStored) -> None:
        """Take the report of a request to store everything."""
        if rank.is_solo:
            return
        if rank.neighbours is not None and rank.neighbours.is_asked_by(command):
            rank.neighbours.all_handed(command)
            return
        if (rank.number, command.call) not in self._to_report:
            raise Violation(f"{command}, which was not asked for, or is reported twice")
        self._to_report.remove((rank.number, command.call))
        self._stored = command
        if min(command.stored, command.present, command.left - command.failed, command.failed) < 0:
            raise Violation(f"{command} does not add up")

    def _store_at_end(self) -> None:
        """Store everything without faults: of what the policy lets pass, storage must have all that fits the host."""
        self.faults.counts["all_is_stored"] += 1
        for faults in (self.faults, *(rank.faults for rank in self.ranks)):
            faults.is_over = True
        self._store_all(3600.0)
        self._run_all()
        if self._to_report:
            raise Violation(f"requests {self._to_report} to store everything have no report")
        assert self._stored is not None
        core, settings = self.core, self.core.state.settings  # The policies may have changed.
        tree, is_held = core.state.index.tree, bool(core.hints.pins) or bool(core.state.index.host_protected)
        lacking = [node for node in core.state.index.nodes() if not tree.is_stored(node)]
        if self._stored.left != sum(node.page_count for node in lacking):
            raise Violation(f"{self._stored}, but storage lacks {lacking}")
        flipped = {page for rank in self.ranks for page in rank.host.flipped}
        for node in lacking:
            # Below a page that the policy keeps out nothing is stored, and of a path only what the host has room for.
            path = core.state.index.path(node)
            is_rare = settings.write == "selective" and any(each.served < settings.write_hits_min for each in path)
            is_short = max(each.depth_pages for each in node.subtree()) * settings.page_size < settings.write_tokens_min
            is_flipped = any(page in flipped for each in path for page in each.host or ())
            if not (is_held or is_rare or is_short or is_flipped or node.depth_pages > settings.host_pages):
                raise Violation(f"{self._stored}, but storage lacks {node}")

    def hinted(self, rank: Rank, command: commands.ReportHinted) -> None:
        """Take the answer to a hint: all ranks have it, and the first one was asked. Each rank has its own reads."""
        if rank.neighbours is not None and rank.neighbours.is_asked_by(command):
            rank.neighbours.answered(command)
        elif self.orchestrator is not None and not rank.number and not rank.is_solo:
            self.orchestrator.answered(command)

    # --- The end ---

    def _check_end(self) -> None:
        for rank in self.ranks:
            rank.check_end()
        if self._live or self._waiting:
            raise Violation(f"requests never ended: {list(self._live)}, {len(self._waiting)} clients wait")
        if len({rank.events for rank in self.ranks}) > 1:
            raise Violation(f"ranks took different numbers of events: {[rank.events for rank in self.ranks]}")
        if len({rank.books() for rank in self.ranks}) > 1:
            raise Violation("the trees or free lists of the ranks differ at the end")
        if self.orchestrator is not None:
            self.orchestrator.check_end()
