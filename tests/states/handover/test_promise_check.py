"""The promises of the ranks of one room are compared, and a difference is described with both values."""

from __future__ import annotations

import msgspec
import pytest

from tidekv.states.handover.promise_check import PromiseCheck, RankPromise

PLEDGE = RankPromise(rank=0, ranks=3, prompt_tokens=40, promised_tokens=32)


def of(rank: int, **changes: object) -> RankPromise:
    return msgspec.structs.replace(PLEDGE, rank=rank, **changes)


def test_a_room_is_complete_when_every_rank_has_pledged_the_same() -> None:
    promise_check = PromiseCheck()
    for rank in (2, 0):
        assert promise_check.take(of(rank)) == ""
        assert not promise_check.is_complete
    assert promise_check.take(of(1)) == ""
    assert promise_check.is_complete


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"promised_tokens": 16}, "rank 2 promised 32 of 40 tokens, rank 1 promised 16 of 40 tokens"),
        ({"prompt_tokens": 41}, "rank 2 promised 32 of 40 tokens, rank 1 promised 32 of 41 tokens"),
        ({"ranks": 2}, "rank 2 counts 3 ranks in the instance, rank 1 counts 2 ranks in the instance"),
        (
            {"component_pages": ()},
            "rank 2 requests component pages from positions None on, rank 1 requests component pages",
        ),
        ({"key_seed": b""}, "rank 2 has the key seed None for the prompt, rank 1 has"),
    ],
)
def test_a_difference_names_both_ranks_and_both_numbers(changes: dict[str, object], words: str) -> None:
    promise_check = PromiseCheck()
    promise_check.take(of(2))
    assert words in promise_check.take(of(1, **changes))


@pytest.mark.parametrize("rank_promise", [of(2), of(3), of(-1)])
def test_a_rank_promises_once_and_is_in_range(rank_promise: RankPromise) -> None:
    promise_check = PromiseCheck()
    promise_check.take(of(2))
    assert "is out of range, or has promised before" in promise_check.take(rank_promise)
