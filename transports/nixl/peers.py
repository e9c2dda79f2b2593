"""Peers known to one NIXL agent, and the prepared lists over their pools.

A peer may be added several times (it dialled again before its old link was cleared away): each time returns a handle
with its own lists, and NIXL forgets the peer with the last handle. Changes are made one at a time. Operations on a
handle must have ended before the handle is removed.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from functools import partial

from tidekv.states.errors import LocalProtocolError, RemoteProtocolError
from tidekv.states.types import PoolMemory, Segment
from tidekv.transports.base import Drive, Exchange, check_memory
from tidekv.transports.blocking import call_in_thread
from tidekv.transports.nixl.agent import NixlAgent
from tidekv.transports.nixl.layout import pair_segments
from tidekv.transports.nixl.metadata import unwrap
from tidekv.transports.nixl.plan import Numbering
from tidekv.transports.nixl.writes import Lane


@dataclass(slots=True, eq=False)
class NixlPeer:
    """A peer's pool as registered in NIXL, with the list of our pool that matches it pairwise, by pieces or parts of
    them.
    """

    instance: str
    memory: PoolMemory
    ours: PoolMemory
    pieces: tuple[Segment, ...]
    numbering: Numbering
    our_list: int
    their_list: int
    lane: Lane
    drive: Drive | None = None
    writes: set[asyncio.Future[None]] = field(default_factory=set)
    is_removed: bool = False


@dataclass(slots=True)
class _Known:
    blob: bytes
    handles: int = 0


class NixlPeers:
    """Adds and removes peers of one agent: called on the event loop, with NIXL's part in a thread."""

    def __init__(self, agent: NixlAgent, ours: PoolMemory, *, timeout_s: float) -> None:
        """`ours` is the source of writes if an exchange names no other of our pools."""
        self._agent = agent
        self._ours = ours
        self._timeout_s = timeout_s
        self._known: dict[str, _Known] = {}
        self._turn = asyncio.Lock()

    async def add(
        self, instance: str, metadata: bytes, memory: PoolMemory, exchange: Exchange | None = None
    ) -> NixlPeer:
        """Make a peer's pool reachable and return a handle, which the caller passes to `remove`.

        Raises RemoteProtocolError for an invalid name, metadata or memory, TransferFailed if NIXL refuses; either
        leaves nothing behind, and so does a cancellation.
        """
        check_memory(memory)
        if instance == self._agent.name:
            raise RemoteProtocolError(f"peer has the name {instance}, which is our own")
        exchange = exchange or Exchange(ours=self._ours, theirs=memory)
        pieces = pair_segments(*exchange)
        blob = unwrap(metadata, expected_name=instance)
        async with self._turn:
            known = self._known.get(instance)
            if known is not None and known.blob != blob:
                raise RemoteProtocolError(f"{instance} comes with other metadata than before: a restart has a new name")
            # A list and not a return value: after a cancellation the handle is still needed, to be unloaded.
            made: list[NixlPeer] = []
            load = partial(self._load, made, instance, blob, memory, exchange, pieces, is_known=known is not None)
            try:
                await call_in_thread(load, what=f"adding {instance}", timeout_s=self._timeout_s)
            except asyncio.CancelledError:
                if made:
                    await self._unload(made[0], forget=known is None)
                raise
            self._known.setdefault(instance, _Known(blob)).handles += 1
            return made[0]

    async def remove(self, peer: NixlPeer) -> None:
        """Forget a handle, once its last write has ended. Raises LocalProtocolError if it was removed before."""
        if peer.is_removed:
            raise LocalProtocolError(f"peer {peer.instance} is removed twice")
        peer.is_removed = True
        if peer.writes:
            await asyncio.wait(peer.writes)
        async with self._turn:
            known = self._known[peer.instance]
            known.handles -= 1
            if known.handles == 0:
                del self._known[peer.instance]
            await self._unload(peer, forget=known.handles == 0)

    def _load(
        self,
        made: list[NixlPeer],
        instance: str,
        blob: bytes,
        memory: PoolMemory,
        exchange: Exchange,
        pieces: tuple[tuple[Segment, ...], tuple[Segment, ...]],
        *,
        is_known: bool,
    ) -> None:
        """Load the peer into NIXL and prepare both lists, all or nothing; runs in a thread."""
        agent, ours = self._agent, exchange.ours
        with contextlib.ExitStack() as undo:
            if not is_known:
                name = agent.load_peer(blob)
                if name not in self._known:
                    undo.callback(agent.forget_peer, name)
                if name != instance:
                    raise RemoteProtocolError(f"metadata of {instance} makes NIXL know {name!r}: it is not authentic")
            our_list = agent.prepare(pieces[0], kind=ours.kind, device=ours.device)
            undo.callback(agent.release_list, our_list)
            their_list = agent.prepare(pieces[1], kind=memory.kind, device=memory.device, owner=instance)
            undo.pop_all()
        numbering = Numbering(pieces[0], our_page_count=ours.page_count, their_page_count=exchange.theirs.page_count)
        lane = Lane(agent, our_list=our_list, their_list=their_list)
        made.append(NixlPeer(instance, memory, ours, pieces[0], numbering, our_list, their_list, lane))

    async def _unload(self, peer: NixlPeer, *, forget: bool) -> None:
        def unload() -> None:
            if self._agent.is_closed:
                return
            self._agent.release_list(peer.their_list)
            self._agent.release_list(peer.our_list)
            if forget:
                self._agent.forget_peer(peer.instance)

        await call_in_thread(unload, what=f"removing {peer.instance}", timeout_s=self._timeout_s)
