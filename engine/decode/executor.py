"""Executor: each command becomes work on the tiers or a message to prefill, and each outcome one event.

Nothing here decides. An effect never raises into the driver: what goes wrong is an outcome, with its words.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from tidekv.engine.decode.component_executor import ComponentExecutor
from tidekv.engine.decode.storage_calls import CallsInFlight, leading, own_cancels_only
from tidekv.engine.decode.token_record import TokenRecord
from tidekv.states import commands, events
from tidekv.states.errors import TidekvError

if TYPE_CHECKING:
    from tidekv.backends.copies.copier import PageCopier
    from tidekv.backends.keys.page_keys import PageKeys
    from tidekv.backends.storage.base import Storage
    from tidekv.engine.decode.known_digests import KnownDigests
    from tidekv.engine.decode.token_record import Caller
    from tidekv.states.commands import Command
    from tidekv.states.events import Event
    from tidekv.transports.decode.receiver import Receiver

LOG = logging.getLogger("tidekv.engine")


class Executor:
    """Starts commands on one device, host, storage and transport."""

    def __init__(
        self,
        *,
        caller: Caller,
        post: Callable[[Event], None],
        clock: Callable[[], float],
        spawn: Callable[[Awaitable[None], str], None],
        copier: PageCopier | None,
        component_copiers: Mapping[str, PageCopier],
        receiver: Receiver,
        keys_put: Callable[[int], tuple[str, bytes]],
        page_keys: PageKeys,
        known: KnownDigests,
        store_timeout_s: float,
        query_timeout_s: float,
    ) -> None:
        self.storage: Storage | None = None
        self.raised = 0
        self._caller = caller
        self._post = post
        self._clock = clock
        self._spawn = spawn
        self._copier = copier
        self._component_copiers = component_copiers
        self._receiver = receiver
        self._keys_put = keys_put
        self._page_keys = page_keys
        self._known = known
        self._store_timeout_s = store_timeout_s
        self._query_timeout_s = query_timeout_s
        self._in_flight = CallsInFlight()
        self._starters: dict[type[Command], Callable[..., None]] = {
            commands.QueryStorage: self._query,
            commands.FetchPages: self._fetch,
            commands.StorePages: self._store,
            commands.ProbeStorage: self._probe,
            commands.CopyToDevice: self._copy_to_device,
            commands.CopyToHost: self._copy_to_host,
            commands.CopyComponent: self._copy_component,
            commands.Recompute: self._recompute,
            commands.SendPromise: self._promise,
            commands.SendExtend: self._extend,
            commands.SendAbort: self._abort,
            commands.SendReceived: self._received,
        }
        self.component_pages = ComponentExecutor(
            caller=caller,
            post=post,
            clock=clock,
            calls=self,
            store_timeout_s=store_timeout_s,
            query_timeout_s=query_timeout_s,
        )
        self._starters.update(self.component_pages.starters)

    def perform(self, command: Command) -> None:
        """Start a command. Raises nothing: a command that cannot be started has that as its outcome."""
        starter = self._starters.get(type(command))
        if starter is None:
            self._caller.tell(command)
            return
        try:
            starter(command)
        except Exception:
            self.raised += 1
            detail = traceback.format_exc()
            LOG.warning("starting %s raised:\n%s", type(command).__name__, detail)
            if isinstance(command, commands.Operation):
                self._post(events.CommandRaised(at_s=self._clock(), op=command.op, detail=detail))
            elif isinstance(command, commands.SendPromise | commands.SendExtend):
                self._post(
                    events.RoomFailed(
                        at_s=self._clock(),
                        request_id=command.request_id,
                        generation=command.generation,
                        cause=detail,
                        settled=isinstance(command, commands.SendPromise),
                    )
                )

    def use(self, storage: Storage | None, component_pages: Mapping[str, Storage]) -> None:
        """Send calls to this storage, and to these by component, from now on. Calls in flight go on where they are; the
        core is not told of what they have stored there.
        """
        self.storage = storage
        self.component_pages.storages = component_pages
        self._in_flight = CallsInFlight()

    @property
    def storage_calls(self) -> int:
        """Calls to the storage in use that have not ended."""
        return self._in_flight.count

    async def storage_is_quiet(self) -> None:
        """Wait until no call to the storage in use is in flight."""
        await self._in_flight.quiet()

    # --- Storage ---

    def _query(self, command: commands.QueryStorage) -> None:
        record = self._caller.tokens_of(command.request_id)
        self.use_storage(self._run_query(self.need_storage(), record, command), f"query {command.op}")

    async def _run_query(self, storage: Storage, record: TokenRecord, command: commands.QueryStorage) -> None:
        found, error = 0, ""
        try:
            keys = await record.digests(command.first, command.count)
            found = leading(await own_cancels_only(storage.exists(keys, timeout_s=self._query_timeout_s), "storage"))
        except Exception as raised:
            error = self.words_of(command, raised)
        self._post(events.StorageAnswered(at_s=self._clock(), op=command.op, found=found, error=error))

    def _fetch(self, command: commands.FetchPages) -> None:
        record = self._caller.tokens_of(command.request_id)
        self.use_storage(self._run_fetch(self.need_storage(), record, command), f"fetch {command.op}")

    async def _run_fetch(self, storage: Storage, record: TokenRecord, command: commands.FetchPages) -> None:
        good, error = 0, ""
        try:
            keys = await record.digests(command.first, len(command.host_pages))
            got = storage.get_into(keys, command.host_pages, timeout_s=command.timeout_s)
            good = leading(await own_cancels_only(got, "storage"))
        except Exception as raised:
            error = self.words_of(command, raised)
        self._post(events.PagesFetched(at_s=self._clock(), op=command.op, good=good, error=error))

    def _store(self, command: commands.StorePages) -> None:
        record = self._caller.tokens_left(command.serial) if command.serial else self.record_put(command.op)
        self.use_storage(self._run_store(self.need_storage(), record, command), f"store {command.op}")

    def record_put(self, op: int) -> TokenRecord:
        """The tokens behind a put whose request is long gone: they are the keys that the core knows the pages by."""
        namespace, keys = self._keys_put(op)
        packed = self._page_keys.tokens_of(keys)
        return TokenRecord(
            packed,
            page_keys=self._page_keys,
            namespace=namespace,
            addresses=(),
            sends_prompt=False,
            known=self._known,
        )

    async def _run_store(self, storage: Storage, record: TokenRecord, command: commands.StorePages) -> None:
        stored, error = 0, ""
        try:
            keys = await record.digests(command.first, len(command.host_pages))
            put = storage.put_from(keys, command.host_pages, timeout_s=self._store_timeout_s)
            stored = leading(await own_cancels_only(put, "storage"))
            if storage is not self.storage:
                # Exchanged meanwhile: to the core, "stored" means in the storage that is in use.
                stored = 0
        except Exception as raised:
            error = self.words_of(command, raised)
        self._post(events.PagesStored(at_s=self._clock(), op=command.op, stored=stored, error=error))

    def _probe(self, command: commands.ProbeStorage) -> None:
        storage = self.need_storage()
        if self._in_flight.is_probed:
            self._probed(command, f"{storage.uri} has not ended its last probe")
            return
        # The probe itself cannot be cut off. Its outcome can: what it brings later is for an operation that has ended.
        slow = f"{storage.uri} did not end a probe within {self._store_timeout_s:g} s"
        late = asyncio.get_running_loop().call_later(self._store_timeout_s, self._probed, command, slow)
        self._in_flight.is_probed = True
        self.use_storage(self._run_probe(storage, command, late, self._in_flight), f"probe {command.op}")

    async def _run_probe(
        self, storage: Storage, command: commands.ProbeStorage, late: asyncio.TimerHandle, in_flight: CallsInFlight
    ) -> None:
        error = ""
        try:
            for engine in (storage, *self.component_pages.storages.values()):
                await own_cancels_only(engine.probe(), "storage")
        except Exception as raised:
            error = self.words_of(command, raised)
        finally:
            in_flight.is_probed = False
            late.cancel()
        self._probed(command, error)

    def _probed(self, command: commands.ProbeStorage, error: str) -> None:
        self._post(events.StorageProbed(at_s=self._clock(), op=command.op, error=error))

    def need_storage(self) -> Storage:
        """The storage of full pages. Raises TidekvError where there is none."""
        if self.storage is None:
            raise TidekvError("no storage is attached")
        return self.storage

    def use_storage(self, call: Awaitable[None], name: str) -> None:
        """Run a call that storage is not quiet before the end of."""
        self._spawn(self._in_flight.begin(call), name)

    def words_of(self, command: Command, raised: Exception) -> str:
        """What an outcome says of an exception."""
        # An engine's own failures speak for themselves; anything else is a bug, whose traceback must not be lost.
        if isinstance(raised, TidekvError):
            return str(raised)
        self.raised += 1
        LOG.error("%s raised", type(command).__name__, exc_info=raised)
        return "".join(traceback.format_exception(raised))

    # --- Copies ---

    def _copy_to_device(self, command: commands.CopyToDevice) -> None:
        assert self._copier is not None, "the core copies only where there is a host pool"
        copied = self._copier.to_device(command.host_pages, command.device_pages)
        copied.add_done_callback(partial(self._copied, command))

    def _copy_to_host(self, command: commands.CopyToHost) -> None:
        assert self._copier is not None, "the core copies only where there is a host pool"
        copied = self._copier.to_host(command.device_pages, command.host_pages)
        copied.add_done_callback(partial(self._copied, command))

    def _copy_component(self, command: commands.CopyComponent) -> None:
        copier = self._component_copiers[command.component]
        if command.target == "host":
            copied = copier.to_host(command.source_pages, command.target_pages)
        elif command.source == "host":
            copied = copier.to_device(command.source_pages, command.target_pages)
        else:
            copied = copier.clone(command.source_pages, command.target_pages)
        copied.add_done_callback(partial(self._copied, command))

    def _copied(self, command: commands.Operation, copied: asyncio.Future[None]) -> None:
        raised = copied.exception()
        error = "" if raised is None else f"{type(raised).__name__}: {raised}"
        self._post(events.CopyEnded(at_s=self._clock(), op=command.op, error=error))

    # --- The last resort ---

    def _recompute(self, command: commands.Recompute) -> None:
        self._spawn(self._caller.recompute(command, self._recomputed), f"recompute {command.op}")

    def _recomputed(self, command: commands.Recompute, raised: Exception | None) -> None:
        error = "" if raised is None else self.words_of(command, raised)
        self._post(events.Recomputed(at_s=self._clock(), op=command.op, error=error))

    # --- The hand-over ---

    def _promise(self, command: commands.SendPromise) -> None:
        record = self._caller.tokens_of(command.request_id)
        # A router brings the prompt to the first prefill, once; for any further room we do.
        sends_prompt = record.sends_prompt or command.renewed
        self._receiver.promise(
            record.address_list[command.prefill],
            command.request_id,
            command.generation,
            prompt_tokens=command.prompt_tokens,
            promised_tokens=command.promised_tokens,
            pages=command.pages,
            tokens=record.packed if sends_prompt else None,
            key_seed=record.key_seed,
            component_pages=command.component_pages,
            # A prefill that does not answer must leave the prefills behind it their share of the time.
            connect_s=max(record.deadline_at_s - self._clock(), 0.0) / (len(record.address_list) - command.prefill),
        )

    def _extend(self, command: commands.SendExtend) -> None:
        self._receiver.extend(command.request_id, command.generation, command.span, command.first, command.pages)

    def _abort(self, command: commands.SendAbort) -> None:
        self._receiver.abort(command.request_id, command.generation)

    def _received(self, command: commands.SendReceived) -> None:
        self._receiver.received(command.request_id, command.generation)
