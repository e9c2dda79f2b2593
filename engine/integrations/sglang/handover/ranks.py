"""The tensor-parallel ranks of a server: what SGLang's schedulers must decide alike, each in its own process.

Schedulers of all ranks make the same calls in the same order, and their trees and allocators must stay equal. So what
follows from a clock, a thread or a random number on one rank is agreed before it has an effect.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any, Final  # A group of torch, which has no types at run time.

import torch

from tidekv.engine.ranks.group import RankGroup
from tidekv.transports.control.addresses import format_address

LOOPBACK: Final = "127.0.0.1"


class Ranks:
    """The place of a scheduler among the ranks of its server. Calls are collective: all ranks make them, in order."""

    def __init__(self, rank: int = 0, ranks: int = 1, group: Any = None) -> None:
        """`group`: SGLang's group of these ranks for the CPU; one rank needs none."""
        self.rank, self.ranks = rank, ranks
        self.engines: RankGroup | None = None
        """Where the engines of several ranks agree, after `meet`."""
        self._group = group

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that decides for all."""
        return self.rank == 0

    def share(self, text: str) -> str:
        """Return what the first rank has given."""
        if self.ranks == 1:
            return text
        distributed = torch.distributed
        shared = [text]
        first = distributed.get_global_rank(self._group, 0)
        distributed.broadcast_object_list(shared, src=first, group=self._group)
        return shared[0]

    def all_of(self, flags: Sequence[bool]) -> list[bool]:
        """Return of each flag whether it is true on all ranks. Their number is the same on all."""
        if self.ranks == 1 or not flags:
            return list(flags)
        values = torch.tensor(flags, dtype=torch.uint8)
        torch.distributed.all_reduce(values, op=torch.distributed.ReduceOp.MIN, group=self._group)
        return [bool(value) for value in values.tolist()]

    def meet(self, host: str, *, kv_heads_total: int, secret: str) -> None:
        """Choose where the engines of several ranks agree: on the first rank's `host`."""
        if self.ranks == 1:
            return
        # Free until the first rank's engine listens there, in this call's caller.
        with socket.create_server((host, 0)) as server:
            port = server.getsockname()[1]
        address = self.share(format_address(host, port))
        self.engines = RankGroup(
            rank=self.rank, ranks=self.ranks, address=address, kv_heads_total=kv_heads_total, secret=secret
        )
