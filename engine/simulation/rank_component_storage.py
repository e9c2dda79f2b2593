"""Storage of components for one simulated rank. Records are missing, lost or unreadable on this rank only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidekv.states import commands, events

if TYPE_CHECKING:
    from tidekv.engine.simulation.rank_tiers import RankTiers
    from tidekv.engine.simulation.surroundings import RankSurroundings
    from tidekv.engine.simulation.components import Tags


class RankTailStorage:
    """Storage calls of one rank for its components. The records are among the rank's `stored` tags."""

    def __init__(self, rank: RankSurroundings, tiers: RankTiers) -> None:
        self._rank = rank
        self._tiers = tiers

    def query(self, command: commands.QueryTails) -> None:
        """Report how many full pages are stored, and at which positions pages of components are."""
        rank, tiers = self._rank, self._tiers
        if tiers.raises(command.op):
            return
        end = command.first + command.count
        wanted = rank.tags(rank.callers[command.request_id].script.tokens)[command.first : end]
        tags, error = self._tags(command.request_id), tiers.error("storage_fails")

        def answer() -> events.Event:
            found = tiers.held(wanted)
            tails = tuple(self._found(name, ours[: command.first + found], command) for name, ours in tags.items())
            return events.StorageAnswered(at_s=0.0, op=command.op, found=found, error=error, tails=tails)

        rank.outcome(tiers.storage_delay(), answer)

    def _found(self, name: str, tags: list[int], command: commands.QueryTails) -> events.StoredTail:
        rank = self._rank
        here = [at for at in range(command.tails_first, len(tags)) if tags[at] in rank.stored]
        if here and rank.hits("storage_is_short"):
            # One record is lost for good. Another one is not reported, or reported although it does not exist.
            rank.stored.discard(tags[rank.random.choice(here)])
            here = sorted({*here} ^ {rank.random.randrange(command.tails_first, len(tags))})
        rank.tails.counts["records_found"] += len(here)
        return events.StoredTail(name, tuple((at, at + 1) for at in here))

    def fetch(self, command: commands.FetchTail) -> None:
        """Read records."""
        rank, tiers = self._rank, self._tiers
        if tiers.raises(command.op):
            return
        tags = self._tags(command.request_id)[command.component]
        wanted = [tags[position] for position in command.positions]
        error, who = tiers.error("storage_fails"), f"fetch {command.op}"
        pool = rank.tails.pools["host", command.component]
        pool.begin_write(command.host_pages, who)

        def end() -> events.Event:
            good = 0 if error else tiers.held(wanted)
            pool.end_write(command.host_pages, who, [*wanted[:good], *([0] * (len(wanted) - good))])
            rank.tails.counts["tails_fetched" if good == len(wanted) else "tails_short"] += 1
            return events.PagesFetched(at_s=0.0, op=command.op, good=good, error=error)

        rank.outcome(tiers.storage_delay(), end)

    def store(self, command: commands.StoreTail) -> None:
        """Put records. Their content must match the tokens."""
        rank, tiers = self._rank, self._tiers
        if tiers.raises(command.op):
            return
        error, who = tiers.error("storage_fails"), f"put {command.op}"
        namespace, keys = rank.core.keys_put(command.op)
        size = rank.world.settings.key_bytes
        tags = rank.world.contents.tags(f"{command.component} of {namespace}", keys, size)
        pool = rank.tails.pools["host", command.component]
        pool.expect(command.host_pages, tags[command.first :], who)
        found = pool.begin_read(command.host_pages, who)

        def end() -> events.Event:
            pool.end_read(command.host_pages, who, found)
            stored = 0 if error else tiers.keep(found)
            rank.tails.counts["tails_stored"] += stored == len(found)
            return events.PagesStored(at_s=0.0, op=command.op, stored=stored, error=error)

        rank.outcome(tiers.storage_delay(), end)

    def _tags(self, request_id: str) -> Tags:
        script = self._rank.callers[request_id].script
        full = len(script.tokens) // self._rank.world.settings.page_size * self._rank.world.settings.page_size
        return self._rank.tails.tags_of("", script.tokens[:full], request_id)
