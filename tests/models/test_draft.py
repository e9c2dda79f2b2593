"""A target and its draft, on the same pages or on pages of their own: restored draft KV is as good as fresh, from every
tier.

The draft is the target's first layers with the target's embeddings and head, so that it often proposes what the target
generates. Tokens are the target's own whatever the draft does; only the accept length shows whether its KV is there.
"""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import pytest
import torch

from demo.model import ModelShape, build_llama, generate_in_one_process
from tests.support.group_model import CausalModel, GroupModel
from tests.support.model_pools import ModelPools
from tests.support.prompts import drawn_prompt
from tests.support.speculation import Answer, Speculation, dampen_later_layers, first_layers
from tests.support.thorough import mark_rest, pairs
from tidekv import DevicePool, KVLayout
from tidekv.backends.page_layout import PageLayout

PAGE_SIZE = 4
OUTPUT = 24
SHAPE = ModelShape(vocab_size=64, hidden_size=64, mlp_size=128, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16)
# Layers of the draft; and whether it sees the next token at each position, as EAGLE does.
DRAFTS = [(1, 0), (2, 0), (1, 1)]
IDS = ["one-layer", "two-layers", "shifted"]


@cache
def target(draft_layers: int) -> CausalModel:
    model = build_llama(SHAPE)
    dampen_later_layers(model, draft_layers, by=0.05)
    return model


def layers_of(count: int) -> KVLayout:
    return KVLayout(num_layers=count, num_kv_heads=2, head_dim=16, dtype="float64", page_size=PAGE_SIZE)


def pair_on(pools: ModelPools, draft_layers: int, shift: int, draft_pools: ModelPools | None = None) -> Speculation:
    """The pair; the draft has pages of its own if its pools are given."""
    model = target(draft_layers)
    draft = pools.plain("draft") if draft_pools is None else draft_pools.plain()
    return Speculation(
        GroupModel(model, pools.plain(), page_size=PAGE_SIZE),
        GroupModel(first_layers(model, draft_layers), draft, page_size=PAGE_SIZE),
        shift=shift,
    )


def layout_of(draft_layers: int) -> PageLayout:
    return PageLayout.of(full=layers_of(4), draft=layers_of(draft_layers))


def in_one_process(draft_layers: int, shift: int, prompt: list[int]) -> Answer:
    """The pair on pages that go nowhere; its tokens are those of the target's own `generate()`."""
    return alone(draft_layers, shift, tuple(prompt))


@cache
def alone(draft_layers: int, shift: int, tokens: tuple[int, ...]) -> Answer:
    prompt = list(tokens)
    pair, pages = (
        pair_on(ModelPools.of_one(DevicePool.allocate(layout_of(draft_layers), 64)), draft_layers, shift),
        list(range(64)),
    )
    answer = pair.answer(prompt, pair.prefill(prompt, pages), pages, OUTPUT)
    assert answer.output == generate_in_one_process(target(draft_layers), prompt, OUTPUT)
    return answer


async def check_every_tier(
    draft_layers: int, shift: int, make_rig: Any, *, own_pages: bool = False, **options: Any
) -> None:
    prompt = drawn_prompt(26, seed=1)
    wanted = in_one_process(draft_layers, shift, prompt)
    assert wanted.accept_length >= 2
    assert any(step != 1 for step in wanted.steps)
    options |= {"bigram_keys": shift == 1, "draft": layers_of(draft_layers) if own_pages else None}
    layout = layers_of(4) if own_pages else layout_of(draft_layers)
    async with make_rig(layout, lambda pools, *own: pair_on(pools, draft_layers, shift, *own), **options) as rig:
        async with rig.decode() as decode:
            fresh = await decode.ask(prompt, OUTPUT)
            assert fresh.sources["transfer"] == len(prompt)
            assert fresh.answer == wanted
            for tier in ("l1", "l2", "l3"):
                asked = await decode.ask_from(tier, prompt, OUTPUT)
                assert asked.answer == wanted, tier
                assert torch.equal(asked.page_bytes, fresh.page_bytes), tier
                spoilt = await decode.ask_from(tier, prompt, OUTPUT, zero="draft")
                assert spoilt.answer.output == wanted.output
                assert spoilt.answer.accept_length < wanted.accept_length - 0.5
                # Where the index holds what was spoilt, drop it: the device, and nothing else, has it.
                await decode.forget(("l1",))
            # The draft KV that decode wrote while it proposed is kept as well: the next turn goes on from it.
            assert (await decode.ask(prompt, OUTPUT)).answer == wanted
            longer = [*prompt, *wanted.output, *drawn_prompt(5, seed=2)]
            second = in_one_process(draft_layers, shift, longer)
            for tier in ("l2", "l3"):
                await decode.forget(("l1",) if tier == "l2" else ("l1", "l2"))
                asked = await decode.ask(longer, OUTPUT)
                assert asked.sources[tier] >= 48
                assert asked.answer == second, tier
        async with rig.decode() as restarted:
            asked = await restarted.ask(longer, OUTPUT)
            assert asked.sources["l3"] >= 52
            assert asked.answer == second


