"""The benchmark of peers: three processes over NIXL, every byte of its first round compared."""

from __future__ import annotations

import pytest

from benchmarks import cache_peers

pytestmark = [pytest.mark.nixl, pytest.mark.slow]


async def test_each_prompt_is_restored_from_both_sources() -> None:
    cells = await cache_peers.measure(rounds=1)
    assert [(cell["tokens"], cell["source"]) for cell in cells] == [
        (tokens, source) for tokens in cache_peers.LENGTHS for source in ("peer", "transfer")
    ]
    assert all(len(cell["ready_s"]) == 1 for cell in cells)  # type: ignore[arg-type]  # A list.
