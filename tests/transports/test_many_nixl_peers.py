"""Many peers of one NIXL agent at once: its calls leave the event loop to others between two peers."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from typing import Any

from tests.support.waits import LIMIT_S
from tidekv.states.types import PoolMemory, Segment
from tidekv.transports.nixl.metadata import wrap
from tidekv.transports.nixl.peers import NixlPeers

PEERS = 16
CALLS_A_PEER = 3
"""Its metadata, and a list over each of the two pools."""


class Agent:
    """Notes the turn of the loop and the thread of each call."""

    name = "decode"
    is_closed = False

    def __init__(self) -> None:
        self.turn = 0
        self.calls_by_turn: dict[int, int] = defaultdict(int)
        self.threads = set[int]()

    def _note(self) -> None:
        self.calls_by_turn[self.turn] += 1
        self.threads.add(threading.get_ident())

    def load_peer(self, blob: bytes) -> str:
        self._note()
        return blob.decode()

    def prepare(self, pieces: Any, *, kind: str, device: int, owner: str | None = None) -> int:
        self._note()
        return sum(self.calls_by_turn.values())

    def forget_peer(self, name: str) -> None:
        raise AssertionError(f"{name} is forgotten")

    def release_list(self, handle: int) -> None:
        raise AssertionError(f"list {handle} is released")

    async def count_turns(self) -> None:
        while True:
            self.turn += 1
            await asyncio.sleep(0)


async def test_the_loop_has_a_turn_between_the_calls_for_two_new_peers() -> None:
    agent, memory = Agent(), PoolMemory((Segment(4096, 64, 64, 8),), 8)
    peers = NixlPeers(agent, memory, timeout_s=LIMIT_S)  # type: ignore[arg-type]  # Stands in for an agent.
    turns = asyncio.create_task(agent.count_turns())
    names = [f"prefill-{number}" for number in range(PEERS)]
    made = await asyncio.gather(*(peers.add(name, wrap(name, name.encode()), memory) for name in names))
    turns.cancel()
    assert [peer.instance for peer in made] == names
    assert sum(agent.calls_by_turn.values()) == CALLS_A_PEER * PEERS
    assert max(agent.calls_by_turn.values()) <= CALLS_A_PEER
    assert threading.get_ident() not in agent.threads
