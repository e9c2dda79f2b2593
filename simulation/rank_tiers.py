"""Storage and copies of one simulated rank. They are late, short or fail on this rank only.

Storage of components for one simulated rank. Records are missing, lost or unreadable on this rank only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulation.memory import LAYERS
from tidekv.states import commands, events

if TYPE_CHECKING:
    from simulation.components import Tags
    from simulation.memory import SimulatedPool
    from simulation.surroundings import RankSurroundings


class RankComponentStorage:
    """Storage calls of one rank for its components. The records are among the rank's `stored` tags."""

    def __init__(self, rank: RankSurroundings, tiers: RankTiers) -> None:
        self._rank = rank
        self._tiers = tiers

    def query(self, command: commands.QueryStorage) -> None:
        """Report how many full pages are stored, and at which positions pages of components are."""
        rank, tiers = self._rank, self._tiers
        if tiers.raises(command.op):
            return
        end = command.first + command.count
        wanted = rank.tags(rank.callers[command.request_id].script.tokens)[command.first : end]
        tags, error = self._tags(command.request_id), tiers.error("storage_fails")

        def answer() -> events.Event:
            found = tiers.held(wanted)
            component_pages = tuple(
                self._found(name, tags[name][:end], first) for name, first in command.components_first.items()
            )
            return events.StorageAnswered(
                at_s=0.0, op=command.op, found=found, error=error, component_pages=component_pages
            )

        rank.outcome(tiers.storage_delay(), answer)

    def _found(self, name: str, tags: list[int], first: int) -> events.StoredComponent:
        rank = self._rank
        here = [at for at in range(first, len(tags)) if tags[at] in rank.stored]
        if here and rank.hits("storage_is_short"):
            # One record is lost for good. Another one is not reported, or reported although it does not exist.
            rank.stored.discard(tags[rank.random.choice(here)])
            here = sorted({*here} ^ {rank.random.randrange(first, len(tags))})
        rank.component_pages.counts["records_found"] += len(here)
        return events.StoredComponent(name, tuple((at, at + 1) for at in here))

    def fetch(self, command: commands.FetchPages) -> None:
        """Read records."""
        rank, tiers = self._rank, self._tiers
        if tiers.raises(command.op):
            return
        tags = self._tags(command.request_id)[command.component]
        wanted = [tags[position] for position in command.positions]
        rank.component_pages.note_fetch(rank.core, command)
        error, who = tiers.error("storage_fails"), f"fetch {command.op}"
        pool = rank.component_pages.pools["host", command.component]
        pool.begin_write(command.host_pages, who)

        def end() -> events.Event:
            valid = 0 if error else tiers.held(wanted)
            pool.end_write(command.host_pages, who, [*wanted[:valid], *([0] * (len(wanted) - valid))])
            rank.component_pages.counts["components_fetched" if valid == len(wanted) else "components_short"] += 1
            return events.PagesFetched(at_s=0.0, op=command.op, valid=valid, error=error)

        rank.outcome(tiers.storage_delay(), end)

    def store(self, command: commands.StorePages) -> None:
        """Put records. Their content must match the tokens."""
        rank, tiers = self._rank, self._tiers
        if tiers.raises(command.op):
            return
        error, who = tiers.error("storage_fails"), f"put {command.op}"
        namespace, keys = rank.core.keys_put(command.op)
        size = rank.world.settings.key_bytes
        tags = rank.world.contents.tags(f"{command.component} of {namespace}", keys, size)
        pool = rank.component_pages.pools["host", command.component]
        pool.expect(command.host_pages, tags[command.first :], who, may_be_flipped=True)
        found = pool.begin_read(command.host_pages, who)

        def end() -> events.Event:
            pool.end_read(command.host_pages, who, found)
            intact = pool.intact(command.host_pages)
            stored = 0 if error else tiers.keep(found[:intact])
            rank.component_pages.counts["components_stored"] += stored == len(found)
            return events.PagesStored(at_s=0.0, op=command.op, stored=stored, put=stored, error=error)

        rank.outcome(tiers.storage_delay(), end)

    def _tags(self, request_id: str) -> Tags:
        script = self._rank.callers[request_id].script
        full = len(script.tokens) // self._rank.world.settings.page_size * self._rank.world.settings.page_size
        return self._rank.component_pages.tags_of("", script.tokens[:full])


