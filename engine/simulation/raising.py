"""Makes rules of the core raise in their middle, as a bug of ours would."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidekv.engine.simulation.world import World


class Raising:
    """Nothing raises yet."""

    def __init__(self, world: World, random: Random) -> None:
        self._world = world
        self._random = random
        self._raised: set[str] = set()

    def has_raised(self, request_id: str) -> bool:
        """Whether a rule of this request was made to raise."""
        return request_id in self._raised
