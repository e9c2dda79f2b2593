"""Detection that a peer on another host is gone, by reading one byte of its memory at intervals.

A read leaves nothing behind at the peer; notifications would pile up in its memory, since it never takes any. A hung
peer leaves its read pending, and does not count as gone.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np

from tidekv.states.errors import RemoteProtocolError, TransferFailed
from tidekv.states.types import PoolMemory, Segment
from tidekv.transports.base import TransferPoller
from tidekv.transports.blocking import call_in_thread, settled
from tidekv.transports.nixl.agent import NixlAgent, NixlRequest, PeerDisconnected
from tidekv.transports.nixl.peers import NixlPeer, NixlPeers
from tidekv.transports.tasks import OwnedTasks

PROBE_INTERVAL_S = 0.5


@dataclass(slots=True, eq=False)
class _Watch:
    """Probing of one peer: its result, and the number of waiting callers."""

    gone: asyncio.Future[None]
    waiters: int = 0


class Presence:
    """Probes whether NIXL still reaches peers of one agent. Nothing runs without a waiting caller."""

    def __init__(self, agent: NixlAgent, peers: NixlPeers, poller: TransferPoller, *, timeout_s: float) -> None:
        self._agent = agent
        self._peers = peers
        self._poller = poller
        self._timeout_s = timeout_s
        self._landing = np.zeros(1, dtype=np.uint8)
        self._landing_list: int | None = None
        self._watches: dict[str, _Watch] = {}
        self._tasks = OwnedTasks("presence of peers")

    async def wait_disconnected(self, instance: str, metadata: bytes, memory: PoolMemory) -> None:
        """Return once NIXL reports the peer as disconnected. May be cancelled: the watch ends its read in flight.

        Raises TransferFailed if the agent is closed.
        """
        watch = self._watches.get(instance)
        if watch is None:
            watch = self._watches[instance] = _Watch(asyncio.get_running_loop().create_future())
            self._tasks.spawn(self._follow(watch, instance, metadata, memory), name=instance)
        watch.waiters += 1
        try:
            await asyncio.wait([watch.gone])
        finally:
            watch.waiters -= 1
        watch.gone.result()

    async def close(self) -> None:
        """End the watches. The agent must be closed already, which ends the reads that hang."""
        await self._tasks.close()

    async def _follow(self, watch: _Watch, instance: str, metadata: bytes, memory: PoolMemory) -> None:
        """Probe a peer until it is gone or no caller waits, and set the watch's result."""
        try:
            while watch.waiters and not watch.gone.done():
                try:
                    await self._probe(watch, instance, metadata, memory)
                except (TransferFailed, RemoteProtocolError) as error:
                    # Any other error proves nothing about the peer: probe again, as long as the agent is open.
                    if self._agent.is_closed:
                        watch.gone.set_exception(error)
                        watch.gone.exception()  # Retrieved here: every waiter may have been cancelled.
                        return
                await asyncio.sleep(PROBE_INTERVAL_S)
        finally:
            del self._watches[instance]
            watch.gone.cancel()

    async def _probe(self, watch: _Watch, instance: str, metadata: bytes, memory: PoolMemory) -> None:
        """Add the peer and read from it until it is gone, which sets the watch's result, or no caller waits."""
        peer = await self._peers.add(instance, metadata, memory)
        try:
            ours, theirs = await call_in_thread(
                lambda: self._prepare(peer), what=f"probing {instance}", timeout_s=self._timeout_s
            )
            try:
                while watch.waiters:
                    await settled(self._poller.submit(PresenceProbe(self._agent, our_list=ours, their_list=theirs)))
                    await asyncio.sleep(PROBE_INTERVAL_S)
            except PeerDisconnected:
                watch.gone.set_result(None)
            finally:
                if not self._agent.is_closed:
                    self._agent.release_list(theirs)
        finally:
            await self._peers.remove(peer)

    def _prepare(self, peer: NixlPeer) -> tuple[int, int]:
        """Return prepared lists of one byte: ours, made once, and the peer's first byte."""
        if self._landing_list is None:
            piece = Segment(address=self._landing.ctypes.data, piece_bytes=1, stride_bytes=1, page_count=1)
            self._agent.register(PoolMemory(segments=(piece,), page_count=1))
            self._landing_list = self._agent.prepare((piece,), kind="DRAM", device=0)
        first = Segment(address=peer.memory.segments[0].address, piece_bytes=1, stride_bytes=1, page_count=1)
        theirs = self._agent.prepare((first,), kind=peer.memory.kind, device=peer.memory.device, owner=peer.instance)
        return self._landing_list, theirs


class PresenceProbe:
    """A Pollable that reads one byte of a peer into unused memory."""

    rounds = 0

    def __init__(self, agent: NixlAgent, *, our_list: int, their_list: int) -> None:
        self._agent = agent
        self._lists = (our_list, their_list)
        self._request: NixlRequest | None = None

    def post(self) -> bool:
        """Post the read. Raises PeerDisconnected."""
        self._request = self._agent.read_request(*self._lists)
        return self._request.post()

    def check(self) -> bool:
        """Return True if the byte has arrived. Raises PeerDisconnected."""
        assert self._request is not None, "a probe is checked before it is posted"
        return self._request.check()

    def release(self) -> None:
        """Release the read."""
        if self._request is not None:
            self._request.release()
