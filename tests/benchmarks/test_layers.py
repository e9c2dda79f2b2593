"""The benchmark of restores by layer: exact times of both ways, from the core's reports alone."""

from __future__ import annotations

import pytest

from benchmarks.layers import COPY_LAYER_S, LAYERS, main, time_to_token
from benchmarks.layers_measured import open_rig


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_waiting_for_all_adds_both_and_early_takes_the_longer_and_one_layer(factor: float) -> None:
    copy_s, pass_s = LAYERS * COPY_LAYER_S, LAYERS * COPY_LAYER_S * factor
    assert time_to_token(factor, early=False) == pytest.approx(copy_s + pass_s)
    one_s = COPY_LAYER_S * min(factor, 1.0)
    assert time_to_token(factor, early=True) == pytest.approx(max(copy_s, pass_s) + one_s)


def test_the_bound_is_met() -> None:
    assert main(["--modeled"]) == 0


@pytest.mark.parametrize("bytes_per_s", [None, 1e8], ids=["unpaced", "paced"])
async def test_the_measured_passes_give_the_tokens_of_prefills_own_pages(bytes_per_s: float | None) -> None:
    async with open_rig(40) as rig:
        rig.mover.bytes_per_s = bytes_per_s
        for early in (False, True):
            await rig.time_to_token(early=early)  # It compares the tokens.
