"""Simulated storage and copies: they execute commands, with delays and faults."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from simulation.memory import LAYERS, SimulatedPool, Violation
from tidekv.states import commands, events
from tidekv.states.types import FULL

if TYPE_CHECKING:
    from collections.abc import Callable

    from simulation.components import Tags
    from simulation.stored import StoredTags
    from simulation.surroundings import Surroundings

FETCH_S_MAX = 10.0
"""Limit for the delay of late fetches: such a fetch takes at most twice this, even if its timeout is longer."""
STUCK_S = 130.0
"""Order of a stuck operation's duration: beyond every deadline, but it ends before the run does."""


class Outcomes:
    """Delivers the outcome of each operation once, or twice if that fault strikes."""

    def __init__(self, world: Surroundings) -> None:
        self._world = world
        self._open: set[int] = set()

    @property
    def open_count(self) -> int:
        """Number of operations without an outcome so far."""
        return len(self._open)

    def begin(self, op: int) -> None:
        """Register an operation."""
        if op in self._open:
            raise Violation(f"operation {op} was begun twice")
        self._open.add(op)

    def tell(self, make: Callable[[float], events.Event], op: int) -> None:
        """Deliver the outcome now."""
        self._open.remove(op)
        self._world.tell(make(self._world.now_s))
        if self._world.faults.hits("outcome_repeats"):
            self._world.schedule.after(self._world.delay(), lambda: self._world.tell(make(self._world.now_s)))

    def raised(self, op: int) -> None:
        """Report that starting the operation raised."""
        self._world.schedule.after(
            0.0, self.tell, lambda at_s: events.CommandRaised(at_s=at_s, op=op, detail="injected"), op
        )


