"""The prefill worker's end of the hand-over: what an embedder of the prefill side holds.

It owns the transport's life, the poller where none is given, and the tasks of `on_room`. Which page goes where and when
is decided by `tidekv.states.sending`; this file only opens, hands out rooms, and closes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

import msgspec

from tidekv.backends.component_pools import ComponentPools, check_components, with_components
from tidekv.backends.device import DevicePool
from tidekv.engine.poller import PollerThread
from tidekv.engine.prompt_store import PromptStore, PromptStoreSettings
from tidekv.states.errors import EngineClosed, InvalidConfig, PrefillCause
from tidekv.states.shapes import Identity, PoolMemory
from tidekv.transports.base import Poller, Transport
from tidekv.transports.outgoing import Room, RoomOutcome, RoomSettings
from tidekv.transports.sender import Sender
from tidekv.transports.tasks import OwnedTasks

if TYPE_CHECKING:
    from tidekv.backends.host import HostPool
    from tidekv.backends.storage.base import Storage

__all__ = ["PrefillPeer", "PromptStoreSettings", "Room", "RoomOutcome", "RoomSettings"]


class Layout(Protocol):
    """The part of a layout that a peer needs."""

    def identity(self, model: str) -> Identity:
        """What must be equal at both ends."""
        ...


class PagePool(Protocol):
    """The part of a device pool that a peer needs."""

    @property
    def memory(self) -> PoolMemory:
        """Where its pages lie."""
        ...

    @property
    def layout(self) -> Layout:
        """How they are laid out."""
        ...


class PrefillPeer:
    """Serves the KV of prompts to decode workers, for as long as the `async with` block lasts.

        transport = NixlTransport(name="prefill-0", secret=secret)
        async with PrefillPeer(device=pool, transport=transport, listen="10.0.0.5:7000") as peer:
            room = await peer.room("r1")
            await room.send(pages, start_token=0)
            await room.finish(first_token=token, aux={})
            await room.received()

    `on_room(room)` is run for each room as its promise comes, as a task of the peer; an exception of it fails that
    room, and decode is told. The pool stays the caller's. Leaving the block fails the rooms that are open, and waits
    for the writes in flight.

    With `components`, the windows and states of the model, decode asks of each for the tail at the prompt's end, as far
    as it has not got it: `room.tails` says which, and `await room.send_tail(name, pages)` hands it over before
    `finish`. A room whose tails were not sent cannot finish. Decode workers must have the same components.

    With `storage`, the full pages of each finished prompt are written through to it, under the keys that decode workers
    of the same model and layout use: what prefill computed, all of them hit. That needs the prompt's tokens: they come
    with the promise (`DecodeRequest(prompt="send")`), or by `room.finish(tokens=…)`; a prompt without is not stored,
    and counted. `room.received()` returns no sooner than the pages were copied to host memory: `host`, all of whose
    pages are the peer's then, or a small pool of its own. Tails of components are not stored. The peer closes storage.
    """

    def __init__(
        self,
        *,
        device: PagePool,
        transport: Transport,
        listen: str = "127.0.0.1:0",
        model: str = "",
        components: Sequence[ComponentPools] = (),
        on_room: Callable[[Room], Awaitable[None]] | None = None,
        lease_s: float = 10.0,
        poller: Poller | None = None,
        settings: RoomSettings | None = None,
        storage: Storage | None = None,
        host: HostPool | None = None,
        store_settings: PromptStoreSettings | None = None,
        close_deadline_s: float = 5.0,
        bigram_keys: bool = False,
        rank: int = 0,
        ranks: int = 1,
        kv_heads_total: int = 0,
        stages: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing is opened yet. Raises InvalidConfig. Leaving the block waits `close_deadline_s` for writes, before it
        closes the transport under them. `bigram_keys` is what decode workers have in their `EngineConfig`. Of
        `components` the device pools alone are used.

        `rank` of `ranks`: its place among the tensor-parallel ranks of a prefill instance, each with a peer of its own.
        Decode workers name all of them (`DecodeRequest(prefill="host:7000,host:7001")`), in order. A decode instance
        may have another number of ranks: each pair exchanges the heads that both hold. A room opens on every prefill
        rank when all ranks of the decode instance have promised the same. `kv_heads_total`: the KV heads of the model
        where there are more ranks than heads; 0: as many as all ranks hold together. `stages`: pipeline stages that the
        ranks make up, counted stage by stage; decode must have as many.
        """
        if components:
            if not isinstance(device, DevicePool):
                raise InvalidConfig(f"components go with a DevicePool, not with {type(device).__name__}")
            components = [dataclasses.replace(pools, host=None) for pools in components]
            check_components(components, device=device, host=host)
        # Peers and NIXL know their addresses only: these references are what keeps the memory there.
        self._device = device
        self._components = tuple(components)
        self._transport = transport
        self._listen = listen
        self._on_room = on_room
        self._poller = poller
        self._close_deadline_s = close_deadline_s
        self._tasks = OwnedTasks(f"prefill peer {transport.instance}")
        self._stack = AsyncExitStack()
        self._was_entered = False
        self._store: PromptStore | None = None
        if storage is not None:
            self._store = PromptStore(
                storage,
                device=device,
                host=host,
                model=model,
                components=components,
                settings=store_settings,
                bigram_keys=bigram_keys,
                rank=rank,
                ranks=ranks,
            )
        identity = with_components(device.layout.identity(model), components)
        self._sender = Sender(
            transport,
            memory=device.memory,
            component_memory={pools.name: pools.device.memory for pools in components},
            identity=msgspec.structs.replace(identity, bigram_keys=bigram_keys),
            clock=clock,
            on_room=self._start_room,
            on_finish=self._store_room,
            lease_s=lease_s,
            rank=rank,
            ranks=ranks,
            kv_heads_total=kv_heads_total,
            stages=stages,
            settings=settings,
        )

    async def __aenter__(self) -> Self:
        """Start the transport, open storage and listen. Raises InvalidConfig, StorageFailed; then nothing stays
        open. Raises EngineClosed for a peer that was entered before.
        """
        if self._was_entered:
            raise EngineClosed("this prefill peer was entered before: a peer lives once, make another one")
        self._was_entered = True
        async with AsyncExitStack() as stack:
            poller = self._poller
            if poller is None:
                poller = PollerThread()
                poller.start()
                stack.push_async_callback(poller.close)
            # Closing a transport that failed to start is harmless, and gives back what it had opened by then.
            stack.push_async_callback(self._transport.close)
            await self._transport.start(poller=poller, listen=self._listen)
            if self._store is not None:
                # File I/O copies within the call that posts it: it must not hold up the transfers of the other poller.
                storage_poller = PollerThread(name="tidekv-storage-poller")
                storage_poller.start()
                stack.push_async_callback(storage_poller.close)
                stack.push_async_callback(self._store.close)
                await self._store.start(storage_poller)
            stack.push_async_callback(self._end_rooms)
            await self._sender.start(self._listen)
            if self._store is not None:
                stack.push_async_callback(self._store.settle)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the tasks of `on_room`, end all rooms, wait for the writes in flight, close."""
        await self._stack.aclose()

    @property
    def address(self) -> str:
        """Where decode workers find us, "host:port"."""
        return self._sender.address

    async def room(self, request_id: str) -> Room:
        """The room of a request; waits until decode's promise has come, and may be asked for before or after it.

        Of several generations the newest is given; one that was finished or has ended is no longer given, and the next
        is waited for: whoever is sent the same request again may be faster than decode's word that it has the first.
        Raises EngineClosed when the peer closes, CapacityError when too many are waited for.
        """
        return await self._sender.room(request_id)

    def statistics(self) -> dict[str, int | float]:
        """bytes_sent, pages_sent, rooms by state, store_… where there is storage, and counts of what was odd."""
        return {**self._sender.statistics(), **({} if self._store is None else self._store.statistics())}

    async def wait_stored(self) -> None:
        """Wait until all prompts finished so far are in storage, or were given up. At once without storage."""
        if self._store is not None:
            await self._store.wait_stored()

    async def _end_rooms(self) -> None:
        """End the tasks of `on_room`, the rooms and their writes. A write to a decode worker that hangs ends only with
        the transport: after the deadline that is closed first.
        """
        ending = asyncio.get_running_loop().create_task(self._close_rooms(), name="end of a prefill peer's rooms")
        try:
            await asyncio.wait([ending], timeout=self._close_deadline_s)
        finally:
            if not ending.done():
                await self._transport.close()
            await ending

    async def _close_rooms(self) -> None:
        try:
            await self._tasks.close()
        finally:
            await self._sender.close()

    def _store_room(self, room: Room) -> None:
        if self._store is not None:
            self._store.keep(room)

    def _start_room(self, room: Room) -> None:
        if self._on_room is not None:
            self._tasks.spawn(self._run_room(self._on_room, room), name=f"room of {room.request_id}")

    async def _run_room(self, on_room: Callable[[Room], Awaitable[None]], room: Room) -> None:
        try:
            await on_room(room)
        except Exception as error:
            # One request's trouble: its room fails, decode gets the words, and whoever runs this the trace.
            asyncio.get_running_loop().call_exception_handler(
                {"message": f"on_room failed for request {room.request_id!r}", "exception": error}
            )
            room.fail(PrefillCause.RAISED.words(f"{type(error).__name__}: {error}"))
