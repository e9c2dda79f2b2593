"""Answers of storage, and storage of components, in the simulated environment, by tag.

The faults are those of full pages, under the same names: answers that report too much or too little; reads that are
short, late or corrupt; partial puts; and records that are lost in between.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from simulation.memory import Violation
from simulation.stored import StoredTags
from simulation.tiers import FETCH_S_MAX
from tidekv.states import commands, events

if TYPE_CHECKING:
    from simulation.components import Tags
    from simulation.tiers import SimulatedStorage, TierSurroundings


class SimulatedComponentStorage:
    """Records of all components. They are never wrong, but may be lost, and answers may be false."""

    def __init__(self, world: TierSurroundings, storage: SimulatedStorage, random: Random) -> None:
        self._world = world
        self._storage = storage
        self._random = random
        self._kept = StoredTags(world.faults, random)
        """Each tag also identifies its component."""

    def query(self, command: commands.QueryStorage) -> None:
        """Report how many full pages are stored, and at which positions pages of components are."""
        world = self._world
        world.outcomes.begin(command.op)
        if world.faults.hits("query_raises"):
            world.outcomes.raised(command.op)
            return
        caller = world.caller(command.request_id)
        wanted = caller.tags[command.first : command.first + command.count]
        end = command.first + command.count
        if len(wanted) != command.count or any(not 0 <= at < end for at in command.components_first.values()):
            raise Violation(f"{command} requests pages that the prompt does not have")
        delay = self._storage.query_delay()
        world.schedule.after(delay, self._answer, command, wanted, caller.component_tags)

    def _answer(self, command: commands.QueryStorage, wanted: list[int], tags: Tags) -> None:
        found, error = self._storage.answer_for(wanted)
        end = command.first + command.count
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
        """Read records."""
        world, faults = self._world, self._world.faults
        world.outcomes.begin(command.op)
        if faults.hits("fetch_raises"):
            world.outcomes.raised(command.op)
            return
        tags = world.caller(command.request_id).component_tags[command.component]
        if not command.positions or len(command.positions) != len(command.host_pages):
            raise Violation(f"{command} does not read as many records as it names")
        wanted = [tags[position] for position in command.positions]
        world.component_pages.note_fetch(world.core, command)
        self._kept.lose_one(wanted)
        world.component_pages.pools["host", command.component].begin_write(command.host_pages, f"fetch {command.op}")
        delay = self._storage.delay("fetch_is_late", min(command.timeout_s, FETCH_S_MAX), "fetch_is_stuck")
        world.schedule.after(delay, self._land, command, wanted)

    def _land(self, command: commands.FetchPages, wanted: list[int]) -> None:
        world, faults = self._world, self._world.faults
        valid, error = self._kept.read(wanted)
        if world.component_pages.is_lost(command.component, faults.hits, is_over=faults.is_over):
            valid = 0
        pool = world.component_pages.pools["host", command.component]
        pool.end_write(command.host_pages, f"fetch {command.op}", [*wanted[:valid], *([0] * (len(wanted) - valid))])
        world.component_pages.counts["components_fetched"] += valid == len(wanted)
        if valid == len(wanted) and faults.hits("fetch_reports_nonsense"):
            valid += 7
        world.outcomes.tell(
            lambda at_s: events.PagesFetched(at_s=at_s, op=command.op, valid=valid, error=error), command.op
        )

    def store(self, command: commands.StorePages) -> None:
        """Put records. Their content must match the tokens."""
        world, faults = self._world, self._world.faults
        world.outcomes.begin(command.op)
        if faults.hits("store_raises"):
            world.outcomes.raised(command.op)
            return
        who = f"put {command.op}"
        namespace, keys = world.core.keys_put(command.op)
        tags = world.contents.tags(f"{command.component} of {namespace}", keys, world.settings.key_bytes)
        pool = world.component_pages.pools["host", command.component]
        pool.expect(command.host_pages, tags[command.first :], who, may_be_flipped=True)
        found = pool.begin_read(command.host_pages, who)
        delay = self._storage.delay("store_is_late", 60.0, "store_is_stuck")
        world.schedule.after(delay, self._stored, command, found)

    def _stored(self, command: commands.StorePages, found: list[int]) -> None:
        world = self._world
        pool = world.component_pages.pools["host", command.component]
        pool.end_read(command.host_pages, f"put {command.op}", found)
        intact = pool.intact(command.host_pages)
        stored, error = self._kept.put(found[:intact])
        world.component_pages.counts["components_stored"] += stored == len(found)
        world.outcomes.tell(
            lambda at_s: events.PagesStored(
                at_s=at_s, op=command.op, stored=stored, error=error, intact=intact, put=stored
            ),
            command.op,
        )
