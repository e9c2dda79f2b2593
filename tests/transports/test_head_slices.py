"""Slices of heads: every head of a decode rank arrives once, from a prefill rank that holds it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidekv.states.errors import InvalidConfig
from tidekv.transports.slices import (
    HeadPartition,
    StageLayers,
    check_stages,
    head_slices_of,
    layer_slice_of,
    partition_of,
    stage_of,
)


def heads_on(holding: HeadPartition, rank: int) -> list[int]:
    first = holding.first(rank)
    return list(range(first, first + holding.heads))


@st.composite
def holdings(draw: st.DrawFn, total: int) -> HeadPartition:
    heads = draw(st.sampled_from([heads for heads in range(1, total + 1) if total % heads == 0]))
    return HeadPartition(ranks=total // heads * draw(st.integers(1, 3)), heads=heads, total=total)


@given(st.data(), st.sampled_from([1, 2, 4, 6, 8, 12]))
def test_every_head_comes_once_from_a_rank_that_holds_it(data: st.DataObject, total: int) -> None:
    decode, prefill = data.draw(holdings(total)), data.draw(holdings(total))
    for rank in range(decode.ranks):
        mine, brought = heads_on(decode, rank), []
        for share in head_slices_of(rank, decode, prefill):
            theirs = heads_on(prefill, share.prefill)
            part = slice(share.source, share.source + share.count)
            assert theirs[part] == mine[share.target : share.target + share.count]
            assert 0 <= share.source <= share.source + share.count <= prefill.heads
            brought += theirs[part]
        assert brought == mine


@given(st.sampled_from([1, 2, 4, 8]), st.integers(1, 4))
def test_every_rank_of_as_many_is_written_by_its_own_counterpart(ranks: int, heads: int) -> None:
    holding = partition_of(ranks=ranks, heads=heads, kind="mha")
    for rank in range(ranks):
        (share,) = head_slices_of(rank, holding, holding)
        assert (share.prefill, share.count) == (rank, heads)


def test_copies_take_turns() -> None:
    # Latent vectors are the same on all ranks: each of four copies writes to one of four decode ranks.
    latent = partition_of(ranks=4, heads=1, kind="mla")
    assert [share.prefill for rank in range(4) for share in head_slices_of(rank, latent, latent)] == [0, 1, 2, 3]
    two = partition_of(ranks=2, heads=1, kind="mla")
    assert [share.prefill for rank in range(4) for share in head_slices_of(rank, latent, two)] == [0, 0, 1, 1]
    assert [share.prefill for rank in range(2) for share in head_slices_of(rank, two, latent)] == [0, 2]


@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4, 8]))
def test_a_group_of_few_heads_comes_from_ranks_that_write_the_pages(decodes: int, prefills: int) -> None:
    """Latent vectors and groups with copies beside pages of 8 heads need no further writers."""
    for total in (1, 2, 4):
        of_group, of_pages = (
            [HeadPartition(ranks=ranks, heads=max(1, heads // ranks), total=heads) for ranks in (decodes, prefills)]
            for heads in (total, 8)
        )
        for rank in range(decodes):
            writers = {share.prefill for share in head_slices_of(rank, *of_pages)}
            assert {share.prefill for share in head_slices_of(rank, *of_group)} <= writers


@given(st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 3, 4]))
def test_every_layer_comes_once_from_a_stage_that_holds_it(decodes: int, prefills: int) -> None:
    layers = 12
    for stage in range(decodes):
        mine = StageLayers(stage, decodes, layers // decodes)
        brought = []
        for other in range(prefills):
            theirs = StageLayers(other, prefills, layers // prefills)
            if (slice_ := layer_slice_of(mine, theirs)) is not None:
                start = other * theirs.layers + slice_.source
                assert slice_.target == start - stage * mine.layers
                brought += range(start, start + slice_.count)
        assert brought == list(range(stage * mine.layers, (stage + 1) * mine.layers))


@pytest.mark.parametrize(
    ("ranks", "heads", "total"), [(3, 2, 4), (2, 3, 4), (2, 1, 4), (1, 8, 4), (2, 0, 4), (0, 1, 1)]
)
def test_heads_that_cannot_lie_so_are_refused(ranks: int, heads: int, total: int) -> None:
    with pytest.raises(InvalidConfig, match="cannot hold"):
        HeadPartition(ranks=ranks, heads=heads, total=total)


def test_ranks_are_counted_stage_by_stage() -> None:
    assert [stage_of(rank, ranks=6, stages=2) for rank in range(6)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    check_stages(ranks=6, stages=3)
    for stages in (0, 4, 7):
        with pytest.raises(InvalidConfig, match="pipeline stages"):
            check_stages(ranks=6, stages=stages)
