"""One vote in a gloo group: the leader takes the words of all other ranks and sends back what they come to under MIN.

That is 2 (n - 1) messages for n ranks. Gloo's own all-reduce passes parts around the ring in 2 (n - 1) steps of all n,
each with handshakes of its own, and for words as few as these takes a multiple of the time and the CPU, as
`benchmarks/ranks.py` measures. All of it blocks, so it is for the thread that votes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tidekv.states.ranks.agreement import LEADER

if TYPE_CHECKING:
    from torch import distributed

CAST_TAGS, ANSWER_TAGS = 1 << 20, 1 << 21
"""To each the number of words is added: words of another number never come to lie where these belong."""


def lead(group: distributed.ProcessGroup, own: torch.Tensor, *, ranks: int) -> None:
    """The leader's part; what all come to lies in `own` afterwards. Raises what the group raises."""
    followers = range(LEADER + 1, ranks)
    rows = torch.empty((len(followers), len(own)), dtype=own.dtype)
    coming = [group.recv([row], rank, CAST_TAGS + len(own)) for row, rank in zip(rows, followers, strict=True)]
    # Row by row: torch takes a hundred times as long for the least of each column.
    for row, words in zip(rows, coming, strict=True):
        words.wait()
        torch.minimum(own, row, out=own)
    for going in [group.send([own], rank, ANSWER_TAGS + len(own)) for rank in followers]:
        going.wait()


def follow(group: distributed.ProcessGroup, own: torch.Tensor) -> None:
    """A follower's part; what all come to lies in `own` afterwards. Raises what the group raises."""
    answer = torch.empty_like(own)
    # Room for the answer comes first: then the leader need not wait for it.
    coming = group.recv([answer], LEADER, ANSWER_TAGS + len(own))
    going = group.send([own], LEADER, CAST_TAGS + len(own))
    coming.wait()
    going.wait()
    own.copy_(answer)
