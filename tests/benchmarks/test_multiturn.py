"""The hit rates of a conversation, exactly."""

from __future__ import annotations

import pytest

from tests.support.multiturn import run_multiturn, total_hit_rate

KEPT = (0, 192 / 256, 384 / 448, 576 / 640, 768 / 832, 960 / 1024)
PROMPTS_ONLY = (0, 64 / 256, 256 / 448, 448 / 640, 640 / 832, 832 / 1024)


@pytest.mark.parametrize(("keep_output", "rates", "total"), [(True, KEPT, 0.882), (False, PROMPTS_ONLY, 0.686)])
async def test_hit_rates_of_each_round_are_exact(keep_output: bool, rates: tuple[float, ...], total: float) -> None:
    rounds = await run_multiturn(keep_output=keep_output)
    assert [hits.prompt_tokens for hits in rounds] == [4 * tokens for tokens in (64, 256, 448, 640, 832, 1024)]
    assert [hits.hit_rate for hits in rounds] == pytest.approx(rates)
    assert round(total_hit_rate(rounds), 3) == total
    assert all(sum(hits.sources[tier] for hits in rounds) > 0 for tier in ("l1", "l2", "l3"))
