"""Effects of components on storage: what it has of tails, and how they come from there and go there.

Each component has a storage engine of its own, beside that of the full pages. The page of a component is named by the
key of the full page at its position, so that it stands for the same prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from tidekv.engine.decode.storage_calls import leading, own_cancels_only
from tidekv.states import commands, events
from tidekv.states.errors import TidekvError

if TYPE_CHECKING:
    from tidekv.backends.storage.base import Storage
    from tidekv.engine.decode.storage_calls import StorageCalls
    from tidekv.engine.decode.token_record import Caller, TokenRecord
    from tidekv.states.commands import Command
    from tidekv.states.events import Event


class ComponentExecutor:
    """Starts commands for tails on the storage of each component."""

    def __init__(
        self,
        *,
        caller: Caller,
        post: Callable[[Event], None],
        clock: Callable[[], float],
        calls: StorageCalls,
        store_timeout_s: float,
        query_timeout_s: float,
    ) -> None:
        self.storages: Mapping[str, Storage] = {}
        """By component; none for those that are not kept in storage."""
        self._caller = caller
        self._post = post
        self._clock = clock
        self._calls = calls
        self._store_timeout_s = store_timeout_s
        self._query_timeout_s = query_timeout_s

    @property
    def starters(self) -> dict[type[Command], Callable[..., None]]:
        """What begins each command."""
        return {
            commands.QueryComponents: self._query,
            commands.FetchComponent: self._fetch,
            commands.StoreComponent: self._store,
        }

    def _query(self, command: commands.QueryComponents) -> None:
        record = self._caller.tokens_of(command.request_id)
        storage = self._calls.need_storage()
        self._calls.use_storage(self._run_query(storage, dict(self.storages), record, command), f"query {command.op}")

    async def _run_query(
        self,
        storage: Storage,
        component_pages: Mapping[str, Storage],
        record: TokenRecord,
        command: commands.QueryComponents,
    ) -> None:
        found, error, here = 0, "", []
        try:
            # Tails are asked for from some page of the caches on, full pages from where these end.
            begin = command.components_first
            keys = await record.digests(begin, command.first + command.count - begin)
            if command.count:
                found = leading(await self._exist(storage, keys[command.first - begin :]))
            # Behind the last full page nobody can go on, whatever there is.
            keys = keys[: command.first + found - begin]
            for name, engine in component_pages.items():
                ranges = ranges_of(await self._exist(engine, keys), command.components_first)
                here.append(events.StoredComponent(name, ranges))
        except Exception as raised:
            found, error, here = 0, self._calls.words_of(command, raised), []
        self._post(
            events.StorageAnswered(
                at_s=self._clock(), op=command.op, found=found, error=error, component_pages=tuple(here)
            )
        )

    async def _exist(self, storage: Storage, keys: Sequence[bytes]) -> list[bool]:
        return await own_cancels_only(storage.exists(keys, timeout_s=self._query_timeout_s), "storage")

    def _fetch(self, command: commands.FetchComponent) -> None:
        record = self._caller.tokens_of(command.request_id)
        storage = self._storage_of(command.component)
        self._calls.use_storage(self._run_fetch(storage, record, command), f"fetch {command.op}")

    async def _run_fetch(self, storage: Storage, record: TokenRecord, command: commands.FetchComponent) -> None:
        good, error = 0, ""
        try:
            first, last = command.positions[0], command.positions[-1]
            known = await record.digests(first, last + 1 - first)
            keys = [known[position - first] for position in command.positions]
            got = storage.get_into(keys, command.host_pages, timeout_s=command.timeout_s)
            good = leading(await own_cancels_only(got, "storage"))
        except Exception as raised:
            error = self._calls.words_of(command, raised)
        self._post(events.PagesFetched(at_s=self._clock(), op=command.op, good=good, error=error))

    def _store(self, command: commands.StoreComponent) -> None:
        record = self._calls.record_put(command.op)
        storage = self._storage_of(command.component)
        self._calls.use_storage(self._run_store(storage, record, command), f"store {command.op}")

    async def _run_store(self, storage: Storage, record: TokenRecord, command: commands.StoreComponent) -> None:
        stored, error = 0, ""
        try:
            keys = await record.digests(command.first, len(command.host_pages))
            put = storage.put_from(keys, command.host_pages, timeout_s=self._store_timeout_s)
            stored = leading(await own_cancels_only(put, "storage"))
            if storage is not self.storages.get(command.component):
                # Exchanged meanwhile: to the core, "stored" means in the storage that is in use.
                stored = 0
        except Exception as raised:
            error = self._calls.words_of(command, raised)
        self._post(events.PagesStored(at_s=self._clock(), op=command.op, stored=stored, error=error))

    def _storage_of(self, component: str) -> Storage:
        if component not in self.storages:
            raise TidekvError(f"no storage is attached that holds component {component!r}")
        return self.storages[component]


def ranges_of(flags: Sequence[bool], first: int) -> tuple[tuple[int, int], ...]:
    """The ranges [begin, end) of positions where a flag is set; the first flag is that of position `first`."""
    ranges = []
    at = first
    for is_here, run in groupby(flags):
        end = at + sum(1 for _ in run)
        if is_here:
            ranges.append((at, end))
        at = end
    return tuple(ranges)
