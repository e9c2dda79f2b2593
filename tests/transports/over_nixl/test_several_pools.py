"""One NIXL agent with several pools: each write goes between the two pools of its handle, and into no other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from benchmarks.nixl_child import NumpyPool
from tidekv.engine.poller import PollerThread
from tidekv.states.errors import InvalidRequest, PeerMismatch, RemoteProtocolError, TransferFailed
from tidekv.states.types import page_ids
from tidekv.transports.base import Exchange
from tidekv.transports.nixl.peers import NixlPeer
from tidekv.transports.nixl.transport import NixlTransport

pytestmark = pytest.mark.nixl

SHAPES = {"full": (4096, 512), "swa": (2048, 2048, 64), "ssm": (1000, 24, 8)}
OURS = {"full": 20, "swa": 9, "ssm": 4}
THEIRS = {"full": 12, "swa": 30, "ssm": 7}


class Side:
    """A transport with its pools."""

    def __init__(self, name: str, counts: dict[str, int], seed: int) -> None:
        self.transport = NixlTransport(name)
        self.pools = {of: NumpyPool(count, SHAPES[of], seed=seed + at) for at, (of, count) in enumerate(counts.items())}

    async def start(self, poller: PollerThread) -> None:
        await self.transport.start(poller=poller)
        await self.transport.register(*(pool.memory for pool in self.pools.values()))


class Sides:
    """A writer and a target that know each other pool by pool."""

    def __init__(self) -> None:
        self.writer, self.target = Side("writer", OURS, 1), Side("target", THEIRS, 50)
        self.before = {name: [piece.copy() for piece in pool.pieces] for name, pool in self.target.pools.items()}

    async def add(self, name: str, *, ours: str = "") -> NixlPeer:
        source, target = self.writer.pools[ours or name].memory, self.target.pools[name].memory
        there = self.target.transport
        return await self.writer.transport.add_peer(
            there.instance, there.metadata(), target, Exchange(ours=source, theirs=target)
        )

    async def write(self, peer: NixlPeer, ours: list[int], theirs: list[int]) -> int:
        return await self.writer.transport.write(peer, page_ids(ours), page_ids(theirs))

    def check(self, written: dict[str, dict[int, int]]) -> None:
        """The target's pools have exactly these pages ({theirs: ours}), and what they had before in all others."""
        for name, pool in self.target.pools.items():
            for source, target, before in zip(
                self.writer.pools[name].pieces, pool.pieces, self.before[name], strict=True
            ):
                for theirs, ours in written.get(name, {}).items():
                    before[theirs] = source[ours]
                assert np.array_equal(target, before), name


@pytest.fixture
async def sides(poller: PollerThread) -> AsyncIterator[Sides]:
    sides = Sides()
    await sides.writer.start(poller)
    await sides.target.start(poller)
    yield sides
    await sides.writer.transport.close()
    await sides.target.transport.close()


async def test_each_handle_writes_between_its_own_pools(sides: Sides) -> None:
    peers = {name: await sides.add(name) for name in SHAPES}
    lots = {"full": {11: 19, 0: 3}, "swa": {29: 8, 1: 0, 5: 2}, "ssm": {6: 3}}
    sizes = await asyncio.gather(
        *(sides.write(peers[name], list(pairs.values()), list(pairs)) for name, pairs in lots.items())
    )
    assert sizes == [len(pairs) * sum(SHAPES[name]) for name, pairs in lots.items()]
    sides.check(lots)
    # Page ids are judged by the pools of the handle: what the full pool has, a state's may not.
    with pytest.raises(InvalidRequest, match="page 4 is not of our pool, which has 4 pages"):
        await sides.write(peers["ssm"], [4], [0])
    with pytest.raises(RemoteProtocolError, match="page 12 is not of target-"):
        await sides.write(peers["full"], [4], [12])
    sides.check({})


async def test_forgetting_one_pool_leaves_the_others(sides: Sides) -> None:
    full, window = await sides.add("full"), await sides.add("swa")
    await sides.writer.transport.remove_peer(full)
    await sides.write(window, [1], [2])
    sides.check({"swa": {2: 1}})


async def test_pools_of_other_pieces_cannot_be_paired(sides: Sides) -> None:
    with pytest.raises(PeerMismatch, match="piece_bytes"):
        await sides.add("swa", ours="full")
    await sides.write(await sides.add("swa"), [0], [0])
    sides.check({"swa": {0: 0}})


async def test_memory_that_was_not_registered_cannot_be_written_from(sides: Sides) -> None:
    stray = NumpyPool(4, SHAPES["ssm"], seed=9)
    there: Any = sides.target.transport
    target = sides.target.pools["ssm"].memory
    with pytest.raises(TransferFailed):
        await sides.writer.transport.add_peer(
            there.instance, there.metadata(), target, Exchange(ours=stray.memory, theirs=target)
        )
    sides.check({})


async def test_a_pool_that_is_not_sound_is_named_before_any_is_registered(poller: PollerThread) -> None:
    side = Side("early", {"full": 2, "swa": 2}, 3)
    await side.transport.start(poller=poller)
    full, window = (pool.memory for pool in side.pools.values())
    broken = type(window)(segments=window.segments, page_count=3)
    with pytest.raises(InvalidRequest, match="cannot be registered"):
        await side.transport.register(full, broken)
    await side.transport.register(full, window)
    await side.transport.close()