class SimulatedStorage:
    """A storage engine with the pages of all groups. They are never wrong, but may be lost, and answers may lie."""

    def __init__(self, world: Surroundings, random: Random, kept: StoredTags) -> None:
        self._world = world
        self._random = random
        self._kept = kept
        """Each tag also identifies its group."""

    def query(self, command: commands.QueryStorage) -> None:
        """Report how many full pages are stored, and at which positions pages of components are."""
        world = self._world
        world.outcomes.begin(command.op)
        if world.faults.hits("query_raises"):
            world.outcomes.raised(command.op)
            return
        caller = world.caller(command.request_id)
        end = command.first + command.count
        wanted = caller.tags[command.first : end]
        if len(wanted) != command.count or any(not 0 <= at < end for at in command.components_first.values()):
            raise Violation(f"{command} requests pages that the prompt does not have")
        world.schedule.after(self._query_delay(), self._answer, command, wanted, caller.component_tags)

    def _answer(self, command: commands.QueryStorage, wanted: list[int], tags: Tags) -> None:
        faults, end = self._world.faults, command.first + command.count
        found, error = self._kept.leading(wanted), ""
        if faults.hits("query_fails"):
            found, error = self._random.choice((0, found)), "injected"
        elif faults.hits("query_promises_too_much"):
            found = self._random.randint(found, len(wanted))
        elif faults.hits("query_promises_too_little"):
            found = self._random.randint(0, found)
        elif faults.hits("query_is_nonsense"):
            found = self._random.choice((-3, len(wanted) + 5))
        component_pages = tuple(
            self._answer_for(name, tags[name][:end], first) for name, first in command.components_first.items()
        )
        self._world.outcomes.tell(
            lambda at_s: events.StorageAnswered(
                at_s=at_s, op=command.op, found=found, error=error, component_pages=component_pages
            ),
            command.op,
        )

    def _answer_for(self, name: str, tags: list[int], first: int) -> events.StoredComponent:
        faults = self._world.faults
        here = [at for at in range(first, len(tags)) if tags[at] in self._kept]
        ranges = [(at, at + 1) for at in here]
        if faults.hits("query_promises_too_much"):
            ranges = [(first, self._random.randint(first, len(tags)))] if first < len(tags) else []
        elif faults.hits("query_promises_too_little"):
            ranges = [each for each in ranges if self._random.random() < 0.5]
        elif faults.hits("query_is_nonsense"):
            ranges = [(-7, 2), (len(tags), len(tags) + 9)]
            name = self._random.choice((name, "nobody"))
        self._world.component_pages.counts["records_found"] += len(here)
        return events.StoredComponent(name, tuple(ranges))

    def fetch(self, command: commands.FetchPages) -> None:
        """Read pages of a group."""
        world = self._world
        world.outcomes.begin(command.op)
        if world.faults.hits("fetch_raises"):
            world.outcomes.raised(command.op)
            return
        if command.component != FULL:
            tags = world.caller(command.request_id).component_tags[command.component]
            world.component_pages.note_fetch(world.core, command)
        else:
            tags = world.caller(command.request_id).tags if command.request_id else world.tags_put(command)
        wanted = [tags[at] for at in command.positions if at < len(tags)]
        if not wanted or len(wanted) != len(command.host_pages):
            raise Violation(f"{command} requests pages that the prompt does not have, or not as many as it names")
        self._kept.lose_one(wanted)
        world.pool("host", command.component).begin_write(command.host_pages, f"fetch {command.op}")
        delay = self._delay("fetch_is_late", min(command.timeout_s, FETCH_S_MAX), "fetch_is_stuck")
        world.schedule.after(delay, self._land, command, wanted)

    def _land(self, command: commands.FetchPages, wanted: list[int]) -> None:
        world, faults = self._world, self._world.faults
        valid, error = self._kept.read(wanted)
        if command.component != FULL:
            if world.component_pages.is_lost(command.component, faults.hits, is_over=faults.is_over):
                valid = 0
            world.component_pages.counts["components_fetched"] += valid == len(wanted)
        left = [*wanted[:valid], *([0] * (len(wanted) - valid))]
        world.pool("host", command.component).end_write(command.host_pages, f"fetch {command.op}", left)
        if valid == len(wanted) and faults.hits("fetch_reports_nonsense"):
            valid += 7
        world.outcomes.tell(
            lambda at_s: events.PagesFetched(at_s=at_s, op=command.op, valid=valid, error=error), command.op
        )

    def store(self, command: commands.StorePages) -> None:
        """Put pages of a group. Their content must match the tokens."""
        world = self._world
        world.outcomes.begin(command.op)
        if world.faults.hits("store_raises"):
            world.outcomes.raised(command.op)
            return
        who, count = f"put {command.op}", len(command.host_pages)
        wanted = world.tags_put(command)[command.first :][: count + command.asked]
        if len(wanted) != count + command.asked:
            raise Violation(f"{command} names pages that the prompt does not have")
        pool = world.pool("host", command.component)
        pool.expect(command.host_pages, wanted[:count], who, may_be_flipped=True)
        if count:
            world.flip_one(pool, command.host_pages)
        found = pool.begin_read(command.host_pages, who)
        delay = self._delay("store_is_late", 60.0, "store_is_stuck")
        world.schedule.after(delay, self._stored, command, found, wanted)

    def _stored(self, command: commands.StorePages, found: list[int], wanted: list[int]) -> None:
        world, pool = self._world, self._world.pool("host", command.component)
        pool.end_read(command.host_pages, f"put {command.op}", found)
        intact = pool.intact(command.host_pages)
        put, error = self._kept.put([tag for tag in found[:intact] if tag not in self._kept])
        stored = 0 if error else self._kept.leading(wanted)
        if command.component != FULL:
            world.component_pages.counts["components_stored"] += stored == len(wanted)
        if command.request_number:
            world.tags_put(command)  # Its tokens must not be forgotten before.
        world.outcomes.tell(
            lambda at_s: events.PagesStored(
                at_s=at_s, op=command.op, stored=stored, error=error, intact=intact, written=put
            ),
            command.op,
        )

    def probe(self, command: commands.ProbeStorage) -> None:
        """Report whether storage can be used again."""
        world = self._world
        world.outcomes.begin(command.op)
        world.schedule.after(world.delay(), self._probed, command.op)

    def _probed(self, op: int) -> None:
        error = "injected" if self._world.faults.hits("probe_fails") else ""
        self._world.outcomes.tell(lambda at_s: events.StorageProbed(at_s=at_s, op=op, error=error), op)

    def _query_delay(self) -> float:
        """Return the time until the answer to a query."""
        deadline_s = self._world.settings.query_deadline_s
        if self._world.faults.hits("query_is_slow"):
            return deadline_s * self._random.random()
        return self._delay("query_is_late", deadline_s, "query_is_stuck")

    def _delay(self, late: str, deadline_s: float, stuck: str) -> float:
        """Return the duration of a call: less than its deadline, unless one of these faults strikes."""
        world = self._world
        if world.faults.hits(late):
            return deadline_s * (1.0 + self._random.random())
        if world.faults.hits(stuck):
            return STUCK_S * (0.5 + self._random.random())
        return min(world.delay(), deadline_s * 0.9)