class RankTiers:
    """The local tiers of one rank."""

    def __init__(self, rank: RankSurroundings) -> None:
        self._rank = rank

    def raises(self, op: int) -> bool:
        """Decide whether starting this operation raises, and report that."""
        if not self._rank.hits("command_raises"):
            return False
        self._rank.outcome(0.0, lambda: events.CommandRaised(at_s=0.0, op=op, detail="injected"))
        return True

    def storage_delay(self) -> float:
        """Return the duration of a storage call."""
        return 0.5 if self._rank.hits("storage_is_late") else self._rank.delay()

    def held(self, tags: list[int]) -> int:
        """Return how many of these pages, from the first on, can be read."""
        held = next((at for at, tag in enumerate(tags) if tag not in self._rank.stored), len(tags))
        return self._rank.random.randint(0, held) if self._rank.hits("storage_is_short") else held

    def keep(self, tags: list[int]) -> int:
        """Store these pages, or only the first half; returns how many."""
        rank = self._rank
        # A tail is put only if the storage of all ranks has every page before it, so complete puts must be frequent.
        wholes = 19 if rank.component_pages.components else 2
        count = rank.random.choice((*(len(tags) for _ in range(wholes)), len(tags) // 2))
        rank.stored.update(tags[:count])
        return count

    def error(self, name: str) -> str:
        """Return an error text if that fault strikes now."""
        return "injected" if self._rank.hits(name) else ""

    def fetch(self, command: commands.FetchPages) -> None:
        """Read pages."""
        if self.raises(command.op):
            return
        if command.request_id:
            tags = self._rank.tags(self._rank.callers[command.request_id].script.tokens)
        else:
            tags = self._tags_put(command.op)
        wanted = [tags[at] for at in command.positions]
        error, who = self.error("storage_fails"), f"fetch {command.op}"
        self._rank.host.begin_write(command.host_pages, who)

        def end() -> events.Event:
            valid = 0 if error else self.held(wanted)
            self._rank.host.end_write(command.host_pages, who, [*wanted[:valid], *([0] * (len(wanted) - valid))])
            return events.PagesFetched(at_s=0.0, op=command.op, valid=valid, error=error)

        self._rank.outcome(self.storage_delay(), end)

    def _tags_put(self, op: int) -> list[int]:
        namespace, keys = self._rank.core.keys_put(op)
        return self._rank.world.contents.tags(namespace, keys, self._rank.world.settings.page_size)

    def store(self, command: commands.StorePages) -> None:
        """Put pages."""
        if self.raises(command.op):
            return
        error, who = self.error("storage_fails"), f"put {command.op}"
        if command.request_number:
            tags = self._rank.records[command.request_number]
        else:
            tags = self._tags_put(command.op)
        wanted = tags[: len(command.host_pages)]
        self._rank.host.expect(command.host_pages, wanted, who, may_be_flipped=True)
        found = self._rank.host.begin_read(command.host_pages, who)

        def end() -> events.Event:
            self._rank.host.end_read(command.host_pages, who, found)
            intact = self._rank.host.intact(command.host_pages)
            put = 0 if error else self.keep([tag for tag in found[:intact] if tag not in self._rank.stored])
            named = tags[: len(command.host_pages) + command.asked]
            stored = next((at for at, tag in enumerate(named) if tag not in self._rank.stored), len(named))
            return events.PagesStored(
                at_s=0.0, op=command.op, stored=0 if error else stored, error=error, intact=intact, put=put
            )

        self._rank.outcome(self.storage_delay(), end)

    def probe(self, command: commands.ProbeStorage) -> None:
        """Report whether storage can be used again."""
        error = self.error("storage_fails")
        self._rank.outcome(self._rank.delay(), lambda: events.StorageProbed(at_s=0.0, op=command.op, error=error))

    def copy(self, command: commands.CopyPages) -> None:
        """Copy between the pools."""
        if not self.raises(command.op):
            pools = {"host": self._rank.host, "device": self._rank.device}
            self._copy(command, pools[command.source], pools[command.target])

    def copy_component(self, command: commands.CopyPages) -> None:
        """Copy pages of a component between its pools, or within the device pool."""
        if self.raises(command.op):
            return
        pools = self._rank.component_pages.pools
        source, target = pools[command.source, command.component], pools[command.target, command.component]
        self._rank.component_pages.note_copy(self._rank.core, command)
        self._copy(command, source, target)

    def _copy(self, command: commands.CopyPages, source: SimulatedPool, target: SimulatedPool) -> None:
        op, by_layer = command.op, command.by_layer
        source_pages, target_pages = command.source_pages, command.target_pages
        who, failed = f"copy {op}", self.error("copy_fails")
        if source.pool.name.startswith("host") and self._rank.hits("host_page_is_flipped"):
            source.flipped.add(self._rank.random.choice(source_pages))
        found = source.begin_read(source_pages, who)
        target.begin_write(target_pages, who)

        def end() -> events.Event:
            intact = None if failed else source.intact(source_pages)
            error = failed if intact is None else "a checksum differs"
            source.end_read(source_pages, who, found)
            target.end_write(target_pages, who, None if error else found)
            return events.CopyEnded(at_s=0.0, op=op, error=error, intact=intact)

        # Layers arrive apart from each other, so that faults and aborts come between them.
        slow = LAYERS * 3 if by_layer else 1
        delay_s = 0.3 if self._rank.hits("copy_is_late") else self._rank.delay() * slow
        self._rank.outcome(delay_s, end)
        if not by_layer:
            return

        def layers_end(layers: int) -> None:
            # With checksums nothing is reported before the end of a copy of which a page is damaged.
            if source.intact(source_pages) is not None:
                return
            target.put_layers(target_pages, found, layers)
            event = events.LayersCopied(at_s=0.0, op=op, layers=layers)
            self._rank.receive(event)
            if self._rank.hits("outcome_repeats"):
                self._rank.after(self._rank.delay(), self._rank.receive, event)

        # A copy that fails brings some of its layers, on this rank only.
        for layers in range(1, self._rank.random.randint(1, LAYERS) if failed else LAYERS):
            self._rank.after(delay_s * layers / LAYERS, layers_end, layers)
