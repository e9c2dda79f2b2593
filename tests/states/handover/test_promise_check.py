"""What the ranks of one room promised is compared, and a difference is told with both numbers."""

from __future__ import annotations

import msgspec
import pytest

from tidekv.states.handover.promise_check import Pledge, Pledges

PLEDGE = Pledge(rank=0, ranks=3, prompt_tokens=40, promised_tokens=32)


def of(rank: int, **changes: object) -> Pledge:
    return msgspec.structs.replace(PLEDGE, rank=rank, **changes)


def test_a_room_is_complete_when_every_rank_has_pledged_the_same() -> None:
    pledges = Pledges()
    for rank in (2, 0):
        assert pledges.take(of(rank)) == ""
        assert not pledges.is_complete
    assert pledges.take(of(1)) == ""
    assert pledges.is_complete


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"promised_tokens": 16}, "rank 2 promised 32 of 40 tokens, rank 1 promised 16 of 40 tokens"),
        ({"prompt_tokens": 41}, "rank 2 promised 32 of 40 tokens, rank 1 promised 32 of 41 tokens"),
        ({"ranks": 2}, "rank 2 says that the instance has 3 ranks, rank 1 says that the instance has 2 ranks"),
        ({"tails": ()}, "rank 2 asks for tails of components from positions None on, rank 1 asks for tails of"),
        ({"key_seed": b""}, "rank 2 names the storage keys of the prompt by None, rank 1 names"),
    ],
)
def test_a_difference_names_both_ranks_and_both_numbers(changes: dict[str, object], words: str) -> None:
    pledges = Pledges()
    pledges.take(of(2))
    assert words in pledges.take(of(1, **changes))


@pytest.mark.parametrize("pledge", [of(2), of(3), of(-1)])
def test_a_rank_pledges_once_and_is_one_of_them(pledge: Pledge) -> None:
    pledges = Pledges()
    pledges.take(of(2))
    assert "cannot promise, or has promised before" in pledges.take(pledge)