@pytest.mark.parametrize("count", [1, 2, 24])
@pytest.mark.parametrize(("draft_layers", "shift"), DRAFTS, ids=IDS)
def test_both_have_kv_of_all_positions_but_the_last(draft_layers: int, shift: int, count: int) -> None:
    """Whatever was accepted last: what is given back is what both would have computed in one go."""
    for seed in range(3):
        prompt, pages = drawn_prompt(10, seed), list(range(64))
        said, afresh = (DevicePool.allocate(layout_of(draft_layers), 64) for _ in range(2))
        pair = pair_on(ModelPools.of_one(said), draft_layers, shift)
        answer = pair.answer(prompt, pair.prefill(prompt, pages), pages, count)
        assert len(answer.output) == count
        assert sum(answer.steps) >= count - 1
        whole = [*prompt, *answer.output]
        assert pair_on(ModelPools.of_one(afresh), draft_layers, shift).prefill(whole[:-1], pages) == whole[-1]
        for name in ("full", "draft"):
            for ours, wanted in zip(said.group(name).tensors, afresh.group(name).tensors, strict=True):
                ours, wanted = (tensor.flatten(0, 1)[: len(whole) - 1] for tensor in (ours, wanted))
                torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-9)


# Each engine with one of the drafts, such that each draft meets every choice: which draft it is changes keys and bytes,
# not the way that pages take.
ENGINES = list(itertools.product([False, True], [False, True], [1, 2]))
WITH_DRAFTS = [(*DRAFTS[number], *engine) for number, engine in zip([0, 0, 1, 2, 2, 1, 0, 1], ENGINES, strict=True)]


@pytest.mark.parametrize(
    ("draft_layers", "shift", "own_pages", "lent", "ranks"),
    mark_rest(WITH_DRAFTS, lambda layers, shift, *engine: {(layers, shift), *pairs(*engine)}),
)
async def test_accept_length_from_every_tier_equals_the_fresh_one(
    draft_layers: int, shift: int, own_pages: bool, lent: bool, ranks: int, make_rig: Any
) -> None:
    await check_every_tier(draft_layers, shift, make_rig, own_pages=own_pages, lent=lent, ranks=ranks)


def test_each_draft_meets_every_choice() -> None:
    for draft in DRAFTS:
        engines = [row[2:] for row in WITH_DRAFTS if row[:2] == draft]
        assert [len(set(choices)) for choices in zip(*engines, strict=True)] == [2, 2, 2]


@pytest.mark.nixl
@pytest.mark.parametrize(
    ("draft_layers", "shift"),
    [pytest.param(*DRAFTS[1], id=IDS[1], marks=pytest.mark.thorough), pytest.param(*DRAFTS[2], id=IDS[2])],
)
async def test_accept_length_over_nixl_equals_the_fresh_one(draft_layers: int, shift: int, make_rig: Any) -> None:
    await check_every_tier(draft_layers, shift, make_rig, nixl=True)


async def test_a_page_is_not_shared_where_its_draft_kv_is_anothers(make_rig: Any) -> None:
    """Two prompts part in the token behind the second page; the draft of the second one saw another token there."""
    first = drawn_prompt(26, seed=1)
    second = [*first[:8], (first[8] + 1) % 64, *drawn_prompt(12, seed=3)]
    wanted = in_one_process(1, 1, second)
    async with (
        make_rig(layout_of(1), lambda pools: pair_on(pools, 1, 1), bigram_keys=True) as rig,
        rig.decode() as decode,
    ):
        await decode.ask(first, OUTPUT)
        asked = await decode.ask(second, OUTPUT)
        assert asked.sources["l1"] == 4
        assert asked.answer == wanted
    draft = layers_of(1).page_bytes
    async with make_rig(layout_of(1), lambda pools: pair_on(pools, 1, 1)) as rig, rig.decode() as decode:
        await decode.ask(first, OUTPUT)
        wrong = await decode.ask(second, OUTPUT)
        # Without bigram keys the page is shared, and the last position of its draft part is the other prompt's.
        assert wrong.sources["l1"] == 8
        differs = (wrong.page_bytes[1] != asked.page_bytes[1]).nonzero().flatten()
        assert len(differs) > 0
        assert int(differs.min()) >= layout_of(1).page_bytes - draft
        assert not torch.equal(wrong.page_bytes[0], asked.page_bytes[1])
