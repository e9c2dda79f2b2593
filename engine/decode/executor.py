"""Executor of commands: work on the tiers or a message to prefill, with one event for each outcome.

It makes no decisions and never raises into the driver: a failure is an outcome, with its text.

The way of a storage hit count, which enters the core by one event:

    storage engine `exists` ──▶ executor `_run_query` ──StorageAnswered──▶ driver ──▶ core `step` ──▶ storage admission
    `StorageQuery` ──▶ record `StorageAnswer` ──▶ plan `PlanFetches.load`: its loads are sources of READY

Each component has a storage engine of its own, beside that of the full pages. The page of a component has the key of
the full page at its position, so both stand for the same prompt.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from tidekv.backends.keys.chain import namespace_seed
from tidekv.backends.storage.base import leading, prefix_of, ranges_of
from tidekv.backends.storage.prefix_put import put_prefix
from tidekv.states import commands, events
from tidekv.states.errors import PagesDamaged, TidekvError
from tidekv.states.types import FULL
from tidekv.transports.tasks import own_cancels_only

if TYPE_CHECKING:
    from tidekv.backends.checksums import StorageChecks
    from tidekv.backends.copies.copier import PageCopier
    from tidekv.backends.keys.prompt_keys import Prompt, PromptKeys
    from tidekv.backends.storage.base import Storage
    from tidekv.engine.decode.peer_cache import PeerCache
    from tidekv.engine.decode.pending_calls import PendingCalls
    from tidekv.engine.log import CoreLog
    from tidekv.states.commands import Command
    from tidekv.states.events import Event
    from tidekv.transports.decode.receiver import Receiver


class CallsInFlight:
    """Calls to one attached storage that have not ended."""

    def __init__(self) -> None:
        self.count = 0
        self.pages_being_stored = 0
        self.is_probed = False
        """Whether a probe is in flight: a store is probed again only after its last probe has ended."""
        self._quiet = asyncio.Event()
        self._quiet.set()

    def begin(self, call: Awaitable[None]) -> Coroutine[object, object, None]:
        """Count a call from now on until it ends; the caller runs what this returns."""
        self.count += 1
        self._quiet.clear()
        return self._run(call)

    async def _run(self, call: Awaitable[None]) -> None:
        try:
            await call
        finally:
            self.count -= 1
            if not self.count:
                self._quiet.set()

    async def quiet(self) -> None:
        """Wait until no call is in flight. Unbounded: the caller sets the deadline."""
        await self._quiet.wait()


class EffectLoop(NamedTuple):
    """Where work of commands runs, and where its outcomes go."""

    post: Callable[[Event], None]
    """Takes an outcome into the core."""
    clock: Callable[[], float]
    spawn: Callable[[Awaitable[None], str], None]
    """Runs a call to its end, under a name."""


class StorageCalls(NamedTuple):
    """What calls to storage need beside storage itself."""

    checks: StorageChecks
    keys_stored: Callable[[int], tuple[str, bytes]]
    """Namespace and keys of the pages of a store, by the number of its operation."""
    store_timeout_s: float
    """Maximum seconds of a store and of a probe."""
    query_timeout_s: float
    """Maximum seconds of a query."""


class Executor:
    """Starts commands on one device, host, storage and transport."""

    def __init__(
        self,
        *,
        calls: PendingCalls,
        loop: EffectLoop,
        copiers: Mapping[str, PageCopier],
        storage_calls: StorageCalls,
        receiver: Receiver,
        log: CoreLog,
        prompt_keys: PromptKeys,
    ) -> None:
        """`copiers` has one for the full pages (`FULL`), if there is a host pool, and one for each component."""
        self.raised = 0
        self._storage: Storage | None = None
        self._component_storages: Mapping[str, Storage] = {}
        """By component; components that are not kept in storage have none."""
        self._calls = calls
        self._post = loop.post
        self._clock = loop.clock
        self._spawn = loop.spawn
        self._copiers = copiers
        self._storage_calls = storage_calls
        self._receiver = receiver
        self._log = log
        self._prompt_keys = prompt_keys
        self.peers: PeerCache | None = None
        """The host pool as peers see it, if it is shared."""
        self.on_missing: Callable[[Sequence[bytes]], None] | None = None
        """Called with keys that storage was asked for and does not have."""
        self._in_flight = CallsInFlight()
        self._starters: dict[type[Command], Callable[..., None]] = {
            commands.QueryStorage: self._query,
            commands.FetchPages: self._fetch,
            commands.SharePages: self._share,
            commands.HandPrompt: self._hand,
            commands.StorePages: self._store,
            commands.ProbeStorage: self._probe,
            commands.CopyPages: self._copy,
            commands.Recompute: self._recompute,
            commands.SendPromise: self._promise,
            commands.SendExtend: self._extend,
            commands.SendAbort: self._abort,
            commands.SendReceived: self._received,
        }

    def perform(self, command: Command) -> None:
        """Start a command. Raises nothing: a command that cannot be started has that as its outcome."""
        starter = self._starters.get(type(command))
        if starter is None:
            self._calls.tell(command)
            return
        try:
            starter(command)
        except Exception:
            self.raised += 1
            detail = traceback.format_exc()
            self._log.of_command(command).warning("starting a command raised", traceback=detail)
            if isinstance(command, commands.OperationCommand):
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

    def use(self, storage: Storage | None, component_storages: Mapping[str, Storage]) -> None:
        """Send calls to this storage, and to these by component, from now on. Calls in flight continue on the old one;
        the core does not receive the pages that they store there.
        """
        self._storage = storage
        self._component_storages = component_storages
        self._in_flight = CallsInFlight()

    @property
    def storage_calls(self) -> int:
        """Calls to the storage in use that have not ended."""
        return self._in_flight.count

    @property
    def pages_being_stored(self) -> int:
        """Pages of the puts to the storage in use that have not ended."""
        return self._in_flight.pages_being_stored

    async def storage_is_quiet(self) -> None:
        """Wait until no call to the storage in use is in flight. Unbounded: the caller sets the deadline."""
        await self._in_flight.quiet()

    # --- Storage ---

    def _query(self, command: commands.QueryStorage) -> None:
        prompt = self._calls.live(command.request_id).prompt
        # The present storages: an exchange meanwhile must not mix the answers of two.
        components = {
            name: (self._component_storages[name], first)
            for name, first in command.components_first.items()
            if name in self._component_storages
        }
        self._use_storage(self._run_query(self._storage_of(FULL), components, prompt, command), f"query {command.op}")

    async def _run_query(
        self,
        storage: Storage,
        components: Mapping[str, tuple[Storage, int]],
        prompt: Prompt,
        command: commands.QueryStorage,
    ) -> None:
        """`components`: by name, where to look it up and from which position of the prompt on."""
        found, error, here = 0, "", []
        try:
            keys = await prompt.digests(0, command.first + command.count)
            if command.count:
                there = await self._exist(storage, keys, command.first)
                found = leading(there)
                if storage is self._storage and self.on_missing is not None:
                    self.on_missing([key for key, has in zip(keys[command.first :], there, strict=True) if not has])
            for name, (engine, first) in components.items():
                here.append(events.StoredComponent(name, ranges_of(await self._exist(engine, keys, first), first)))
        except Exception as raised:
            found, error, here = 0, self._text_of(command, raised), []
        self._post(
            events.StorageAnswered(
                at_s=self._clock(), op=command.op, found=found, error=error, component_pages=tuple(here)
            )
        )

    async def _exist(self, storage: Storage, keys: Sequence[bytes], first: int) -> list[bool]:
        above = prefix_of(storage, keys[:first])
        asked = storage.exists(keys[first:], timeout_s=self._storage_calls.query_timeout_s, **above)
        return await own_cancels_only(asked, "storage")

    def _fetch(self, command: commands.FetchPages) -> None:
        if command.peer:
            # Without a request: a prompt that another worker hands over.
            live = command.request_id
            prompt = self._calls.live(live).prompt if live else self._prompt_put(command.op)
            self._spawn(self._run_peer_fetch(self._peers, prompt, command), f"fetch {command.op}")
            return
        is_of_request = bool(command.request_id)
        prompt = self._calls.live(command.request_id).prompt if is_of_request else self._prompt_put(command.op)
        storage = self._storage_of(command.component)
        self._use_storage(self._run_fetch(storage, prompt, command), f"fetch {command.op}")

    async def _run_fetch(self, storage: Storage, prompt: Prompt, command: commands.FetchPages) -> None:
        valid, error = 0, ""
        try:
            # The digests before the first position exist already: each depends on the one before it.
            known = await prompt.digests(0, command.positions[-1] + 1)
            above = prefix_of(storage, known[: command.positions[0]])
            keys = [known[position] for position in command.positions]
            got = storage.get_into(keys, command.host_pages, timeout_s=command.timeout_s, **above)
            valid = leading(await own_cancels_only(got, "storage"))
            await self._storage_calls.checks.note_read(command.component, command.host_pages[:valid])
        except Exception as raised:
            error = self._text_of(command, raised)
        self._post(events.PagesFetched(at_s=self._clock(), op=command.op, valid=valid, error=error))

    async def _run_peer_fetch(self, peers: PeerCache, prompt: Prompt, command: commands.FetchPages) -> None:
        try:
            valid, error = await peers.fetch(command, prompt.packed + prompt.behind, prompt.seed)
        except Exception as raised:
            valid, error = 0, self._text_of(command, raised)
        self._post(events.PagesFetched(at_s=self._clock(), op=command.op, valid=valid, error=error))

    def _share(self, command: commands.SharePages) -> None:
        self._peers.share(command)

    def _hand(self, command: commands.HandPrompt) -> None:
        namespace, keys = self._storage_calls.keys_stored(command.op)
        self._spawn(self._run_hand(self._peers, command, namespace, keys), f"hand {command.op}")

    async def _run_hand(self, peers: PeerCache, command: commands.HandPrompt, namespace: str, keys: bytes) -> None:
        there = brought = 0
        refuses = False
        try:
            taken = await peers.hand(command, namespace, keys)
            there, brought, error, refuses = taken.there, taken.brought, taken.cause, taken.refuses
        except Exception as raised:
            error = self._text_of(command, raised)
        self._post(
            events.PromptHanded(
                at_s=self._clock(), op=command.op, there=there, brought=brought, error=error, refuses=refuses
            )
        )

    @property
    def _peers(self) -> PeerCache:
        if self.peers is None:
            raise TidekvError("host memory is not shared with peers: cache_peers.enabled is not set")
        return self.peers

    def _store(self, command: commands.StorePages) -> None:
        prompt = (
            self._calls.tokens_left(command.request_number) if command.request_number else self._prompt_put(command.op)
        )
        storage = self._storage_of(command.component)
        self._use_storage(self._run_store(storage, prompt, command, self._in_flight), f"store {command.op}")

    def _prompt_put(self, op: int) -> Prompt:
        """Return the tokens of a put after the end of its request, from the page keys of the core."""
        namespace, keys = self._storage_calls.keys_stored(op)
        packed = self._prompt_keys.page_keys.tokens_of(keys)
        return self._prompt_keys.prompt(packed, namespace_seed(namespace))

    async def _run_store(
        self, storage: Storage, prompt: Prompt, command: commands.StorePages, in_flight: CallsInFlight
    ) -> None:
        stored, put, error, intact = 0, 0, "", None
        in_flight.pages_being_stored += len(command.host_pages)
        try:
            first = command.first
            keys = await prompt.digests(0, first + len(command.host_pages) + command.asked)
            checked = partial(self._storage_calls.checks.intact, command.component)
            done = await own_cancels_only(
                put_prefix(
                    storage,
                    keys[first:],
                    command.host_pages,
                    timeout_s=self._storage_calls.store_timeout_s,
                    checked=checked,
                    prefix_keys=keys[:first],
                ),
                "storage",
            )
            stored, put, intact = leading(done.there), done.put, done.intact
            if intact is not None:
                self._log.of_command(command).warning("a page in host memory is damaged: it is not stored", at=intact)
            if storage is not self._storage_in_use(command.component):
                # Exchanged meanwhile: to the core, "stored" means in the storage that is in use.
                stored = 0
        except Exception as raised:
            error = self._text_of(command, raised)
        finally:
            in_flight.pages_being_stored -= len(command.host_pages)
        self._post(
            events.PagesStored(
                at_s=self._clock(), op=command.op, stored=stored, error=error, intact=intact, written=put
            )
        )

    def _probe(self, command: commands.ProbeStorage) -> None:
        storage = self._storage_of(FULL)
        if self._in_flight.is_probed:
            self._probed(command, f"{storage.uri} has not ended its last probe")
            return
        # The probe itself cannot be stopped, but its outcome can be dropped: its operation has ended.
        slow = f"{storage.uri} did not end a probe within {self._storage_calls.store_timeout_s:g} s"
        late = asyncio.get_running_loop().call_later(self._storage_calls.store_timeout_s, self._probed, command, slow)
        self._in_flight.is_probed = True
        self._use_storage(self._run_probe(storage, command, late, self._in_flight), f"probe {command.op}")

    async def _run_probe(
        self, storage: Storage, command: commands.ProbeStorage, late: asyncio.TimerHandle, in_flight: CallsInFlight
    ) -> None:
        error = ""
        try:
            for engine in (storage, *self._component_storages.values()):
                await own_cancels_only(engine.probe(), "storage")
        except Exception as raised:
            error = self._text_of(command, raised)
        finally:
            in_flight.is_probed = False
            late.cancel()
        self._probed(command, error)

    def _probed(self, command: commands.ProbeStorage, error: str) -> None:
        self._post(events.StorageProbed(at_s=self._clock(), op=command.op, error=error))

    def _storage_of(self, component: str) -> Storage:
        """Return the storage of a component, or of full pages. Raises TidekvError if there is none."""
        storage = self._storage_in_use(component)
        if storage is None:
            held = "" if component == FULL else f" that holds component {component!r}"
            raise TidekvError(f"no storage is attached{held}")
        return storage

    def _storage_in_use(self, component: str) -> Storage | None:
        return self._storage if component == FULL else self._component_storages.get(component)

    def _use_storage(self, call: Awaitable[None], name: str) -> None:
        """Run a call, and count it as in flight until it ends."""
        self._spawn(self._in_flight.begin(call), name)

    def _text_of(self, command: Command, raised: Exception) -> str:
        """Return the text of an outcome for an exception."""
        # An engine's own failures have a message; anything else is a defect, so its traceback is kept.
        if isinstance(raised, TidekvError):
            self._log.of_command(command).warning("a command failed", cause=str(raised))
            return str(raised)
        self.raised += 1
        self._log.of_command(command).error("a command raised", exc_info=raised)
        return "".join(traceback.format_exception(raised))

    # --- Copies ---

    def _copy(self, command: commands.CopyPages) -> None:
        copier, sources, targets = self._copiers[command.component], command.source_pages, command.target_pages
        if command.target == "host":
            copied = copier.to_host(sources, targets)
        elif command.source == "device":
            copied = copier.clone(sources, targets)
        elif command.by_layer:
            copied = copier.to_device_by_layer(sources, targets, partial(self._layers_copied, command.op)).done
        else:
            copied = copier.to_device(sources, targets)
        copied.add_done_callback(partial(self._copied, command))

    def _layers_copied(self, op: int, layers: int) -> None:
        self._post(events.LayersCopied(at_s=self._clock(), op=op, layers=layers))

    def _copied(self, command: commands.OperationCommand, copied: asyncio.Future[None]) -> None:
        raised = copied.exception()
        error = "" if raised is None else f"{type(raised).__name__}: {raised}"
        intact = None
        if isinstance(raised, PagesDamaged):
            intact = raised.intact
            self._log.of_command(command).warning("pages in host memory are damaged: they are not used", cause=error)
        self._post(events.CopyEnded(at_s=self._clock(), op=command.op, error=error, intact=intact))

    # --- The last resort ---

    def _recompute(self, command: commands.Recompute) -> None:
        live = self._calls.live(command.request_id)
        if command.is_short and not live.request.send_prompt:
            # A router has sent the prompt to the first prefill, which keeps pages until decode asks or declines.
            self._receiver.decline(live.request.prefills[0], command.request_id, live.prompt_digest())
        self._spawn(self._calls.recompute(command, self._recomputed), f"recompute {command.op}")

    def _recomputed(self, command: commands.Recompute, raised: Exception | None) -> None:
        error = "" if raised is None else self._text_of(command, raised)
        self._post(events.Recomputed(at_s=self._clock(), op=command.op, error=error))

    # --- The hand-over ---

    def _promise(self, command: commands.SendPromise) -> None:
        live = self._calls.live(command.request_id)
        addresses = live.request.prefills
        if not addresses:
            self._promise_nobody(command)
            return
        # A router sends the prompt to the first prefill, once; for any further room this engine sends it.
        sends_prompt = live.request.send_prompt or command.renewed
        self._receiver.promise(
            addresses[command.prefill],
            command.request_id,
            command.generation,
            prompt_tokens=command.prompt_tokens,
            promised_tokens=command.promised_tokens,
            pages=command.pages,
            prompt_digest=live.prompt_digest(),
            tokens=live.prompt.packed if sends_prompt else None,
            # None: these tokens must not be kept, or prefill knows them under another namespace.
            key_seed=live.prompt.seed if live.request.cache and live.request.prompt_digest is None else None,
            component_pages=command.component_pages,
            # A prefill that does not answer must leave time for the prefills after it.
            connect_s=max(live.deadline_at_s - self._clock(), 0.0) / (len(addresses) - command.prefill),
        )

    def _promise_nobody(self, command: commands.SendPromise) -> None:
        """Answer for the prefill that a request does not name: the room is complete if nothing is asked of it."""
        at_s, request_id, generation = self._clock(), command.request_id, command.generation
        if command.pages or any(part.pages for part in command.component_pages or ()):
            self._refuse_for_nobody(command)
            return
        first = -(-command.promised_tokens // self._prompt_keys.page_keys.page_size)
        for event in (
            events.PromiseSent(at_s=at_s, request_id=request_id, generation=generation, writer="", ranks=1),
            events.ChunkReceived(
                at_s=at_s, request_id=request_id, generation=generation, rank=0, span=0, first=first, count=0, last=True
            ),
            events.AuxReceived(at_s=at_s, request_id=request_id, generation=generation, rank=0),
        ):
            self._post(event)

    def _refuse_for_nobody(self, command: commands.SendPromise | commands.SendExtend) -> None:
        self._post(
            events.RoomFailed(
                at_s=self._clock(),
                request_id=command.request_id,
                generation=command.generation,
                cause="the request names no prefill",
                settled=True,
            )
        )

    def _extend(self, command: commands.SendExtend) -> None:
        if not self._calls.live(command.request_id).request.prefills:
            self._refuse_for_nobody(command)
            return
        self._receiver.extend(
            command.request_id,
            command.generation,
            command.span,
            command.first,
            command.pages,
            component=command.component,
        )

    def _abort(self, command: commands.SendAbort) -> None:
        self._receiver.abort(command.request_id, command.generation)

    def _received(self, command: commands.SendReceived) -> None:
        self._receiver.received(command.request_id, command.generation)