class SimulatedCopies:
    """Copies between the pools."""

    verifies = True
    """Whether copies from host memory verify the checksums of their pages."""

    def __init__(self, world: Surroundings, random: Random) -> None:
        self._world = world
        self._random = random

    def copy(self, command: commands.CopyPages) -> None:
        """Copy pages of a group between host and device, or of a component within the device."""
        world = self._world
        source, target = (world.pool(tier, command.component) for tier in (command.source, command.target))
        if command.component != FULL:
            world.component_pages.note_copy(world.core, command)
            self._start(command, "component_copy", source, target)
        else:
            self._start(command, "copy_in" if command.target == "device" else "copy_out", source, target)

    def _start(self, command: commands.CopyPages, name: str, source: SimulatedPool, target: SimulatedPool) -> None:
        world, faults, op = self._world, self._world.faults, command.op
        source_pages, target_pages, by_layer = command.source_pages, command.target_pages, command.by_layer
        world.outcomes.begin(op)
        if len(source_pages) != len(target_pages) or not source_pages:
            raise Violation(f"{command} does not copy as many pages as it names")
        if faults.hits(f"{name}_raises"):
            world.outcomes.raised(op)
            return
        who = f"copy {op}"
        if command.source == "host":
            world.flip_one(source, source_pages)
        found = source.begin_read(source_pages, who)
        target.begin_write(target_pages, who)
        deadline_s = world.settings.copy_deadline_s
        # Layers arrive apart from each other, so that faults and aborts come between them.
        delay = min(world.delay() * (LAYERS * 3 if by_layer else 1), deadline_s * 0.9)
        if faults.hits(f"{name}_is_late"):
            delay = deadline_s * (1.0 + self._random.random())
        elif name != "copy_out" and faults.hits(f"{name}_is_stuck"):
            delay = STUCK_S * (0.5 + self._random.random())

        def end() -> None:
            error = "injected" if faults.hits(f"{name}_fails") else ""
            if name == "component_copy" and command.source == "host":
                is_lost = world.component_pages.is_lost(command.component, faults.hits, is_over=faults.is_over)
                error = "the tier is lost" if is_lost else error
            intact = source.intact(source_pages) if self.verifies and not error else None
            error = error if intact is None else "a checksum differs"
            source.end_read(source_pages, who, found)
            target.end_write(target_pages, who, None if error else found)
            target.flipped.update(to for of, to in zip(source_pages, target_pages, strict=True) if of in source.flipped)
            world.outcomes.tell(lambda at_s: events.CopyEnded(at_s=at_s, op=op, error=error, intact=intact), op)

        world.schedule.after(delay, end)
        if not by_layer:
            return

        def layers_end(layers: int) -> None:
            # With checksums nothing is reported before the end of a copy of which a page is damaged.
            if self.verifies and source.intact(source_pages) is not None:
                return
            target.put_layers(target_pages, found, layers)
            world.tell(events.LayersCopied(at_s=world.now_s, op=op, layers=layers))
            if faults.hits("outcome_repeats"):
                repeat = events.LayersCopied(at_s=world.now_s, op=op, layers=layers)
                world.schedule.after(world.delay(), world.tell_now, repeat)

        for layers in range(1, LAYERS):
            world.schedule.after(delay * layers / LAYERS, layers_end, layers)
